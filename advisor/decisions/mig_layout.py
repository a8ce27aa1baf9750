"""Which layout of MIG slices each node should have, from the site's own recent demand. Pure.

A GPU's layout is a sorted tuple of shapes (see almanac.mig), such as ("3g", "4g"); a GPU without MIG is (WHOLE,).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WHOLE = "gpu"
"""The shape of a GPU with MIG off."""
GpuLayout = tuple[str, ...]


@dataclass(frozen=True)
class MigNode:
    """A node whose layout can be changed. model: key of almanac.mig.mig_models().

    is_free: no job, no reservation, and in service. changed_s: when its layout last changed; None where unknown.
    target: the layout that the node is drained for; None where it takes jobs. can_change: False where nothing may
    change it, such as a reservation, a failure, or an operator's drain.
    """

    name: str
    model: str
    gpus: tuple[GpuLayout, ...]
    is_free: bool
    changed_s: int | None = None
    target: tuple[GpuLayout, ...] | None = None
    can_change: bool = True


@dataclass(frozen=True)
class SliceJob:
    """A recent or waiting job of one GPU or slice. shape: the smallest that holds it.

    run_s: measured, or predicted while it waits or runs. start_s: None while it waits. A job runs at now_s if start_s
    + run_s is later than now_s. ran_on: the shape that it was given; None where that is `shape`. node: where it runs.
    compute: compute slices that it keeps busy, such as 4.65; None where unknown, which counts as the shape's own.
    model: key of almanac.mig.mig_models(); None on a site with one model.
    """

    shape: str
    submit_s: int
    run_s: float
    start_s: int | None = None
    ran_on: str | None = None
    node: str | None = None
    compute: float | None = None
    model: str | None = None


@dataclass(frozen=True)
class LayoutChange:
    """The new layout of one node, and why, in one line."""

    node: str
    old: tuple[GpuLayout, ...]
    new: tuple[GpuLayout, ...]
    reason: str


@dataclass(frozen=True)
class LayoutPlan:
    """The changes to make now. why_none: why there are none; empty if there are some.

    drains: changes of busy nodes that are worth waiting for: drain each node (it takes no more jobs), and change it when
    its last job has ended. A node in `drains` keeps its target in `MigNode.target` until then.
    wait_now_s, wait_then_s: the mean wait that the demand is expected to have; None where no estimate was possible.
    """

    changes: tuple[LayoutChange, ...]
    why_none: str = ""
    wait_now_s: float | None = None
    wait_then_s: float | None = None
    drains: tuple[LayoutChange, ...] = ()


def decide_layout(nodes: Sequence[MigNode], jobs: Sequence[SliceJob], now_s: int) -> LayoutPlan:
    """The layouts that the demand asks for."""
    raise NotImplementedError
