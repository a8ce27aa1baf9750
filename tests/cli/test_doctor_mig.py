"""doctor on MIG slices: mixed partitions, tiers that no node has, and slices that no tier names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from almanac.config_file import parse_config
from cli.app import App
from cli.doctor.findings import Check
from cli.doctor.main import PROBES

Examine = Callable[..., list[Check]]
SLICE = {"name": "slice", "capacity_mib": 9728, "gpu_model": "A100-80", "gres": "1g.10gb"}


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    def examine(lines: str, *tiers: dict[str, object], code: int = 0) -> list[Check]:
        (tmp_path / "lines").write_text(lines)
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\ncat {tmp_path / 'lines'}\nexit {code}\n")
        (tmp_path / "sinfo").chmod(0o755)
        app = App()
        app.__dict__["config"] = parse_config({"slurm": {"bin_dir": str(tmp_path)}, "tiers": list(tiers)})
        return list(PROBES["MIG slices"](app))

    return examine


def test_untyped_requests_on_a_mixed_partition(examine: Examine) -> None:
    lines = "gpu*|idle|gpu:a100:4\ngpu*|mix|gpu:1g.10gb:7\nlong|idle|gpu:a100:4\ntwo|idle|gpu:a100:2,gpu:1g.10gb:14\n"
    [check] = examine(lines, SLICE)
    assert check.status == "warn"
    assert check.said == "2 partitions (gpu, two) have whole GPUs and MIG slices: untyped requests land on slices"
    assert "job_submit.lua" in check.todo and "partition of their own" in check.todo


def test_partitions_of_slices_alone_are_in_order(examine: Examine) -> None:
    [check] = examine("gpu|idle|gpu:a100:4\nmig|idle|gpu:1g.10gb:7\ngpu|drain|gpu:1g.10gb:7\n", SLICE)
    assert (check.status, check.said) == ("ok", "advised: slice")


def test_tiers_that_no_node_has_and_slices_that_no_tier_names(examine: Examine) -> None:
    wrong = {**SLICE, "name": "wrong", "gres": "1g.5gb"}
    found = examine("mig|idle|gpu:2g.20gb:3\n", SLICE, wrong)
    assert [check.status for check in found] == ["warn"] * 3
    assert [check.said for check in found] == [
        "wrong: A100-80 has no MIG profile 1g.5gb",
        "no node in service has the GRES type of 2 tiers (slice, wrong), so almanac does not advise it",
        "no tier names 1 GRES type (2g.20gb) of MIG slices, so almanac does not advise it",
    ]


def test_nothing_without_slices_or_without_slurm(examine: Examine) -> None:
    whole = {"name": "w", "capacity_mib": 81920, "gres": "a100"}
    assert examine("gpu|idle|gpu:a100:4\n", whole) == []
    assert examine("gpu|idle|gpu:1g.10gb:7\n", SLICE, code=1) == []
