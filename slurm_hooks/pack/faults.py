"""Whether tasks on one GPU ended together because of a fatal fault under MPS, and which of them are innocent.

A fatal fault of one client ends the work of all clients on that GPU, and CUDA does not say whose fault it was. MPS's
logs differ between releases: of them only lines that speak of a fault and the process ids in them are used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

TOGETHER_S = 10.0
"""Tasks that fail within so many seconds of each other may have ended by one fault."""
_ENDED_BY_MPS = re.compile(
    r"MPS_?CLIENT_?TERMINATED|MPS client has been terminated|MPS_?RPC_?FAILURE|MPS_?SERVER_?NOT_?READY"
    r"|MPS_?CONNECTION_?FAILED|(?:MPS RPC|connect to the MPS|MPS server is not ready)",
    re.IGNORECASE,
)
"""What CUDA says to a client whose server ended its work, or is not ready after a fault (errors 805, 806, 807, 810)."""
_STICKY = re.compile(
    r"illegal memory access|ILLEGAL_ADDRESS|device-side assert|misaligned address|MISALIGNED_ADDRESS"
    r"|illegal instruction|ILLEGAL_INSTRUCTION|hardware stack error|HARDWARE_STACK_ERROR|invalid program counter"
    r"|unspecified launch failure|LAUNCH_FAILED|CUDA_ERROR_ASSERT|uncorrectable ECC error|ECC_UNCORRECTABLE"
    r"|\bXid\b",
    re.IGNORECASE,
)
"""Faults after which a CUDA context is lost (errors 700 to 719)."""
_STAMP = re.compile(r"^\[[^\]]*\]")
_LOGGED = re.compile(r"^(?!.*on socket:).*(?<![a-z/])(?:fault|fatal|exception)", re.IGNORECASE)
"""Lines that speak of a fault. "Default" and the paths of sockets do not."""
_NUMBER = re.compile(r"(?<![\w.])[0-9]{1,9}(?!\w|\.[0-9])")


@dataclass(frozen=True)
class Failure:
    """A task that ended with a code other than 0. text: the end of its output; pids: all of its processes seen."""

    text: str
    pids: frozenset[int]


def names_fault(text: str) -> bool:
    """Whether a task's output speaks of a fault that can end other tasks."""
    return bool(_ENDED_BY_MPS.search(text) or _STICKY.search(text))


def innocent(failures: Sequence[Failure], log: str, is_daemon_dead: bool) -> tuple[list[int], str]:
    """Which of these tasks of one GPU, failed together, should run again, and why; [] where it was no common fault.

    log: new lines of MPS's logs.
    """
    everyone = list(range(len(failures)))
    if is_daemon_dead:
        return everyone, "the MPS daemon ended"
    is_faulty = [_STICKY.search(each.text) is not None for each in failures]
    victims = [number for number in everyone if _ENDED_BY_MPS.search(failures[number].text) and not is_faulty[number]]
    logged = [line for line in (_STAMP.sub("", line) for line in log.splitlines()) if _LOGGED.search(line)]
    if len(failures) > 1:
        numbers = {int(word) for line in logged for word in _NUMBER.findall(line)}
        named = [number for number in everyone if failures[number].pids & numbers]
        if 0 < len(named) < len(failures):
            return _but(named, everyone), "a fatal GPU fault of another task ended it (MPS's log names that one)"
        if not any(is_faulty) if victims else logged or all(is_faulty):
            return everyone, "a fatal GPU fault ended all tasks of its GPU, and nothing says whose fault it was"
    return victims, "MPS ended its work, or refused it" if victims else ""


def _but(some: Sequence[int], everyone: Sequence[int]) -> list[int]:
    return [number for number in everyone if number not in some]
