"""Actions that findings call for now: mail to the owner, mail to operators, and the cancel of a job that does no work.

Pure: of the findings of one round, the site's settings, and what was done before. A job is cancelled only if its owner
was warned twice; `why_not_cancel` holds all other conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from advisor.watch.round import MOST_KEPT_S, Kind, Round, WatchFinding, comment_words
from almanac.actions_config import WatchSection
from almanac.records import Counts
from almanac.units import HOUR_S

WARNINGS = 2
"""Mails that must have told the owner that the job will be cancelled, since it does no work."""
LAST_CALL_S = 900
"""Least time from the last warning to the cancel (own choice: job_defense_shield of Princeton waits as long)."""
USER_PAUSE_S = 600
"""Least time between two mails to one user: the tasks of an array idle one after the other, and share mails."""
LEAST_COVERAGE = 0.9
"""Least share of the time without work that has samples of all GPUs."""
MOST_CANCELS = 20
"""Most jobs cancelled in an hour: a fault that makes busy GPUs look idle does no more harm until somebody looks."""
MOST_PER_MAIL = 500
"""Most jobs that one mail lists; the others wait for the next one."""
Step = Literal["message", "warn", "warned", "operators", "cancel"]
"""A mail to the owner; one that says when the job will be cancelled; the same, once the mail server took it."""
TO_OWNER: frozenset[Step] = frozenset({"message", "warn", "warned"})
Run = tuple[int, int, int]
"""One run of a job: its number, its time of submission, and its restarts."""


class PastStep(NamedTuple):
    """A mail or a cancel in the record. cancel_s: the time before which a warning said that no cancel comes; else 0."""

    what: Step
    kind: Kind
    time_s: int
    cancel_s: int = 0


@dataclass(frozen=True)
class DueStep:
    """A step to take now. job: its row of JOBS. cancel_s: of a warning, as in PastStep; 0 for any other step."""

    what: Step
    finding: WatchFinding
    job: Mapping[str, Any]
    cancel_s: int = 0


def run_of(job: Mapping[str, Any]) -> Run:
    return job["job_id"], job["submit_s"], job["restarts"]


def rows_of(jobs: pa.Table, job_ids: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the rows of some jobs, by number: 10,000 jobs would be 10,000 objects."""
    chosen = jobs.filter(pc.is_in(jobs["job_id"], value_set=pa.array(sorted(job_ids), pa.int64())))
    return {row["job_id"]: row for row in chosen.to_pylist()}


def due_steps(
    round_: Round,
    findings: Iterable[WatchFinding],
    past: Mapping[Run, Sequence[PastStep]],
    settings: WatchSection,
    why_no_mail: Callable[[Mapping[str, Any], Step], str] = lambda job, step: "",
    now_s: int | None = None,
) -> tuple[list[DueStep], Counts]:
    """Return the steps to take now, cancels last, and why the other findings need none.

    past: steps of the last days, oldest first. why_no_mail: why the owner of a job gets no such mail; "" if they do.
    now_s: the time now, as in the record; a round is a minute older. Without one, the round's.
    """
    found, counts, now_s = list(findings), Counts(), round_.at_s if now_s is None else now_s
    rows = rows_of(round_.jobs, {each.job_id for each in found} | {run[0] for run in past})
    mailed = _last_mails(rows, past, now_s)
    mails, cancels = list[DueStep](), list[DueStep]()
    for finding in found:
        counts.seen += 1
        job = rows.get(finding.job_id)
        if job is None or job["start_s"] != finding.start_s:
            counts.drop("another run of the job")
            continue
        before = [each for each in past.get(run_of(job), ()) if each.kind == finding.kind and each.time_s <= now_s]
        own, why_not = _owner_step(round_, finding, job, before, settings, now_s)
        if own and own.what in TO_OWNER:
            why_not = why_no_mail(job, own.what) or _why_later(before, finding, TO_OWNER, now_s)
        if own and not why_not:
            (cancels if own.what == "cancel" else mails).append(own)
        elif why_not:
            counts.drop(why_not)
        if finding.kind in settings.operators and not _why_later(before, finding, {"operators"}, now_s):
            mails.append(DueStep("operators", finding, job))
    steps = [*_bundled(mails, mailed, now_s, counts), *_allowed(cancels, past, now_s, counts)]
    counts.kept = len(steps)
    return steps, counts


