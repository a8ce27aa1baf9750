"""Evidence of a job's memory, and its least amount."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.duration.features import submission_of, submitted_by
from advisor.memory import peak_store
from advisor.memory.evidence import PAUSE_S, Evidence
from advisor.memory.peak_store import Case, remember_peaks, replay_peaks, similar_names
from advisor.memory.runs import SPIKE_MARGIN, MeasuredRun, runs_of
from almanac.config import Config
from almanac.records import JobRequest

NOW_S, DAY_S = 1_750_000_000, 86_400
History = Callable[[list[dict[str, Any]]], pd.DataFrame]
SMALL = {"hbm_capacity_mib": 40960.0, "tier": "hbm40g"}


def evidence_of(history: pd.DataFrame, config: Config, name: str = "train-9", **request: Any) -> Evidence:
    job = submission_of(JobRequest(user="ann", job_name=name, gpu_count=4, submit_s=NOW_S, **request), config.tiers)
    return remember_peaks([job.user], history, NOW_S, config.advice, config.tiers).evidence(job, NOW_S)


def test_preallocated_and_unjudged_runs_are_excluded_and_counted(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(5)]
    rows += [{"hbm_peak_mib": math.nan, "hbm_evidence": "preallocated"}] * 3
    rows += [{"hbm_peak_mib": math.nan, "hbm_evidence": "none", "verdict": "low coverage"}] * 2
    evidence = evidence_of(history_of(rows), config)
    assert evidence.runs == 5
    assert evidence.excluded == {"preallocated memory": 3, "low coverage": 2}


def test_packed_runs_change_nothing_and_are_counted(history_of: History, config: Config) -> None:
    """Their peaks are those of two tasks, and neither their ends nor their tiers say anything of one."""
    plain: list[dict[str, Any]] = [{**SMALL, "is_packed": value} for value in (False, None, False, None, False, None)]
    plain[2] |= {"state": "FAILED", "hbm_peak_mib": 10000.0}
    packed = [
        {"hbm_peak_mib": 41000.0},
        {"hbm_peak_mib": 80000.0, "state": "FAILED"},
        {"hbm_peak_mib": math.nan, "hbm_evidence": "preallocated", "hbm_max_mib": 0.75 * 81920},
        {"hbm_peak_mib": math.nan, "hbm_evidence": "none", "verdict": "short"},
    ]
    ends = [{"end_s": NOW_S - 90_000 + 600 * number} for number in range(10)]
    plain = [{**row, **end} for row, end in zip(plain, [*ends[::2], ends[-1]], strict=True)]
    packed = [{**row, **end, "is_packed": True} for row, end in zip(packed, ends[1::2], strict=False)]
    alone, mixed = (evidence_of(history_of(rows), config) for rows in (plain, plain + packed))
    assert mixed == dataclasses.replace(alone, excluded={**alone.excluded, "packed": 4})
    assert (alone.runs, alone.oom, alone.highest_mib) == (5, None, 20000.0)


def test_a_family_that_preallocates_learns_nothing_from_the_users_others(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{"name": "other"}] * 9
    reserved = {"name": "jax", "hbm_peak_mib": math.nan, "hbm_evidence": "preallocated"}
    assert evidence_of(history_of(rows), config, name="other-jax").runs == 9
    silent = evidence_of(history_of([*rows, {**reserved, "name": "other-jax"}]), config, name="other-jax")
    assert (silent.runs, silent.excluded) == (0, {"preallocated memory": 1})


def flat(share: float, capacity_mib: float = 40960.0, **row: Any) -> dict[str, Any]:
    """A run whose flat peak telemetry takes for a reservation."""
    return {
        "hbm_peak_mib": math.nan, "hbm_max_mib": share * capacity_mib, "hbm_capacity_mib": capacity_mib,
        "hbm_evidence": "preallocated", **row,
    }  # fmt: skip


def test_a_flat_peak_counts_once_the_family_has_shown_what_it_uses(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{"hbm_max_mib": 20000.0}] * 6
    evidence = evidence_of(history_of([*rows, flat(0.75, 81920.0)]), config)
    assert (evidence.runs, evidence.highest_mib, evidence.excluded) == (7, 0.75 * 81920, {})


@pytest.mark.parametrize("shown", [{"state": "FAILED"}, {"hbm_peak_mib": 0.76 * 81920}])
def test_a_failed_run_and_one_at_a_reserved_share_do_not_show_what_a_family_uses(
    history_of: History, config: Config, shown: dict[str, Any]
) -> None:
    evidence = evidence_of(history_of([shown, *[flat(0.75)] * 3]), config)
    assert evidence.excluded.get("preallocated memory") == 3


@pytest.mark.parametrize("hidden", ["flat", "short"])
def test_a_death_of_memory_is_recognized_however_it_was_filed(history_of: History, config: Config, hidden: str) -> None:
    death = flat(0.98, state="FAILED", tier="hbm40g")
    if hidden == "short":
        death |= {"hbm_evidence": "none", "verdict": "short"}
    for before in ([], [{"hbm_max_mib": 20000.0}] * 6):
        evidence = evidence_of(history_of([*before, death]), config)
        assert evidence.oom is not None
        assert evidence.censored_mib == 40960
    ended_well = {**death, "state": "COMPLETED"}
    assert evidence_of(history_of([ended_well]), config).oom is None


def test_a_family_that_reserves_does_not_die_of_memory_when_it_fails(history_of: History, config: Config) -> None:
    died = flat(0.92, state="FAILED")
    for rows in ([flat(0.92), died], [died, flat(0.92)]):
        evidence = evidence_of(history_of(rows), config)
        assert (evidence.oom, evidence.censored_mib, evidence.runs) == (None, None, 0)


LOW: dict[str, Any] = {"hbm_peak_mib": 20000.0}


def known(rows: list[dict[str, Any]], history_of: History, config: Config) -> str:
    """K for a run with a known need, one letter a run; F for a preallocated one, and - for any other."""
    runs = runs_of(history_of(rows), config.advice, config.tiers)
    return "".join("K" if run and run.is_known else "F" if run and "prealloc" in run.why_not else "-" for run in runs)


def test_a_flat_peak_is_read_by_what_had_ended_before(history_of: History, config: Config) -> None:
    """Later runs of a family change nothing in an earlier one."""
    assert known([flat(0.75), LOW, flat(0.98)], history_of, config) == "FKK"


def test_a_newer_flat_run_takes_back_what_a_lower_run_showed(history_of: History, config: Config) -> None:
    rows = [flat(0.75), LOW, flat(0.75), LOW, LOW, *[flat(0.75)] * 3]
    assert known(rows, history_of, config) == "FKFKKFFF"
    evidence = evidence_of(history_of(rows), config)
    assert (evidence.runs, evidence.oom, evidence.censored_mib) == (0, None, None)
    assert evidence_of(history_of([*rows, *[LOW] * 5]), config).runs == 5, "needs from before the reservation are void"


EARLY_ENDS = ("CANCELLED", "CANCELLED by 1000", "PREEMPTED", "TIMEOUT", "FAILED", "NODE_FAIL")


@pytest.mark.parametrize(
    # A first run that reached its time limit had all its time, and nothing was reserved before it.
    ("state", "place"), [each for each in product(EARLY_ENDS, (0, 1, 6)) if each != ("TIMEOUT", 0)],
)  # fmt: skip
def test_a_run_that_ended_early_unmasks_no_family_that_reserves(
    history_of: History, config: Config, state: str, place: int
) -> None:
    """Before its reservation stood, its peak is low for that reason alone."""
    rows = [flat(0.75, 81920.0) for _ in range(12)]
    rows.insert(place, {**LOW, "state": state})
    found = known(rows, history_of, config)
    assert found.replace("-", "").removeprefix("K") == "F" * 12
    evidence = evidence_of(history_of(rows), config)
    assert evidence.runs <= 1 and evidence.censored_mib is None
    if place and not state.startswith(("FAILED", "NODE")):
        assert evidence.excluded["ended early"] == 1


def test_completed_runs_without_a_reservation_unmask_the_family(history_of: History, config: Config) -> None:
    evidence = evidence_of(history_of([*[flat(0.75, 81920.0)] * 9, *[LOW] * 5]), config)
    assert (evidence.runs, evidence.highest_mib) == (5, 20000.0)


def test_a_completed_run_on_a_gpu_of_unknown_capacity_unmasks_nothing(history_of: History, config: Config) -> None:
    unknown = {**LOW, "hbm_capacity_mib": math.nan, "tier": None}
    assert known([flat(0.75), unknown, flat(0.98)], history_of, config)[2] == "F"


def test_a_program_that_starts_to_reserve_is_masked_after_three_equal_runs(history_of: History, config: Config) -> None:
    """One flat peak can be what the program uses; equal ones are a reservation, and deaths of memory are none."""
    rows = [*[LOW] * 5, *[flat(0.98)] * 6]
    assert known(rows, history_of, config) == "KKKKKKKFFFF"
    assert evidence_of(history_of(rows), config).censored_mib is None
    varied = [*[LOW] * 5, flat(0.96), flat(0.98), flat(0.95), flat(0.985)]
    assert known(varied, history_of, config) == "K" * 9


@given(st.lists(st.sampled_from("FFFFKXT"), min_size=1, max_size=40))
def test_no_single_run_decides_for_good(history_of: History, config: Config, letters: list[str]) -> None:
    """Whatever came before, three equal flat runs mask a family, and five low completed ones give evidence of it."""
    rows = {"F": flat(0.75), "K": LOW, "X": {**LOW, "state": "CANCELLED"}, "T": {**LOW, "state": "TIMEOUT"}}
    before = [rows[letter] for letter in letters]
    masked = [*before, *[flat(0.75)] * 3]
    assert known(masked, history_of, config)[-1] == "F"
    assert evidence_of(history_of(masked), config).censored_mib is None
    assert known([*before, *[LOW] * 5], history_of, config)[-5:] == "K" * 5


@pytest.mark.parametrize(
    ("state", "share", "is_cut_off"),
    [("COMPLETED", 0.985, True), ("COMPLETED", 0.92, False), ("FAILED", 0.92, True), ("FAILED", 0.85, False)],
)
def test_a_run_near_its_capacity_may_have_been_cut_off(
    history_of: History, config: Config, state: str, share: float, is_cut_off: bool
) -> None:
    rows: list[dict[str, Any]] = [{**SMALL, "hbm_peak_mib": 30000.0}] * 8
    rows += [{**SMALL, "hbm_peak_mib": 40960 * share, "state": state}]
    evidence = evidence_of(history_of(rows), config)
    assert evidence.censored_mib == (40960 if is_cut_off else None)
    assert evidence.supports_tier(config.advice.min_runs) == (not is_cut_off)


def test_a_run_on_more_memory_shows_what_was_cut_off(history_of: History, config: Config) -> None:
    died = {**SMALL, "hbm_peak_mib": 40900.0, "state": "FAILED"}
    evidence = evidence_of(history_of([died, {"hbm_peak_mib": 55000.0, "is_flat": False}]), config)
    assert evidence.censored_mib is None
    assert evidence.least_mib == pytest.approx(55000 * (1 + SPIKE_MARGIN))


def test_a_failed_runs_peak_is_a_least_need_and_no_run(history_of: History, config: Config) -> None:
    evidence = evidence_of(history_of([{}] * 6 + [{"hbm_peak_mib": 26000.0, "state": "FAILED"}]), config)
    assert (evidence.runs, evidence.highest_mib, evidence.excluded) == (6, 20000, {"failed before its end": 1})
    assert evidence.least_mib == pytest.approx(26000 * 1.02)


@pytest.mark.parametrize(
    ("peak_mib", "evidence", "is_oom"),
    [(math.nan, "none", True), (60000.0, "telemetry", True), (20000.0, "telemetry", False)],
)
def test_failed_then_success_on_a_larger_tier(
    history_of: History, config: Config, peak_mib: float, evidence: str, is_oom: bool
) -> None:
    failed = {**SMALL, "hbm_peak_mib": 25000.0, "state": "FAILED"}
    found = evidence_of(history_of([failed, {"hbm_peak_mib": peak_mib, "hbm_evidence": evidence}]), config)
    assert (found.oom is not None) == is_oom
    if found.oom:
        assert (found.oom.capacity_mib, found.oom.is_after_move) == (40960, False)


def test_a_death_on_a_smaller_tier_than_before_pauses_the_family_and_no_other(
    history_of: History, config: Config
) -> None:
    rows: list[dict[str, Any]] = [{}] * 6 + [{**SMALL, "hbm_peak_mib": 40500.0, "state": "FAILED"}]
    assert evidence_of(history_of(rows), config).is_paused()
    assert not evidence_of(history_of(rows), config, name="something else").is_paused()
    earlier = [{**row, "end_s": NOW_S - PAUSE_S - DAY_S} for row in rows]
    assert not evidence_of(history_of(earlier), config).is_paused()


def test_names_that_begin_alike_are_one_kin(history_of: History, config: Config) -> None:
    rows = [{"name": "vasp-relax-1"}] * 2 + [{"name": "vasp-relax-1-v2"}] * 2
    evidence = evidence_of(history_of(rows), config, name="vasp-relax-7")
    assert (evidence.runs, evidence.scope) == (4, "similar")
    assert evidence_of(history_of([*rows, rows[0]]), config, name="vasp-relax-7").scope == "family"


def test_old_runs_are_forgotten_and_other_names_say_nothing(history_of: History, config: Config) -> None:
    assert evidence_of(history_of([{}] * 9), config, name="something else").runs == 0
    old = NOW_S - (config.advice.history_days + 1) * DAY_S
    assert evidence_of(history_of([{"end_s": old + number} for number in range(9)]), config).runs == 0


def is_like(one: str, other: str) -> bool:
    return other in similar_names(one, [other])


@given(st.text(max_size=20), st.text(max_size=20))
def test_likeness_is_mutual_and_everything_is_like_itself(one: str, other: str) -> None:
    assert is_like(one, one)
    assert is_like(one, other) == is_like(other, one)


def test_likeness_by_hand() -> None:
    names = ["vasp", "vas", "vasp-relax", "vasq-relaxes", "relax-vasp"]
    assert similar_names("vasp-relax-#", names) == {"vasp", "vasp-relax"}
    assert similar_names("vasp-relaxes", names) == {"vasp", "vasp-relax", "vasq-relaxes"}
    assert similar_names("vas", names) == {"vas"}, "three letters are no beginning"


def cases_of(history: pd.DataFrame, config: Config) -> list[Case]:
    return list(replay_peaks(history, config.advice, config.tiers))


def words(number: int) -> list[str]:
    """Distinct words of three letters, none of them like another."""
    return ["".join(word) for word in product("ghijklmnopqrstuv", repeat=3)][:number]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the names that each new name is compared with; only 8 families are remembered."""
    counts: list[int] = []

    def counted(name: str, others: Collection[str]) -> set[str]:
        counts.append(len(others))
        return similar_names(name, others)

    monkeypatch.setattr(peak_store, "similar_names", counted)
    monkeypatch.setattr(peak_store, "MAX_FAMILIES", 8)
    return counts


