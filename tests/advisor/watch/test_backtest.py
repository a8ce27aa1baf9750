"""`almanac trial watch` on five weeks of a store: jobs of people of whom some do nothing, or work in the end."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa

from advisor.trial import DO_NOT, NO_DATA, SWITCH_ON, Verdict, judge
from advisor.watch.backtest import _samples, replay, trial_watch
from advisor.watch.round import GPU_COUNTERS, GPUS, Round
from advisor.watch.round import JOBS as WATCHED
from almanac.actions_config import WatchSection
from almanac.config import Config
from almanac.units import DAY_S
from telemetry.counters import GPU_METRICS, HIGHEST
from telemetry.store.schema import JOBS, TELEMETRY
from telemetry.store.store import ClusterStore, Store

FIRST_S, DAYS, MINUTES = 1_740_960_000, 36, 240
NAMES = {"ann": "train", "bob": "train", "cy": "interactive", "dan": "sys/dashboard/sys/jupyter", "eve": "train"}
"""Ann and the two sessions of people do nothing, bob works all the time, and of eve's idle GPU samples are missing."""


def table(rows: list[dict[str, object]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)


def made_store(root: Path, last_min: int = 0) -> ClusterStore:
    """A job of everybody each day; all work in their last last_min minutes."""
    store, jobs, gpus, samples = Store.create(root).of("c"), [], [], []
    for day in range(DAYS):
        for number, (user, name) in enumerate(NAMES.items()):
            start_s = FIRST_S + day * DAY_S + 3600
            job = {"job_id": 10 * day + number + 1, "submit_s": start_s - 9}
            given = {
                "user": user,
                "partition": "gpu",
                "name": name,
                "gpu_count": 1,
                "node_count": 1,
                "state": "TIMEOUT",
            }
            jobs.append(job | given | {"start_s": start_s, "end_s": start_s + MINUTES * 60})
            unit = {"host": f"n{number}", "gpu": 0, "mig": ""}
            gpus.append(job | unit)
            for minute in range(0, MINUTES if day >= DAYS - 22 else 0, 2):
                works = user == "bob" or minute >= MINUTES - last_min
                if user != "eve" or not 60 <= minute < 180:
                    value = {"gpu_util_pct": 90.0 * works, "sm_active_frac": 0.5 * works, "power_w": 80 + minute % 7}
                    samples.append({**unit, **value, "time_ms": (start_s + 60 * minute + 30) * 1000})
    store.write("jobs", table(jobs, JOBS))
    store.write("gpu_metrics", table(gpus, GPU_METRICS))
    store.write("telemetry", table(samples, TELEMETRY))
    return store


def verdict_of(store: ClusterStore) -> Verdict:
    return judge(trial_watch(store, Config()), Config().trial)


def test_cancels_pay_where_jobs_idle_to_their_end(tmp_path: Path) -> None:
    verdict = verdict_of(made_store(tmp_path / "s"))
    assert verdict.answer == SWITCH_ON
    assert verdict.result.settings == ("[watch]", 'cancel = ["idle"]', 'partitions = ["gpu"]')
    assert "21 cancels free" in verdict.result.notes[0]
    assert verdict.result.notes[1].startswith("0 of these jobs used a GPU later")
    gains = verdict.result.gains
    assert gains is not None
    # Ann's job alone is cancelled, after 150 minutes and at most half an hour more, and frees the rest of four hours.
    # Ann's job alone is cancelled, after 150 minutes and at most half an hour, and frees the rest of four hours.
    assert 1 / len(NAMES) <= gains.site.mean <= 1.5 / len(NAMES)


def test_jobs_that_work_later_lose_what_they_did(tmp_path: Path) -> None:
    verdict = verdict_of(made_store(tmp_path / "s", last_min=30))
    assert verdict.answer == DO_NOT
    assert verdict.result.notes[1].startswith("21 of these jobs used a GPU later")
    assert [each.name for each in verdict.result.losers.by_user if each.is_worse] == ["ann"]


def test_a_replayed_round_takes_the_values_that_a_live_one_does(tmp_path: Path) -> None:
    store, kept = Store.create(tmp_path / "s").of("c"), [name for name in GPU_COUNTERS if name in TELEMETRY.names]
    unit = {"host": "n1", "gpu": 0, "mig": ""}
    values = [1.0, 5.0, 3.0]
    rows = [unit | dict.fromkeys(kept, value) | {"time_ms": (FIRST_S + 60 * number) * 1000}
            for number, value in enumerate(values)]  # fmt: skip
    store.write("telemetry", table(rows, TELEMETRY))
    units = pa.Table.from_pylist([unit | {"run": 0, "start_s": FIRST_S, "end_s": FIRST_S + 600}])
    (found,) = _samples(store, units, FIRST_S // DAY_S * DAY_S).to_pylist()
    wanted = {name: 5.0 if name in HIGHEST else 3.0 for name in kept}
    assert {name: found[name] for name in kept} == wanted and {"xid", "ecc_uncorrected"} <= set(kept)


def test_a_record_without_jobs_is_not_judged(tmp_path: Path) -> None:
    assert verdict_of(Store.create(tmp_path / "s").of("c")).answer == NO_DATA


def test_a_replay_cancels_each_job_once_and_few_in_an_hour() -> None:
    """The jobs of a record run on after their cancel, and take no place of others."""
    job = {"submit_s": 1, "restarts": 0, "user": "ann", "account": "a", "partition": "gpu", "node_count": 1,
           "gpu_count": 1, "start_s": FIRST_S, "is_interactive": False, "is_shared": False, "is_serving": False,
           "comment": ""}  # fmt: skip
    jobs = pa.Table.from_pylist([{**job, "job_id": number, "user": f"u{number}"} for number in range(25)], WATCHED)

    def at(number: int) -> Round:
        values = dict.fromkeys(GPU_COUNTERS, math.nan) | {"gpu_util_pct": 0.0, "power_w": 60.0 + number % 7}
        rows = [{"job": n, "host": f"n{n}", "gpu": "0", "sample_count": 4.0, **values} for n in range(25)]
        return Round(FIRST_S + 600 * number, 600, jobs, pa.Table.from_pylist(rows, GPUS))

    found = list(replay(map(at, range(1, 40)), WatchSection(cancel=("idle",), partitions=("gpu",), cancel_min=90)))
    cancels = [(each.at_s, len(cancelled)) for each, _, cancelled in found if cancelled]
    assert [number for _, number in cancels] == [20, 5] and cancels[1][0] - cancels[0][0] == 3600
