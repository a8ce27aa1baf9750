"""Run times of the queue's jobs, from a trained speed table and the runs in a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from advisor.artefacts import current_version, save
from advisor.duration.intervals import COVERAGE
from advisor.service import train
from advisor.speed import site as speed_site
from advisor.speed.runs import load_speed_runs
from almanac.config import Config
from almanac.errors import NoModelError, StoreError
from slurm_hooks.placement.speeds import no_speeds, speeds_or_fault, stored_speeds
from slurm_hooks.placement.state import usable_times
from telemetry.history import HISTORY
from telemetry.slurm.placement_queue import QueueJob, queue_jobs
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.store import Store

from .placement_slurm import NOW_S, Job

TYPES = ("a100", "h100")
JobsOf = Callable[[Store, list[dict[str, Any]]], None]


def queued(limit_min: int = 1440, user: str = "ann") -> QueueJob:
    row = Job(11, limit_min=limit_min, user=user).record(True)
    [job], _ = queue_jobs(json.dumps({"jobs": [row]}).encode(), "lab")
    return job


def untrained(tmp_path: Path, jobs_of: JobsOf, types: Sequence[str] = TYPES) -> ClusterStore:
    """ann's and bob's job ran about an hour on the first type, and about half an hour on the second."""
    store = Store.create(tmp_path / "store")
    jobs_of(store, [
        {
            "job_id": number + 1, "submit_s": NOW_S - 90_000 + number * 600, "user": "ann" if number % 4 < 2 else "bob",
            "name": "x\nJobId=1", "gpu_count": 1, "gpu_type": types[number % 2], "constraints": "",
            "elapsed_s": (3600, 1800)[number % 2] + 100 * (number % 5),
        }
        for number in range(32)
    ])  # fmt: skip
    return store.of("lab")


def trained(tmp_path: Path, jobs_of: JobsOf, types: Sequence[str] = TYPES) -> ClusterStore:
    store = untrained(tmp_path, jobs_of, types)
    runs = load_speed_runs(store)
    save(train(HISTORY.empty_table().to_pandas(), Config(), NOW_S, speed_runs=runs), store.models_dir)
    return store


def test_times_are_those_of_the_trained_table(tmp_path: Path, jobs_of: JobsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not learned again, and only the runs of the users who wait are read."""
    store = trained(tmp_path, jobs_of)
    for name in ("learn_site_speeds", "learn_types", "learn_speeds"):
        monkeypatch.delattr(speed_site, name)
    speeds = stored_speeds(store, Config(), NOW_S, {"ann"})
    assert speeds([queued(user="bob")], TYPES)[11] == []
    ann = speeds([queued()], TYPES)[11]
    times = {each.gpu_type: each for each in ann}
    assert 3400 < times["a100"].run_s < 4100
    assert 1700 < times["h100"].run_s < 2300
    assert all(each.low_s < each.run_s < each.high_s <= each.longest_s for each in ann)


def test_the_interval_is_that_of_a_run(tmp_path: Path, jobs_of: JobsOf) -> None:
    store, config = trained(tmp_path, jobs_of), Config()
    [known, *_] = stored_speeds(store, config, NOW_S, {"ann"})([queued()], TYPES)[11]
    table = speed_site.learn_site_speeds(load_speed_runs(store), config, NOW_S)
    families = speed_site.user_families(load_speed_runs(store), table, config, NOW_S)
    [usual, *_] = speed_site.request_times(queued().record.request(), families, table, None, config)
    assert (known.low_s, known.high_s) == pytest.approx(usual.next_run(COVERAGE))
    assert known.low_s < usual.low_s < usual.high_s < known.high_s


def test_the_time_limit_must_hold_a_long_run(tmp_path: Path, jobs_of: JobsOf) -> None:
    found = stored_speeds(trained(tmp_path, jobs_of), Config(), NOW_S, {"ann"})([queued()], TYPES)[11]
    [fast] = [each for each in found if each.gpu_type == "h100"]
    needed_min = int(fast.longest_s // 60) + 1
    assert set(usable_times(queued(limit_min=needed_min), found, ["h100"])) == {"h100"}
    assert usable_times(queued(limit_min=needed_min - 1), found, ["h100"]) == {}


def test_a_table_must_know_two_of_the_types(tmp_path: Path, jobs_of: JobsOf) -> None:
    speeds = stored_speeds(trained(tmp_path, jobs_of, ("a100", "v100")), Config(), NOW_S, {"ann"})
    with pytest.raises(NoModelError, match=r"1 of 2 GPU types \(a100, v100\)"):
        speeds([queued()], TYPES)
    assert no_speeds([queued()], ("a100",)) == {}


def test_nothing_is_trained(tmp_path: Path, jobs_of: JobsOf) -> None:
    store = untrained(tmp_path, jobs_of)
    with pytest.raises(NoModelError, match="no model is trained") as caught:
        stored_speeds(store, Config(), NOW_S, {"ann"})
    assert "almanac train" in caught.value.hint
    with pytest.raises(NoModelError, match="no model is trained"):
        speeds_or_fault(store, Config(), NOW_S, {"ann"})([queued()], TYPES)


def test_a_version_without_speeds(tmp_path: Path, jobs_of: JobsOf) -> None:
    store = untrained(tmp_path, jobs_of)
    save(train(HISTORY.empty_table().to_pandas(), Config(), NOW_S), store.models_dir)
    with pytest.raises(NoModelError, match="0 of 2"):
        stored_speeds(store, Config(), NOW_S, {"ann"})([queued()], TYPES)


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 4}', '{"schema": 4, "speeds": {"names": 7}}'])
def test_a_damaged_table(tmp_path: Path, jobs_of: JobsOf, content: str) -> None:
    store = trained(tmp_path, jobs_of)
    path = store.models_dir / "speed" / str(current_version(store.models_dir)) / "meta.json"
    path.chmod(0o644)
    path.write_text(content)
    with pytest.raises(StoreError) as caught:
        speeds_or_fault(store, Config(), NOW_S, {"ann"})([queued()], TYPES)
    assert "almanac train" in caught.value.hint
