"""Each user's run times by GPU type: their own, for them alone."""

from __future__ import annotations

import stat
from typing import Any

import pytest

from advisor.artefacts import save
from advisor.types.learning import SpeedTable
from advisor.types.runs import load_speed_runs
from advisor.types.times import learn_site_speeds
from almanac.config_file import parse_config
from almanac.errors import ConfigError
from slurm_hooks.advice.kinds import TIMES
from slurm_hooks.advice.publish import PublishRun
from slurm_hooks.advice.type_files import publish_times

Site = Any  # of conftest.py
CLUSTER = "lab"


def run_of(site: Site, speeds: SpeedTable) -> PublishRun:
    save(site.trained, site.bound.store.models_dir, speeds=speeds)
    return PublishRun(site.bound, site.folder, site.trained, "observe")


def test_nothing_is_written_while_one_type_is_known(site: Site) -> None:
    assert publish_times(run_of(site, SpeedTable()), site.uids.get).written == 0


def test_each_users_file_names_their_families_only(site: Site, jobs_of: Any) -> None:
    """u0 runs "fine" twice as fast on h100; u1 only ran on a100, and takes u0's ratio for a hint."""
    rows = []
    for number in range(24):
        user, gpu_type = ("u0", ("a100", "h100")[number % 2]) if number < 16 else ("u1", "a100")
        rows.append(
            {
                "job_id": 50_000 + number, "submit_s": site.now_s - 90_000 + number * 600, "user": user,
                "name": f"fine-{number}", "gpu_count": 2, "gpu_type": gpu_type, "constraints": "",
                "elapsed_s": 3600 if gpu_type == "a100" else 1800,
            }
        )  # fmt: skip
    jobs_of(site.store, rows)
    speeds = learn_site_speeds(load_speed_runs(site.store.of(CLUSTER)), site.config, site.now_s)
    assert {"a100", "h100"} <= set(speeds.names)
    done = publish_times(run_of(site, speeds), site.uids.get)
    assert done.written >= 1
    path = site.root / "user" / str(site.uids["u0"]) / "times"
    file = TIMES.parse(path.read_bytes()).value
    times = {time.gpu_type: time for time in file.of_family(("fine-#", 2))}
    assert (times["a100"].runs, times["a100"].source) == (8, "own runs")
    assert times["a100"].low_s <= times["a100"].run_s <= times["a100"].high_s
    assert 1.6 < times["a100"].run_s / times["h100"].run_s < 2.4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(len(family.times) >= 2 for family in file.families)
    assert (file.written_s, file.expires_s) == (site.now_s, site.now_s + 48 * 3600)
    assert b"u1" not in path.read_bytes()


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
