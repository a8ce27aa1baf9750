"""The section of the configuration for jobs that accept any GPU type: [placement]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from almanac.submit_config import key

PlacementMode = Literal["observe", "apply"]
TypeSelector = Literal["constraint", "gres"]
"""How a job asks for a GPU type at this site."""


@dataclass(frozen=True)
class Placement:
    """GPU types of pending jobs whose owner accepts any type. Nothing is planned without partitions and types."""

    mode: PlacementMode = key("observe", "observe: only show and log plans; apply: change jobs in Slurm")
    partitions: tuple[str, ...] = key(
        (), "partitions that take part; a job that may start in any other partition is left alone"
    )
    types: tuple[str, ...] = key((), "GPU types to choose from: node features, or GRES types")
    select_by: TypeSelector = key(
        "constraint", "constraint: --constraint names the type; gres: --gres or --gpus does (Slurm 24.11 and later)"
    )
    jobs_per_run: int = key(20, "most pending jobs that one run changes", low=1, high=1000)
    undo_min: float = key(
        10.0,
        "minutes until a job that still waits gets its own request back, or may be placed elsewhere",
        low=1,
        high=10080,
    )
    again_min: float = key(60.0, "minutes from then until almanac may place the same job again", low=0, high=10080)
    requeue: bool = key(False, "also requeue running jobs of almanac:movable, one a run, when they end sooner")
    requeue_delay_s: float = key(
        121.0, "seconds from a requeue to the next start, until the log of requeues has 3", low=0, high=86400
    )
    start_up_s: float = key(
        120.0, "seconds that a restarted job needs until it goes on from its checkpoint", low=0, high=86400
    )
    checkpoint_s: float = key(
        300.0, "jobs whose --signal asks for more seconds for their checkpoint are not requeued", low=1, high=3600
    )
    max_age_s: float = key(60.0, "seconds after which a look at Slurm is too old to act on", low=1, high=600)
