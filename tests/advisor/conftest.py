"""Histories to learn from: hand-made rows, and a generated one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from advisor.duration.replay import DurationReplay, replay_durations
from advisor.service import Trained, train
from almanac.config import Config
from almanac.config_file import parse_config
from almanac.names import name_key

sys.path.insert(0, str(Path(__file__).parent))  # packing_site, speed_site

NOW_S = 1_750_000_000
DEFAULTS: dict[str, Any] = {
    "user": "ann", "account": "ml", "partition": "gpu", "qos": "normal", "name": "train-1", "node_count": 1,
    "cpu_count": 32, "gpu_count": 4, "gpu_type": "a100", "constraints": "gpu&hbm80g", "tier": "hbm80g",
    "time_limit_s": 7200.0, "is_array": False, "state": "COMPLETED", "elapsed_s": 600.0, "hbm_peak_mib": 20000.0,
    "hbm_capacity_mib": 81920.0, "hbm_evidence": "telemetry", "verdict": "ok",
}  # fmt: skip


def make_history(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A history frame of these rows, an hour apart and the last one ending an hour before NOW_S unless they say."""
    whole = []
    for number, row in enumerate(rows):
        full = {**DEFAULTS, "job_id": number + 1, **row}
        full.setdefault("end_s", NOW_S - 3600 * (len(rows) - number))
        if "start_s" not in full:
            full["start_s"] = int(full["end_s"] - full["elapsed_s"])
        full.setdefault("submit_s", full["start_s"])
        full.setdefault("hbm_max_mib", full["hbm_peak_mib"])
        full["name_key"] = name_key(full["name"])
        whole.append(full)
    frame = pd.DataFrame(whole)
    frame["tier"] = frame["tier"].astype(object)
    return frame.sort_values(["end_s", "job_id"]).reset_index(drop=True)


def random_history(jobs: int, seed: int = 1) -> pd.DataFrame:
    """Users with families of their own duration and memory, submitted over 60 days."""
    rng = np.random.default_rng(seed)
    families = [(user, family) for user in range(12) for family in range(3)]
    length = rng.lognormal(7, 1.2, len(families))
    memory = rng.uniform(4000, 70000, len(families))
    rows = []
    submit_s = np.sort(rng.integers(NOW_S - 60 * 86400, NOW_S - 86400, jobs))
    for number in range(jobs):
        place = int(rng.integers(len(families)))
        user, family = families[place]
        elapsed_s = float(max(5, length[place] * rng.lognormal(0, 0.4)))
        start_s = int(submit_s[number] + rng.exponential(600))
        rows.append({
            "user": f"u{user}", "name": f"fam{'abc'[family]}-run{number}", "gpu_count": int(2**family),
            "submit_s": int(submit_s[number]), "start_s": start_s, "end_s": int(start_s + elapsed_s),
            "elapsed_s": elapsed_s, "state": "FAILED" if rng.random() < 0.1 else "COMPLETED",
            "hbm_peak_mib": float(memory[place] * rng.lognormal(0, 0.04)),
        })  # fmt: skip
    return make_history(rows)


@pytest.fixture(scope="session")
def config() -> Config:
    sizes = (("hbm40g", 40960), ("hbm80g", 81920))
    tiers = [{"name": name, "capacity_mib": mib, "constraint": name, "gpu_model": "A100-40"} for name, mib in sizes]
    return parse_config({"tiers": tiers})


@pytest.fixture(scope="session")
def history_of() -> Callable[[list[dict[str, Any]]], pd.DataFrame]:
    return make_history


@pytest.fixture(scope="session")
def site_history() -> pd.DataFrame:
    return random_history(900)


@pytest.fixture(scope="session")
def trained(site_history: pd.DataFrame, config: Config) -> Trained:
    return train(site_history, config, NOW_S)


@pytest.fixture(scope="session")
def past(site_history: pd.DataFrame) -> DurationReplay:
    return replay_durations(site_history)
