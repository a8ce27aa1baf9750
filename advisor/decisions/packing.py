"""Which jobs of one user can share a GPU: two families, or several runs of one. Pure.

They can where their peaks and contexts together fit the GPU's memory at the stated risk, and where the low ends of
their speeds promise more work per GPU-hour than one after the other. Whatever is unknown keeps the advice silent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

from advisor.packing.speeds import Demand, Range, speed_ranges, summed
from almanac.hardware import gpu_models

PackingReason = Literal[
    "share", "other user", "no GPU", "several nodes", "unequal GPUs", "several GPUs", "MIG", "unknown GPU",
    "old GPU", "other GPU", "preallocated", "too few runs", "thin coverage", "no memory bound", "memory", "little gain",
]  # fmt: skip
SHARE: Final = "share"
OTHER_USER: Final = "other user"
NO_GPU: Final = "no GPU"
SEVERAL_NODES: Final = "several nodes"
UNEQUAL_GPUS: Final = "unequal GPUs"
SEVERAL_GPUS: Final = "several GPUs"
ON_MIG: Final = "MIG"
UNKNOWN_GPU: Final = "unknown GPU"
OLD_GPU: Final = "old GPU"
OTHER_GPU: Final = "other GPU"
PREALLOCATED: Final = "preallocated"
TOO_FEW_RUNS: Final = "too few runs"
THIN_COVERAGE: Final = "thin coverage"
NO_BOUND: Final = "no memory bound"
MEMORY: Final = "memory"
LITTLE_GAIN: Final = "little gain"

MOST_TASKS: Final = 4
"""Runs that may share a GPU; above two they must be of one family."""
HIGH_QUANTILE: Final = 0.75
"""A family's demand is that of its busier runs: so many of its newest runs are at most as busy."""
MPS_CAPABILITY: Final = 7.0
"""Least compute capability: Volta's MPS runs kernels of several processes side by side, each in its own memory."""
FamilyKey = tuple[str, str, int]
"""User, masked name, and number of GPUs."""


@dataclass(frozen=True)
class PackingFamily:
    """What one job family's newest runs on one GPU model say.

    gpu_count: of a job. node_count: most nodes of a run; None where unknown. sm, dram: each run's means of SM_ACTIVE
    and DRAM_ACTIVE, shares of a whole GPU, NaN where not measured; runs of thin coverage are left out. coverage: share
    of a run's samples that is known, of the less covered counter, median over these runs, or over the thin ones if
    there are no others. bounds_mib: the peak memory of one GPU that a run exceeds with at most risk / n, by n, the
    number of tasks on the GPU. is_preallocated: whether a run's peak is what its framework reserved; False where only
    the peak is known, None without a peak. gpu_type: GRES type of the newest of these runs; "" where none is recorded.
    capacity_mib: of the GPU; None where unknown. newest_s: end of the newest run, s since 1970.
    """

    user: str
    name_key: str
    gpu_count: int
    node_count: int | None = 1
    sm: tuple[float, ...] = ()
    dram: tuple[float, ...] = ()
    coverage: float = math.nan
    bounds_mib: Mapping[int, float] = field(default_factory=dict)
    is_preallocated: bool | None = None
    is_on_mig: bool = False
    gpu_model: str = ""
    gpu_type: str = ""
    capacity_mib: float | None = None
    newest_s: int = 0

    @property
    def key(self) -> FamilyKey:
        return self.user, self.name_key, self.gpu_count

    @cached_property
    def known(self) -> tuple[Demand, ...]:
        """The runs with both means. A mean outside [0, 1] is not known."""
        both = zip(self.sm, self.dram, strict=True)
        return tuple(Demand(sm, dram) for sm, dram in both if 0 <= sm <= 1 and 0 <= dram <= 1)

    @property
    def runs(self) -> int:
        return len(self.known)

    @cached_property
    def demand(self) -> Demand | None:
        """The demand of its busier runs; None without any."""
        known = self.known
        if not known:
            return None
        place = math.ceil(HIGH_QUANTILE * (len(known) - 1))
        return Demand(sorted(run.sm for run in known)[place], sorted(run.dram for run in known)[place])


@dataclass(frozen=True)
class PackingRules:
    """risk: that the jobs together exceed the memory. context_mib: of each task's CUDA context.

    min_gain: least work per GPU-hour, as a multiple of one job alone, that sharing must surely bring.
    most_gpus: of a job; almanac-pack gives each task one GPU.
    """

    risk: float = 0.01
    headroom_mib: float = 1024
    context_mib: float = 500
    min_gain: float = 1.15
    min_runs: int = 5
    min_coverage: float = 0.7
    most_gpus: int = 1


