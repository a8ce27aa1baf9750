"""What Slurm says of the nodes just before their power is changed.

Slurm calls SuspendProgram for idle nodes only. Minutes can pass before a slow BMC obeys, and a person can call the
program by hand: power is cut only while Slurm still says that the node is powering down and runs nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from almanac.errors import CommandError
from slurm_hooks.power.bmc_file import BmcError
from telemetry.slurm import hostlist
from telemetry.slurm.commands import SlurmCommands
from telemetry.slurm.node_states import without_fulfilled

DOWN = frozenset({"POWER_DOWN", "POWERING_DOWN", "POWERED_DOWN"})
UP = frozenset({"POWER_UP", "POWERING_UP"})
CUT_FROM = frozenset({"IDLE", "DOWN"})
MAX_AGE_S = 0.5
_LINE = re.compile(r"NodeName=(\S+) .*? State=(\S+)")
_SYMBOLS = "*~#!%$@^-"


def why_not_off(states: frozenset[str]) -> str:
    """Why a node in these states keeps its power; "" where it can be cut."""
    shown = "+".join(sorted(states))
    if not states & CUT_FROM or "COMPLETING" in states:
        return f"Slurm says {shown}: it may run a job"
    if states & UP:
        return f"Slurm says {shown}: it is being woken"
    if not states & DOWN:
        return f"Slurm says {shown}: nobody powers it down (scontrol update nodename=... state=power_down_asap)"
    return ""


def why_not_on(states: frozenset[str]) -> str:
    """Why a node in these states is left off. Waking is safe: only a later call to power it down forbids it."""
    if states & {"POWER_DOWN", "POWERING_DOWN"} and not states & UP:
        return f"Slurm says {'+'.join(sorted(states))}: it is being powered down"
    return ""


def parse_states(text: str) -> dict[str, frozenset[str]]:
    """States by node, of `scontrol -o show node`. Lines that are none are passed over."""
    found = (_LINE.match(line) for line in text.splitlines())
    return {one[1]: without_fulfilled({part.rstrip(_SYMBOLS) for part in one[2].split("+")}) for one in found if one}


class NodeStates:
    """Slurm's answers about some nodes, asked for all at once, and again where an answer is older than MAX_AGE_S."""

    def __init__(
        self, commands: SlurmCommands, nodes: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._commands, self._nodes, self._clock = commands, hostlist.fold(nodes), clock
        self._lock = threading.Lock()
        self._asked_s = float("-inf")
        self._known: Mapping[str, frozenset[str]] = {}
        self._trouble = ""

    def of(self, node: str) -> frozenset[str]:
        """Raises BmcError where Slurm does not answer or does not know the node: another try can succeed."""
        with self._lock:
            if self._clock() > self._asked_s + MAX_AGE_S:
                self._ask()
                self._asked_s = self._clock()
            if node not in self._known:
                raise BmcError(self._trouble or f"scontrol does not show node {node}")
            return self._known[node]

    def _ask(self) -> None:
        # A node that Slurm does not know makes scontrol fail, and show the others all the same.
        self._known, self._trouble = {}, ""
        try:
            done = self._commands.run(["scontrol", "-o", "show", "node", self._nodes])
        except (CommandError, OSError) as error:
            self._trouble = f"Slurm does not answer: {error}"
        else:
            self._known = parse_states(done.stdout.decode(errors="replace"))
            self._trouble = "" if self._known else f"Slurm does not answer: {done.said}"
