"""Pending jobs that Slurm stopped considering because no node had their GPU type (BadConstraints, priority 0).

They stay so when the type returns, until somebody releases them. Jobs that a user or an operator holds have another
reason, and are never released.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from almanac import __version__
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
    """Log, remember, and release; what Slurm said against it. The next run tries refused jobs again.

    Raises CommandError, StoreError.
    """
    if not jobs:
        return state, []
    rows = [
        {
            "time_s": now_s, "cluster": cluster, "what": "release", "job": job.address,
            "why": f"{job.gpu_type} is back", "mode": "apply", "almanac": __version__,
        }
        for job in jobs
    ]  # fmt: skip
    folder.log.append(rows, now_s)
    kept = {key: time_s for key, time_s in state.released_s.items() if now_s - time_s < AGAIN_S}
    state = replace(state, released_s=kept | {_key(job): now_s for job in jobs})
    folder.save(state)
    said = {_key(job): slurm.release(job.address) for job in jobs}
    if refused := {key for key, lines in said.items() if lines}:
        state = replace(state, released_s={key: s for key, s in state.released_s.items() if key not in refused})
        folder.save(state)
    return state, [line for lines in said.values() for line in lines]


def _key(job: QueuedGpuJob) -> str:
    """Job ids are used again after a reset; the time of submission tells them apart."""
    return f"{job.address} {job.submit_s}"