def why_not_cancel(finding: WatchFinding, job: Mapping[str, Any], round_: Round, settings: WatchSection) -> str:
    """Return the reason to leave a job alone, whatever its owner was told; "" if it may be cancelled in time."""
    words = comment_words(job["comment"])
    if finding.kind not in settings.cancel:
        return "no finding to cancel a job for (watch.cancel)"
    if job["partition"] not in settings.partitions:
        return "its partition is not in watch.partitions"
    if job["is_interactive"] and job["partition"] not in settings.interactive_partitions:
        return "interactive (watch.interactive_partitions)"
    if job["het_job_id"] is not None:
        return "part of a heterogeneous job"
    if job["comment"] is None:
        return "its comment cannot be read"
    if round_.at_s < finding.since_s + max(words.keep_s, MOST_KEPT_S * words.is_serving):
        return "kept by its owner (almanac:keep or almanac:serving)"
    if job["is_serving"] is not False:
        return "it serves requests" if job["is_serving"] else "not known if it serves requests"
    if round_.unknown or finding.is_suspect:
        return "a counter cannot be trusted now"
    if not finding.coverage >= LEAST_COVERAGE:
        return f"samples of less than {LEAST_COVERAGE:.0%} of the time"
    return "" if finding.until_s == round_.at_s else "no samples now"


def _owner_step(
    round_: Round,
    finding: WatchFinding,
    job: Mapping[str, Any],
    before: Sequence[PastStep],
    settings: WatchSection,
    now_s: int,
) -> tuple[DueStep | None, str]:
    """Return the step for the owner, due or not; without one, the reason."""
    if why_not := why_not_cancel(finding, job, round_, settings):
        is_told = finding.kind in settings.message
        return (DueStep("message", finding, job), "") if is_told else (None, why_not)
    least_s = settings.cancel_min * 60
    warned = warnings_of(finding, before)
    times = [each.time_s for each in warned]
    is_warned = len(warned) >= WARNINGS and times[-1] - times[0] >= HOUR_S and now_s >= times[-1] + LAST_CALL_S
    promised_s = max((each.cancel_s for each in warned), default=0)
    if is_warned and finding.until_s - finding.since_s >= least_s and now_s >= promised_s:
        return DueStep("cancel", finding, job), ""
    answer_s = LAST_CALL_S + (0 if warned else HOUR_S)
    return DueStep("warn", finding, job, max(finding.since_s + least_s, promised_s, now_s + answer_s)), ""


def warnings_of(finding: WatchFinding, past: Iterable[PastStep]) -> list[PastStep]:
    """Return the warnings about a finding: of its kind, and of the present time without work."""
    return [
        each for each in past if (each.what, each.kind) == ("warned", finding.kind) and each.time_s >= finding.since_s
    ]


def _allowed(
    cancels: Iterable[DueStep], past: Mapping[Run, Sequence[PastStep]], now_s: int, counts: Counts
) -> list[DueStep]:
    """Return the cancels of this hour, the longest without work first. A job that outlived its cancel counts once."""
    recent = {run for run, steps in past.items() if any(_is_recent_cancel(each, now_s) for each in steps)}
    ordered = sorted(cancels, key=lambda each: (each.finding.since_s, each.job["job_id"]))
    again, new = list[DueStep](), list[DueStep]()
    for each in ordered:
        (again if run_of(each.job) in recent else new).append(each)
    room = max(0, MOST_CANCELS - len(recent))
    counts.drop(f"waits ({MOST_CANCELS} cancels an hour)", len(new[room:]))
    return again + new[:room]


def _is_recent_cancel(step: PastStep, now_s: int) -> bool:
    return step.what == "cancel" and step.time_s > now_s - HOUR_S


def _why_later(before: Sequence[PastStep], finding: WatchFinding, steps: AbstractSet[Step], now_s: int) -> str:
    """Return why no mail is due yet: at most hourly, and after the second one each time twice as late."""
    times = [each.time_s for each in before if each.what in steps]
    here = [time_s for time_s in times if time_s >= finding.since_s]
    pause_s = max(HOUR_S, here[-1] - here[0]) if here else HOUR_S
    return "told before, and not yet again" if times and now_s - times[-1] < pause_s else ""


def _bundled(steps: Sequence[DueStep], mailed: Mapping[str, int], now_s: int, counts: Counts) -> list[DueStep]:
    """Return the mails to those who had none just now, and as many jobs of each as one mail lists."""
    kept, numbers = list[DueStep](), dict[str, int]()
    for each in steps:
        name = reader_of(each.what, each.job)
        numbers[name] = numbers.get(name, 0) + 1
        if now_s - mailed.get(name, now_s - USER_PAUSE_S) < USER_PAUSE_S or numbers[name] > MOST_PER_MAIL:
            counts.drop("waits for its reader's next mail")
        else:
            kept.append(each)
    return kept


def reader_of(what: Step, job: Mapping[str, Any]) -> str:
    """Return the user whose mail a step is part of; "" for the operators."""
    return "" if what == "operators" else str(job["user"])


def _last_mails(
    rows: Mapping[int, Mapping[str, Any]], past: Mapping[Run, Sequence[PastStep]], now_s: int
) -> dict[str, int]:
    """Return when each reader had the last mail about a job that still runs."""
    last = dict[str, int]()
    for run, steps in past.items():
        job = rows.get(run[0])
        for each in steps if job is not None and run_of(job) == run else ():
            if each.time_s <= now_s:
                name = reader_of(each.what, job or {})
                last[name] = max(last.get(name, 0), each.time_s)
    return last
