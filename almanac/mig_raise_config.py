"""The section of the configuration for larger slices: [mig_raise]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from almanac.submit_config import key

MigRaiseMode = Literal["off", "apply"]


@dataclass(frozen=True)
class MigRaise:
    """Pending jobs of one MIG slice that get an idle larger one, on Slurm 24.11 and later."""

    mode: MigRaiseMode = key("off", "off: only show what could be raised; apply: raise jobs")
    partitions: tuple[str, ...] = key(
        (), "partitions whose jobs may be raised without almanac:larger in their --comment"
    )
    types: tuple[str, ...] = key(
        (), "GRES types from the smallest up, each able to run every job of the ones before; empty: by profile names"
    )
    undo_min: float = key(10.0, "minutes until a raised job that still waits gets its own type back", low=1, high=10080)
    again_min: float = key(60.0, "minutes from then until almanac may raise the same job again", low=0, high=10080)
    soon_min: float = key(
        60.0, "pending jobs that may start within these minutes count as waiting for their type", low=0, high=10080
    )
    jobs_per_run: int = key(20, "most jobs that one run raises", low=1, high=1000)
