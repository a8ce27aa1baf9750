"""Past submissions as requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd

from advisor.evaluation.recorded import recorded_requests
from almanac.config import Tier
from almanac.records import Request

TIERS = (Tier("hbm40g", 40960, constraint="hbm40g"), Tier("hbm80g", 81920, constraint="hbm80g"))
EXPECTED = Request(
    user="ann", job_name="x", partition="all", constraints="hbm80g", gpu_count=2, submit_s=7, time_limit_s=60
)


def request_of(**changes: Any) -> Request:
    row = {
        "user": "ann", "name": "x", "account": "", "partition": "all", "qos": "", "constraints": "hbm80g",
        "gpu_count": 2, "node_count": 1, "cpu_count": 1, "submit_s": 7, "time_limit_s": 60.0, "is_array": False,
        "tier": "hbm80g", "gpu_type_req": None, **changes,
    }  # fmt: skip
    return recorded_requests(pd.DataFrame([row]), TIERS)[0]


def test_a_type_that_was_asked_for_stays() -> None:
    """Such a request is not rewritten for another tier: the back-test must not say that it would be."""
    assert request_of() == EXPECTED
    assert request_of(gpu_type_req="") == EXPECTED
    assert request_of(gpu_type_req="a100") == dataclasses.replace(EXPECTED, gpu_type="a100")


def test_the_recorded_tier_counts_where_the_type_has_become_a_tiers() -> None:
    tiers = (*TIERS, Tier("old", 16384, gres="v100"))
    row = pd.DataFrame([{**dataclasses.asdict(EXPECTED), "name": "x", "tier": "hbm80g", "gpu_type_req": "v100"}])
    (found,) = recorded_requests(row, tiers)
    assert (found.gpu_type, found.constraints) == ("", "hbm80g")
