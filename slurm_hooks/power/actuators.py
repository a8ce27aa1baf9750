"""Two ways to power nodes down: by name, and by the count of nodes that Slurm's own power saving leaves on.

Waking is by name in both. Every call tells Slurm, and returns what Slurm said against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from slurm_hooks.last_look import Facts, must_still_hold
from slurm_hooks.power.nodes import DID_NOT_WAKE, REASON
from slurm_hooks.power.plan import Kept
from slurm_hooks.power.settings import KeptOn, counted, joined, parse_exceptions
from telemetry.slurm.backend import Node, SlurmBackend
from telemetry.slurm.hostlist import fold

_MARKS = frozenset({"DRAIN", "DRAINING", "DRAINED", "DOWN", "FAIL", "MAINT", "MAINTENANCE", "RESERVED"})


def power_down(backend: SlurmBackend, names: Sequence[str]) -> list[str]:
    """power_down_asap: a job that started meanwhile runs to its end, and the node powers down after it.

    A sleeping node is not drained, so that Slurm itself wakes it for a job that needs it.
    """
    return backend.set_node_state(names, "power_down_asap", REASON) if names else []


def exceptions_by_count(others: Sequence[KeptOn], kept: Iterable[Kept]) -> str:
    """SuspendExcNodes=<nodes>:N on Slurm 24.11 and later: Slurm powers idle nodes down by SuspendTime, but for N.

    N counts busy nodes. slurmctld forgets it when it reads slurm.conf again, so that each run tells it again. others:
    the site's own entries, which stay.
    """
    own = []
    for each in kept:
        if each.always:
            own.append(KeptOn(fold(sorted(each.always))))
        if each.counted:
            own.append(counted(each.counted, each.count))
    return joined((*others, *own))


def mark_facts(node: Node) -> Facts:
    """An operator's marks on a node. Its sleep is left out: waking it does no harm."""
    return {"is_marked": bool(node.states & _MARKS), "reason": node.reason, "reservation": node.reservation}


def unchanged(
    backend: SlurmBackend,
    names: Sequence[str],
    before: Mapping[str, Node],
    facts_of: Callable[[Node], Facts],
    note: Callable[[str, str], None] = lambda name, why: None,
) -> tuple[str, ...]:
    """The names of nodes that Slurm still shows as before. note: hears of the others, and why. Raises CommandError."""
    relied_on = {name: facts_of(before[name]) for name in names if name in before}
    changed = must_still_hold(relied_on, lambda asked: {each.name: facts_of(each) for each in backend.nodes(asked)})
    for name, why in changed.items():
        note(name, why)
    return tuple(name for name in names if name in relied_on and name not in changed)


def set_exceptions(backend: SlurmBackend, before: str, wanted: str) -> list[str]:
    """Replace SuspendExcNodes, unless somebody else did; what Slurm said against it."""
    key = "SuspendExcNodes"
    changed = must_still_hold({key: {key: before}}, lambda _: {key: {key: stands_now(backend)}})
    if changed:
        return [f"{key} {changed[key]}; the next run decides again"]
    said, stands = backend.set_suspend_exceptions(wanted), stands_now(backend)
    return said or ([] if stands == wanted else [f"{key} is {stands!r} after it was set to {wanted!r}"])


def stands_now(backend: SlurmBackend) -> str:
    return joined(parse_exceptions(backend.suspend_exceptions()))


def wake(backend: SlurmBackend, names: Sequence[str]) -> list[str]:
    """Slurm drops the order without a word for a node that is still powering down: look again afterwards."""
    return backend.set_node_state(names, "power_up") if names else []


def resume(backend: SlurmBackend, names: Sequence[str]) -> list[str]:
    return backend.set_node_state(names, "resume") if names else []


def quarantine(backend: SlurmBackend, names: Sequence[str], retries: int) -> list[str]:
    why = f"{DID_NOT_WAKE} within ResumeTimeout ({retries + 1} tries)"
    return backend.set_node_state(names, "drain", why) if names else []
