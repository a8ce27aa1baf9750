"""Choose the jobs of one user that can share a GPU: two families, or several runs of one, and the best partner. Pure.

They can where their peaks and contexts together fit the GPU's memory at the stated risk, and where the low ends of
their speeds promise more work per GPU-hour than one after the other. Whatever is unknown keeps the advice silent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

from almanac.hardware import gpu_models

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


Number = TypeVar("Number", float, "npt.NDArray[np.float64]")

LOW_ALONE: Final = 0.77
"""Low end of the speed next to jobs that hardly use the GPU: caches, clocks, and the CPU's part are shared too."""
LOW_PER_DEMAND: Final = 0.6
"""Share by which a job takes longer at the low end for each GPU's worth of demand of the others."""
LEAST_SPEED: Final = 0.05


class PackingDemand(NamedTuple):
    """The demand of a job that runs alone: shares of a GPU's multiprocessors and of its memory bandwidth."""

    sm: float
    dram: float


class Range(NamedTuple):
    """Low and high end."""

    low: float
    high: float


def summed(demands: Sequence[PackingDemand]) -> PackingDemand:
    """Add the demands of jobs; above 1 they surely slow each other."""
    return PackingDemand(math.fsum(each.sm for each in demands), math.fsum(each.dram for each in demands))


def speed_ranges(demands: Sequence[PackingDemand]) -> tuple[Range, ...]:
    """The likely speed of each job, relative to alone, when all of them share one GPU. Two jobs or more.

    High end: the GPU does no more than all of its work, 1 / x, where x is the demand together for the scarcer resource.
    Low end: 0.77 / (1 + 0.6 y) / sqrt(x), where y is the demand of the others and x is at least 1. docs/packing.md says
    how these constants came about, and on which pairs they hold.
    """
    scarce = max(1.0, *summed(demands))
    found = []
    for place in range(len(demands)):
        others = max(summed([*demands[:place], *demands[place + 1 :]]))
        high = 1 / scarce
        found.append(Range(min(max(low_end(others, scarce), LEAST_SPEED), high), high))
    return tuple(found)


def low_end(others: Number, scarce: Number) -> Number:
    """0.77 / (1 + 0.6 y) / sqrt(x): y of the others, x of all, at least 1; numbers, or arrays of one shape."""
    found: Number = LOW_ALONE / ((1 + LOW_PER_DEMAND * others) * scarce**0.5)
    return found


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
    """The evidence of one job family's newest runs on one GPU model.

    gpu_count: of a job. node_count: most nodes of a run; None where unknown. sm, dram: each run's means of SM_ACTIVE
    and DRAM_ACTIVE, shares of a whole GPU, NaN where not measured; runs of thin coverage are left out. coverage: share
    of a run's samples that is known, of the less covered counter, median over these runs, or over the thin ones if
    there are no others. bounds_mib: the peak memory of one GPU that a run exceeds with at most risk / n, by n, the
    number of tasks on the GPU. is_preallocated: True if a run's peak is what its framework reserved, False if only the
    peak is known, None without a peak. gpu_type: GRES type of the newest of these runs; "" if not recorded.
    capacity_mib: of the GPU; None if unknown. newest_s: end of the newest run, s since 1970.
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
    def known(self) -> tuple[PackingDemand, ...]:
        """The runs with both means. A mean outside [0, 1] is not known."""
        both = zip(self.sm, self.dram, strict=True)
        return tuple(PackingDemand(sm, dram) for sm, dram in both if 0 <= sm <= 1 and 0 <= dram <= 1)

    @property
    def runs(self) -> int:
        return len(self.known)

    @cached_property
    def demand(self) -> PackingDemand | None:
        """The demand of its busier runs; None without any."""
        known = self.known
        if not known:
            return None
        place = math.ceil(HIGH_QUANTILE * (len(known) - 1))
        return PackingDemand(sorted(run.sm for run in known)[place], sorted(run.dram for run in known)[place])


@dataclass(frozen=True)
class PackingRules:
    """Limits of advice to share a GPU.

    risk: accepted risk that the jobs together exceed the memory. context_mib: CUDA context of each task, MiB. min_gain:
    least work per GPU-hour, as a multiple of one job alone, that sharing must surely bring. most_gpus: largest number
    of GPUs of a job; almanac-pack gives each task one GPU.
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
    """The advice on members sharing a GPU, and its evidence; `reason` is one of this module's constants.

    members: one per task on the GPU; the same family several times for runs of one family. speeds: of each member,
    relative to alone; empty where not known. gain: sum of the speeds, the work per GPU-hour. needed_mib, usable_mib:
    memory of bounds and contexts, and of the GPU less the headroom. runs: fewest measured runs of a member.
    """

    reason: PackingReason
    members: tuple[PackingFamily, ...]
    speeds: tuple[Range, ...] = ()
    gain: Range | None = None
    demand: PackingDemand | None = None
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
        """The number of tasks on each GPU."""
        return len(self.members)

    @property
    def is_with_itself(self) -> bool:
        return len({member.key for member in self.members}) == 1


def decide_packing(members: Sequence[PackingFamily], rules: PackingRules) -> PackingAdvice:
    """Advise members on sharing a GPU. members: two families, or one of them two to MOST_TASKS times.

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
    return _with_speeds(found, [each.demand or PackingDemand(1.0, 1.0) for each in members])


def _with_speeds(found: PackingAdvice, demands: Sequence[PackingDemand]) -> PackingAdvice:
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
    return known is not None and (known.compute_capability or math.inf) < MPS_CAPABILITY


def _why_unknown(members: Sequence[PackingFamily], rules: PackingRules) -> PackingReason | None:
    """The missing knowledge about the members' memory and use; None if enough is known."""
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


