"""Where a job goes that outgrew its GPU memory: the next larger type that exists, or why it stays as it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Request = Literal["gres", "TresPerJob", ""]
"""The field of `scontrol update` that holds the job's GPUs; "": none that can be rewritten."""
FIRST_RELEASE = (24, 11)
"""On 22.05 a job whose GRES is updated is given the old type and the new one."""
_PROFILE = re.compile(r"([1-9][0-9]?)g\.([1-9][0-9]{0,3})gb(?:\.me|\+me)?")


@dataclass(frozen=True)
class RunningJob:
    """The job as Slurm shows it. gpus: of all its nodes; gpu_type: that it was given; restarts: so far."""

    gpus: int
    gpu_type: str
    request: Request
    restarts: int
    can_requeue: bool
    is_own: bool
    appends_output: bool
    is_het: bool = False


@dataclass(frozen=True)
class Destination:
    """The type to ask for, or why there is none ("" with a type)."""

    gpu_type: str = ""
    why_not: str = ""


def why_never(job: RunningJob, release: tuple[int, int] | None, most_restarts: int) -> str:
    """Why this job is never moved, whatever its memory does; "" if it can be. Known when the job starts."""
    if release is None or release < FIRST_RELEASE:
        seen = "an unknown release" if release is None else "Slurm {}.{:02d}".format(*release)
        return f"restarts need Slurm 24.11 or later, this is {seen}"
    if not job.is_own:
        return "the job belongs to another user"
    if not job.can_requeue:
        return "the job cannot be requeued: submit it without --no-requeue, or with --requeue"
    if job.is_het:
        return "the job is part of a heterogeneous job"
    if job.gpus != 1:
        return f"the job has {job.gpus} GPUs, and only a job with one is moved"
    if not job.request:
        return "the job's GPU is not requested by --gres, --gpus-per-node, or --gpus alone"
    if not job.appends_output:
        return "a restart would empty the output file: submit with --open-mode=append"
    if job.restarts >= most_restarts:
        return f"the job was restarted {job.restarts} times, at most {most_restarts} are allowed"
    return ""


def next_type(
    job: RunningJob, capacities_mib: Mapping[str, int], existing: Collection[str], wanted: Sequence[str] = ()
) -> Destination:
    """The smallest existing type with more memory than the job's. Always strictly up, so restarts end.

    capacities_mib: of the site's tiers, by type; a MIG profile that is not among them counts by its name. wanted: types
    that the user named, in order; the first that is larger counts, and one of unknown size only after the type before
    it in the list.
    """
    if not existing:
        return Destination(why_not="Slurm lists no GPU types")
    if wanted:
        return _named(job.gpu_type, capacities_mib, existing, wanted)
    here = capacity_of(job.gpu_type, capacities_mib)
    if here is None:
        return Destination(why_not=f'the memory of the type "{job.gpu_type}" is unknown: name the next with --next')
    sizes = {name: capacity_of(name, capacities_mib) for name in existing}
    larger = [(size, name) for name, size in sizes.items() if size is not None and size > here]
    if not larger:
        return Destination(why_not=f'no type is larger than "{job.gpu_type}"')
    slices = slices_of(job.gpu_type)
    return Destination(min(larger, key=lambda each: (each[0], *_compute(each[1], slices), each[1]))[1])


def _named(
    here: str, capacities_mib: Mapping[str, int], existing: Collection[str], wanted: Sequence[str]
) -> Destination:
    wanted = list(dict.fromkeys(wanted))  # a name that comes twice would make a circle
    rest = wanted[wanted.index(here) + 1 :] if here in wanted else wanted
    size = capacity_of(here, capacities_mib)
    for name in rest:
        other = capacity_of(name, capacities_mib)
        if name == here or (size is not None and other is not None and other <= size):
            continue
        if name in existing:
            return Destination(name)
    return Destination(why_not=f'no type of --next ({", ".join(wanted)}) exists and comes after "{here}"')


def capacity_of(gpu_type: str, capacities_mib: Mapping[str, int]) -> int | None:
    """MiB of a type: the site's tier, else of a MIG profile such as 2g.20gb what its name says; else None."""
    if gpu_type in capacities_mib:
        return capacities_mib[gpu_type]
    match = _PROFILE.search(gpu_type)
    return int(match[2]) * 1024 if match else None


def slices_of(gpu_type: str) -> int:
    """Compute slices of a MIG profile by its name; 7 of any other type."""
    match = _PROFILE.search(gpu_type)
    return int(match[1]) if match else 7


def _compute(gpu_type: str, slices: int) -> tuple[bool, int]:
    """Of types with as much memory: no fewer compute slices than now, then as few as possible."""
    return slices_of(gpu_type) < slices, slices_of(gpu_type)
