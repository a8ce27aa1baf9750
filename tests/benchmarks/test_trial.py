"""The verdicts of `almanac trial` on a few generated sites, as benchmarks/trial.py counts them on many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from trial import NULL, PAYS, SUBJECTS, config_of, made_pairs, made_record, part_of, result_of, workload_of

from advisor.memory.backtest import trial_tiers
from advisor.packing.backtest import trial_packing
from advisor.trial import DO_NOT, NO_DATA, SWITCH_ON, TrialResult, judge
from advisor.types.backtest import trial_types
from almanac.units import DAY_S
from simulator.cluster import uniform
from simulator.trial import SiteOrder, priority_trial

QUICK = ("tiers", "packing", "types")


@pytest.mark.parametrize(("kind", "answer"), [(NULL, DO_NOT), (PAYS, SWITCH_ON)])
def test_a_subject_is_switched_on_only_if_it_pays(kind: str, answer: str) -> None:
    assert {each: judge(result_of(each, 1, kind), config_of().trial).answer for each in QUICK} == dict.fromkeys(
        QUICK, answer
    )


@pytest.mark.parametrize("subject", sorted(SUBJECTS.keys() - {*QUICK, "mig"}))
def test_what_takes_longer_is_switched_on_if_it_pays(subject: str) -> None:
    assert judge(result_of(subject, 1, PAYS), config_of().trial).answer == SWITCH_ON


@pytest.mark.parametrize(
    ("columns", "subject"), [(("hbm_peak_mib",), "tiers"), (("tier", "constraints"), "tiers"), (("gpu_type",), "types")]
)
def test_nothing_is_switched_on_without_its_column(columns: tuple[str, ...], subject: str) -> None:
    record, config = made_record(1, PAYS), config_of()
    for column in columns:
        record[column] = None if column == "hbm_peak_mib" else ""
    result = trial_tiers(record, config) if subject == "tiers" else trial_types(record, config)
    assert judge(result, config.trial).answer != SWITCH_ON


TIMES = ["submit_s", "start_s", "end_s"]


def stray(record: pd.DataFrame) -> pd.DataFrame:
    """Three jobs of a clock that stood at 1970, and three of one ten years ahead."""
    jobs = record.copy()
    jobs.loc[:2, TIMES] -= int(jobs["submit_s"].min()) - 1000
    jobs.loc[3:5, TIMES] += 3650 * DAY_S
    return jobs.sort_values("submit_s", kind="stable", ignore_index=True)


HOLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "nothing": lambda record: record,
    "clock jumps": stray,
    "one user": lambda record: record.assign(user="ann", name_key="job-x", name="job-x"),
    "one GPU type and size": lambda record: record.assign(gpu_type="a100", gpu_count=1),
    "no limits": lambda record: record.assign(time_limit_s=float("nan")),
    "one day": lambda record: record[record["submit_s"] < record["submit_s"].min() + DAY_S].reset_index(drop=True),
    "jobs twice": lambda record: pd.concat([record, record.iloc[:100]]).sort_values("end_s", ignore_index=True),
}


@pytest.mark.parametrize("hole", HOLES)
def test_holes_in_a_record_bring_no_fault_and_no_switch(hole: str) -> None:
    """Of the predictable jobs too few are left to prove a gain, so nothing is switched on that the whole is not."""
    jobs, pairs = (HOLES[hole](each) for each in (part_of(made_record(1, PAYS), 12), made_pairs(1, NULL).iloc[::4]))
    config, site = config_of(), (uniform(1, 4), SiteOrder(), config_of())

    def quiet(share: float, note: str) -> None:
        """Tell nothing."""

    results: list[TrialResult] = [
        trial_tiers(jobs, config), trial_types(jobs, config), trial_packing(pairs.reset_index(drop=True), config),
        priority_trial(workload_of(jobs), *site, quiet),
    ]  # fmt: skip
    verdicts: dict[str, Any] = {each.subject: judge(each, config.trial) for each in results}
    assert SWITCH_ON not in {each.answer for each in verdicts.values()}
    if hole == "one day":
        assert {each.answer for each in verdicts.values()} == {NO_DATA}
    if hole == "clock jumps":
        assert "6 jobs lie over 60 days" in verdicts["priority"].result.notes[0]
        assert len(verdicts["priority"].result.gains.starts_s) == 3
