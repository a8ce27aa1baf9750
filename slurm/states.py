"""Slurm's job and node states, and what each means. Other modules use the names that are derived from these tables."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Flag, auto


class JobIs(Flag):
    """Meanings of a job's state or flag.

    PART: its accounting record is one run, or one size, of several. WELL: no fault of the program or a node ended it,
    so that its measured use tells what such jobs need. OF_NODE: a node ended it, so that its end tells nothing of the
    job.
    """

    WAITING = auto()
    RUNNING = auto()
    HOLDING_NODES = auto()
    ENDED = auto()
    FAILED = auto()
    PART = auto()
    WELL = auto()
    OF_NODE = auto()


_NONE, _WAITS, _HOLDS, _ENDED = JobIs(0), JobIs.WAITING, JobIs.HOLDING_NODES, JobIs.ENDED
_RUNS, _FAILED = JobIs.RUNNING | JobIs.HOLDING_NODES, JobIs.ENDED | JobIs.FAILED
JOB_STATES: Mapping[str, JobIs] = {
    "PENDING": _WAITS, "REQUEUE_FED": _WAITS, "REQUEUE_HOLD": _WAITS, "RESV_DEL_HOLD": _WAITS, "SPECIAL_EXIT": _WAITS,
    "EXPEDITING": _WAITS,
    "RUNNING": _RUNS, "SUSPENDED": _RUNS, "STOPPED": _RUNS,
    "COMPLETING": _HOLDS, "CONFIGURING": _HOLDS, "SIGNALING": _HOLDS, "STAGE_OUT": _HOLDS,
    "RESIZING": _HOLDS | JobIs.PART, "REQUEUED": JobIs.PART,
    "COMPLETED": _ENDED | JobIs.WELL, "CANCELLED": _ENDED | JobIs.WELL, "PREEMPTED": _ENDED | JobIs.WELL,
    "REVOKED": _ENDED,
    "FAILED": _FAILED, "NODE_FAIL": _FAILED | JobIs.OF_NODE, "BOOT_FAIL": _FAILED | JobIs.OF_NODE,
    "OUT_OF_MEMORY": _FAILED, "DEADLINE": _FAILED,
    "TIMEOUT": _FAILED | JobIs.WELL,
    "LAUNCH_FAILED": _NONE, "RECONFIG_FAIL": _NONE, "POWER_UP_NODE": _NONE, "UPDATE_DB": _NONE,
}  # fmt: skip
"""JOB STATE CODES in man sacct and man squeue. EXPEDITING is new in 25.11.