@pytest.mark.parametrize("start", ["", "x" * 61])
def test_the_work_of_a_name_does_not_grow_with_the_number_of_names(
    history_of: History, config: Config, compared: list[int], start: str
) -> None:
    cases_of(history_of([{"name": start + word} for word in words(300)]), config)
    assert len(compared) <= 2 * 300, "once when it is submitted, and once when it has ended"
    assert max(compared) == 8


def test_names_that_are_all_alike_take_no_more_memory_than_the_families_that_are_remembered(
    history_of: History, config: Config, compared: list[int]
) -> None:
    rows = [{"name": "x" * 61 + word, "gpu_count": 1 + number % 2} for number, word in enumerate(words(300))]
    store = remember_peaks(["ann"], history_of(rows), NOW_S, config.advice, config.tiers)
    for gpu_count in (1, 2):
        user = store._users["ann", gpu_count]
        assert list(user.families) == [rows[place]["name"] for place in range(284 + gpu_count - 1, 300, 2)]
        assert all(kin == set(user.families) for kin in user.kin_of.values())


def test_the_family_that_ended_last_longest_ago_is_forgotten_first(
    history_of: History, config: Config, compared: list[int]
) -> None:
    names = [*["keep"] * 5, *words(7), "keep", *words(8)[7:]]
    known = evidence_of(history_of([{"name": name} for name in names]), config, name="keep")
    assert (known.scope, known.runs) == ("family", 6)
    names += words(14)[8:]
    assert evidence_of(history_of([{"name": name} for name in names]), config, name="keep").scope == "family"
    names += words(15)[14:]
    forgotten = evidence_of(history_of([{"name": name} for name in names]), config, name="keep")
    assert (forgotten.scope, forgotten.runs) == ("similar", 6), "its own runs are still known"


