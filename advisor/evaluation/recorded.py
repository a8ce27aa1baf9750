"""Past submissions as requests: what a job's record says was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pandas as pd

from almanac.config import Tier
from almanac.names import is_family, name_key
from almanac.records import Request
from almanac.tiers import requested_tier

_TEXTS = ("user", "name", "account", "partition", "qos", "constraints")
_COUNTS = ("gpu_count", "node_count", "cpu_count", "submit_s")


def recorded_requests(history: pd.DataFrame, tiers: Sequence[Tier]) -> list[Request]:
    """One per row of the history frame, in its order, as far as accounting tells: the tier asked for is recorded."""
    by_name = {tier.name: tier for tier in tiers}
    texts = [history[name].fillna("").astype(str).tolist() for name in _TEXTS]
    counts = [history[name].fillna(0).astype("int64").tolist() for name in _COUNTS]
    limits = history["time_limit_s"].astype("float64").tolist()
    arrays = history["is_array"].fillna(False).astype(bool).tolist()
    asked = [by_name.get(name) for name in history["tier"].fillna("").astype(str)]
    none = pd.Series("", history.index)
    maybe = ("gpu_type_req", "script_key", "name_key")
    types, scripts, keys = (history.get(name, none).fillna("").astype(str) for name in maybe)
    return [
        _request(
            dict(zip((*_TEXTS, *_COUNTS, "script_key", "rule"), row, strict=True)),
            limit_s,
            is_array,
            gpu_type,
            tier,
            tiers,
        )
        for *row, limit_s, is_array, gpu_type, tier in zip(
            *texts, *counts, scripts, keys, limits, arrays, types, asked, strict=True
        )
    ]


def _request(
    row: dict[str, object], limit_s: float, is_array: bool, gpu_type: str, tier: Tier | None, tiers: Sequence[Tier]
) -> Request:
    """gpu_type: as recorded; where an older record does not have it, that of the tier. A rule is recorded as key."""
    gres = tier.gres if tier else ""
    known = {"job_name": row.pop("name"), **row, "is_array": is_array}
    if not row["rule"] or is_family(name_key(str(known["job_name"]))):
        known["rule"] = ""
    known["time_limit_s"] = int(limit_s) if limit_s > 0 else None
    known |= {"gpu_type": gpu_type or gres, "gres": f"gpu:{gres}:{row['gpu_count']}" if gres else ""}
    request = Request(**known)  # type: ignore[arg-type]
    if tier is None or not tier.constraint:
        return request
    # Accounting can lack the constraint, and the partition can stand for another tier.
    if requested_tier(request, tiers) != tier:
        request = dataclasses.replace(request, constraints=tier.constraint)
    if requested_tier(request, tiers) != tier:
        request = dataclasses.replace(request, partition="")
    if requested_tier(request, tiers) != tier:
        request = dataclasses.replace(request, gpu_type="")
    return request
