"""Packing advice as plain values in the file of a user's own report, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from advisor.decisions.packing import MOST_TASKS, PackingAdvice, PackingFamily, PackingRules
from advisor.packing.speeds import Demand, Range


def packing_row(advice: PackingAdvice) -> dict[str, Any]:
    """Without what JSON cannot hold: NaN of runs that say nothing."""
    return {**asdict(advice), "members": [_family_row(each) for each in advice.members]}


def packing_of(values: Mapping[str, Any]) -> PackingAdvice:
    """Raises KeyError, TypeError, ValueError, AttributeError for other values."""
    if not 2 <= len(values["members"]) == len(values["speeds"]) <= MOST_TASKS:
        raise ValueError("members and speeds do not fit together")
    changed = {
        "members": tuple(_family(each) for each in values["members"]),
        "speeds": tuple(Range(*map(float, each)) for each in values["speeds"]),
        "gain": None if values["gain"] is None else Range(*map(float, values["gain"])),
        "demand": None if values["demand"] is None else Demand(*map(float, values["demand"])),
        "rules": PackingRules(**values["rules"]),
    }
    return PackingAdvice(**{**values, **changed})


def _family_row(family: PackingFamily) -> dict[str, Any]:
    known = family.known
    return {
        **asdict(family),
        "sm": [each.sm for each in known],
        "dram": [each.dram for each in known],
        "coverage": None if math.isnan(family.coverage) else family.coverage,
        "bounds_mib": {str(tasks): mib for tasks, mib in family.bounds_mib.items()},
    }


def _family(values: Mapping[str, Any]) -> PackingFamily:
    changed = {
        "sm": tuple(map(float, values["sm"])),
        "dram": tuple(map(float, values["dram"])),
        "coverage": math.nan if values["coverage"] is None else float(values["coverage"]),
        "bounds_mib": {int(tasks): float(mib) for tasks, mib in values["bounds_mib"].items()},
    }
    return PackingFamily(**{**values, **changed})
