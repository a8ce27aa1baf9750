"""Each user's run times by GPU type: their own, for them alone."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from advisor.speed.learning import SpeedTable
from advisor.speed.runs import load_speed_runs
from advisor.speed.site import learn_site_speeds
from almanac.config_file import parse_config
from almanac.errors import ConfigError
from slurm_hooks.advice.folder import AdviceDir
from slurm_hooks.advice.publish import PublishRun
from slurm_hooks.advice.times import publish_times
from slurm_hooks.advice.times_file import usable_times

Site = Any  # of conftest.py
CLUSTER = "lab"


def run_of(site: Site, speeds: SpeedTable) -> PublishRun:
    trained = dataclasses.replace(site.trained, speeds=speeds)
    folder = AdviceDir(site.root, os.geteuid())
    return PublishRun(site.store.of(CLUSTER), site.config, site.now_s, folder, trained, "observe")


def speeds_of(site: Site) -> SpeedTable:
    """The site's two memory tiers, whose features stand for GPU types here."""
    return learn_site_speeds(load_speed_runs(site.store.of(CLUSTER)), site.config, site.now_s)


def test_nothing_is_written_while_one_type_is_known(site: Site) -> None:
    assert publish_times(run_of(site, SpeedTable()), site.uids.get).written == 0


def test_each_users_file_names_their_families_only(site: Site, tmp_path: Path) -> None:
    speeds = speeds_of(site)
    if len(speeds.names) < 2:
        speeds = dataclasses.replace(speeds, names=(*speeds.names, "a100", "h100")[:2])
    done = publish_times(run_of(site, speeds), site.uids.get)
    for user, uid in site.uids.items():
        path = site.root / "user" / str(uid) / "times"
        file = usable_times(path, site.now_s)
        if file is None:
            continue
        assert stat.S_IMODE(path.stat().st_mode) == 0o400, user
        assert {key for key, _ in file.times} <= {"fama-run#", "famb-run#", "famc-run#"}
        assert all(len(times) >= 2 for times in file.times.values())
        assert usable_times(path, site.now_s + 200 * 3600) is None
    assert done.not_shown == []


def test_types_in_the_configuration_need_one_selector_and_a_plain_name() -> None:
    found = parse_config({"gpu_types": [{"name": "a100", "gres": "a100"}, {"name": "h100", "constraint": "gpu_h100"}]})
    assert [(kind.name, kind.kind, kind.selector) for kind in found.gpu_types] == [
        ("a100", "gres", "a100"),
        ("h100", "constraint", "gpu_h100"),
    ]
    for wrong in (
        {"name": "a100"},
        {"name": "a100", "gres": "a100", "constraint": "a100"},
        {"name": "a 100", "gres": "a100"},
        {"name": "a100", "constraint": "a|b"},
    ):
        with pytest.raises(ConfigError, match="gpu_types"):
            parse_config({"gpu_types": [wrong]})
