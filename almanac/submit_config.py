"""The sections of the configuration that the submit path needs, apart from the others: sbatch-almanac has 80 ms.

It does not import msgspec, which almanac.config_file reads the file with: that takes 15 ms.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

PriorityMode = Literal["off", "observe", "apply"]
PromptMode = Literal["off", "show", "ask"]
SubmitMode = Literal["off", "show", "ask", "apply"]
"""A user can ask for `apply` ($ALMANAC_ADVICE); a site cannot."""
TierKind = Literal["constraint", "gres", "partition"]
"""The key that selects a tier."""
MAX_COMPUTE_SLICES = 7
"""Most compute slices of a MIG slice on any GPU."""
MAX_WAIT_AGE_S = 600
"""Age in seconds above which published waits are not used: a queue changes within minutes."""
MIN_TYPE_GAIN = 0.15
"""Share of the time until the end that another GPU type must save: below it, the estimates are too rough for advice."""
SITE = "_site"
"""Name of the folder or file for everybody, in the place of a uid."""


def key(default: Any, about: str, low: float | None = None, high: float | None = None, is_secret: bool = False) -> Any:
    """A key of a section: default, explanation, smallest and largest value. repr() leaves out a secret."""
    return field(default=default, repr=not is_secret, metadata={"about": about, "low": low, "high": high})


def fixed(default: Any, about: str) -> Any:
    """A value of a section that the code varies and no file sets: default, and why."""
    return field(default=default, metadata={"about": about, "fixed": True})


def keys_of(section: type[Any]) -> list[Field[Any]]:
    """The keys of a section that a file can set."""
    return [each for each in fields(section) if "fixed" not in each.metadata]


@dataclass(frozen=True)
class Priority:
    mode: PriorityMode = key(
        "observe", "off: no site factor; observe: only show it; apply: set it in Slurm, if its weights fit (doctor)"
    )
    points_per_e: float = key(
        1000.0,
        "K of site_factor = C - K ln(GPU-time): gain of a job with 1/e (37%) of the GPU-time",
        low=1,
        high=1_000_000,
    )
    min_gpu_time_s: float = fixed(60.0, "shorter GPU-times count as this, GPU-seconds: shorter jobs gain nothing more")
    max_gpu_time_s: float = fixed(8_640_000.0, "longer GPU-times count as this, GPU-seconds: 100 GPU-days")
    tau_hours: float = key(
        24.0, "tau, the goal of doctor: hours that a job waits longer if it is e times as long", low=0.1
    )
    relief_points: int = key(
        0,
        "added by reprioritize to jobs of the 5% of users whose jobs wait longest in sum (Hu et al., implication 7)",
        low=0,
        high=1_000_000,
    )
    short_gpu_time_s: float = key(
        0.0, "jobs with at most this predicted GPU-time get short_points extra (Hu et al., SC'21, implication 6)", low=0
    )
    short_points: int = key(0, "added to the site factor of short jobs", low=0, high=1_000_000)


@dataclass(frozen=True)
class Hooks:
    """The advice files that `almanac publish` writes, and what Slurm's hooks do with them."""

    advice_dir: str = key("/var/lib/almanac-advice", "root folder of the advice files, on each host's local disk")
    group: str = key("", "Unix group that may read sched/, the group of SlurmUser; empty: ask Slurm")
    tell: bool = key(False, "job_submit shows users on the submitting terminal what is known of their job")
    prompt: PromptMode = key("ask", "advice for sbatch on a terminal; off: none; show: show it; ask: offer to take it")


@dataclass(frozen=True)
class Tier:
    """A GPU memory size that users can ask for. Exactly one of constraint, gres, and partition selects it."""

    name: str = key("", "name in advice")
    capacity_mib: int = key(0, "nominal memory of one GPU, MiB")
    gpu_model: str = key("", "row of the hardware table, such as A100-80")
    constraint: str = key("", "node feature of the tier, such as hbm80g")
    gres: str = key("", "GRES type of the tier, such as a100_80 in gpu:a100_80:4")
    partition: str = key("", "partition of the tier")
    compute_slices: int = key(
        0,
        "compute slices of a MIG slice; 0: what the GRES type says (1g.10gb: 1), or a whole GPU",
        low=0,
        high=MAX_COMPUTE_SLICES,
    )

    def __post_init__(self) -> None:
        if not self.compute_slices and "g." in self.gres.lower():
            from almanac.hardware import compute_slices  # late: it loads a reader of TOML

            object.__setattr__(self, "compute_slices", compute_slices(self.gres) or 0)

    @property
    def is_slice(self) -> bool:
        """True for a MIG slice: CUDA uses one per process, and slices share no memory."""
        return self.compute_slices > 0

    @property
    def size(self) -> tuple[int, int]:
        """Memory, MiB, then compute: what tiers are compared by. A whole GPU has more compute than any slice."""
        return self.capacity_mib, self.compute_slices or MAX_COMPUTE_SLICES + 1

    @property
    def kind(self) -> TierKind:
        """The key that selects the tier: constraint, gres, or partition."""
        return "constraint" if self.constraint else "gres" if self.gres else "partition"

    @property
    def kind_text(self) -> str:
        return "GRES type" if self.gres and not self.constraint else self.kind


@dataclass(frozen=True)
class GpuType:
    """A GPU type that users can ask for. Exactly one of constraint, gres, and partition selects it."""

    name: str = key("", "name in advice, such as a100")
    constraint: str = key("", "node feature of the type, such as a100")
    gres: str = key("", "GRES type, such as a100 in gpu:a100:4")
    partition: str = key("", "partition of the type")

    @property
    def kind(self) -> TierKind:
        """The key that selects the type."""
        return "constraint" if self.constraint else "gres" if self.gres else "partition"

    @property
    def selector(self) -> str:
        return self.constraint or self.gres or self.partition

    def as_tier(self) -> Tier:
        """The type in the form that almanac.tiers rewrites requests for. It says nothing of memory."""
        return Tier(name=self.name, constraint=self.constraint, gres=self.gres, partition=self.partition)