@dataclass(frozen=True)
class PackingAdvice:
    """Whether the members share a GPU, and what is known of it; `reason` is one of this module's constants.

    members: one per task on the GPU; the same family several times for runs of one family. speeds: of each member,
    relative to alone; empty where not known. gain: sum of the speeds, the work per GPU-hour. needed_mib, usable_mib:
    memory of bounds and contexts, and of the GPU less the headroom. runs: fewest measured runs of a member.
    """

    reason: PackingReason
    members: tuple[PackingFamily, ...]
    speeds: tuple[Range, ...] = ()
    gain: Range | None = None
    demand: Demand | None = None
    needed_mib: float | None = None
    usable_mib: float | None = None
    risk: float | None = None
    runs: int = 0
    rules: PackingRules = field(default_factory=PackingRules)

    @property
    def is_advised(self) -> bool:
        return self.reason == SHARE

    @property
    def tasks(self) -> int:
        """On each GPU."""
        return len(self.members)

    @property
    def is_with_itself(self) -> bool:
        return len({member.key for member in self.members}) == 1


def decide_packing(members: Sequence[PackingFamily], rules: PackingRules) -> PackingAdvice:
    """Whether these share a GPU. members: two families, or one of them two to MOST_TASKS times.

    Raises ValueError for fewer than two members, more than MOST_TASKS, or more than two of different families.
    """
    tasks = len(members)
    if not 2 <= tasks <= MOST_TASKS or (tasks > 2 and any(each != members[0] for each in members)):
        raise ValueError(f"{tasks} members: give two families, or one family two to {MOST_TASKS} times")
    runs = min(each.runs for each in members)
    found = PackingAdvice(LITTLE_GAIN, tuple(members), runs=runs, risk=rules.risk, rules=rules)
    silent = _why_silent(members, rules)
    if silent:
        return replace(found, reason=silent)
    needed_mib = math.fsum(each.bounds_mib[tasks] for each in members) + tasks * rules.context_mib
    usable_mib = min(each.capacity_mib or 0.0 for each in members) - rules.headroom_mib
    found = replace(found, needed_mib=needed_mib, usable_mib=usable_mib)
    if not needed_mib <= usable_mib:
        return replace(found, reason=MEMORY)
    return _with_speeds(found, [each.demand or Demand(1.0, 1.0) for each in members])


def _with_speeds(found: PackingAdvice, demands: Sequence[Demand]) -> PackingAdvice:
    speeds = speed_ranges(demands)
    gain = Range(math.fsum(each.low for each in speeds), math.fsum(each.high for each in speeds))
    return replace(
        found,
        reason=SHARE if gain.low >= found.rules.min_gain else LITTLE_GAIN,
        speeds=speeds,
        gain=gain,
        demand=summed(demands),
    )


def _why_silent(members: Sequence[PackingFamily], rules: PackingRules) -> PackingReason | None:
    """The reason that holds whatever memory and speed are; None without such a reason."""
    if len({each.user for each in members}) > 1:
        return OTHER_USER
    if any(each.gpu_count < 1 for each in members):
        return NO_GPU
    if any(each.node_count != 1 for each in members):
        return SEVERAL_NODES
    if len({each.gpu_count for each in members}) > 1:
        return UNEQUAL_GPUS
    if any(each.gpu_count > rules.most_gpus for each in members):
        return SEVERAL_GPUS
    if any(each.is_on_mig for each in members):
        return ON_MIG
    if not all(each.gpu_model and _is_size(each.capacity_mib) for each in members):
        return UNKNOWN_GPU
    if any(_is_old(each.gpu_model) for each in members):
        return OLD_GPU
    if len({each.gpu_model for each in members}) > 1:
        return OTHER_GPU
    return _why_unknown(members, rules)


def _is_old(gpu_model: str) -> bool:
    known = gpu_models().get(gpu_model)
    return known is not None and known.compute_capability < MPS_CAPABILITY


def _why_unknown(members: Sequence[PackingFamily], rules: PackingRules) -> PackingReason | None:
    """What is not known of the members' memory and use; None where enough is."""
    if any(each.is_preallocated for each in members):
        return PREALLOCATED
    if any(each.coverage < rules.min_coverage for each in members):
        return THIN_COVERAGE  # of all runs: none counts
    if any(each.runs < max(rules.min_runs, 1) for each in members):
        return TOO_FEW_RUNS
    if not all(each.coverage >= rules.min_coverage for each in members):
        return THIN_COVERAGE
    if not all(each.is_preallocated is False and _is_size(each.bounds_mib.get(len(members))) for each in members):
        return NO_BOUND
    return None


def _is_size(mib: float | None) -> bool:
    return mib is not None and 0 < mib < math.inf
