"""The sections of the configuration that the submit path needs, apart from the others: sbatch-almanac has 80 ms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def key(default: Any, about: str, low: float | None = None, high: float | None = None, is_secret: bool = False) -> Any:
    """A key of a section: its default, its explanation, the least and greatest value; a secret is left out of repr."""
    return field(default=default, repr=not is_secret, metadata={"about": about, "low": low, "high": high})


@dataclass(frozen=True)
class Priority:
    mode: str = key(
        "observe", "off: no term; observe: it is only shown; apply: Slurm is told, where its weights fit (doctor)"
    )
    points_per_e: float = key(
        1000.0, "K of site_factor = C - K ln(GPU-time): points for a job e times as short", low=1, high=1_000_000
    )
    min_gpu_time_s: float = key(60.0, "shorter GPU-times count as this one, GPU-seconds", low=1)
    max_gpu_time_s: float = key(8_640_000.0, "longer GPU-times count as this one, GPU-seconds", low=2)
    tau_hours: float = key(24.0, "hours that a job waits longer for being e times as long: goal of doctor", low=0.1)
    overrun_share: float = key(
        0.5,
        "a user whose newest runs took twice the expected time in this share is ranked by the interval's upper end; "
        "above 1: never",
        low=0,
        high=2,
    )
    relief_users: tuple[str, ...] = key((), "users whose jobs get relief_points more (helios-qssf-ces, implication 7)")
    relief_points: int = key(0, "points for relief_users", low=0, high=1_000_000)
    short_gpu_time_s: float = key(
        0.0, "jobs predicted to need at most this get short_points more (helios-qssf-ces, implication 6)", low=0
    )
    short_points: int = key(0, "points for short jobs", low=0, high=1_000_000)


@dataclass(frozen=True)
class Hooks:
    """The advice files that `almanac publish` writes, and what Slurm's hooks do with them."""

    advice_dir: str = key("/var/lib/almanac-advice", "root folder of the advice files, on each host's local disk")
    lifetime_hours: float = key(48.0, "hours after which an advice file is no longer believed", low=0.5, high=8760)
    group: str = key("", "Unix group that may read sched/: that of SlurmUser; empty: asked from Slurm")
    tell: bool = key(False, "job_submit tells users what is known of their job, on the submitting terminal")
    prompt: str = key("ask", "sbatch on a terminal: off: says nothing; show: shows the advice; ask: offers to take it")


@dataclass(frozen=True)
class Tier:
    """A kind of GPU memory that can be asked for. Exactly one of constraint, gres and partition selects it."""

    name: str = key("", "what it is called in advice")
    capacity_mib: int = key(0, "nominal HBM of one GPU, MiB")
    gpu_model: str = key("", "row of the hardware table, such as A100-80")
    constraint: str = key("", "node feature that selects it, such as hbm80g")
    gres: str = key("", "GRES type that selects it, such as a100_80 of gpu:a100_80:4")
    partition: str = key("", "partition that selects it")
