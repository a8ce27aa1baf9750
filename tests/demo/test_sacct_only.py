"""A site without GPU telemetry: tiers are advised by Slurm's gres/gpumem, at the stated risk."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from advisor.memory.backtest import replay_tiers, score_tiers
from almanac.config_file import parse_config
from cli.demo import CONFIG
from demo import SiteShape, plan_site, truth_table
from demo.accounting import accounted_jobs
from telemetry.attribution.runs import opens
from telemetry.history import load_history
from telemetry.metrics.summary import summarize
from telemetry.store.store import Store


@pytest.mark.parametrize(("gpus_per_node", "least_down"), [(1, 200), (4, 5)])
def test_tiers_are_advised_by_accounting_alone(tmp_path: Path, gpus_per_node: int, least_down: int) -> None:
    """Four GPUs of one task have an upper bound only, so less is advised; what is advised holds as often."""
    config, plan = parse_config(tomllib.loads(CONFIG)), plan_site(SiteShape.demo(1))
    store = Store.create(tmp_path / "s").of("demo")
    jobs = accounted_jobs(plan, gpus_per_node)
    store.write("jobs", jobs, opens(store, "jobs", jobs))
    summarize(store, config)
    history = load_history(store)
    assert {"sacct", "unclear", "none"} == set(history["hbm_evidence"])
    outcomes = replay_tiers(history, config)
    scores = score_tiers(outcomes)[0]
    assert scores.moved_down >= least_down
    assert not scores.exceeded_bound.share > config.advice.risk and not scores.exceeded_tier.share > config.advice.risk
    truth = truth_table(plan).to_pandas().set_index(["job_id", "submit_s"])
    truth = truth.loc[list(zip(history["job_id"], history["submit_s"], strict=True))].iloc[outcomes["row"]]
    is_down, need_mib = (outcomes["move"] == "down").to_numpy(), truth["need_mib"].to_numpy()
    is_own = (truth["framework"] < 0).to_numpy() & outcomes["bound_mib"].notna().to_numpy()
    bound_mib, usable_mib = outcomes["bound_mib"].to_numpy(), outcomes["usable_mib"].to_numpy()
    assert np.mean(need_mib[is_own] > bound_mib[is_own]) <= config.advice.risk, "what jobs really needed"
    assert np.mean(need_mib[is_down] > usable_mib[is_down]) <= config.advice.risk


@pytest.mark.parametrize("gpus_per_node", [1, 4])
def test_accounting_bounds_the_peaks_and_knows_nothing_of_idle_jobs(gpus_per_node: int) -> None:
    plan = plan_site(SiteShape(days=1, nodes_40=4, nodes_80=2, users=6, jobs_per_day=60))
    jobs, truth = accounted_jobs(plan, gpus_per_node).to_pylist(), truth_table(plan).to_pylist()
    needs = {(row["job_id"], row["submit_s"]): row for row in truth}
    known = [row for row in jobs if row["sacct_hbm_peak_mib"] is not None]
    assert 10 < len(known) < len(jobs)
    for row in known:
        peak_mib = needs[row["job_id"], row["submit_s"]]["hbm_peak_mib"]
        assert 0.98 * peak_mib - 400 <= row["sacct_hbm_least_mib"] <= peak_mib and row["end_s"] is not None
        assert row["sacct_hbm_peak_mib"] == gpus_per_node * row["sacct_hbm_least_mib"]
        assert row["gpu_count"] == gpus_per_node * row["node_count"]
