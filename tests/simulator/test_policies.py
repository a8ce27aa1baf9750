"""Policies: their orders on small traces, and that none of them knows what it cannot know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pandas as pd
import pytest

from advisor.duration.rank import DEFAULT_RANK, RankChoice, RankRule, mean_rule
from almanac.config import Config
from almanac.errors import RequestError
from simulator import comparison as registry
from simulator.cluster import uniform
from simulator.comparison import make_policy, policy_names
from simulator.engine import simulate
from simulator.policies.base import Backfill, Fifo, Multifactor, Ranking, Weights
from simulator.policies.priority import Qssf, RelievedQssf, ShuffledQssf
from simulator.simulation import Record
from simulator.workload import Workload, make_workload, split_history


@pytest.fixture
def config() -> Config:
    return Config()


def habits(count: int = 120, seed: int = 0) -> pd.DataFrame:
    """Users with habits: u0's jobs are short, u1's long."""
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 2, count)
    return pd.DataFrame(
        {
            "job_id": [str(number) for number in range(count)],
            "submit_s": np.sort(rng.integers(0, 20_000, count)),
            "run_s": np.where(users == 0, rng.integers(50, 80, count), rng.integers(1500, 2500, count)),
            "gpu_count": rng.choice([1, 2, 4], count),
            "user": [f"u{user}" for user in users],
        }
    )


def mean_jct_s(record: Record, workload: Workload) -> float:
    return float((record.end_s - workload.array("submit_s")).mean())


def test_qssf_learns_the_users_habits(config: Config) -> None:
    workload = make_workload(habits())
    qssf, fifo = (simulate(workload, uniform(1, 4), policy) for policy in (Qssf(config), Fifo()))
    assert mean_jct_s(qssf, workload) < 0.8 * mean_jct_s(fifo, workload)


@pytest.mark.parametrize(
    "name", ["qssf", "qssf-aged", "qssf-relief", "qssf-debug", "fifo+easy:predicted", "multifactor"]
)
def test_no_policy_knows_the_future(name: str, config: Config) -> None:
    """Other run times of jobs that have not ended change no start before their end."""
    frame = habits()
    before = simulate(make_workload(frame), uniform(1, 4), make_policy(name, config))
    time_s = int(np.median(before.start_s))
    changed = frame.assign(
        run_s=np.where(before.end_s > time_s, frame["run_s"] * 7 + 13, frame["run_s"]),
        state=np.where(before.end_s > time_s, "FAILED", ""),
    )
    after = simulate(make_workload(changed), uniform(1, 4), make_policy(name, config))
    early = before.start_s < time_s
    assert early.sum() > 20
    assert np.array_equal(before.start_s[early], after.start_s[early])


def test_the_first_predictions_come_from_the_history(config: Config) -> None:
    whole = make_workload(habits())
    workload = split_history(whole, 0.5)
    assert len(workload) == 60 and workload.history is not None
    known: dict[int, float] = {}

    class Watched(Qssf):
        def key(self, job: int, prediction: Any, now_s: int) -> float:
            known[job] = prediction.duration.duration_s
            return super().key(job, prediction, now_s)

    simulate(workload, uniform(2, 4), Watched(config))
    users = workload.array("user")
    assert max(known[job] for job in range(60) if users[job] == "u0") < 100
    assert min(known[job] for job in range(60) if users[job] == "u1") > 1000


@pytest.mark.parametrize(("given", "chosen"), [(None, RankRule("gpus", 1.0)), (0.8, mean_rule(0.8))])
def test_trainings_in_a_simulation_choose_the_order(
    given: float | None, chosen: RankRule, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = dataclasses.replace(config, training=dataclasses.replace(config.training, min_jobs=40, retrain_hours=1))
    monkeypatch.setattr(
        "simulator.policies.priority.choose_rank", lambda jobs, **_: RankChoice(RankRule("gpus", 1.0), 0)
    )
    used = set[RankRule]()

    class Watched(Qssf):
        def key(self, job: int, prediction: Any, now_s: int) -> float:
            used.update([prediction.rule] if prediction else [])
            return super().key(job, prediction, now_s)

    simulate(make_workload(habits(400)), uniform(4, 4), Watched(quick, given))
    assert chosen in used
    assert used <= {chosen, DEFAULT_RANK}, "the default without unseen jobs"


@pytest.mark.parametrize("backfill", ["none", "easy"])
def test_a_new_model_ranks_all_waiting_jobs_again(backfill: Backfill, config: Config) -> None:
    quick = dataclasses.replace(config, training=dataclasses.replace(config.training, min_jobs=40, retrain_hours=1))
    workload = make_workload(habits(250))
    again: list[tuple[int, list[int]]] = []

    class Watched(Qssf):
        def rank_again(self, jobs: Sequence[int], now_s: int) -> Ranking:
            again.append((now_s, sorted(jobs)))
            return super().rank_again(jobs, now_s)

    class Once(Qssf):
        def has_learned(self) -> bool:
            return False

    watched, once = Watched(quick), Once(quick)
    watched.backfill = once.backfill = backfill
    record = simulate(workload, uniform(1, 4), watched)
    submit_s = workload.array("submit_s")
    assert len(again) >= 2 and all(jobs for _, jobs in again)
    for now_s, jobs in again:
        assert jobs == np.flatnonzero((submit_s < now_s) & (record.start_s >= now_s)).tolist()
    assert not np.array_equal(record.start_s, simulate(workload, uniform(1, 4), once).start_s)


def test_shuffled_predictions_differ_by_seed_and_are_repeatable(config: Config) -> None:
    workload = make_workload(habits())
    first, again, other = (
        simulate(workload, uniform(1, 4), ShuffledQssf(config, seed)).start_s.tolist() for seed in (1, 1, 2)
    )
    assert first == again != other


def test_fair_share_puts_the_light_user_first() -> None:
    rows = [(0, 1000, 4, "heavy"), (1, 10, 4, "heavy"), (2, 10, 4, "light")]
    workload = make_workload(pd.DataFrame(rows, columns=["submit_s", "run_s", "gpu_count", "user"]))
    fair = simulate(workload, uniform(1, 4), Multifactor(Weights(age=0, fair_share=1000)))
    aged = simulate(workload, uniform(1, 4), Multifactor(Weights(age=1000, fair_share=0)))
    assert fair.start_s.tolist() == [0, 1010, 1000]
    assert aged.start_s.tolist() == [0, 1000, 1010]
    site = simulate(workload, uniform(1, 4), Multifactor(Weights(age=0, fair_share=0), [0, 1, 2]))
    assert site.start_s.tolist() == [0, 1010, 1000]


def test_relief_goes_to_the_user_who_waits_most(config: Config) -> None:
    # Nothing has ended yet, so that all jobs have equal keys, and FIFO decides; relief turns the order.
    rows = [(0, 5000, 4, "a"), (1, 10, 4, "b"), *[(2 + number, 10, 4, "c") for number in range(5)]]
    workload = make_workload(pd.DataFrame(rows, columns=["submit_s", "run_s", "gpu_count", "user"]))
    relieved = simulate(workload, uniform(1, 4), RelievedQssf(config))
    assert relieved.start_s[1] > relieved.start_s[2:].max()
    assert simulate(workload, uniform(1, 4), Qssf(config)).start_s[1] == 5000


def test_a_debug_lane_goes_by_the_limit_that_was_asked_for(config: Config) -> None:
    rows = [(0, 5000, 4, 0), (1, 10, 4, 3600), (2, 10, 4, 600)]
    frame = pd.DataFrame(rows, columns=["submit_s", "run_s", "gpu_count", "time_limit_s"])
    record = simulate(make_workload(frame), uniform(1, 4), make_policy("qssf-debug", config))
    assert record.start_s.tolist() == [0, 5010, 5000]


def test_ageing_ends_the_wait_of_a_large_job(config: Config) -> None:
    """A stream of short jobs holds up a long one for ever, but not under ageing."""
    short = [(100 * number, 100, 4, "short") for number in range(1500)]
    rows = sorted([*short, (5000, 50_000, 4, "long"), (5000, 50_000, 4, "long")])
    frame = pd.DataFrame(rows, columns=["submit_s", "run_s", "gpu_count", "user"])
    workload = make_workload(frame)
    longest = {}
    for name in ("ssf", "qssf-aged:tau_hours=2"):
        record = simulate(workload, uniform(1, 4), make_policy(name, config))
        longest[name] = int((record.start_s - workload.array("submit_s")).max())
    assert longest["qssf-aged:tau_hours=2"] < longest["ssf"] / 1.5


def test_names_and_options(config: Config) -> None:
    for name in policy_names():
        assert make_policy(name, config).label == name
    easy = make_policy("sjf+easy:true", config)
    assert (easy.name, easy.backfill, easy.estimate) == ("sjf", "easy", "true")
    assert make_policy("srtf:restart_s=60", config).restart_s == 60


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lifo", "there is no policy 'lifo'"),
        ("fifo+hard", "there is no backfill 'hard'"),
        ("fifo+easy:guessed", "there is no estimate 'guessed'"),
        ("qssf:exponent=much", "'exponent=much' is no option"),
        ("qssf:size=3", "size"),
        ("qssf:exponent=nan", "'exponent=nan' is out of range"),
        ("srtf:restart_s=-50", "'restart_s=-50' is out of range"),
        ("multifactor:max_age_s=0", "'max_age_s=0' is out of range"),
        ("qssf-relief:tick_s=0.5", "tick_s"),
        ("", "there is no policy ''"),
    ],
)
def test_mistakes_are_explained(text: str, said: str, config: Config) -> None:
    with pytest.raises(RequestError, match=said):
        make_policy(text, config)


def test_a_site_adds_its_own(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("ours", "simulator.policies.base:Fifo", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.GROUP else [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda config: Fifo())
    assert policy_names()[-1] == "ours"
    assert isinstance(make_policy("ours+skip", config), Fifo)