def test_a_live_request_forgets_what_the_replay_forgets(
    history_of: History, config: Config, compared: list[int]
) -> None:
    names = [word + "-relax" * (place % 3) for place, word in enumerate(words(40))] * 3
    history = history_of([{"name": name, "hbm_peak_mib": 9000.0 + len(name)} for name in names])
    for case in cases_of(history, config)[::7]:
        job = case.submission
        store = remember_peaks([job.user], history, job.submit_s, config.advice, config.tiers)
        assert store.evidence(job, job.submit_s) == case.evidence


@given(st.lists(st.text("abc-", min_size=1, max_size=8), min_size=1, max_size=60))
def test_until_the_cap_evidence_is_all_runs_of_names_like_it(names: list[str]) -> None:
    user = peak_store.UserPeaks()
    runs = [MeasuredRun(1.0, 1.0, False, False, False, 1.0, number, number) for number in range(len(names))]
    for name, run in zip(names, runs, strict=True):
        user.family(name)
        user.absorb(name, "", run)
    for asked in {*names, "abc", "abc-abc"}:
        expected = [run for name, run in zip(names, runs, strict=True) if is_like(asked, name)]
        own = user.families.get(asked)
        assert (
            list(own.kin) if own else user.runs_of(peak_store.similar_names(asked, user.families) | {asked})
        ) == expected


