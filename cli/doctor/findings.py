"""A finding of `almanac doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CheckStatus = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. todo: the fix, empty if ok. details: the same data for programs.

    is_blocking: the site is not ready until this is fixed, even if it is only a warning.
    """

    name: str
    status: CheckStatus
    said: str
    todo: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    is_blocking: bool = False