TINY_SPEED = 0.6
"""Three or four runs share a GPU only where each keeps this speed at the low end."""
MOST_PARTNERS = 8
"""Best partners of each family that are considered."""
_EQUAL = 1e-9
MOST_FAMILIES = 200
"""Newest families of each user that count: pairs of older ones are history."""


def packing_alone(family: PackingFamily, rules: PackingRules) -> PackingAdvice:
    """Advice for runs of one family, such as an array: as many on a GPU as promise the most work, two or more."""
    best = decide_packing((family, family), rules)
    for tasks in range(3, MOST_TASKS + 1) if best.is_advised else ():
        advice = decide_packing((family,) * tasks, rules)
        if not advice.is_advised or advice.speeds[0].low < TINY_SPEED:
            break
        best = max(best, advice, key=_low)
    return best


def packing_pairs(families: Iterable[PackingFamily], rules: PackingRules) -> list[PackingAdvice]:
    """One advice for each family that can share a GPU: with its best partner, itself first among equals.

    families: of any users; only families of one user are paired, of each the MOST_FAMILIES newest. Of two families that
    are each other's best partner, there is one advice. The most gain first.
    """
    found: dict[frozenset[FamilyKey], PackingAdvice] = {}
    for own in _by_user(families).values():
        for advice in best_partners(own, rules).values():
            found.setdefault(frozenset(_keys(advice)), advice)
    return sorted(found.values(), key=lambda each: (-_low(each), _keys(each)))


def best_partners(families: Sequence[PackingFamily], rules: PackingRules) -> dict[FamilyKey, PackingAdvice]:
    """Map families of one user to the advice with their best partner; families without one are left out.

    The family itself stands first among the members.
    """
    alone = [packing_alone(family, rules) for family in families]
    best = {advice.members[0].key: advice for advice in alone if advice.is_advised}
    for pair in _promising(alone):
        for members in (pair.members, pair.members[::-1]):
            known = best.get(members[0].key)
            if known is None or pair.low > _low(known) + _EQUAL:
                advice = decide_packing(members, rules)
                if advice.is_advised:
                    best[members[0].key] = advice
    return best


class _Partner(NamedTuple):
    """Members on one GPU, and the low end of their gain."""

    low: float
    members: tuple[PackingFamily, ...]


def _promising(alone: Sequence[PackingAdvice]) -> list[_Partner]:
    """The best pairs of one user's families, the most gain first; arrays find them, since there can be many.

    alone: packing_alone of each family.
    """
    groups: defaultdict[tuple[int, str], list[PackingFamily]] = defaultdict(list)
    for advice in alone:
        family, rules = advice.members[0], advice.rules
        # What keeps a family from any partner, such as MIG, keeps it from itself.
        if advice.reason in (SHARE, MEMORY, LITTLE_GAIN):
            groups[family.gpu_count, family.gpu_model].append(family)
    found = [pair for group in groups.values() for pair in _of_group(group, rules)]
    return sorted(found, key=lambda pair: (-pair.low, [member.key for member in pair.members]))


def _of_group(group: Sequence[PackingFamily], rules: PackingRules) -> list[_Partner]:
    """Pairs of families that nothing but memory and gain can keep apart: of each family with its MOST_PARTNERS best."""
    if len(group) < 2:
        return []
    import numpy as np  # not in the client package, whose reports need the texts of packing

    demands = np.array([family.demand for family in group], dtype="float64")
    bounds = np.array([family.bounds_mib[2] for family in group])
    capacities = np.array([family.capacity_mib for family in group], dtype="float64")
    usable = np.minimum.outer(capacities, capacities) - rules.headroom_mib - 2 * rules.context_mib
    scarce = np.maximum((demands[:, None] + demands[None, :]).max(axis=2), 1.0)
    lows = low_end(np.broadcast_to(demands.max(axis=1), scarce.shape), scarce)
    gains = np.where(np.add.outer(bounds, bounds) <= usable + _EQUAL, lows + lows.T, -np.inf)
    np.fill_diagonal(gains, -np.inf)
    best = np.argsort(-gains, axis=1, kind="stable")[:, :MOST_PARTNERS]
    pairs = {(min(one, other), max(one, other)) for one, row in enumerate(best.tolist()) for other in row}
    found = [_Partner(float(gains[pair]), (group[pair[0]], group[pair[1]])) for pair in sorted(pairs)]
    return [each for each in found if each.low >= rules.min_gain - _EQUAL]


def _by_user(families: Iterable[PackingFamily]) -> dict[str, list[PackingFamily]]:
    """Of each user the newest MOST_FAMILIES."""
    found: defaultdict[str, list[PackingFamily]] = defaultdict(list)
    for family in families:
        found[family.user].append(family)
    return {
        user: sorted(own, key=lambda each: (-each.newest_s, each.key))[:MOST_FAMILIES] for user, own in found.items()
    }


def _low(advice: PackingAdvice) -> float:
    return advice.gain.low if advice.gain else 0.0


def _keys(advice: PackingAdvice) -> list[FamilyKey]:
    return [member.key for member in advice.members]
