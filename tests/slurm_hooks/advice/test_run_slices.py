"""A run of publish advises only the slice types that nodes in service have, and names the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from almanac.config_file import parse_config
from almanac.errors import CommandError
from slurm_hooks.advice.publish import prepare
from telemetry.site import Site
from telemetry.store.store import Store

CONFIG = parse_config(
    {
        "hooks": {"group": "root"},
        "tiers": [
            {"name": "slice", "capacity_mib": 9728, "gres": "1g.10gb"},
            {"name": "whole", "capacity_mib": 81920, "gres": "a100"},
        ],
    }
)


@pytest.mark.parametrize(
    ("said", "tiers", "warning"),
    [
        ("all*|idle|gpu:a100:3,gpu:1g.10gb:7\n", ["slice", "whole"], ""),
        ("all*|idle|gpu:a100:4\n", ["whole"], "not advised: slice: no node in service has its GRES type"),
        ("all*|idle|gpu:a100:4\nall*|drain|gpu:1g.10gb:7\n", ["whole"], "not advised: slice: no node in service"),
        (None, ["whole"], "not advised: slice: sinfo failed (lost)"),
    ],
)
def test_types_that_exist_now(tmp_path: Path, said: str | None, tiers: list[str], warning: str) -> None:
    def commands(argv: Sequence[str]) -> bytes:
        assert argv[0] == "sinfo"
        if said is None:
            raise CommandError("lost", "start slurmctld")
        return said.encode()

    store = Store.create(tmp_path / "store").of("lab")
    run, warnings = prepare(Site.of(store, CONFIG, 0).but(commands=commands))
    assert [tier.name for tier in run.site.config.tiers] == tiers
    assert "\n".join(warnings).startswith(warning)
    assert bool(warnings) == bool(warning)
