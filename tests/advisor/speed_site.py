"""A made-up site with known speeds: families whose run times and rates on each type follow from true log speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from advisor.types.runs import COLUMNS, FamilyKey, FamilyRuns, RunProfile, SpeedRun, families_of

TYPES = ("a100", "h100", "v100")
NOW_S = 1_750_000_000


@dataclass(frozen=True)
class Truth:
    """log_s: true usual run time on each type, logarithm of s."""

    families: dict[FamilyKey, FamilyRuns]
    log_s: dict[FamilyKey, dict[str, float]]


def made_up_site(
    seed: int, users: int = 25, of_user: float = 0.25, of_family: float = 0.15, noise: float = 0.3
) -> Truth:
    """Users with two families each, which ran 1 to 6 times on one to three types."""
    rng = np.random.default_rng(seed)
    site = rng.normal(0, 0.3, len(TYPES)) + np.log([2.039, 3.35, 0.9])
    runs, truth = [], {}
    for user in range(users):
        usual = site + rng.normal(0, of_user, len(TYPES))
        for family in range(2):
            key = FamilyKey(f"u{user}", f"bert-{family}", 4)
            log_s = rng.normal(8.5, 1) - (usual + rng.normal(0, of_family, len(TYPES)))
            truth[key] = dict(zip(TYPES, log_s.tolist(), strict=True))
            for name in rng.permutation(TYPES)[: rng.integers(1, 4)]:
                for _ in range(rng.integers(1, 7)):
                    profile = RunProfile(str(name), "memory", "fp32", 0.2, 0.9)
                    value = truth[key][str(name)] + rng.normal(0, noise)
                    runs.append(SpeedRun(key, str(name), NOW_S - 1000 + len(runs), value, profile=profile))
    return Truth(families_of(runs), truth)


def job_frame(rows: list[dict[str, object]]) -> pd.DataFrame:
    """Rows of load_speed_runs: completed runs of ann's bert-# on 4 whole GPUs, an hour apart, unless they say."""
    whole = []
    for number, row in enumerate(rows):
        full: dict[str, object] = {
            **dict.fromkeys(COLUMNS), "job_id": number + 1, "user": "ann", "name_key": "bert-#", "gpu_count": 4,
            "gpu_type": "", "constraints": "", "gpu_model": "", "state": "COMPLETED", "elapsed_s": 3600.0,
            "time_limit_s": 7200.0, "verdict": "no telemetry", "has_profiling_fault": False,
            "end_s": NOW_S - 3600 * (len(rows) - number), **row,
        }  # fmt: skip
        full.setdefault("start_s", None)
        if full["start_s"] is None:
            full["start_s"] = int(float(str(full["end_s"])) - float(str(full["elapsed_s"])))
        if full["submit_s"] is None:
            full["submit_s"] = full["start_s"]
        whole.append(full)
    frame = pd.DataFrame(whole, columns=list(COLUMNS))
    numbers = [name for name in COLUMNS if frame[name].map(lambda v: not isinstance(v, str)).all()]
    for name in numbers:
        if name != "has_profiling_fault":
            frame[name] = pd.to_numeric(frame[name]) if frame[name].notna().any() else math.nan
    return frame.astype({"job_id": "int64", "submit_s": "int64", "start_s": "int64"})
