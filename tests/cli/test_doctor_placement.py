"""doctor on jobs that accept any GPU type."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from advisor.artefacts import current_version, save
from advisor.service import train
from advisor.speed.learning import SpeedTable
from almanac.config import Config
from almanac.config_file import parse_config
from almanac.errors import DamageWarning
from cli.app import App
from cli.doctor.findings import Check
from cli.doctor.main import PROBES
from telemetry.history import HISTORY
from telemetry.store.store import Store

Examine = Callable[..., list[Check]]
NODES = {"n1": ("a100", "gpu:a100:2"), "n2": ("h100", "gpu:h100:2")}


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    def examine(
        release: str = "24.11.5",
        nodes: dict[str, tuple[str, str]] = NODES,
        gpu_types: Sequence[dict[str, str]] = (),
        store: Path | None = None,
        **values: Any,
    ) -> list[Check]:
        rows = [
            {"name": name, "state": ["IDLE"], "partitions": ["gpu"], "features": [feature], "gres": gres}
            for name, (feature, gres) in nodes.items()
        ]
        (tmp_path / "nodes").write_text(json.dumps({"nodes": rows}))
        text = f"ClusterName = x\\nSLURM_VERSION = {release}\\nAccountingStorageType = accounting_storage/none\\n"
        for name, prints in (("scontrol", f"printf '{text}'"), ("sinfo", f"cat {tmp_path / 'nodes'}")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{prints}\n")
            (tmp_path / name).chmod(0o755)
        settings = {"partitions": ["gpu"], "types": ["a100", "h100"], **values}
        app = App(None, str(store or tmp_path / "no-store"), "x")
        app.__dict__["config"] = parse_config(
            {"slurm": {"bin_dir": str(tmp_path)}, "placement": settings, "gpu_types": [*gpu_types]}
        )
        return list(PROBES["placement"](app))

    return examine


def test_in_order(examine: Examine) -> None:
    [check] = examine()
    assert (check.status, check.said) == ("ok", "2 types (a100, h100), by constraint; mode observe")


def test_nothing_unless_configured(examine: Examine) -> None:
    assert examine(partitions=[], types=[]) == []


@pytest.mark.parametrize(
    ("values", "status", "said"),
    [
        ({"partitions": ["gpus"]}, "fail", "no node is in 1 partition (gpus)"),
        ({"types": ["a100", "h200"]}, "fail", "no node of these partitions has 1 feature (h200)"),
        (
            {"types": ["a100", "h200"], "select_by": "gres"},
            "fail",
            "no node of these partitions has 1 GRES type (h200)",
        ),
        ({"types": ["a100"]}, "fail", "placement has 1 partitions and 1 types"),
        ({"select_by": "gres", "release": "22.05.8"}, "fail", "22.05"),
        ({"nodes": {**NODES, "n3": ("x", "gpu:2")}}, "warn", "1 node (n3) without exactly one of placement.types"),
        ({"requeue": True}, "warn", "no job will be requeued"),
        (
            {"gpu_types": [{"name": "a100", "constraint": "a100"}, {"name": "h100", "gres": "h100"}]},
            "warn",
            "no [[gpu_types]] has as its constraint 1 placement type (h100)",
        ),
    ],
)
def test_misconfiguration(examine: Examine, values: dict[str, Any], status: str, said: str) -> None:
    checks = examine(**values)
    assert any(check.status == status and said in check.said and check.todo for check in checks), checks


def test_the_trained_speeds_must_know_the_types(examine: Examine, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    [check] = examine(store=store.root)
    assert (check.status, check.todo) == ("warn", "run `almanac train`")
    models_dir, trained = store.of("x").models_dir, train(HISTORY.empty_table().to_pandas(), Config(), 1_750_000_000)
    for names, said in ((("a100", "h100"), "2 types"), (("a100", "H100"), "have no 1 placement type (h100); they")):
        table = SpeedTable(names=names)
        save(dataclasses.replace(trained, speeds=table), models_dir)
        [check] = examine(store=store.root)
        assert said in check.said
    (models_dir / "speed" / str(current_version(models_dir)) / "meta.json").unlink()
    with pytest.warns(DamageWarning, match="cannot be read"):
        [check] = examine(store=store.root)
    assert "2 types" in check.said  # of the newest whole version
