"""Pending jobs that Slurm stopped considering because no node had their GPU type (BadConstraints, priority 0).

They stay so when the type returns, until somebody releases them. Jobs that a user or an operator holds have another
reason, and are never released.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from almanac import __version__
from slurm_hooks.last_look import Facts, must_still_hold
from slurm_hooks.mig.folder import MigFolder, MigState
from slurm_hooks.mig.slurm_side import SlurmSide
from telemetry.slurm.gpu_queue import QueuedGpuJob

REASON = "BadConstraints"
AGAIN_S = 86_400
"""A job that is stuck again within a day has another fault."""


@dataclass(frozen=True)
class StuckJobs:
    """release: their type is in service. wait: (job, type) of those whose type no node in service has."""

    release: tuple[QueuedGpuJob, ...] = ()
    wait: tuple[QueuedGpuJob, ...] = ()


def stuck_jobs(
    queue: Sequence[QueuedGpuJob],
    slice_types: Collection[str],
    in_service: Collection[str],
    state: MigState,
    now_s: int,
) -> StuckJobs:
    """slice_types: GPU types that layouts of the managed nodes can have; jobs of other types are not almanac's."""
    own = [
        job for job in queue if job.is_pending and job.is_held and job.reason == REASON and job.gpu_type in slice_types
    ]
    return StuckJobs(
        release=tuple(
            job for job in own if job.gpu_type in in_service and now_s - state.released_s.get(_key(job), 0) >= AGAIN_S
        ),
        wait=tuple(job for job in own if job.gpu_type not in in_service),
    )


def release(
    jobs: Sequence[QueuedGpuJob], slurm: SlurmSide, folder: MigFolder, state: MigState, cluster: str, now_s: int
) -> tuple[MigState, list[str]]:
    """Log, remember, and release. Returns Slurm's objections too. The next run tries refused jobs again.

    Raises CommandError, StoreError.
    """
    if not jobs:
        return state, []
    folder.log.append([_row(job, "release", f"{job.gpu_type} is back", cluster, now_s) for job in jobs], now_s)
    kept = {key: time_s for key, time_s in state.released_s.items() if now_s - time_s < AGAIN_S}
    state = replace(state, released_s=kept | {_key(job): now_s for job in jobs})
    folder.save(state)
    said, left = list[str](), set[str]()
    for job in jobs:
        lines, why = _release(job, slurm)
        if why:
            folder.log.append([_row(job, "dropped", why, cluster, now_s)], now_s)
        if lines or why:
            left.add(_key(job))
        said += lines
    if left:
        state = replace(state, released_s={key: s for key, s in state.released_s.items() if key not in left})
        folder.save(state)
    return state, said


def _release(job: QueuedGpuJob, slurm: SlurmSide) -> tuple[list[str], str]:
    """Release a job; try again if slurmctld has just restarted. Returns its objections, or why nothing was sent."""
    said: list[str] = []

    def read(keys: Collection[str]) -> dict[str, Facts]:
        number = int(re.match(r"[0-9]+", job.address)[0])  # type: ignore[index]
        return {_key(each): _facts(each) for each in slurm.queue([number])}

    for wait_s in (1, 2, 4, 0):
        if why := must_still_hold({_key(job): _facts(job)}, read).get(_key(job), ""):
            return [], why
        said = slurm.release(job.address)
        if not wait_s or not any("try again" in line for line in said):
            break
        slurm.sleep(wait_s)
    return said, ""


def _facts(job: QueuedGpuJob) -> Facts:
    return {name: value for name, value in vars(job).items() if name != "count"}


def _row(job: QueuedGpuJob, what: str, why: str, cluster: str, now_s: int) -> dict[str, object]:
    return {
        "time_s": now_s, "cluster": cluster, "what": what, "job": job.address, "why": why, "mode": "apply",
        "almanac": __version__,
    }  # fmt: skip


def _key(job: QueuedGpuJob) -> str:
    """Job ids are used again after a reset; the time of submission tells them apart."""
    return f"{job.address} {job.submit_s}"
