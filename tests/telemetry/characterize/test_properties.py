"""What holds of the tables whatever the jobs are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from scipy.stats import spearmanr

from almanac.config import Config, Tier
from telemetry.characterize import characterize, population_of
from telemetry.characterize.population import POPULATION
from telemetry.characterize.relations import COUNTERS, spearman

PIPES = ("fp64", "fp32", "fp16", "tensor")
SITE = Config(tiers=(Tier(name="hbm80g", capacity_mib=81920, constraint="hbm80g"),))
SLOW = examples(0.05)


def some_jobs(seed: int, number: int) -> pa.Table:
    """Jobs of every kind: each metric missing in some, several verdicts, tiers and models."""
    rng = np.random.default_rng(seed)

    def real(high: float = 1.0, missing: float = 0.15) -> list[float | None]:
        return [None if rng.random() < missing else float(value) for value in rng.uniform(0, high, number)]

    def word(*words: str | None) -> list[str | None]:
        return [words[n] for n in rng.integers(0, len(words), number)]

    columns: dict[str, Any] = {
        name: real() for name in POPULATION.names if pa.types.is_floating(POPULATION.field(name).type)
    }
    columns |= {f"intensity_bins_{pipe}": [rng.integers(0, 9, 32).tolist() for _ in range(number)] for pipe in PIPES}
    columns |= {f"class_{pipe}": word("compute", "memory", None) for pipe in PIPES}
    columns |= {
        "job_id": rng.permutation(number).tolist(),
        "submit_s": [0] * number,
        "verdict": word("ok", "ok", "ok", "ok", "short", "idle"),
        "state": word("COMPLETED", "FAILED", "REQUEUED", None),
        "tier": word("hbm80g", "hbm40g", None),
        "gpu_model": word("A100-40", "A100-80", None),
        "job_class": word("compute", "memory", None),
        "main_pipe": word(*PIPES),
        "is_preallocated": [[True, False, None][n] for n in rng.integers(0, 3, number)],
        "idle_gpus": [[] for _ in range(number)],
        "gpu_count": rng.integers(1, 600, number).tolist(),
        "elapsed_s": rng.integers(180, 10**5, number).tolist(),
        "samples": rng.integers(1, 1000, number).tolist(),
        "mean_gpu_util_pct": real(100.0),
    }
    columns["gpus_seen"] = columns["gpu_count"]
    return pa.table([pa.array(columns.get(f.name, [None] * number), f.type) for f in POPULATION], schema=POPULATION)


@SLOW
@given(seed=st.integers(0, 1000), number=st.integers(1, 120))
def test_the_order_of_the_jobs_changes_nothing(seed: int, number: int) -> None:
    jobs = some_jobs(seed, number)
    shuffled = jobs.take(np.random.default_rng(seed + 1).permutation(number))
    once, again = characterize(population_of(jobs), SITE), characterize(population_of(shuffled.to_pandas()), SITE)
    for name, result in once.items():
        assert result.rows.equals(again[name].rows), name
        assert (result.jobs, result.left_out) == (again[name].jobs, again[name].left_out)


@SLOW
@given(seed=st.integers(0, 1000), number=st.integers(1, 120))
def test_every_job_is_in_a_table_or_left_out_of_it(seed: int, number: int) -> None:
    for name, result in characterize(population_of(some_jobs(seed, number)), SITE).items():
        assert result.jobs + sum(result.left_out.values()) == number, name
        assert bool(result.why_empty) == (result.rows.num_rows == 0), name


# Over which columns the shares of a table add up to 1, and the column in which they do.
WHOLE = {
    "fig01_job_size": ([], "share"),
    "fig02_pipe_mix": (["rule"], "share"),
    "fig03_hbm_peak": (["tier", "hbm_capacity_mib", "reserved"], "share"),
    "sec06_idle_gpus": (["gpu_count"], "share"),
    "fig04_intensity": (["pipe", "gpu_model"], "share"),
    "fig06_spatial_by_util": (["gpu_util_from_pct"], "share"),
    "fig07_temporal_by_util": (["gpu_util_from_pct"], "share"),
}


@SLOW
@given(seed=st.integers(0, 1000), number=st.integers(30, 150))
def test_shares_add_up_and_groups_hold_every_job(seed: int, number: int) -> None:
    found = characterize(population_of(some_jobs(seed, number)), SITE)
    for name, (keys, column) in WHOLE.items():
        frame = found[name].rows.to_pandas()
        totals = frame.assign(whole=0).groupby(["whole", *keys], dropna=False)[column].sum()
        assert totals.to_numpy() == pytest.approx(1.0, abs=1e-12), name
    for name in ("fig01_job_size", "fig01_duration", "fig03_hbm_peak", "fig06_spatial_shares", "fig10_heatmap"):
        assert sum(found[name].rows["jobs"].to_pylist()) == found[name].jobs, name
    classes = found["fig04_class_shares"].rows.to_pandas()
    assert (classes["compute_share"] + classes["memory_share"]).to_numpy() == pytest.approx(1.0)


@SLOW
@given(seed=st.integers(0, 1000), number=st.integers(40, 150))
def test_the_spearman_matrix_is_symmetric_with_ones_and_scipys_pair_by_pair(seed: int, number: int) -> None:
    jobs = some_jobs(seed, number)
    result = characterize(population_of(jobs), SITE)["fig11_spearman"]
    long = result.rows.to_pandas()
    matrix = long.pivot(index="counter_a", columns="counter_b", values="spearman")
    assert matrix.shape == (len(COUNTERS), len(COUNTERS))
    assert np.array_equal(matrix.to_numpy(), matrix.to_numpy().T)
    assert np.diag(matrix.to_numpy()) == pytest.approx(1.0)
    frame = jobs.to_pandas()
    frame = frame[(frame["verdict"] == "ok") & (frame["state"] != "REQUEUED")]
    for a, b in (("mean_gpu_util_pct", "energy_power_w"), ("mean_temp_c", "mean_power_w")):
        both = frame[[a, b]].dropna()
        (row,) = long[(long["counter_a"] == a) & (long["counter_b"] == b)].itertuples()
        assert row.jobs == len(both)
        assert row.spearman == pytest.approx(spearmanr(both[a], both[b]).statistic, abs=1e-12)


@examples(0.3)
@given(seed=st.integers(0, 1000), number=st.integers(3, 40), levels=st.integers(2, 50))
def test_a_rising_transform_changes_no_rank_correlation(seed: int, number: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    means = pd.DataFrame(rng.integers(0, levels, (number, 4)).astype(float), columns=list("abcd"))
    complete = spearman(means)
    bent = spearman(means.assign(a=np.exp(means["a"] / 10), b=means["b"] ** 3))
    assert bent.to_numpy() == pytest.approx(complete.to_numpy(), abs=1e-12, nan_ok=True)
    if means.nunique().min() > 1:
        assert complete.to_numpy() == pytest.approx(spearmanr(means.to_numpy()).statistic, abs=1e-12)
