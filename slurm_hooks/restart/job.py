"""The job that the wrapper runs in, as `scontrol` shows it, how its owner moves it, and the site's facts about it.

Only the user's own job is parsed: a job name that imitates a field misleads nobody but its owner, and Slurm checks
every right again. The user's own files may be believed here: they steer the user's own job alone.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from advisor.memory.restart import ExpectedEnd, GpuField, RestartJob
from almanac.files import open_plain
from almanac.names import name_key
from almanac.published.files import usable
from almanac.submit_config import SITE
from slurm_hooks.advice.file import ADVICE, FAMILY
from slurm_hooks.orders import Facts, must_still_hold

UPDATE_S = 20.0
"""Seconds for which the update is tried: slurmctld refuses it while the job's processes end."""
PAUSE_S = 0.5
_GPU_TERM = re.compile(r"(?:gres[:/])?gpu(?:[:/][^,]*)?")
_GIVEN = re.compile(r"\bgpu(?::([^:(,]+))?:([0-9]+)\(IDX:")


class Answer(Protocol):
    """The end of a command."""

    @property
    def code(self) -> int: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def said(self) -> str: ...


Run = Callable[[Sequence[str]], Answer]
"""Runs a command. Raises CommandError if it cannot be run."""


@dataclass(frozen=True)
class ShownJob:
    """The fields of `scontrol show job -d -o`; a missing one is ""."""

    text: str

    def field(self, name: str) -> str:
        match = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", self.text)
        return match[1] if match else ""

    @property
    def request(self) -> GpuField:
        """The field that holds the GPUs, if it is one."""
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


def running_job(shown: ShownJob, uid: int, appends_output: bool) -> RestartJob:
    given = [(kind, int(count)) for kind, count in _GIVEN.findall(shown.text)]
    nodes = shown.field("NumNodes").split("-")[0]
    owner = re.search(r"\sUserId=[^\s(]*\(([0-9]+)\)", shown.text)
    restarts = shown.field("Restarts")
    return RestartJob(
        gpus=sum(count for _, count in given) * (int(nodes) if nodes.isdecimal() else 1),
        gpu_type=given[0][0] if given else "",
        request=shown.request,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        can_requeue=shown.field("Requeue") == "1",
        is_own=owner is not None and int(owner[1]) == uid,
        appends_output=appends_output,
        is_het="HetJobId=" in shown.text,
    )


@dataclass(frozen=True)
class Moved:
    """The result of a move. why: what went wrong."""

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


ADVICE_DIR = "/var/lib/almanac-advice"
PREDICTED_SPREAD = 0.5
"""Standard deviation of the logarithm of a run time around its published median."""


@dataclass(frozen=True)
class SiteFacts:
    """Facts about the site and the job's family. predicted_s and peak_mib are None if unknown.

    capacities_mib: GPU memory of the site's tiers, by GPU type.
    """

    capacities_mib: Mapping[str, int] = field(default_factory=dict)
    predicted_s: float | None = None
    peak_mib: float | None = None

    def run_time(self, own_s: float | None, limit_s: float | None) -> ExpectedEnd:
        """Return the expected end. own_s: the user's own estimate, which counts as exact; None: predict it."""
        if own_s:
            return ExpectedEnd(own_s, 0.0, limit_s)
        return ExpectedEnd(self.predicted_s, PREDICTED_SPREAD, limit_s)


def read_site(environ: Mapping[str, str], uid: int, now_s: int) -> SiteFacts:
    """Read the site's facts from the configuration file and the published advice.

    Leaves out what is absent or malformed.
    """
    settings = _settings(environ)
    hooks, tiers = settings.get("hooks"), settings.get("tiers")
    folder = hooks.get("advice_dir") if isinstance(hooks, dict) else None
    folder = folder if isinstance(folder, str) else ADVICE_DIR
    capacities = _capacities(tiers if isinstance(tiers, list) else [])
    own, site = (usable(ADVICE, folder, name, now_s) for name in (str(uid), SITE))
    for file in (site, own):
        capacities |= {tier.gres: tier.capacity_mib for tier in (file.tiers if file else ()) if tier.gres}
    row = own.find(name_key(environ.get("SLURM_JOB_NAME", "")), 1) if own else None
    if row is None or row.kind != FAMILY:
        return SiteFacts(capacities)
    return SiteFacts(capacities, row.predicted_s or None, row.bound_mib)


def _settings(environ: Mapping[str, str]) -> dict[str, object]:
    """The tables of the first configuration file that is there; {} if it cannot be read."""
    home = environ.get("XDG_CONFIG_HOME") or environ.get("HOME", "") + "/.config"
    named = environ.get("ALMANAC_CONFIG")
    for path in [named] if named else ["/etc/almanac/almanac.toml", f"{home}/almanac/config.toml"]:
        try:
            with open_plain(path) as file:
                return tomllib.load(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return {}
    return {}


def _capacities(tiers: list[object]) -> dict[str, int]:
    found = {}
    for tier in tiers:
        if isinstance(tier, dict):
            gres, capacity = tier.get("gres"), tier.get("capacity_mib")
            if isinstance(gres, str) and gres and isinstance(capacity, int) and capacity > 0:
                found[gres] = capacity
    return found
