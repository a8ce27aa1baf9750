"""The site of the proof: its families are what they claim, and its record is one that the product could have read."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from telemetry.history import load_history
from telemetry.sources.generated import SiteShape, generate_jobs
from telemetry.sources.generated.hostile import KINDS, hostile_profile, proof_shape
from telemetry.sources.generated.plan import SitePlan, plan_site
from telemetry.sources.generated.record import record_of
from telemetry.store import Store

USABLE_MIB = 40960 - 1024


@pytest.fixture(scope="module")
def plan() -> SitePlan:
    return plan_site(dataclasses.replace(proof_shape(501), days=30.0, users=60))


@pytest.fixture(scope="module")
def record(plan: SitePlan) -> tuple[pd.DataFrame, pd.DataFrame]:
    return record_of(plan, USABLE_MIB)


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


def test_the_stated_chance_is_the_share_that_needs_more(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    truth = record[1]
    above = truth["need_mib"] > USABLE_MIB
    for low, high in ((0, 0.001), (0.001, 0.2), (0.2, 0.8), (0.8, 1.0)):
        rows = truth["chance_above"].between(low, high)
        expected, number = truth["chance_above"][rows].mean(), rows.sum()
        tolerance = 4 * math.sqrt(max(expected * (1 - expected), 1e-4) / number) + 0.002
        assert above[rows].mean() == pytest.approx(expected, abs=tolerance)


def test_samples_miss_a_little_and_deaths_of_memory_show_less(record: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    history, truth = record
    ratio = history["hbm_peak_mib"] / np.minimum(truth["need_mib"], 0.985 * history["hbm_capacity_mib"])
    assert ratio.max() <= 1.0
    usual = ratio[(truth["need_mib"] < history["hbm_capacity_mib"]) & ratio.notna()]
    assert usual.min() >= 0.98 - 1e-9
    assert history["hbm_peak_mib"][truth["kind"] == "preallocating"].isna().all()


def test_the_record_has_the_columns_of_the_products_history(
    record: tuple[pd.DataFrame, pd.DataFrame], tmp_path: object
) -> None:
    store = Store.create(tmp_path / "store")  # type: ignore[operator]
    store.write("jobs", "c", generate_jobs(SiteShape(days=1, users=6, jobs_per_day=40, nodes_40=4, nodes_80=4)))
    assert set(load_history(store, "c").columns) - set(record[0].columns) == {"mean_gpu_util_pct", "coverage_frac"}


def test_a_plain_site_is_what_it_was_before_there_were_hostile_ones() -> None:
    shape = SiteShape(days=3, users=12, jobs_per_day=60, nodes_40=8, nodes_80=4)
    plain = plan_site(shape)
    hostile = plan_site(dataclasses.replace(shape, is_hostile=True))
    assert plain.hostile is None
    assert np.array_equal(plain.jobs.submit_s, hostile.jobs.submit_s)
    assert np.array_equal(plain.families.need_mib, hostile.families.need_mib)
