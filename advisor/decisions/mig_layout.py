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
    """

    name: str
    model: str
    gpus: tuple[GpuLayout, ...]
    is_free: bool
    changed_s: int | None = None


@dataclass(frozen=True)
class SliceJob:
    """A recent or waiting job of one GPU or slice. shape: the smallest that holds it.

    run_s: measured, or predicted while it waits or runs. start_s: None while it waits.
    """

    shape: str
    submit_s: int
    run_s: float
    start_s: int | None = None


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

    wait_now_s, wait_then_s: the mean wait that the demand is expected to have; None where no estimate was possible.
    """

    changes: tuple[LayoutChange, ...]
    why_none: str = ""
    wait_now_s: float | None = None
    wait_then_s: float | None = None


def decide_layout(nodes: Sequence[MigNode], jobs: Sequence[SliceJob], now_s: int) -> LayoutPlan:
    """The layouts that the demand asks for."""
    raise NotImplementedError
