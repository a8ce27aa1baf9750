"""Each user's packing file: their own families, for them alone, made with the advice file."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from advisor.memory.calibration import Calibration, Margins
from slurm_hooks.advice.kinds import PACKING, PackingFile
from slurm_hooks.submit.late_proposals import note
from telemetry.store.schema import TABLES

Site = Any  # of conftest.py
CLUSTER = "lab"
DCGM = {
    "mean_sm_active_frac": 0.3, "mean_dram_active_frac": 0.2, "coverage_sm_active_frac": 1.0,
    "coverage_dram_active_frac": 1.0, "mean_gpu_util_pct": 40.0, "gpu_model": "A100-80", "hbm_capacity_mib": 81_920.0,
    "is_preallocated": False, "coverage_frac": 1.0, "verdict": "ok",
}  # fmt: skip


class Everywhere(dict[str, Any]):
    """The same margin for every pool: a small site has too few runs for margins of its own."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: str) -> Any:
        return self.value

    def get(self, key: str, default: Any = None) -> Any:
        return self.value


KNOWN = Calibration(0.05, Everywhere(Margins(1.0, 1.0)), {tasks: Everywhere(1.5) for tasks in (2, 3, 4)})


def add_family(site: Site, jobs_of: Any, user: str, name: str, first_id: int, **other: Any) -> None:
    """Thirty runs of a family of one GPU, one after another, with a peak of about 10 GiB unless `other` says so."""
    metrics = {**DCGM, **{key: value for key, value in other.items() if key in DCGM}}
    peak_mib = other.get("hbm_peak_mib", 10_000.0)
    rows, measured = [], []
    for number in range(30):
        key = {"job_id": first_id + number, "submit_s": site.now_s - 900_000 + number * 20_000}
        rows.append({**key, "user": user, "name": name, "gpu_count": 1, "hbm_peak_mib": peak_mib + number})
        measured.append({**key, "hbm_peak_mib": peak_mib + number, "hbm_max_mib": peak_mib + number, **metrics})
    jobs_of(site.store, rows)
    schema = TABLES["job_metrics"].schema
    fields = pa.schema([schema.field(each) for each in measured[0]])
    site.store.of(CLUSTER).write("job_metrics", pa.Table.from_pylist(measured, fields))


@pytest.fixture
def packed(site: Site, jobs_of: Any) -> Site:
    """u0 has a family that can share, u1 one that fills its GPU, and u2 one that reserves memory."""
    add_family(site, jobs_of, "u0", "tune-1", 70_000)
    add_family(site, jobs_of, "u1", "full-1", 71_000, mean_sm_active_frac=0.95, mean_dram_active_frac=0.9)
    add_family(site, jobs_of, "u2", "jax-1", 72_000, is_preallocated=True)
    return dataclasses.replace(site, trained=dataclasses.replace(site.trained, calibration=KNOWN))


def path_of(site: Site, user: str) -> Path:
    return Path(site.root / "user" / str(site.uids[user]) / "packing")


def file_of(site: Site, user: str) -> PackingFile:
    return PACKING.parse(path_of(site, user).read_bytes()).value


def test_each_user_gets_their_own_families_that_can_share(packed: Site) -> None:
    packed.publish()
    file = file_of(packed, "u0")
    (row,) = file.rows
    assert (row.key, row.gpus) == ("tune-#", 1)
    assert row.text.startswith("Pack ")
    assert row.text.endswith("-- CMD {}")
    *_, command = note(row).splitlines()
    assert command.startswith("         Use: --array=A-B:")
    assert command.endswith("-- CMD {}")
    assert "times the work per GPU-hour" in row.text
    assert "times its run time: raise --time." in row.text
    assert 2 * 10_000 < row.need_mib <= 81_920
    assert not path_of(packed, "u1").exists()
    assert not path_of(packed, "u2").exists()
    assert stat.S_IMODE(path_of(packed, "u0").stat().st_mode) == 0o600


def test_what_can_no_longer_share_is_taken_away(packed: Site, jobs_of: Any) -> None:
    packed.publish()
    assert path_of(packed, "u0").exists()
    add_family(packed, jobs_of, "u0", "tune-1", 70_000, hbm_peak_mib=70_000.0)  # the same runs, summarized again
    packed.publish()
    assert not path_of(packed, "u0").exists()


def test_a_site_can_switch_it_off_and_an_older_models_has_no_bounds_for_it(packed: Site) -> None:
    packed.publish()
    assert path_of(packed, "u0").exists()
    off = dataclasses.replace(packed.config, packing=dataclasses.replace(packed.config.packing, advise=False))
    packed.publish(config=off)
    assert not path_of(packed, "u0").exists()
    old = dataclasses.replace(packed.trained, calibration=dataclasses.replace(packed.trained.calibration, shared={}))
    packed.publish(trained=old, now_s=packed.now_s + 20 * 3600)
    assert not path_of(packed, "u0").exists()


def test_a_dry_run_writes_nothing_and_a_user_who_is_gone_leaves_nothing(packed: Site) -> None:
    packed.publish(is_dry=True)
    assert not path_of(packed, "u0").exists()
    packed.publish()
    assert path_of(packed, "u0").exists()
    packed.publish(
        config=dataclasses.replace(packed.config, advice=dataclasses.replace(packed.config.advice, history_days=1))
    )
    assert not path_of(packed, "u0").parent.exists()
