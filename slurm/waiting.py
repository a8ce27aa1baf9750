"""Say in words why a job waits, and what lets it start sooner, by Slurm's reason."""

from __future__ import annotations

import re

from almanac.units import printable
from slurm.queued_job import QueuedJob

_SHORTER = "a shorter time limit can let it start in a gap: scontrol update jobid={id} timelimit=TIME"
_CANCEL = "cancel it (scancel {id}), correct the request, and submit it again"
_REASONS: tuple[tuple[str, str, str], ...] = (
    ("PRIORITY", "jobs with a higher priority come first", _SHORTER),
    ("RESOURCES", "it is next, as soon as what it asks for is free", _SHORTER),
    ("JOBHELDUSER", "its owner holds it", "release it: scontrol release {id}"),
    ("JOBHELDADMIN", "an administrator holds it", "ask the administrators of the cluster"),
    ("JOBARRAYTASKLIMIT", "its array runs as many tasks as you allow at a time (%)",
     "raise that: scontrol update jobid={id} arraytaskthrottle=N"),
    ("BEGINTIME", "its start time (--begin) has not come, or it was requeued a moment ago", ""),
    ("DEPENDENCYNEVERSATISFIED", "a job that it depends on failed, so it will never start", "cancel it: scancel {id}"),
    ("DEPENDENCY", "it waits for other jobs (--dependency)", "see them: squeue -j {id} -o %E"),
    ("REQNODENOTAVAIL", "a node that it needs is down, drained, or reserved", _SHORTER),
    ("RESERVATION", "its reservation has not begun", ""),
    ("NODEDOWN", "a node that it needs is down", ""),
    ("BADCONSTRAINTS", "no node can meet its constraints", _CANCEL),
    ("PARTITIONTIMELIMIT", "it asks for more time than its partition allows",
     "shorten it: scontrol update jobid={id} timelimit=TIME"),
    ("PARTITIONNODELIMIT", "it asks for more nodes than its partition allows", _CANCEL),
    ("PARTITIONDOWN", "its partition is down", ""),
    ("PARTITIONINACTIVE", "its partition is inactive", ""),
    ("PARTITIONCONFIG", "its partition cannot take it", _CANCEL),
    ("LICENSES", "it waits for licenses", ""),
    ("ASSOC", "your account has reached a limit ({reason})", "it starts as jobs of the account end; fewer GPUs help"),
    ("QOS", "its QOS has reached a limit ({reason})", "it starts as jobs of the QOS end; fewer GPUs help"),
    ("MAX", "you have reached a limit ({reason})", "it starts as your jobs end"),
    ("INVALIDACCOUNT", "its account is not valid", _CANCEL),
    ("INVALIDQOS", "its QOS is not valid", _CANCEL),
    ("PROLOG", "Slurm prepares its nodes", ""),
    ("CLEANING", "Slurm cleans up after its earlier run", ""),
    ("LAUNCHFAILED", "its launch failed, and Slurm holds it", "release it: scontrol release {id}"),
    ("NONE", "Slurm has not looked at it yet", "ask again in a minute"),
)  # fmt: skip
"""Beginning of a reason (JOB REASON CODES in man squeue), what it means, and what helps. The first that fits counts."""


def why_waiting(job: QueuedJob) -> str:
    """The reason in words: "jobs with a higher priority come first (Priority)"."""
    reason, (_, meaning, _) = _shown(job), _found(job)
    text = meaning.replace("{reason}", reason)
    return text if reason in ("", "None") or f"({reason})" in text else f"{text} ({reason})"


def what_helps(job: QueuedJob) -> str:
    """A sentence about what the owner can do, or ""."""
    _, _, hint = _found(job)
    # Braces around a number could not be a job's, so that a text of Slurm cannot stand in for them.
    return hint.replace("{id}", re.sub(r"[^0-9_+\[\],-]", "", job.address))


def _found(job: QueuedJob) -> tuple[str, str, str]:
    key = job.reason_key or "NONE"
    return next((each for each in _REASONS if key.startswith(each[0])), ("", "Slurm gives this reason", ""))


def _shown(job: QueuedJob) -> str:
    return printable(job.reason, 60)
