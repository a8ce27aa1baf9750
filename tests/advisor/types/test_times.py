"""Run times per GPU type: hand-computed cases, properties, and honest intervals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from speed_site import NOW_S, TYPES, made_up_site

from advisor.types.learning import OF_USER, SpeedTable, learn_speeds
from advisor.types.runs import FamilyKey, FamilyRuns, GpuTypes, RunProfile, SpeedRun, families_of, log_speeds
from advisor.types.times import MemoryFit, TypeTime, family_times
from almanac.hardware import gpu_models

KEY = FamilyKey("ann", "bert-#", 4)
ANY = MemoryFit(is_checked=False)
BARE = learn_speeds({}, GpuTypes(), TYPES)
RUNS = st.dictionaries(
    st.sampled_from(TYPES), st.lists(st.floats(60, 1e5), min_size=1, max_size=6), min_size=1, max_size=3
)


def run(gpu_type: str, run_s: float, key: FamilyKey = KEY, **more: float) -> SpeedRun:
    """run_s: NaN for a run that timed out."""
    return SpeedRun(key, gpu_type, NOW_S, math.log(run_s), profile=RunProfile(gpu_type, "memory"), **more)


def times(runs: list[SpeedRun], table: SpeedTable = BARE, fit: MemoryFit = ANY) -> dict[str, TypeTime]:
    return {each.gpu_type: each for each in family_times(KEY, families_of(runs), table, fit)}


def test_own_runs_are_told_as_they_are() -> None:
    told = times([run("a100", 3600.0)] * 9 + [run("h100", 1800.0)] * 9)
    assert told["a100"].run_s == pytest.approx(3600, rel=0.05)
    assert told["h100"].run_s == pytest.approx(1800, rel=0.05)
    assert {name: (each.runs, each.source) for name, each in told.items()} == {
        "a100": (9, "own runs"), "h100": (9, "own runs"), "v100": (0, "specifications"),
    }  # fmt: skip


def test_specifications_alone_follow_the_peaks_within_a_wide_interval() -> None:
    told = times([run("a100", 3600.0)])
    # A memory-bound run, unless more is known: a fifth of the time computes.
    expected = 0.2 * 19.5 / 66.9 + 0.8 * 1.555 / 3.35
    assert told["h100"].run_s / told["a100"].run_s == pytest.approx(expected)
    assert told["h100"].high_s / told["h100"].low_s > 4
    assert [each.gpu_type for each in family_times(KEY, families_of([run("a100", 3600.0)]), BARE, ANY)] == [
        "h100", "a100", "v100",
    ]  # fmt: skip


def test_the_busy_share_bounds_what_a_faster_type_can_win() -> None:
    hardware = [gpu_models()["A100-80"], gpu_models()["H100-80"]]
    for busy, compute, expected in (
        (1.0, 1.0, 66.9 / 19.5),
        (1.0, 0.0, 3.35 / 2.039),
        (0.5, 0.0, 1 / (0.5 + 0.5 * 2.039 / 3.35)),
    ):
        logs = log_speeds(RunProfile("a100", "", "fp32", compute, busy), ("a100", "h100"), hardware)
        assert math.exp(logs[1] - logs[0]) == pytest.approx(expected)


def test_rates_of_runs_that_timed_out_move_the_estimate() -> None:
    known = [run("a100", 3600.0, log_bytes=math.log(1e12))] * 5
    cut = [run("h100", math.nan, log_bytes=math.log(3e12))] * 5
    before, after = times(known)["h100"], times(known + cut)["h100"]
    assert (after.source, after.runs) == ("own rates", 0)
    assert after.run_s < before.run_s
    assert after.run_s == pytest.approx(1200, rel=0.15)
    assert after.high_s / after.low_s < before.high_s / before.low_s


def test_flops_count_only_on_one_and_the_same_pipe() -> None:
    def compute(gpu_type: str, pipe: str, log_flops: float) -> SpeedRun:
        return SpeedRun(KEY, gpu_type, NOW_S, math.nan, log_flops, 25.0, RunProfile(gpu_type, "compute", pipe))

    same = families_of([compute("v100", "fp32", 30.0), compute("a100", "fp32", 31.0)])[KEY]
    assert same.log_rates() == {"v100": [30.0], "a100": [31.0]}
    other = families_of([compute("v100", "fp32", 30.0), compute("a100", "tensor", 33.0)])[KEY]
    assert other.log_rates() == {"v100": [25.0], "a100": [25.0]}, "bytes/s"


def test_other_families_teach_a_type_and_outliers_teach_little() -> None:
    others = [
        run(name, run_s, FamilyKey(f"u{user}", "x", 4))
        for user in range(20)
        for name, run_s in (("a100", 100.0), ("h100", 80.0))
    ]
    table = learn_speeds(families_of(others), GpuTypes(), TYPES)
    told = times([run("a100", 3600.0)], table)
    assert told["h100"].source == "other families"
    assert told["h100"].run_s == pytest.approx(0.8 * 3600, rel=0.1)
    assert told["v100"].source == "specifications"
    odd = [run(name, run_s, FamilyKey("odd", "x", 4)) for name, run_s in (("a100", 100.0), ("h100", 5000.0))]
    moved = times([run("a100", 3600.0)], learn_speeds(families_of(others + odd), GpuTypes(), TYPES))
    assert moved["h100"].run_s == pytest.approx(told["h100"].run_s, rel=0.15)


def test_runs_of_another_gpu_count_count_and_those_of_another_name_do_not() -> None:
    wide = FamilyKey("ann", "bert-#", 8)
    more = [run("a100", 1000.0, wide), run("h100", 900.0, wide)] * 5
    told, alone = times([run("a100", 3600.0), *more]), times([run("a100", 3600.0)])
    assert alone["h100"].run_s < told["h100"].run_s
    strange = [run("a100", 1000.0, FamilyKey("bob", "bert-#", 8)), run("h100", 900.0, FamilyKey("bob", "bert-#", 8))]
    assert times([run("a100", 3600.0), *strange]) == alone


def test_without_a_completed_run_nothing_is_told() -> None:
    assert times([run("a100", math.nan, log_bytes=20.0)] * 5) == {}
    assert times([]) == {}


def test_a_type_of_unknown_hardware_is_told_only_where_somebody_ran() -> None:
    table = learn_speeds({}, GpuTypes(), ("a100", "strange"))
    assert set(times([run("a100", 3600.0)], table)) == {"a100"}
    told = times([run("a100", 3600.0), run("strange", 7200.0)], table)
    assert told["strange"].run_s == pytest.approx(7200, rel=0.2)


@pytest.mark.parametrize(
    ("fit", "expected"),
    [(MemoryFit(20_000.0), {"a100", "h100"}), (MemoryFit(40_000.0, 1024.0), {"h100"}), (MemoryFit(1e6), set()),
     (MemoryFit(None), {"a100", "h100"}), (ANY, set(TYPES))],
)  # fmt: skip
def test_no_type_is_told_whose_memory_does_not_hold_the_family(fit: MemoryFit, expected: set[str]) -> None:
    assert set(times([run("a100", 3600.0)], fit=fit)) == expected


@given(RUNS, st.floats(0.1, 10))
def test_scaling_time_scales_the_results(values: dict[str, list[float]], factor: float) -> None:
    one = times([run(name, run_s) for name, each in values.items() for run_s in each])
    other = times([run(name, run_s * factor) for name, each in values.items() for run_s in each])
    for name, told in one.items():
        assert other[name].run_s == pytest.approx(max(told.run_s * factor, 1), rel=1e-6)
        if told.low_s * factor > 1 and told.low_s > 1:
            assert other[name].low_s == pytest.approx(told.low_s * factor, rel=1e-6)
            assert other[name].high_s == pytest.approx(told.high_s * factor, rel=1e-6)


@given(RUNS)
def test_more_evidence_narrows_every_interval(values: dict[str, list[float]]) -> None:
    runs = [run(name, run_s) for name, each in values.items() for run_s in each]
    once, thrice = times(runs), times(runs * 3)
    for name, told in once.items():
        # The spread of the family itself becomes better known, too, which can widen it a little.
        assert thrice[name].high_s / thrice[name].low_s <= 1.35 * told.high_s / told.low_s
        if told.source != "specifications" and thrice[name].spread <= told.spread:
            assert thrice[name].high_s / thrice[name].low_s <= told.high_s / told.low_s * (1 + 1e-9)


@given(st.dictionaries(st.sampled_from(TYPES), st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=30), min_size=1))
def test_no_time_is_ever_zero_or_infinite(values: dict[str, list[float]]) -> None:
    runs = [run(name, run_s, log_bytes=-math.log(run_s)) for name, each in values.items() for run_s in each]
    table = learn_speeds(families_of(runs), GpuTypes(), TYPES)
    for told in times(runs, table).values():
        low_s, high_s = told.next_run()
        assert 1 <= low_s <= told.low_s <= told.run_s <= told.high_s <= high_s < math.inf


@pytest.mark.parametrize(("of_user", "noise"), [(0.25, 0.3), (0.5, 0.1), (0.05, 0.8)])
def test_the_intervals_are_honest(of_user: float, noise: float) -> None:
    held: dict[str, list[bool]] = {}
    for seed in range(6):
        site = made_up_site(seed + 100, of_user=of_user, noise=noise)
        table = learn_speeds(site.families, GpuTypes())
        for key in site.families:
            for told in family_times(key, {key: site.families[key]}, table, ANY):
                true_s = math.exp(site.log_s[key][told.gpu_type])
                held.setdefault(told.source, []).append(told.low_s <= true_s <= told.high_s)
    assert set(held) == {"own runs", "other families"}
    for shares in held.values():
        assert 0.74 <= np.mean(shares) <= 0.97


def test_the_site_learns_its_own_deviation() -> None:
    varied, alike = (learn_speeds(made_up_site(7, 40, sd, 0.05, 0.1).families, GpuTypes()) for sd in (0.6, 0.05))
    assert alike.of_user < OF_USER < varied.of_user


def test_the_table_survives_json() -> None:
    table = learn_speeds(made_up_site(3).families, GpuTypes({"a100": "A100-80"}))
    again = SpeedTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again.to_json() == table.to_json()
    runs = families_of([run("a100", 3600.0)])
    assert family_times(KEY, runs, again, ANY) == family_times(KEY, runs, table, ANY)


def test_the_newest_runs_of_a_type_count() -> None:
    runs = FamilyRuns()
    for run_s in [100.0] * 30 + [1000.0] * 20:
        runs.add(run("a100", run_s))
    told = {each.gpu_type: each for each in family_times(KEY, {KEY: runs}, BARE, ANY)}
    assert told["a100"].run_s == pytest.approx(1000, rel=0.01)
    assert told["a100"].runs == 20
