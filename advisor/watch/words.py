"""Findings of the watch in words: first what to do, then what was seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from advisor.watch.round import Kind
from almanac.units import format_duration, format_gib, format_job_id, format_moment

Row = Mapping[str, Any]


def said_of(kind: Kind, job: Row, evidence: Row, since_s: int, until_s: int, at_s: int) -> str:
    """Return what the owner of a job can do about a finding, and why, in one or two sentences."""
    return _SAID[kind](job, evidence, format_duration(max(0, until_s - since_s)), at_s)


def _gpus(evidence: Row) -> str:
    names = evidence["gpus"]
    return ", ".join(names[:2]) + (f", and {evidence['gpu_count'] - 2} more" if len(names) > 2 else "")


def _count(evidence: Row) -> str:
    number, all_of = evidence["gpu_count"], evidence["of_gpus"]
    return ("its GPU" if all_of == 1 else f"all {all_of} GPUs") if number == all_of else f"{number} of {all_of} GPUs"


def _idle(job: Row, evidence: Row, took: str, at_s: int) -> str:
    held = f", and hold up to {format_gib(evidence['hbm_used_mib'])}" if evidence.get("hbm_used_mib", 0) > 1024 else ""
    return (
        f"if it waits for nothing, end it: scancel {format_job_id(job)}. {_count(evidence)} idle for {took}{held}. "
        "A server says so with --comment=almanac:serving"
    )


def _unused(job: Row, evidence: Row, took: str, at_s: int) -> str:
    used = evidence["of_gpus"] - evidence["gpu_count"]
    return f"ask for {used} next time, or use all: {_count(evidence)} never used in {took} ({_gpus(evidence)})"


def _hang(job: Row, evidence: Row, took: str, at_s: int) -> str:
    return (
        "look whether it still makes progress, and restart it from its last checkpoint if not: "
        f"{_count(evidence)} wait for each other for {took}, as in a stuck collective"
    )


def _memory(job: Row, evidence: Row, took: str, at_s: int) -> str:
    left = format_duration(max(0, evidence["full_s"] - at_s))
    used, of = format_gib(evidence["used_mib"]), format_gib(evidence["of_mib"])
    return f"save a checkpoint: {used} of {of} are used on {_gpus(evidence)}, and growth fills the rest in about {left}"


def _slow(cause: str) -> Callable[[Row, Row, str, int], str]:
    def said(job: Row, evidence: Row, took: str, at_s: int) -> str:
        return f"tell the operators, it is not your code: {cause} on {_gpus(evidence)} for {took}"

    return said


def _error(what: str) -> Callable[[Row, Row, str, int], str]:
    def said(job: Row, evidence: Row, took: str, at_s: int) -> str:
        values = ", ".join(str(value) for value in evidence.get("values", ()))
        return f"save a checkpoint if it still runs well: {what.format(values)} on {_gpus(evidence)}"

    return said


def _host_memory(job: Row, evidence: Row, took: str, at_s: int) -> str:
    used, of = format_gib(evidence["used_mib"]), format_gib(evidence["limit_mib"])
    return f"save a checkpoint, and ask for more --mem next time: {used} of {of} of host memory are used on one node"


def _limit(job: Row, evidence: Row, took: str, at_s: int) -> str:
    command = f"scontrol update jobid={format_job_id(job)} timelimit=+60"
    return (
        f"save a checkpoint before {format_moment(job['limit_end_s'])}, or ask the operators for more time: only they "
        f"can run {command}. Jobs like it need more than the time that is left"
    )


_SAID: Mapping[Kind, Callable[[Row, Row, str, int], str]] = {
    "idle": _idle,
    "unused_gpus": _unused,
    "hang": _hang,
    "memory_full": _memory,
    "throttled": _slow("the hardware slows the clock, or heat does,"),
    "power_brake": _slow("a power brake slows the clock"),
    "ecc": _error("{} memory errors that ECC could not correct"),
    "row_remap": _error("no spare memory rows are left"),
    "xid": _error("XID {}"),
    "host_memory": _host_memory,
    "limit": _limit,
}
