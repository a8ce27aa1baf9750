"""The site of the proof: its families are what they claim, and its record is one that the product could have read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hostile_site import BATCHES, KINDS, hostile_profile, plan_hostile, proof_shape, record_of

from demo import SiteShape, generate_jobs, plan_site
from telemetry.history import load_history
from telemetry.metrics.data_quality import is_reserved_share
from telemetry.store.store import Store


@pytest.fixture(scope="module")
def record() -> tuple[pd.DataFrame, pd.DataFrame]:
    return record_of(dataclasses.replace(proof_shape(501), days=30.0, users=60))


def test_every_kind_has_about_its_share_of_the_jobs(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    shares = record[1]["kind"].value_counts(normalize=True)
    for kind in KINDS[1:]:
        assert shares[kind] > 0.6 * hostile_profile()[kind]["share"], kind


def test_the_needs_are_those_of_their_kinds(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    history, truth = record
    truth = truth.assign(submit_s=history["submit_s"]).sort_values("submit_s")
    by_family = truth[truth["family"].isin(truth["family"].value_counts().loc[lambda n: n >= 30].index)]
    spread = by_family.groupby(["kind", "family"])["need_mib"].agg(lambda need: need.max() / need.median())
    assert spread["plain"].max() < 1.5
    assert spread["bimodal"].max() > 1.3
    growing = by_family[by_family["kind"] == "growing"].groupby("family")["need_mib"]
    assert (growing.apply(lambda need: need.tail(5).mean() / need.head(5).mean()) > 1.2).mean() > 0.8


def test_most_families_have_a_script_and_some_users_one_for_all(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    history, truth = record
    whole = history.assign(family=truth["family"])
    has_script = whole.groupby("family")["script_key"].agg(lambda keys: keys.notna().any())
    assert 0.75 < has_script.mean() < 0.95
    known = whole[whole["script_key"].notna()]
    assert (known.groupby("script_key")["user"].nunique() == 1).all()
    families = known.groupby("script_key")["family"].nunique()
    launchers = families[families > 1].index
    users = known[known["script_key"].isin(launchers)]["user"].unique()
    assert 0.1 < len(users) / known["user"].nunique() < 0.45
    of_launchers = known[known["user"].isin(users)]
    assert (of_launchers.groupby("user")["script_key"].nunique() == 1).all(), "everything"


def test_batches_are_submitted_together_as_single_jobs(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    history, truth = record
    batched = truth["kind"].isin(BATCHES)
    assert (truth["batch"] >= 0).equals(batched)
    assert not history["is_array"][batched].any()
    batches = history["submit_s"][batched].groupby([truth["family"][batched], truth["batch"][batched]])
    jobs, span_s = batches.size(), batches.agg(np.ptp)
    assert jobs.max() >= 20
    assert (span_s < jobs * 2 * hostile_profile()["burst"]["gap_s"]).mean() > 0.9, "a requeued job comes later"
    assert plan_in_order(history)


def plan_in_order(history: pd.DataFrame) -> bool:
    by_id = history.drop_duplicates("job_id").sort_values("job_id")
    return bool(by_id["submit_s"].is_monotonic_increasing)


def test_a_change_of_regime_comes_on_one_day(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    history, truth = record
    runs = truth.assign(submit_s=history["submit_s"])[truth["kind"] == "regime"].sort_values("submit_s")
    for _, family in runs.groupby("family"):
        needs = family["need_mib"].to_numpy() / family["need_mib"].iloc[0]
        last_before = np.flatnonzero(needs < 1.2).max()
        assert (needs[: last_before + 1] < 1.4).all()


def test_what_is_reserved_is_told_by_the_products_rule(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    """Never from the truth: deaths and families near a reserved share pass for reservations, other shares for needs."""
    history, truth = record
    taken = history["hbm_evidence"] == "preallocated"
    share = history["hbm_max_mib"] / history["hbm_capacity_mib"]
    assert share[taken].map(is_reserved_share).all()
    assert (taken & truth["is_death"]).sum() > 20
    assert (taken & (truth["kind"] == "plain")).any()
    assert not taken[truth["kind"] == "reserved"].any()
    is_long = history["verdict"] != "short"
    assert taken[(truth["kind"] == "preallocating") & is_long].all()


def test_no_framework_uses_more_than_it_reserves(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    history, truth = record
    is_seen = (truth["kind"] == "reserved") & history["hbm_max_mib"].notna() & ~truth["is_death"]
    assert is_seen.sum() > 100
    assert (truth["need_mib"] <= history["hbm_max_mib"] * 1.03)[is_seen].all()


def test_runs_that_are_cut_end_early_and_show_less(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    history, truth = record
    cut = (truth["kind"] == "cut") & history["state"].str.startswith("CANCELLED by")
    assert 0.2 < cut[truth["kind"] == "cut"].mean() < 0.8
    assert (history["hbm_max_mib"] < 0.93 * truth["need_mib"])[cut].all()


def test_gaps_hide_runs_and_peaks(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    history, truth = record
    gaps = (truth["kind"] == "gaps") & (history["verdict"] != "short")
    assert 0.2 < (history["verdict"][gaps] == "no telemetry").mean() < 0.9
    ratio = (history["hbm_max_mib"] / truth["need_mib"])[gaps]
    assert 0.01 < (ratio < 0.95).sum() / ratio.notna().sum() < 0.2


def test_samples_miss_a_little_and_deaths_of_memory_show_less(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    history, truth = record
    ratio = history["hbm_peak_mib"] / np.minimum(truth["need_mib"], 0.985 * history["hbm_capacity_mib"])
    assert ratio[~truth["kind"].isin(["reserved", "fraction"])].max() <= 1.0
    usual = ratio[(truth["need_mib"] < history["hbm_capacity_mib"]) & ratio.notna() & (truth["kind"] == "plain")]
    assert usual.min() >= 0.98 - 1e-9
    assert history["hbm_peak_mib"][truth["kind"] == "preallocating"].isna().all()


def test_the_record_has_the_columns_of_the_products_history(
    record: tuple[pd.DataFrame, pd.DataFrame], tmp_path: object
) -> None:
    store = Store.create(tmp_path / "store")  # type: ignore[operator]
    store.of("c").write("jobs", generate_jobs(SiteShape(days=1, users=6, jobs_per_day=40, nodes_40=4, nodes_80=4)))
    measured = {"gpu_model", "has_profiling_fault", "coverage_frac", "mean_gpu_util_pct", "mig_profile"}
    measured |= {"coverage_sm_active_frac", "coverage_dram_active_frac"}
    measured |= {f"mean_{name}_active_frac" for name in ("sm", "dram", "gr_engine")}
    assert set(load_history(store.of("c")).columns) - set(record[0].columns) == measured


def test_only_jobs_differ_from_a_plain_site() -> None:
    shape = SiteShape(days=3, users=12, jobs_per_day=60, nodes_40=8, nodes_80=4)
    plain, (plan, hostile) = plan_site(shape), plan_hostile(shape)
    assert len(plain.jobs.family) == len(plan.jobs.family)
    assert np.array_equal(plain.families.need_mib, plan.families.need_mib)
    assert not np.array_equal(plain.jobs.need_mib, plan.jobs.need_mib)
    assert set(hostile.kind) > {0}