22.05 and pyslurm show one of a job's flags, or its state if it has none; later releases show all of them. `squeue -t
PENDING` leaves out every job with a flag, so jobs are filtered by this table instead.
"""


def _jobs(meaning: JobIs) -> frozenset[str]:
    return frozenset(name for name, found in JOB_STATES.items() if found & meaning)


JOB_WAITS, JOB_RUNS, HOLDS_NODES = _jobs(JobIs.WAITING), _jobs(JobIs.RUNNING), _jobs(JobIs.HOLDING_NODES)
JOB_ENDED, JOB_FAILED, PART_OF_JOB = _jobs(JobIs.ENDED), _jobs(JobIs.FAILED), _jobs(JobIs.PART)
ENDED_WELL = tuple(sorted(_jobs(JobIs.WELL)))
NODE_FAILED = tuple(sorted(_jobs(JobIs.OF_NODE)))
"""Tuples, as str.startswith and SQL take them."""
USER_FAILED = JOB_FAILED - frozenset(NODE_FAILED)
WAITS_FOR_ROOM = frozenset({"RESOURCES", "PRIORITY"})
"""Reasons of jobs that Slurm would start if there were free GPUs, as `QueuedJob.reason_key` spells them."""


def has_ended(states: AbstractSet[str]) -> bool:
    """Return True for a job that neither waits nor holds nodes any more."""
    return bool(states & JOB_ENDED) and not states & (JOB_WAITS | HOLDS_NODES)


def ends(states: AbstractSet[str]) -> bool:
    """Return True for a job that has ended or whose nodes are cleaned up (COMPLETING): it runs no more."""
    return bool(states & (JOB_ENDED | {"COMPLETING"})) and not states & (JOB_WAITS | JOB_RUNS)


_EXIT_CODES = {
    126: "a program that cannot be run: not executable, or of another machine",
    127: "command not found",
    128: "invalid exit code",
}
_SIGNALS = {
    1: "hangup", 2: "interrupted", 4: "illegal instruction, often of a program for another CPU", 6: "aborted",
    7: "bus error, often a full disk or /dev/shm", 8: "arithmetic error", 9: "killed, often for too much memory",
    11: "segmentation fault", 13: "broken pipe", 15: "terminated", 24: "CPU time limit", 25: "file size limit",
}  # fmt: skip


def exit_text(code: int | None, signal: int | None, *, is_short: bool = False) -> str:
    """ "exit code 127: command not found", or "signal 9: killed, ..."; "" for none. is_short: without what it means.

    A shell turns the signal of its last program into exit code 128 + signal.
    """
    if not (signal or code):
        return ""
    said = f"signal {signal}" if signal else f"exit code {code}"
    meaning = _SIGNALS.get(signal) if signal else _EXIT_CODES.get(code or 0, _SIGNALS.get((code or 0) - 128))
    return f"{said}: {meaning}" if meaning and not is_short else said


class NodeIs(Flag):
    """Meanings of a node's state or flag. UP: its base state says that it can have jobs. HARMLESS: keeps no job away.

    OFF: powered down, or on the way. TOLD_OFF: Slurm will power it down, and drains it until then.
    """

    UP = auto()
    HARMLESS = auto()
    BUSY = auto()
    DRAINED = auto()
    DOWN = auto()
    SILENT = auto()
    RESERVED = auto()
    REBOOTING = auto()
    OFF = auto()
    TOLD_OFF = auto()
    WAKING = auto()


NODE_STATES: Mapping[str, NodeIs] = {
    "IDLE": NodeIs.UP, "ALLOCATED": NodeIs.UP | NodeIs.BUSY, "MIXED": NodeIs.UP | NodeIs.BUSY,
    "COMPLETING": NodeIs.HARMLESS | NodeIs.BUSY,
    "PLANNED": NodeIs.HARMLESS, "CLOUD": NodeIs.HARMLESS, "DYNAMIC_NORM": NodeIs.HARMLESS,
    "DYNAMIC_FUTURE": NodeIs.HARMLESS,
    "DRAIN": NodeIs.DRAINED, "DRAINING": NodeIs.DRAINED, "DRAINED": NodeIs.DRAINED,
    "DOWN": NodeIs.DOWN, "ERROR": NodeIs.DOWN, "FAIL": NodeIs.DOWN, "FUTURE": NodeIs.DOWN, "INVAL": NodeIs.DOWN,
    "INVALID_REG": NodeIs.DOWN, "UNKNOWN": NodeIs.DOWN, "NOT_RESPONDING": NodeIs.SILENT,
    "RESERVED": NodeIs.RESERVED, "MAINT": NodeIs.RESERVED, "MAINTENANCE": NodeIs.RESERVED,
    "REBOOT_ISSUED": NodeIs.REBOOTING, "REBOOT_REQUESTED": NodeIs.REBOOTING,
    "POWERED_DOWN": NodeIs.OFF, "POWERING_DOWN": NodeIs.OFF,
    "POWER_DOWN": NodeIs.TOLD_OFF, "POWER_DRAIN": NodeIs.TOLD_OFF,
    "POWER_UP": NodeIs.WAKING, "POWERING_UP": NodeIs.WAKING,
    "BLOCKED": NodeIs(0),
}  # fmt: skip
"""BLOCKED: by another job with an exclusive topology."""


def _nodes(meaning: NodeIs) -> frozenset[str]:
    return frozenset(name for name, found in NODE_STATES.items() if found & meaning)


NODE_UP, NODE_BUSY, NODE_DRAINED, NODE_DOWN = map(_nodes, (NodeIs.UP, NodeIs.BUSY, NodeIs.DRAINED, NodeIs.DOWN))
NODE_OFF, NODE_TOLD_OFF, NODE_WAKING = _nodes(NodeIs.OFF), _nodes(NodeIs.TOLD_OFF), _nodes(NodeIs.WAKING)
NODE_ASLEEP, NODE_RESERVED, NODE_REBOOTING = NODE_OFF | NODE_TOLD_OFF, _nodes(NodeIs.RESERVED), _nodes(NodeIs.REBOOTING)
IN_SERVICE = _nodes(NodeIs.UP | NodeIs.HARMLESS)
MAINTENANCE = NODE_RESERVED - {"RESERVED"}
_UNDER_WAY = NODE_ASLEEP | {"POWERING_UP", "NOT_RESPONDING", "DOWN", "UNKNOWN"}
"""POWER_UP together with none of these is stale: a node that was told to power up while it booted keeps it for good, is
up, and takes jobs (tried on 22.05).
"""


def without_fulfilled(states: AbstractSet[str]) -> frozenset[str]:
    """Return the states of a node without power requests that Slurm has already fulfilled.

    POWER_DOWN and POWER_DRAIN stay on a node after power_down_force (aws-parallelcluster-node, pull 402).
    """
    done = set[str]()
    if "POWERED_DOWN" in states and "POWERING_DOWN" not in states:
        done |= NODE_TOLD_OFF
    if not states & _UNDER_WAY:
        done.add("POWER_UP")
    return frozenset(states - done)


def is_in_service(states: AbstractSet[str]) -> bool:
    """Return True for a node that is up, powered, and neither drained, reserved, nor in maintenance.

    states: as in `Node`.
    """
    return bool(states & NODE_UP) and states <= IN_SERVICE