def submitted(ago_s: int, **row: Any) -> dict[str, Any]:
    """A job that was submitted so long before NOW_S and has not ended."""
    row = {"submit_s": NOW_S - ago_s, "start_s": math.nan, "end_s": math.nan, "state": "PENDING", **row}
    return {"hbm_peak_mib": math.nan, "hbm_evidence": "none", "elapsed_s": math.nan, **row}


def test_what_is_open_is_counted_by_family_and_an_array_once(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{}] * 6
    rows += [submitted(100), submitted(90, start_s=NOW_S - 50, state="RUNNING"), submitted(80, name="train-2-v2")]
    rows += [submitted(70, is_array=True)] * 9
    rows += [submitted(60, name="other"), submitted(60, gpu_count=8), submitted(60, user="bob"), submitted(-1)]
    history = history_of(rows)
    evidence = evidence_of(history, config)
    assert (evidence.runs, evidence.open_jobs) == (6, 3), "two jobs and an array; what is like it has not ended yet"
    like = history_of([*rows, {"name": "train-2-v2"}])
    assert evidence_of(like, config).open_jobs == 4
    ended = history_of([row if row.get("state") != "RUNNING" else {**row, "end_s": NOW_S - 1} for row in rows])
    assert evidence_of(ended, config).open_jobs == 2


