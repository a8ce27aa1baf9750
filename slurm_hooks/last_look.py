"""The last look at Slurm before an order: what an owner or an operator did since the decision wins.

Every hook calls `must_still_hold` after the line of its log, after each wait, and right before the command that changes
something. What is left is the time of that one command: Slurm has no order that names the state it expects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from telemetry.slurm.backend import Node, PendingJob

if TYPE_CHECKING:  # the client package has no ClusterShell, which these need
    from telemetry.slurm.gres_queue import GresJob
    from telemetry.slurm.placement_queue import QueueJob

AT_ONCE = 20
"""Jobs that one look and one command are for: the last one is told some 50 ms after its look."""
Key = TypeVar("Key")
Order = TypeVar("Order")
Facts = Mapping[str, Any]
"""Grounds of a decision, by name: the identity of a job or node, its owner's choices, and operators' marks."""
GONE = "it is gone"
_OF_SLURM = {"priority", "reason", "task_count", "address", "cpu_count", "cpus", "memory_mib"}
"""Fields that Slurm itself changes while a job waits."""
_OF_A_RUN = {"submit_s", "restarts", "states", "start_s", "eligible_s", "nodes", "given", "node_count", "partitions"}
_OF_A_RUN |= {"partition", "is_array", "gpu_type"}
"""Fields that a requeue changes."""


def must_still_hold(
    relied_on: Mapping[Key, Facts], read: Callable[[Collection[Key]], Mapping[Key, Facts]]
) -> dict[Key, str]:
    """Return why a target must be left alone, for each job or node that is not as the decision saw it.

    read: looks at these targets in Slurm now; gone ones are left out. Raises what it raises.
    """
    seen = read(relied_on.keys()) if relied_on else {}
    return {key: why for key, facts in relied_on.items() if (why := _why(facts, seen.get(key)))}


def _why(facts: Facts, seen: Facts | None) -> str:
    if seen is None:
        return GONE
    changed = sorted(name for name, value in facts.items() if seen.get(name) != value)
    return f"changed meanwhile: {', '.join(changed)}" if changed else ""


def job_facts(job: QueueJob | GresJob | PendingJob) -> Facts:
    """Everything that is known of a job but what Slurm itself changes while it waits."""
    from telemetry.slurm.placement_queue import QueueJob

    if isinstance(job, QueueJob):
        own = {name: value for name, value in vars(job).items() if name not in ("gres", "record")}
        return {**job_facts(job.record), **job_facts(job.gres), **own}
    facts = {name: value for name, value in vars(job).items() if name not in _OF_SLURM}
    # Slurm's own hold, BadConstraints, has priority 0 as an owner's hold has.
    return facts if isinstance(job, PendingJob) else {**facts, "hold": "" if job.priority else job.reason or "held"}


def requeued_facts(before: QueueJob, now: QueueJob) -> Facts:
    """The facts of a job that a requeue by Slurm keeps. Compare those of (before, before) and (before, now)."""
    kept = {name: value for name, value in job_facts(now).items() if name not in _OF_A_RUN}
    is_next = 0 <= now.gres.restarts - before.gres.restarts <= 1
    return {**kept, "restarts": is_next, "partitions": set(before.gres.partitions) <= set(now.gres.partitions)}


def node_facts(node: Node) -> Facts:
    """A node's state, reason, Gres, and reservation."""
    return {"states": node.states, "reason": node.reason, "gres": node.gres, "reservation": node.reservation}


def batches(orders: Sequence[Order], size: int = AT_ONCE) -> Iterator[Sequence[Order]]:
    """Split orders, so that each look is followed by its command at once."""
    return (orders[first : first + size] for first in range(0, len(orders), size))


def standing(
    lines: Iterable[Order], job_id: Callable[[Order], int], is_dropped: Callable[[Order], bool]
) -> dict[int, Order]:
    """The newest line of each job in a log; a dropped order's lines do not count, as nothing was sent."""
    found: dict[int, list[Order]] = {}
    for line in lines:
        own = found.setdefault(job_id(line), [])
        if is_dropped(line):
            del own[-1:]
        else:
            own.append(line)
    return {number: own[-1] for number, own in found.items() if own}
