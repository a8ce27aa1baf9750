"""Meanings of GPU errors, from gpu_errors.toml: whose fault an error is, and which one a job died of."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from slurm.hostlist import expand
from slurm.states import NODE_FAILED

NODE_CAUSES = frozenset({"node", "reset", "replace"})
"""Causes that are no fault of the program."""
UNKNOWN = "unknown"
GAP_S = 1800
"""Samples further apart do not say when an error between them was."""
BEFORE_END_S = 600
"""A job that fails within so many seconds of an error died of it."""
DIED = "FAILED"
"""Slurm's state of a job whose program ended with an error, whatever the cause."""


@dataclass(frozen=True)
class GpuError:
    """One error, such as "XID 79". gpu_errors.toml explains the fields."""

    code: str
    cause: str
    about: str
    action: str
    texts: tuple[str, ...] = ()

    @property
    def is_of_node(self) -> bool:
        return self.cause in NODE_CAUSES


@cache
def gpu_errors() -> Mapping[str, GpuError]:
    """All known errors by code."""
    text = files("telemetry.health").joinpath("gpu_errors.toml").read_text(encoding="utf-8")
    return {
        code: GpuError(code, row["cause"], row["about"], row["action"], tuple(row.get("texts", ())))
        for code, row in tomllib.loads(text)["errors"].items()
    }


def gpu_error(code: str) -> GpuError:
    """The error of this code; one of unknown cause for a code that the table lacks."""
    return gpu_errors().get(code) or GpuError(code, UNKNOWN, "an error that almanac does not know", "see NVIDIA's list")


def codes_of(causes: frozenset[str]) -> list[str]:
    """Codes of these causes, sorted."""
    return sorted(error.code for error in gpu_errors().values() if error.cause in causes)


def lost_context() -> re.Pattern[str]:
    """Pattern of the texts by which CUDA says that a program's context is lost."""
    texts = [text for error in gpu_errors().values() for text in error.texts]
    return re.compile("|".join([*texts, r"\bXid\b"]), re.IGNORECASE)


@dataclass(frozen=True)
class JobError:
    """An error of one GPU in the time of a job."""

    host: str
    gpu: str
    code: str
    time_s: int

    @property
    def known(self) -> GpuError:
        return gpu_error(self.code)

    @classmethod
    def of(cls, text: str) -> JobError:
        """Read an item of gpu_errors. Raises ValueError."""
        host, gpu, code, time_s = text.rsplit(":", 3)
        return cls(host, gpu, code, int(time_s))


def fatal_error(
    state: str | None, end_s: int | None, texts: Iterable[str] | None, accounted: str | None = None
) -> JobError | None:
    """The error that a failed job died of: of those near its end, one of the node before one of its program.

    None for a job that did not fail, and for one without an error of known cause. As NODE_FAILED_SQL. Slurm ended a
    job with NODE_FAIL for its node: no error of the program is its cause, and none of a node other than accounted
    (FailedNode).
    """
    if end_s is None or state not in (DIED, *NODE_FAILED):
        return None
    errors = [JobError.of(text) for text in texts or ()]
    near = [each for each in errors if -BEFORE_END_S <= each.time_s - end_s <= GAP_S]
    of_node = [each for each in near if each.known.is_of_node]
    if state in NODE_FAILED:
        return next((each for each in of_node if each.host == (accounted or each.host)), None)
    return next(iter(of_node + [each for each in near if each.known.cause == "code"]), None)


def failed_node(state: str | None, node_list: str | None, accounted: str | None, error: JobError | None) -> str:
    """The node that ended a job: accounting's, that of the fatal error, or the job's only one; "" if unknown."""
    if state not in NODE_FAILED:
        return error.host if error and error.known.is_of_node else ""
    if accounted or error:
        return accounted or (error.host if error else "")
    try:
        hosts = expand(node_list or "")
    except ValueError:
        return ""
    return hosts[0] if len(hosts) == 1 else ""