def test_each_job_of_a_burst_meets_those_before_it(history_of: History, config: Config) -> None:
    burst = [{"submit_s": NOW_S - 9000, "start_s": NOW_S - 8000, "end_s": NOW_S - 100 + n} for n in range(4)]
    later = {"submit_s": NOW_S, "start_s": NOW_S, "end_s": NOW_S + 9}
    array = [{**burst[0], "is_array": True, "name": "sweep-1"}] * 3
    cases = cases_of(history_of([*burst, *array, later]), config)
    assert [case.evidence.open_jobs for case in cases] == [0, 1, 2, 3, 0, 0, 0, 0]


def test_what_accounting_has_lost_is_not_open(history_of: History, config: Config) -> None:
    lost = submitted((config.advice.history_days + 1) * DAY_S, start_s=NOW_S - 999 * DAY_S, state="RUNNING")
    history = history_of([lost, submitted(50), submitted(40, state="REQUEUED"), submitted(0)])
    known = submitted_by(history, NOW_S, config.advice.history_days)
    assert (NOW_S - known["submit_s"]).tolist() == [50]


def rising(per_run: float, runs: int = 8) -> Evidence:
    newest = tuple(math.log(10000) + per_run * n for n in range(runs))
    return Evidence("family", 9 * DAY_S, runs, newest, tuple(n * DAY_S for n in range(runs)), 1.0, 1.0)


def test_growth_extends_the_line_to_now() -> None:
    # eight runs a day apart, the newest on day 7; two days later, at 5% a day
    assert rising(0.05).growth == pytest.approx(0.1)
    assert rising(-0.05).growth == 0
    assert rising(0.6).growth == pytest.approx(math.log(2))
    assert rising(0.0).growth == 0


def test_the_t_value_of_a_trend_by_hand() -> None:
    # slope 0.5 over places 0..4 of 0, 1, 0, 1, 2: correlation 0.4 * 10 / sqrt(10 * 2.8)
    evidence = Evidence("family", 0, 5, (0.0, 1.0, 0.0, 1.0, 2.0), (0, 1, 2, 3, 4))
    correlation = 4 / math.sqrt(10 * 2.8)
    assert evidence.trend == pytest.approx(correlation * math.sqrt(3 / (1 - correlation**2)))
    assert evidence.spread == pytest.approx(math.sqrt(2.8 / 4))
