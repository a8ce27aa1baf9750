"""Evidence of a user's runs for sharing a GPU, with the holes that real records have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from advisor.memory.calibration import Calibration, Margins, class_of, pools_of
from advisor.memory.evidence import Evidence
from advisor.packing.decide import MOST_FAMILIES, PackingFamily, decide_packing
from advisor.packing.evidence import NEWEST_RUNS, packing_families, packing_of_request, rules_of
from almanac.config import AdviceSection, Config, Tier
from almanac.records import JobRequest

NOW_S = 1_750_000_000
CONFIG = Config(tiers=(Tier("hbm40g", 40960, constraint="hbm40g"), Tier("hbm80g", 81920, constraint="hbm80g")))
ROW: dict[str, Any] = {
    "gpu_count": 1, "mean_sm_active_frac": 0.3, "mean_dram_active_frac": 0.1, "coverage_sm_active_frac": 0.98,
    "coverage_dram_active_frac": 0.97, "gpu_model": "A100-80", "mig_profile": None, "has_profiling_fault": False,
    "mean_gr_engine_active_frac": 0.5, "mean_gpu_util_pct": 50.0, "coverage_frac": 0.99,
}  # fmt: skip
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


def calibrated() -> Calibration:
    """Margins for steady families of 8 to 12 and of 13 to 24 runs, also for two jobs on a GPU."""
    pools = [
        pools_of(class_of(Evidence("family", NOW_S, number, (9.0,) * number, tuple(range(number)), 9.0, 9.0)))[0]
        for number in (8, 13, 25)
    ]
    return Calibration(AdviceSection().risk, dict.fromkeys(pools, Margins(1.0, 1.0)), {2: dict.fromkeys(pools, 2.0)})


def runs(number: int = 10, **changes: Any) -> list[dict[str, Any]]:
    return [{**ROW, **changes} for _ in range(number)]


def family_of(history_of: History, rows: list[dict[str, Any]]) -> PackingFamily:
    (found,) = packing_families(history_of(rows), calibrated(), CONFIG, NOW_S)
    return found


def why(history_of: History, rows: list[dict[str, Any]]) -> str:
    family = family_of(history_of, rows)
    return decide_packing((family, family), rules_of(CONFIG)).reason


def test_a_family_by_hand(history_of: History) -> None:
    family = family_of(history_of, runs())
    spread = 0.02 * math.sqrt(1.1)
    assert (family.key, family.runs, family.demand) == (("ann", "train-#", 1), 10, (0.3, 0.1))
    assert (family.coverage, family.gpu_model, family.capacity_mib) == (0.97, "A100-80", 81920.0)
    assert family.bounds_mib == {2: pytest.approx(20000 * 1.02 * math.exp(2 * spread))}
    assert (family.is_preallocated, family.is_on_mig, family.node_count) == (False, False, 1)
    assert decide_packing((family, family), rules_of(CONFIG)).is_advised


def test_jobs_that_are_almanac_pack_itself_are_no_family_to_pack(history_of: History) -> None:
    assert packing_families(history_of(runs(name="almanac-pack")), calibrated(), CONFIG, NOW_S) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mean_sm_active_frac": np.nan}, "too few runs"),
        ({"mean_dram_active_frac": np.nan}, "too few runs"),
        ({"mean_sm_active_frac": 0.0}, "too few runs"),  # on a busy GPU: a fault, no idleness
        # nothing says that the GPU was idle
        (
            {"mean_sm_active_frac": 0.0, "mean_gr_engine_active_frac": np.nan, "mean_gpu_util_pct": np.nan},
            "too few runs",
        ),
        ({"mean_dram_active_frac": 0.0}, "too few runs"),  # kernels ran, and they read memory
        ({"has_profiling_fault": True}, "too few runs"),
        ({"state": "FAILED"}, "too few runs"),
        ({"verdict": "low coverage"}, "too few runs"),
        ({"coverage_sm_active_frac": 0.4}, "thin coverage"),
        ({"coverage_dram_active_frac": np.nan}, "thin coverage"),
        ({"gpu_model": None}, "unknown GPU"),
        ({"hbm_capacity_mib": np.nan}, "unknown GPU"),
        ({"hbm_capacity_mib": math.inf}, "unknown GPU"),
        ({"hbm_evidence": "preallocated", "hbm_peak_mib": np.nan}, "preallocated"),
        ({"hbm_evidence": "none", "hbm_peak_mib": np.nan}, "no memory bound"),
        ({"mig_profile": "1g.10gb"}, "MIG"),
        ({"gpu_type": "nvidia_a100_1g.10gb"}, "MIG"),
        ({"node_count": 2}, "several nodes"),
        ({"hbm_peak_mib": 60000.0}, "memory"),
        ({"mean_dram_active_frac": 0.9}, "little gain"),
    ],
)
def test_what_keeps_a_family_alone(history_of: History, change: dict[str, Any], reason: str) -> None:
    assert why(history_of, runs(**change)) == reason


def test_packed_runs_change_nothing(history_of: History) -> None:
    """Newer than the others, busier, larger, and of another GPU."""
    packed = runs(
        25, is_packed=True, mean_sm_active_frac=0.7, mean_dram_active_frac=0.5, hbm_peak_mib=41000.0, gpu_model="H100"
    )
    plain = [{**row, "end_s": NOW_S - 200_000 + 600 * number} for number, row in enumerate(runs())]
    mixed, alone = (family_of(history_of, rows) for rows in ([*plain, *packed], plain))
    assert mixed == alone
    assert packing_families(history_of(packed), calibrated(), CONFIG, NOW_S) == []


def test_a_zero_that_other_counters_bear_out_counts(history_of: History) -> None:
    idle = {"mean_sm_active_frac": 0.0, "mean_dram_active_frac": 0.0, "mean_gr_engine_active_frac": 0.0}
    assert family_of(history_of, runs(**idle)).demand == (0.0, 0.0)


@pytest.mark.parametrize("counter", ["sm", "dram"])
def test_runs_of_thin_coverage_say_nothing_of_speed(history_of: History, counter: str) -> None:
    thin = {f"coverage_{counter}_active_frac": 0.01, "mean_sm_active_frac": 0.9}
    family = family_of(history_of, [*runs(9, **thin), *runs(5)])
    assert (family.runs, family.demand, family.coverage) == (5, (0.3, 0.1), 0.97)
    assert why(history_of, [*runs(9, **thin), *runs(5)]) == "share"
    assert why(history_of, [*runs(9, **thin), *runs(4)]) == "too few runs"
    assert why(history_of, runs(9, **thin)) == "thin coverage"


def test_without_a_calibration_or_runs_there_is_no_advice(history_of: History) -> None:
    history = history_of(runs())
    (family,) = packing_families(history, None, CONFIG, NOW_S)
    assert decide_packing((family, family), rules_of(CONFIG)).reason == "no memory bound"
    assert packing_families(history.iloc[:0], calibrated(), CONFIG, NOW_S) == []
    assert packing_families(history, calibrated(), CONFIG, NOW_S - 400 * 86_400) == []
    assert packing_families(history, calibrated(), CONFIG, NOW_S + 400 * 86_400) == []


def test_a_history_without_the_counters_says_nothing_of_speed(history_of: History) -> None:
    bare = history_of([{"gpu_count": 1} for _ in range(10)])
    (family,) = packing_families(bare, calibrated(), CONFIG, NOW_S)
    assert decide_packing((family, family), rules_of(CONFIG)).reason == "unknown GPU"


def test_after_a_change_of_gpu_only_its_own_runs_count_and_the_smaller_memory(history_of: History) -> None:
    old = runs(6, gpu_model="A100-40", hbm_capacity_mib=40960.0, mean_sm_active_frac=0.9)
    family = family_of(history_of, [*old, *runs(5)])
    assert (family.gpu_model, family.runs, family.demand) == ("A100-80", 5, (0.3, 0.1))
    assert family.capacity_mib == 40960.0
    assert why(history_of, [*old, *runs(3)]) == "too few runs"


def test_only_the_newest_runs_count(history_of: History) -> None:
    family = family_of(history_of, [*runs(9, mean_sm_active_frac=0.9), *runs(NEWEST_RUNS)])
    assert (family.runs, family.demand) == (NEWEST_RUNS, (0.3, 0.1))


def test_a_family_whose_memory_grows_has_no_bound_without_margins_for_growth(history_of: History) -> None:
    rows = [{**ROW, "hbm_peak_mib": 8000.0 * 1.1**number} for number in range(10)]
    assert why(history_of, rows) == "no memory bound"


def test_of_ten_thousand_families_the_newest_count(history_of: History) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = [
        {**ROW, "name": f"{letters[n % 26]}{letters[n // 26 % 26]}{letters[n // 676]}w", "end_s": NOW_S - n - 1,
         "submit_s": NOW_S - n - 700, "start_s": NOW_S - n - 601}
        for n in range(10_000)
    ]  # fmt: skip
    found = packing_families(history_of(rows), calibrated(), CONFIG, NOW_S)
    assert len(found) == MOST_FAMILIES
    assert min(each.newest_s for each in found) == NOW_S - MOST_FAMILIES


def test_names_are_data(history_of: History) -> None:
    hostile = '\x1b]0;x\x07"; DROP TABLE jobs; --\n<script>'
    family = family_of(history_of, runs(name=hostile))
    assert family.runs == 10
    for unknown in ({"name": ""}, {"user": ""}):
        assert packing_families(history_of(runs(**unknown)), calibrated(), CONFIG, NOW_S) == []


def request(**changes: Any) -> JobRequest:
    return dataclasses.replace(JobRequest("ann", "train-7", gpu_count=1, constraints="hbm80g"), **changes)


def test_an_array_shares_with_itself_and_a_job_with_its_best_partner(history_of: History) -> None:
    rows = [*runs(mean_sm_active_frac=0.5), *runs(name="eval", mean_sm_active_frac=0.1)]
    families = packing_families(history_of(rows), calibrated(), CONFIG, NOW_S)
    rules = rules_of(CONFIG)
    array = packing_of_request(request(is_array=True), families, rules, CONFIG.tiers, NOW_S)
    single = packing_of_request(request(), families, rules, CONFIG.tiers, NOW_S)
    later = packing_of_request(request(), families, rules, CONFIG.tiers, NOW_S + 30 * 86_400)
    assert array.best.is_with_itself
    assert [member.name_key for member in single.best.members] == ["train-#", "eval"]
    assert later.best.is_with_itself
    assert packing_of_request(request(job_name="new"), families, rules, CONFIG.tiers, NOW_S) is None
    assert packing_of_request(request(user="bob"), families, rules, CONFIG.tiers, NOW_S) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"constraints": "hbm40g"}, "memory"),
        ({"constraints": "hbm40g|hbm80g"}, "memory"),  # Slurm may give either
        ({"constraints": ""}, "memory"),
        ({"constraints": "gpu"}, "memory"),
        ({"node_count": 2}, "several nodes"),
        ({"may_use_more": True}, "several nodes"),  # -N1-4
        ({"gpu_type": "1g.10gb", "constraints": ""}, "MIG"),  # no tier of this site
        ({"gpu_type": "nvidia_a100_1g.10gb", "constraints": ""}, "MIG"),
        ({"gpu_type": "k80", "constraints": ""}, "unknown GPU"),
    ],
)
def test_what_the_submission_asks_for_counts(history_of: History, change: dict[str, Any], reason: str) -> None:
    families = packing_families(history_of(runs()), calibrated(), CONFIG, NOW_S)
    found = packing_of_request(request(**change), families, rules_of(CONFIG), CONFIG.tiers, NOW_S)
    assert found.best.reason == reason


def test_jobs_must_fit_the_tier_that_is_advised_beside(history_of: History) -> None:
    families = packing_families(history_of(runs()), calibrated(), CONFIG, NOW_S)
    rules = rules_of(CONFIG)
    reasons = [
        found.best.reason
        for tier in (None, "hbm80g", "hbm40g")
        if (found := packing_of_request(request(), families, rules, CONFIG.tiers, NOW_S, tier))
    ]
    assert reasons == ["share", "share", "memory"]
    for constraints, reason in (("", "share"), ("hbm40g|hbm80g", "memory")):
        asked = request(constraints=constraints)
        found = packing_of_request(asked, families, rules, CONFIG.tiers, NOW_S, "hbm80g")
        assert found.best.reason == reason


GRES = (Tier("v100", 32768, gres="v100"), Tier("a100", 40960, gres="a100"), Tier("a100_80", 81920, gres="a100_80"))
MODELS = (
    Tier("hbm16g", 16384, "V100-16", constraint="hbm16g"),
    Tier("hbm40g", 40960, "A100-40", constraint="hbm40g"),
    Tier("hbm80g", 81920, "A100-80", constraint="hbm80g"),
)


@pytest.mark.parametrize(
    ("tiers", "change", "reason"),
    [
        ((), {}, "share"),
        ((), {"gpu_type": "a100_80"}, "share"),  # the type that the runs had, at a site without tiers
        ((), {"gpu_type": "v100"}, "unknown GPU"),
        (GRES, {"gpu_type": "a100_80"}, "share"),
        (GRES, {"gpu_type": "v100"}, "unknown GPU"),
        (GRES, {}, "unknown GPU"),  # it may be a V100
        (MODELS, {"constraints": "hbm80g"}, "share"),
        (MODELS, {"constraints": "hbm40g"}, "share"),  # two of them fit into 40 GiB, and the model has other memory
        (MODELS, {"constraints": "hbm16g"}, "unknown GPU"),
        (MODELS, {"constraints": "hbm16g|hbm80g"}, "unknown GPU"),
        (MODELS, {}, "unknown GPU"),
        (MODELS, {"gpu_type": "a100_80"}, "share"),  # no V100 has this type
        (MODELS[1:], {}, "share"),
    ],
)
def test_a_job_that_may_get_another_gpu_is_told_nothing(
    history_of: History, tiers: tuple[Tier, ...], change: dict[str, Any], reason: str
) -> None:
    rows = runs(gpu_type="a100_80", hbm_peak_mib=8000.0)
    config = dataclasses.replace(CONFIG, tiers=tiers)
    families = packing_families(history_of(rows), calibrated(), config, NOW_S)
    asked = request(**{"constraints": "", **change})
    found = packing_of_request(asked, families, rules_of(config), tiers, NOW_S)
    assert found.alone.reason == reason
