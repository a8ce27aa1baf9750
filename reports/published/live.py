"""Running jobs as the last round of `almanac watch` saw them, published for their owners.

Reading needs the standard library only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from almanac.atomic import make_folders, write_atomically
from almanac.errors import FileFormatError
from almanac.published.files import TEXT_BYTES, PublishedKind, is_of_future
from almanac.units import format_job_id

if TYPE_CHECKING:
    from advisor.watch.actions import PastStep, Run
    from advisor.watch.round import Round, WatchFinding
    from almanac.published.outgoing import Outgoing, Uids

LIFETIME_S = 600
"""Rounds are made every 2 minutes. What is older is not shown."""
_WORDS = 400


@dataclass(frozen=True)
class LiveJob:
    """A running GPU job. Its figures are those of the round, over its GPUs; None: not known.

    job: the id as Slurm shows it. gpu_util_pct: mean. hbm_used_mib, hbm_total_mib: of the fullest GPU. gpus_seen: GPUs
    with samples. idle_gpus, idle_s: GPUs that are idle or were never used, and for how long. kinds: what the watch
    found ("idle", "hang", and others of docs/watch.md), the gravest first. says: what to do about the first.
    cancel_s: when almanac cancels the job at the earliest, as its owner was warned; None: no warning is about what it
    does now.
    """

    job_id: int
    job: str
    user: str
    partition: str
    name: str
    gpu_count: int
    start_s: int
    limit_end_s: int | None = None
    gpus_seen: int = 0
    gpu_util_pct: float | None = None
    hbm_used_mib: float | None = None
    hbm_total_mib: float | None = None
    idle_gpus: int = 0
    idle_s: int = 0
    kinds: tuple[str, ...] = ()
    says: str = ""
    cancel_s: int | None = None


@dataclass(frozen=True)
class LiveJobs:
    """A user's running GPU jobs at written_s."""

    cluster: str
    written_s: int
    expires_s: int
    jobs: tuple[LiveJob, ...] = ()


LIVE = PublishedKind("live", LiveJobs, is_plain=False, text_bytes=4 * TEXT_BYTES)
_GRAVEST = ("xid", "ecc", "row_remap", "hang", "memory_full", "host_memory", "limit", "power_brake", "throttled")
_IDLE = ("idle", "unused_gpus")


def live_jobs(
    round_: Round, findings: Iterable[WatchFinding], past: Mapping[Run, Sequence[PastStep]] = MappingProxyType({})
) -> list[LiveJob]:
    """Return the running jobs of a round with what was found about them, by start. past: steps of the watch."""
    found: dict[int, list[WatchFinding]] = {}
    for finding in findings:
        found.setdefault(finding.job_id, []).append(finding)
    frame = round_.gpus.select(["job", "gpu_util_pct", "hbm_used_mib", "hbm_total_mib", "sample_count"]).to_pydict()
    of_job: dict[int, list[tuple[float, float, float]]] = {}
    for job, util, used, total, samples in zip(*frame.values(), strict=True):
        if samples:
            of_job.setdefault(job, []).append((util, used, total))
    jobs = [
        _live(row, of_job.get(number, ()), found.get(row["job_id"], ()), past)
        for number, row in enumerate(round_.jobs.to_pylist())
    ]
    return sorted(jobs, key=lambda job: (job.start_s, job.job_id))


def _live(
    row: Mapping[str, Any],
    gpus: Sequence[tuple[float, float, float]],
    findings: Iterable[WatchFinding],
    past: Mapping[Run, Sequence[PastStep]],
) -> LiveJob:
    from advisor.watch.actions import run_of, warnings_of

    rank = {kind: place for place, kind in enumerate((*_GRAVEST, *_IDLE))}
    ordered = sorted(findings, key=lambda each: rank.get(each.kind, len(rank)))
    idle = [each for each in ordered if each.kind in _IDLE]
    promised = [
        max(step.cancel_s for step in warned)
        for each in ordered if (warned := warnings_of(each, past.get(run_of(row), ())))
    ]  # fmt: skip
    utils = [util for util, _, _ in gpus if not math.isnan(util)]
    used, total = max(((used, total) for _, used, total in gpus if used >= 0), default=(math.nan, math.nan))
    return LiveJob(
        job_id=row["job_id"],
        job=format_job_id(row),
        user=row["user"],
        partition=row["partition"],
        name=(row["name"] or "")[:200],
        gpu_count=row["gpu_count"],
        start_s=row["start_s"],
        limit_end_s=row["limit_end_s"],
        gpus_seen=len(gpus),
        gpu_util_pct=round(sum(utils) / len(utils), 1) if utils else None,
        hbm_used_mib=None if math.isnan(used) else round(used, 1),
        hbm_total_mib=None if math.isnan(total) else round(total, 1),
        idle_gpus=max((int(each.evidence.get("gpu_count", 0)) for each in idle), default=0),
        idle_s=max((each.until_s - each.since_s for each in idle), default=0),
        kinds=tuple(dict.fromkeys(each.kind for each in ordered)),
        says=ordered[0].says[:_WORDS] if ordered else "",
        cancel_s=min(promised, default=None),
    )


def publish_live(folder: Outgoing, cluster: str, at_s: int, jobs: Iterable[LiveJob], uids: Uids) -> int:
    """Replace the users' files, each whole or not at all, and return their number. Raises StoreError.

    The files of users without running jobs are removed. `almanac publish` may hold its lock for longer than these
    files are used, so they do without.
    """
    from almanac.published.outgoing import FOLDER_MODE, explained, owners_of

    by_user: dict[str, list[LiveJob]] = {}
    for job in jobs:
        by_user.setdefault(job.user, []).append(job)
    uid_of = owners_of(by_user, uids).uids
    for user, uid in uid_of.items():
        path = folder.path(str(uid), LIVE.name)
        with explained(path, folder.root):
            make_folders(path.parent, FOLDER_MODE)
            own = LIVE.fitting(reversed(by_user[user]))
            write_atomically(path, LIVE.render(LiveJobs(cluster, at_s, at_s + LIFETIME_S, own[::-1])))
    served = {str(uid) for uid in uid_of.values()}
    for other in folder.users():
        if other not in served and folder.path(other, LIVE.name).exists():
            folder.remove(other, [LIVE.name])
    return len(uid_of)


def all_live(folder: Outgoing, now_s: int) -> LiveJobs | None:
    """All users' running jobs, from the folder in the store; None without a round in force."""
    files = list[LiveJobs]()
    for user in folder.users():
        content = folder.read(user, LIVE.name)
        with contextlib.suppress(FileFormatError):
            if content and (file := LIVE.parse(content).value).expires_s > now_s and not is_of_future(file, now_s):
                files.append(file)
    if not files:
        return None
    newest = max(files, key=lambda file: file.written_s)
    jobs = sorted((job for file in files for job in file.jobs), key=lambda job: (job.start_s, job.job_id))
    return LiveJobs(newest.cluster, newest.written_s, newest.expires_s, tuple(jobs))
