"""The job that the wrapper runs in, as `scontrol` shows it, and how it is moved: by its owner alone.

What is parsed is the user's own job: a job name that imitates a field misleads nobody but its owner, and Slurm checks
every right again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from advisor.decisions.restart import Request, RunningJob
from slurm_hooks.last_look import Facts, must_still_hold

UPDATE_S = 20.0
"""How long the update is tried: slurmctld refuses it while the job's processes end."""
PAUSE_S = 0.5
_GPU_TERM = re.compile(r"(?:gres[:/])?gpu(?:[:/][^,]*)?")
_GIVEN = re.compile(r"\bgpu(?::([^:(,]+))?:([0-9]+)\(IDX:")


class Answer(Protocol):
    """How a command ended."""

    @property
    def code(self) -> int: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def said(self) -> str: ...


Run = Callable[[Sequence[str]], Answer]
"""Runs a command. Raises CommandError where it cannot be run."""


@dataclass(frozen=True)
class ShownJob:
    """The fields of `scontrol show job -d -o`; a missing one is ""."""

    text: str

    def field(self, name: str) -> str:
        match = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", self.text)
        return match[1] if match else ""

    @property
    def request(self) -> Request:
        """Where the GPUs stand, if in one place."""
        places = {
            name for name in ("TresPerNode", "TresPerJob", "TresPerTask", "TresPerSocket") if "gpu" in self.field(name)
        }
        if places == {"TresPerNode"}:
            return "gres"
        return "TresPerJob" if places == {"TresPerJob"} else ""

    def changed(self, gpu_type: str) -> str:
        """The argument of `scontrol update` that asks for one GPU of this type, other GRES kept."""
        if self.request == "TresPerJob":
            return f"TresPerJob=gres/gpu:{gpu_type}:1"
        terms = self.field("TresPerNode").split(",")
        others = [re.sub("^gres[:/]", "", term) for term in terms if not _GPU_TERM.fullmatch(term)]
        return "gres=" + ",".join([f"gpu:{gpu_type}:1", *others])


def running_job(shown: ShownJob, uid: int, appends_output: bool) -> RunningJob:
    given = [(kind, int(count)) for kind, count in _GIVEN.findall(shown.text)]
    nodes = shown.field("NumNodes").split("-")[0]
    owner = re.search(r"\sUserId=[^\s(]*\(([0-9]+)\)", shown.text)
    restarts = shown.field("Restarts")
    return RunningJob(
        gpus=sum(count for _, count in given) * (int(nodes) if nodes.isdecimal() else 1),
        gpu_type=given[0][0] if given else "",
        request=shown.request,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        can_requeue=shown.field("Requeue") == "1",
        is_own=owner is not None and int(owner[1]) == uid,
        appends_output=appends_output,
        is_het="HetJobId=" in shown.text,
    )


def release_of(text: str) -> tuple[int, int] | None:
    """(24, 11) of "slurm 24.11.5" or "slurm-wlm 22.05.8"; None of anything else."""
    match = re.search(r"\b([0-9]{2})\.([0-9]{2})\b", text)
    return (int(match[1]), int(match[2])) if match else None


def types_in(listing: str) -> set[str]:
    """GPU types of `sinfo -h -o %G`."""
    terms = re.sub(r"\([^()]*\)", "", listing).replace("\n", ",").split(",")
    found = (re.fullmatch(r"gpu:([^:]+):[0-9]+", term.strip()) for term in terms)
    return {match[1] for match in found if match}


@dataclass(frozen=True)
class Moved:
    """Whether the job is queued again, and as what; why: what went wrong."""

    is_requeued: bool
    is_changed: bool = False
    why: str = ""


_CHOICES = (
    "UserId", "Account", "QOS", "Comment", "AdminComment", "Nice", "TimeLimit", "Requeue", "Features", "ReqNodeList",
    "ExcNodeList", "Reservation", "TresPerNode", "TresPerJob", "TresPerTask", "TresPerSocket",
)  # fmt: skip
_RUN = ("JobState", "SubmitTime", "StartTime", "Restarts", "Partition", "Dependency", "Deadline")


def _facts(shown: ShownJob) -> Facts:
    """Choices of owners and operators; an operator's hold has another reason."""
    is_running = shown.field("JobState") == "RUNNING"
    chosen = {name: shown.field(name) for name in (*_CHOICES, *(_RUN if is_running else ()))}
    state = shown.field("JobState")
    is_left = state in ("CANCELLED", "") or shown.field("Reason").startswith("JobHeldAdmin")
    return {**chosen, "is cancelled or held by an operator": is_left}


def move(job: ShownJob, change: str, run: Run, sleep: Callable[[float], None] = time.sleep) -> Moved:
    """Requeue and hold the job, change its request, and release it: each only if nobody changed the job meanwhile.

    slurmctld ends this very process some time after the first step (KillWait), so nothing in between waits. While the
    job completes, all of it is accepted (seen on 22.05.8). The start time stays Slurm's, its requeue delay of 121 s: a
    job that starts in the second in which slurmd revoked its credential is refused. The job is released even where the
    change fails: it then runs again as it was.
    """
    job_id, facts = job.field("JobId"), _facts(job)

    def why_not(relied_on: Facts) -> str:
        def read(_: Collection[str]) -> dict[str, Facts]:
            done = run(["scontrol", "-d", "-o", "show", "job", job_id])
            return {} if done.code else {job_id: _facts(ShownJob(done.stdout.decode("utf-8", "replace")))}

        return must_still_hold({job_id: relied_on}, read).get(job_id, "")

    if why := why_not(facts):
        return Moved(False, why=why)
    held = run(["scontrol", "requeuehold", job_id])
    if held.code:
        return Moved(False, why=held.said)
    queued = {name: value for name, value in facts.items() if name not in _RUN}
    said, is_changed = "", False
    end = max(1, round(UPDATE_S / PAUSE_S))
    for attempt in range(end):
        if said := why_not(queued):
            break
        changed = run(["scontrol", "update", f"jobid={job_id}", change])
        is_changed, said = not changed.code, changed.said if changed.code else ""
        if is_changed:
            break
        if attempt + 1 < end:
            sleep(PAUSE_S)
    # What was changed is not compared any more; an operator's hold is.
    left = {name: facts[name] for name in facts if name.startswith("is ")}
    if why := why_not(left):
        return Moved(True, is_changed, said or why)
    released = run(["scontrol", "release", job_id])
    return Moved(True, is_changed, said or (released.said if released.code else ""))
