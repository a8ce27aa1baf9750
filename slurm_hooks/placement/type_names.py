"""Whether placement.types names what Slurm, [[gpu_types]], and the trained speeds call the site's GPU types. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from almanac.actions_config import Placement
from almanac.submit_config import GpuType
from almanac.units import listed
from telemetry.slurm.placement_queue import QueueNode


@dataclass(frozen=True)
class TypeFault:
    """Types that are unknown somewhere. is_fatal: Slurm does not know them, so that no job can be placed there."""

    said: str
    todo: str
    is_fatal: bool = False


def type_faults(
    settings: Placement, nodes: Sequence[QueueNode], gpu_types: Sequence[GpuType], learned: Collection[str] | None
) -> Iterator[TypeFault]:
    """gpu_types: of the configuration; empty where the site names none. learned: of the trained speeds; None where
    nothing is trained.
    """
    own = nodes_of(settings, nodes)
    if own and (absent := _absent(settings, {name for each in own for name in names_of(each, settings)})):
        what = "feature" if settings.select_by == "constraint" else "GRES type"
        said = f"no node of these partitions has {listed(absent, what)}"
        yield TypeFault(said, "correct placement.types, or placement.select_by", is_fatal=True)
    named = {each.selector for each in gpu_types if each.kind == settings.select_by}
    if gpu_types and (absent := _absent(settings, named)):
        yield TypeFault(
            f"no [[gpu_types]] has as its {settings.select_by} {listed(absent, 'placement type')}",
            "add them to [[gpu_types]], or correct placement.types: both name the same node features or GRES types",
        )
    if learned is None:
        yield TypeFault("no model is trained: almanac does not know the speeds of GPU types", "run `almanac train`")
    elif absent := _absent(settings, learned):
        known = ", ".join(sorted(learned)) or "none"
        yield TypeFault(
            f"the trained speeds have no {listed(absent, 'placement type')}; they have: {known}",
            "use the same names in placement.types, or run `almanac train` once jobs ran on these types",
        )


def nodes_of(settings: Placement, nodes: Sequence[QueueNode]) -> list[QueueNode]:
    """The nodes with GPUs in partitions that take part."""
    return [each for each in nodes if set(each.node.partitions) & set(settings.partitions) and each.total]


def names_of(each: QueueNode, settings: Placement) -> Collection[str]:
    """What a request can call a node's GPUs."""
    return each.node.features if settings.select_by == "constraint" else each.total


def _absent(settings: Placement, known: Collection[str]) -> list[str]:
    return [name for name in dict.fromkeys(settings.types) if name not in known]
