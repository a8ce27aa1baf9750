"""The bound of the HBM peak: how it is laid, what it needs, and how often it is exceeded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.duration.features import submission_of
from advisor.explain import short_text
from advisor.memory.backtest import replay_tiers, score_group
from advisor.memory.calibration import Calibration, Calibrator, Margins, class_of, conformal_margin, pools_of
from advisor.memory.decide import RETRAIN_S, BoundReplay, bound_of, decide_memory, decide_tier
from advisor.memory.evidence import Evidence
from advisor.memory.peak_store import Case
from advisor.memory.runs import MeasuredRun
from almanac.config import AdviceSection, Config, Tier
from almanac.records import Advice, JobRequest, MemoryBound

NOW_S = 1_750_000_000
History = Callable[[list[dict[str, Any]]], pd.DataFrame]
CONFIG = AdviceSection()


def evidence_of(peaks: list[float], scope: str = "family") -> Evidence:
    logs = tuple(math.log(peak) for peak in peaks)
    return Evidence(scope, NOW_S, len(peaks), logs, tuple(range(len(peaks))), max(peaks), max(peaks))


def calibrated(evidence: Evidence, margin: float) -> Calibration:
    return Calibration(CONFIG.risk, {pools_of(class_of(evidence))[0]: Margins(margin, margin)})


def test_the_bound_by_hand() -> None:
    evidence = evidence_of([20000.0, 22000.0, 20000.0, 22000.0, 20000.0])
    found = bound_of(evidence, calibrated(evidence, 2.0), CONFIG).bound
    spread = math.log(1.1) * math.sqrt(5 * 0.4 * 0.6 / 4)
    assert found.bound_mib == pytest.approx(22000 * math.exp(2 * spread * math.sqrt(1.2)))
    assert (found.runs, found.highest_mib, found.scope, found.risk) == (5, 22000.0, "family", 0.01)
    assert found.evidence_class == "family, steady, spread to 6%, fewer than 8 runs, 0-4 open"


@pytest.mark.parametrize(
    ("change", "why_not", "said"),
    [
        ({"runs": 2}, "too few runs", "no evidence, None: 2 of the 3 measured runs needed"),
        ({"censored_mib": 40960.0}, "ran out",
         "no evidence, None: a run seems to have run out of GPU memory, so its need is unknown"),
        ({"censored_mib": 81920.0}, "ran out", "none large enough, None: "),
        ({"scope": "similar"}, "not calibrated",
         "no evidence, None: the site's history is too short to judge 6 measured runs"),
    ],
)  # fmt: skip
def test_what_supports_no_bound(change: dict[str, Any], why_not: str, said: str, config: Config) -> None:
    evidence = evidence_of([20000.0] * 6)
    found = bound_of(dataclasses.replace(evidence, **change), calibrated(evidence, 1.0), CONFIG)
    assert (found.bound, found.why_not) == (None, why_not)
    request = JobRequest(user="a", job_name="x", gpu_count=1, constraints="hbm80g")
    tier = decide_memory(request, dataclasses.replace(evidence, **change), calibrated(evidence, 1.0), config).tier
    assert f"{tier.reason}, {tier.tier}: {tier.note}" == said


@pytest.mark.parametrize(
    ("change", "bound_mib"), [({"runs": 4}, None), ({"seen_mib": math.inf}, None), ({"seen_mib": 70000.0}, 70000.0)]
)
def test_older_needs_and_fewer_runs_than_a_bound_needs_leave_the_tier(
    change: dict[str, Any], bound_mib: float | None, config: Config
) -> None:
    evidence = evidence_of([20000.0] * 6)
    found = decide_memory(
        JobRequest(user="a", job_name="x", gpu_count=1, constraints="hbm80g"),
        dataclasses.replace(evidence, **change), calibrated(evidence, 1.0), config,
    )  # fmt: skip
    assert (found.bound.bound_mib, found.tier.tier, found.tier.holds_bound) == (bound_mib, "hbm40g", False)


def test_no_bound_without_calibration_or_by_one_of_another_risk_or_of_runs_that_differ_wildly() -> None:
    evidence = evidence_of([20000.0] * 30)
    assert bound_of(evidence, None, CONFIG).why_not == "not calibrated"
    other = dataclasses.replace(calibrated(evidence, 1.0), risk=0.05)
    assert bound_of(evidence, other, CONFIG).why_not == "not calibrated"

    evidence = evidence_of([500.0, 40000.0, 900.0, 30000.0, 700.0, 600.0])
    assert bound_of(evidence, calibrated(evidence, 1.0), CONFIG).why_not == "too wide"


def test_runs_that_differ_too_much_for_a_bound_can_still_have_a_tier(config: Config) -> None:
    evidence = evidence_of([500.0, 9000.0, 900.0, 7000.0, 700.0, 600.0])
    calibration = Calibration(config.advice.risk, {pools_of(class_of(evidence))[0]: Margins(3.0, 0.5)})
    request = JobRequest(user="a", job_name="x", gpu_count=1, constraints="hbm80g")
    said = decide_memory(request, evidence, calibration, config)
    assert said.bound.bound_mib is None
    assert (said.tier.tier, said.tier.reason, said.tier.holds_bound) == ("hbm40g", "smaller", False)
    text = short_text(Advice(request, said.tier, said.bound, None, None))
    assert text.endswith("; about 1 in 100 jobs with such advice needs a larger tier.")


@given(st.lists(st.floats(10, 80000), min_size=5, max_size=60), st.floats(0, 9))
def test_a_bound_is_never_below_a_need_that_was_seen(peaks: list[float], margin: float) -> None:
    evidence = evidence_of(peaks)
    found = bound_of(evidence, calibrated(evidence, margin), CONFIG).bound
    assert found is None or found.bound_mib is None or found.bound_mib >= max(peaks) * (1 - 1e-12)
    assert found is None or found.tier_mib >= max(peaks) * (1 - 1e-12)


def margin_of(scores: list[float], risk: float, errors: float = 0.0, families: list[int] | None = None) -> float | None:
    return conformal_margin(np.array(scores), np.array(families or range(len(scores))), risk, errors)


def test_the_conformal_quantile_by_hand() -> None:
    scores = [float(value) for value in range(1, 101)]
    assert margin_of(scores[:99], 0.01) == 99.0
    assert margin_of(scores[:99], 0.1) == 90.0
    assert margin_of(scores[:98], 0.01) is None
    assert margin_of([], 0.01) is None


def test_high_scores_of_one_family_ask_for_more_than_those_of_many() -> None:
    scores = [float(value) for value in range(1000)]
    of_many = margin_of(scores, 0.05, 1.0)
    of_one = margin_of(scores, 0.05, 1.0, [*range(960), *[960] * 40])
    assert 949 < of_many < of_one


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=300), st.floats(0.005, 0.3))
def test_at_most_the_accepted_share_of_scores_lies_above_the_margin(scores: list[float], risk: float) -> None:
    margin = margin_of(scores, risk, 0.5)
    if margin is not None:
        assert (sum(score > margin for score in scores) + 1) / (len(scores) + 1) <= risk + 1e-9


def test_wider_pools_hold_no_better_evidence() -> None:
    evidence = evidence_of([20000.0] * 30)
    *_, same_scope, any_name, few_scores = pools_of(class_of(evidence))
    assert (same_scope, any_name, few_scores) == ("family/0/0/*/..3", "names/0/0+/*/..3", "few/0/0+")
    few = evidence_of([20000.0] * 6)
    calibration = Calibration(CONFIG.risk, {same_scope: Margins(1.0, 1.0)})
    assert calibration.of(evidence) == (1.0, 1.0)
    assert calibration.of(few) is None


def test_each_margin_comes_from_the_first_pool_that_has_it() -> None:
    evidence = evidence_of([20000.0] * 30)
    own, _, wider, widest, _ = pools_of(class_of(evidence))
    margins = {own: Margins(None, 1.0), wider: Margins(2.0, 3.0), widest: Margins(4.0, 5.0)}
    assert Calibration(CONFIG.risk, margins).of(evidence) == (2.0, 1.0)
    assert Calibration(CONFIG.risk, {own: Margins(None, 1.0)}).of(evidence) == (None, 1.0)
    only_bound = Calibration(CONFIG.risk, {own: Margins(2.0, None)})
    assert only_bound.of(evidence) is None
    assert bound_of(evidence, only_bound, CONFIG).why_not == "not calibrated"


@pytest.mark.parametrize(
    ("open_jobs", "grows", "said"),
    [(3, False, "the site's history is too short to judge 30 measured runs"),
     (12, False, "12 such jobs are waiting or running; ask again when fewer than 5 are"),
     (25, False, "25 such jobs are waiting or running; ask again when fewer than 5 are"),
     (0, True, "the memory of your last 30 measured runs keeps growing, and the site's history is too short to"),
     (25, True, "25 such jobs are waiting or running; ask again when fewer than 5 are")],
)  # fmt: skip
def test_without_a_margin_the_advice_says_what_lacks_it(config: Config, open_jobs: int, grows: bool, said: str) -> None:
    """25 jobs submitted at once used to read as if 44 runs were too little knowledge."""
    peaks = [20000.0 + 40.0 * grows * number for number in range(30)]
    evidence = dataclasses.replace(evidence_of(peaks), open_jobs=open_jobs)
    few_open = dataclasses.replace(evidence, open_jobs=0)
    if open_jobs >= 5:
        margins = {pools_of(class_of(few_open))[0]: Margins(1.0, 1.0)}
    else:
        margins = {pools_of(class_of(evidence_of([20000.0] * 30)))[0]: Margins(1.0, 1.0)} if grows else {}
    request = JobRequest(user="a", job_name="x", gpu_count=1, constraints="hbm80g")
    found = decide_memory(request, evidence, Calibration(config.advice.risk, margins), config)
    assert found.tier.tier is None
    assert found.tier.note.startswith(said)
    other_risk = Calibration(0.5, margins)
    untrained = "the site's predictors are not trained for its accepted risk yet"
    assert decide_memory(request, evidence, other_risk, config).tier.note == untrained


def test_a_bound_is_stated_by_the_scores_of_twenty_families_or_more() -> None:
    scores = [float(value) for value in range(1000)]
    assert margin_of(scores, 0.05, 1.0, [number % 20 for number in range(1000)]) is not None
    assert margin_of(scores, 0.05, 1.0, [number % 19 for number in range(1000)]) is None
    assert margin_of(scores, 0.05, 1.0, [*range(100), *[100] * 900]) is None, "one of them is nine tenths"
    assert margin_of(scores, 0.05, 0.0, [0] * 1000) is not None


@pytest.mark.parametrize(
    ("scores", "families", "need_mib", "is_advised"),
    [(20, 5, 20000.0, True), (20, 5, 45000.0, True), (19, 5, 20000.0, False), (20, 4, 20000.0, False)],
)
def test_a_tier_is_advised_by_all_evidence_while_few_submissions_were_as_many_at_once(
    config: Config, scores: int, families: int, need_mib: float, is_advised: bool
) -> None:
    quiet = evidence_of([20000.0] * 30)
    busy = dataclasses.replace(quiet, open_jobs=20)
    calibrator = absorbed(quiet, [20000.0] * 200, 0.01, config.tiers)
    for number in range(scores):
        calibrator.absorb(outcome(busy, need_mib if number == 0 else 20000.0, number % families), None)
    margins = calibrator.calibration().of(busy)
    assert (margins is not None) == is_advised
    if margins is None:
        return
    centre, scale = busy.centre_and_scale()
    highest = (math.log(40960 - CONFIG.headroom_mib) - centre) / scale if need_mib > 40960 else 0.0
    assert margins.bound is None
    assert margins.tier == pytest.approx(highest)
    growing = dataclasses.replace(evidence_of([20000.0 + 100 * run for run in range(30)]), open_jobs=20)
    assert calibrator.calibration().of(growing) is None, "steady evidence says nothing of what grows"


def outcome(evidence: Evidence, need_mib: float, number: int, is_array: bool = False) -> Case:
    request = JobRequest(user=f"u{number}", job_name="x", gpu_count=1, is_array=is_array, submit_s=5)
    run = MeasuredRun(need_mib, need_mib, False, False, False, 81920.0, 5, 6, is_known=True)
    return Case(number, submission_of(request, ()), evidence, run)


def absorbed(
    evidence: Evidence, needs_mib: Iterable[float], risk: float = 0.1, tiers: Sequence[Tier] = ()
) -> Calibrator:
    """A calibrator that has seen these needs with that evidence, each of a user of its own, and no bound given."""
    found = Calibrator(AdviceSection(risk=risk), tiers)
    for number, need_mib in enumerate(needs_mib):
        found.absorb(outcome(evidence, need_mib, number), None)
    return found


def bound(mib: float, tier_mib: float = 0.0) -> MemoryBound:
    return MemoryBound(mib, tier_mib or mib, 0.1, mib, 30, "family", "")


def bound_margin(calibration: Calibration, evidence: Evidence) -> float | None:
    margins = calibration.of(evidence)
    return margins.bound if margins else None


@pytest.mark.parametrize(("ended_s", "is_known"), [(RETRAIN_S - 1, True), (RETRAIN_S, False)])
def test_a_replay_trains_on_runs_that_ended_before_the_training(ended_s: int, is_known: bool) -> None:
    cases = []
    for number, (submit_s, end_s) in enumerate([(5, ended_s)] * 100 + [(RETRAIN_S, RETRAIN_S + 9)]):
        case = outcome(evidence_of([20000.0] * 30), 20000.0, number)
        assert case.run is not None
        submission = dataclasses.replace(case.submission, submit_s=submit_s)
        cases.append(dataclasses.replace(case, submission=submission, run=dataclasses.replace(case.run, end_s=end_s)))
    replay, advice = BoundReplay(cases, AdviceSection(risk=0.1)), AdviceSection(risk=0.1)
    *_, last = [bound_of(case.evidence, replay.calibration, advice).bound for case in replay]
    assert (last is not None) == is_known


def test_the_tiers_margin_counts_only_needs_above_a_tier(config: Config) -> None:
    """Runs well above the highest need before: the bound goes up, the tier of 39 GiB still holds them all."""
    evidence = evidence_of([20000.0] * 30)
    needs_mib = [30000.0, 20000.0, 20000.0, 20000.0] * 25
    margins = absorbed(evidence, needs_mib, tiers=config.tiers).calibration().of(evidence)
    assert margins.bound is not None and margins.bound > 10
    assert margins.tier == 0.0


def test_a_tier_that_is_too_small_more_often_than_accepted_is_not_chosen(config: Config) -> None:
    evidence = evidence_of([38000.0] * 30)
    calibrator = absorbed(evidence, [60000.0, 38000.0, 38000.0, 38000.0] * 25, tiers=config.tiers)
    section = AdviceSection(risk=0.1)
    found = bound_of(evidence, calibrator.calibration(), section).bound
    assert 40960 - section.headroom_mib < found.tier_mib < found.bound_mib
    assert decide_tier(JobRequest(user="a", gpu_count=1), found, config.tiers, section.headroom_mib).tier == "hbm80g"


def test_a_tier_smaller_than_the_bound_is_said_to_be_exceeded_at_the_risk(config: Config) -> None:
    evidence = evidence_of([30000.0] * 30)
    margins = {pools_of(class_of(evidence))[0]: Margins(20.0, 2.0)}
    request = JobRequest(user="a", job_name="x", gpu_count=1, constraints="hbm80g")
    said = decide_memory(request, evidence, Calibration(config.advice.risk, margins), config)
    assert said.bound.bound_mib is not None and said.bound.bound_mib > 40960
    assert (said.tier.tier, said.tier.holds_bound) == ("hbm40g", False)
    text = short_text(Advice(request, said.tier, said.bound, None, None))
    assert text.endswith("; about 1 in 100 jobs with such advice needs a larger tier.")


def test_errors_of_given_bounds_make_the_next_ones_wider_and_time_heals() -> None:
    evidence = evidence_of([20000.0] * 30)
    calibrator = absorbed(evidence, [20000.0 + 10 * number for number in range(200)])
    usual = bound_margin(calibrator.calibration(), evidence)
    for number in range(5):
        calibrator.absorb(outcome(evidence, 20000.0, 300 + number), bound(19999.0))
    strict = bound_margin(calibrator.calibration(), evidence)
    healed = bound_margin(calibrator.calibration(90), evidence)
    assert strict > usual and healed < strict


def test_evidence_is_calibrated_apart_by_how_much_of_the_family_is_open() -> None:
    quiet = evidence_of([20000.0] * 30)
    busy = dataclasses.replace(quiet, open_jobs=20)
    calibrator = absorbed(quiet, [20000.0] * 100)
    assert bound_margin(calibrator.calibration(), quiet) == 0.0
    assert bound_margin(calibrator.calibration(), busy) is None
    for number in range(100):
        calibrator.absorb(outcome(busy, 50000.0, number), bound(20000.0))
    calibration = calibrator.calibration(0)
    assert bound_margin(calibration, quiet) == 0.0, "errors in bursts leave the quiet alone"
    assert bound_margin(calibration, busy) is None


def test_the_errors_of_one_user_between_two_trainings_count_as_one() -> None:
    evidence = evidence_of([20000.0] * 30)
    risks = []
    for errors in (0, 1, 200):
        calibrator = absorbed(evidence, [20000.0 + 10 * number for number in range(300)])
        for _ in range(errors):
            calibrator.absorb(outcome(evidence, 20000.0, 7), bound(19999.0))
        calibrator.calibration()
        risks.append(calibrator._bounds.of("family/0/0/0/0"))
    assert risks == [pytest.approx(0.1), pytest.approx(0.091), pytest.approx(0.091)]


def test_a_tier_is_advised_while_errors_above_the_bound_silence_it(config: Config) -> None:
    """A need above the bound that fits every tier costs no job anything, and a tier no trust."""
    evidence = evidence_of([20000.0] * 30)
    calibrator = absorbed(evidence, [21000.0] * 100, tiers=config.tiers)
    for number in range(200):
        calibrator.absorb(outcome(evidence, 25000.0, number), bound(22000.0))
        calibrator.calibration()
    assert calibrator.calibration().of(evidence) == (None, 0.0)


def test_steady_evidence_is_supported_by_that_of_growing_families_and_not_the_reverse() -> None:
    steady = evidence_of([20000.0] * 30)
    growing = evidence_of([20000.0 + 100 * run for run in range(30)])
    assert (class_of(steady)[2], class_of(growing)[2]) == (0, 2)
    for scored, asked, has_margin in ((growing, steady, True), (steady, growing, False)):
        calibrator = absorbed(scored, [20000.0] * 100)
        assert (calibrator.calibration().of(asked) is not None) == has_margin


def test_a_bound_that_was_not_stated_is_no_error_of_one(config: Config) -> None:
    evidence = evidence_of([20000.0] * 30)
    calibrator = Calibrator(AdviceSection(risk=0.1), config.tiers)
    for number in range(200):
        calibrator.absorb(outcome(evidence, 60000.0, number), dataclasses.replace(bound(22000.0), bound_mib=None))
    calibrator.calibration()
    assert calibrator._bounds.of("family/0/0/0/0") == pytest.approx(0.1)
    assert calibrator._tiers.of("family/0/0/0/0") == 0.0


def test_an_array_counts_once() -> None:
    evidence = evidence_of([20000.0] * 30)
    calibrator = Calibrator(AdviceSection(risk=0.1))
    for number in range(100):
        calibrator.absorb(dataclasses.replace(outcome(evidence, 20000.0, 1, is_array=True), row=number), None)
    assert calibrator.calibration().margins == {}


def steady(number: int, rng: np.random.Generator) -> float:
    family = number % 25
    return float((5000 + 2500 * family) * rng.lognormal(0, 0.02 + 0.004 * (family % 5)))


def growing(number: int, rng: np.random.Generator) -> float:
    return (4000 + 640 * (number % 25)) * math.exp(0.0075 * (number // 25)) * rng.lognormal(0, 0.03)


def changing(number: int, rng: np.random.Generator) -> float:
    """From the middle on, every twentieth run needs half as much again: the risk holds once that is known."""
    factor = 1.5 if number > 2000 and rng.random() < 0.05 else 1.0
    return (5000 + 500 * (number % 25)) * factor * rng.lognormal(0, 0.02)


@pytest.mark.parametrize(
    ("peak_mib", "seed", "runs", "least_advised", "most_share"),
    [(steady, 11, 4000, 1500, 0.0175), (growing, 12, 4000, 1000, 0.02), (changing, 5, 6000, 0, 0.015)],
)
def test_the_stated_risk_holds_for_the_newer_half(
    history_of: History, config: Config, peak_mib: Callable[[int, np.random.Generator], float], seed: int, runs: int,
    least_advised: int, most_share: float,
) -> None:  # fmt: skip
    """1.75% is three standard errors above 1% of 1,500."""
    rng = np.random.default_rng(seed)
    rows = [
        {"user": f"u{number % 25}", "hbm_peak_mib": peak_mib(number, rng), "end_s": NOW_S - 900 * (runs - number)}
        for number in range(runs)
    ]
    outcomes = replay_tiers(history_of(rows), config)
    exceeded = score_group("new", outcomes[len(outcomes) // 2 :]).exceeded_bound
    assert exceeded.jobs > least_advised
    assert exceeded.share <= most_share
