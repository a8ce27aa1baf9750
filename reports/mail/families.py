"""The jobs of a digest by family, and the advice that they share: each piece of advice once, with all its jobs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from almanac.names import is_family
from almanac.units import counted, format_count, format_duration, printable, span_text
from reports.job.conclusions import Conclusions, conclude
from reports.job.evidence import NOT_KNOWN, JobContext
from reports.job.facts import facts_of
from reports.job.job_report import Suggestion
from reports.job.rules import Fact
from reports.mail.due import outcome_of
from reports.mail.record import Told
from slurm.states import JOB_FAILED
from telemetry.metrics.data_quality import IDLE, OK

MOST_ADVICE = 5
"""Most pieces of advice in a digest."""
MOST_LIMITS = 5
"""Most job families whose time limits a digest lists."""
LIMIT_RULE = "limit_far"
"""Each job has another time limit to ask for, so digests have a section of their own for it: `TimeLimit`."""
_NAMED = 3


@dataclass(frozen=True)
class DigestJob:
    """One job in a digest.

    gpu_hours: None if the run time is unknown. unused_hours: gpu_hours x (1 - utilization); None: not measured.
    limit_s, next_limit_s: the time limit that it asked for, and one that holds it.
    rules: topic and headline of the rules that hold, by name. url: the site's first link for the job, or "".
    """

    cluster: str
    job_id: int
    shown_id: str
    name: str
    name_key: str
    gpu_count: int
    state: str
    elapsed_s: int | None
    gpu_hours: float | None
    unused_hours: float | None
    limit_s: int | None
    next_limit_s: int | None
    conclusions: Conclusions
    rules: Mapping[str, tuple[str, str]]
    url: str = ""
    is_node_failure: bool = False

    @property
    def has_failed(self) -> bool:
        return self.state in JOB_FAILED

    @property
    def advice(self) -> list[Suggestion]:
        return [each for each in self.conclusions.suggestions if each.rule != LIMIT_RULE]

    def told(self, what: str) -> Told:
        return Told(self.cluster, self.name_key, self.gpu_count, what)


def job_of(context: JobContext) -> DigestJob:
    facts, job = facts_of(context), context.job
    conclusions, links = conclude(facts), context.site.links_of(job, context.cluster)
    hours, next_s = context.gpu_hours, facts.values["limit_next_s"]
    return DigestJob(
        cluster=context.cluster,
        job_id=context.job_id,
        shown_id=context.shown_id,
        name=job["name"] or "",
        name_key=job["name_key"] or "",
        gpu_count=context.gpu_count,
        state=job["state"] or "",
        is_node_failure=facts.values["is_node_failure"] is True,
        elapsed_s=context.elapsed_s,
        gpu_hours=hours,
        unused_hours=_unused(hours, facts.values["util_pct"], context.data_quality),
        limit_s=job["time_limit_s"],
        next_limit_s=int(next_s) if isinstance(next_s, int | float) else None,
        conclusions=conclusions,
        rules={
            rule.name: (rule.topic, rule.headline.format_map(facts.words))
            for rule in facts.rules.rules
            if rule.name in conclusions.rules
        },
        url=links[0].url if links else "",
    )


def _unused(hours: float | None, util_pct: Fact, data_quality: str) -> float | None:
    """Short and hardly measured jobs have a utilization too, but it does not say how the GPUs were used."""
    if hours is None or not isinstance(util_pct, int | float) or data_quality not in (OK, IDLE):
        return None
    return hours * (1 - min(util_pct, 100.0) / 100)


def told_of_job(job: DigestJob) -> frozenset[Told]:
    """The facts that the report of a job tells about its family."""
    found = [outcome_of(job.state), *(each.rule for each in job.conclusions.suggestions)]
    return frozenset(map(job.told, found))


@dataclass(frozen=True)
class JobFamily:
    """The jobs of a user with one masked name and GPU count; at least one."""

    jobs: tuple[DigestJob, ...]

    @property
    def first(self) -> DigestJob:
        return self.jobs[0]

    @cached_property
    def name(self) -> str:
        """The name of its jobs, or the masked name if they have several."""
        names = {job.name for job in self.jobs}
        if len(names) == 1:
            return printable(names.pop() or "no name", 40)
        return printable(self.first.name_key, 40) if is_family(self.first.name_key) else "jobs of several names"

    @property
    def gpus(self) -> str:
        return counted(self.first.gpu_count, "GPU")

    @property
    def states(self) -> str:
        return said_states(self.jobs)

    @property
    def gpu_hours(self) -> float:
        return sum_hours(job.gpu_hours for job in self.jobs)

    @property
    def unused_hours(self) -> float | None:
        """Unused GPU-hours of the measured jobs; None if there are none."""
        known = [job.unused_hours for job in self.jobs if job.unused_hours is not None]
        return sum(known) if known else None

    @property
    def unmeasured(self) -> int:
        return sum(job.unused_hours is None for job in self.jobs)


def families_of(jobs: Iterable[DigestJob]) -> list[JobFamily]:
    """The families, the one with the most unused GPU-hours first; unmeasured ones last, by GPU-hours."""
    found: dict[tuple[str, int], list[DigestJob]] = defaultdict(list)
    for job in jobs:
        found[job.name_key, job.gpu_count].append(job)
    families = [JobFamily(tuple(each)) for each in found.values()]
    return sorted(families, key=lambda each: (-(each.unused_hours or 0.0), -each.gpu_hours, each.first.job_id))


def sum_hours(hours: Iterable[float | None]) -> float:
    return sum(each for each in hours if each is not None)


def said_states(jobs: Sequence[DigestJob]) -> str:
    """ "20 completed, 4 failed"."""
    states = Counter(printable(job.state or NOT_KNOWN, 40).lower().replace("_", " ") for job in jobs)
    return ", ".join(f"{format_count(number)} {state}" for state, number in states.most_common(4))


@dataclass(frozen=True)
class SharedAdvice:
    """One piece of advice and all jobs that it is for, the one with the most GPU-hours first."""

    advice: str
    rule: str
    jobs: tuple[DigestJob, ...]
    reason: str

    @property
    def gpu_hours(self) -> float:
        return sum_hours(job.gpu_hours for job in self.jobs)

    @property
    def short(self) -> str:
        """The advice without figures and options: "40 GB GPUs are enough", "find out what your GPUs wait for"."""
        # A headline of two parts says first what happened to the job, and others can have figures of one job.
        said = {first_statement(headline) for job in self.jobs if ";" not in (headline := job.rules[self.rule][1])} - {
            ""
        }
        return said.pop() if len(said) == 1 else first_statement(self.advice[:1].lower() + self.advice[1:])

    def where(self, among: Sequence[DigestJob]) -> str:
        """ "12 of 17 jobs: train-# (8), eval (4)"; without names if all 17 are of one family."""
        share = f"{format_count(len(self.jobs))} of {counted(len(among), 'job')}"
        if len(families_of(among)) == 1:
            return share
        families = [(each.name, len(each.jobs)) for each in families_of(self.jobs)]
        names = [f"{name} ({format_count(number)})" if number > 1 else name for name, number in families[:_NAMED]]
        more = len(families) - _NAMED
        rest = f", and {format_count(more)} other job families" if more > 1 else ", and 1 more" if more == 1 else ""
        return f"{share}: {', '.join(names)}{rest}"


def first_statement(text: str) -> str:
    """Its first statement."""
    ends = [place for mark in (". ", ": ", " (", ", or ") if (place := text.find(mark)) > 0]
    return text[: min(ends, default=len(text))].rstrip(".")


def shared_advice(jobs: Sequence[DigestJob]) -> list[SharedAdvice]:
    """The most important advice for these jobs, from all jobs that it is for; what wastes most comes first."""
    found: dict[tuple[str, str], list[tuple[DigestJob, Suggestion]]] = defaultdict(list)
    for job in sorted(jobs, key=lambda job: -(job.gpu_hours or 0.0)):
        for each in job.advice:
            topic, _ = job.rules[each.rule]
            found[each.rule, each.advice if topic == "memory" else ""].append((job, each))
    advice = [_shared(rule, those) for (rule, _), those in found.items()]
    return sorted(advice, key=_rank)[:MOST_ADVICE]


def _shared(rule: str, those: Sequence[tuple[DigestJob, Suggestion]]) -> SharedAdvice:
    """One fault of several jobs is one piece of advice: with the figures of the largest job, if they differ."""
    largest, given = those[0]
    differ = len({each.advice for _, each in those}) > 1
    note = (
        f" The figures are those of job {largest.shown_id}; `almanac report JOBID` has the others'." if differ else ""
    )
    return SharedAdvice(given.advice, rule, tuple(job for job, _ in those), given.reason + note)


def _rank(advice: SharedAdvice) -> tuple[int, float]:
    """A sort key. A failed job, or a GPU that is larger than needed, wastes all GPU-hours; other jobs the unused ones.

    Advice that wastes nothing comes later: how to learn more about memory, then what the kernels compute.
    """
    topic, _ = advice.jobs[0].rules[advice.rule]
    is_all = topic == "outcome" or advice.rule.startswith("tier_")
    if is_all or topic == "use":
        return 0, -(advice.gpu_hours if is_all else sum_hours(job.unused_hours for job in advice.jobs))
    return 2 if topic == "kernel" else 1, -advice.gpu_hours


def told_of_digest(jobs: Sequence[DigestJob], advice: Sequence[SharedAdvice]) -> frozenset[Told]:
    """The facts that a digest tells: its advice, and the ends of each family's jobs."""
    told = {job.told(each.rule) for each in advice for job in each.jobs}
    far = {job.told(LIMIT_RULE) for limit in time_limits(families_of(jobs)) for job in limit.jobs}
    return frozenset({job.told(outcome_of(job.state)) for job in jobs} | told | far)


@dataclass(frozen=True)
class TimeLimit:
    """The completed jobs of a family whose time limit was much too long. asked_hours, used_hours: their GPU-hours."""

    name: str
    jobs: tuple[DigestJob, ...]
    asked_hours: float
    used_hours: float

    @property
    def spans(self) -> str:
        """ "ran 15 min to 1 h of 4 h"."""
        asked, ran = ([job.limit_s or 0 for job in self.jobs], [job.elapsed_s or 0 for job in self.jobs])
        return f"ran {_span(ran)} of {_span(asked)}"


def time_limits(families: Iterable[JobFamily]) -> list[TimeLimit]:
    """Return the time limits to shorten, most GPU-hours asked for and not used first.

    Leaves out families with a job that needs such a long limit.
    """
    found = [limit for family in families if (limit := _time_limit(family)) is not None]
    return sorted(found, key=lambda limit: limit.used_hours - limit.asked_hours)[:MOST_LIMITS]


def _time_limit(family: JobFamily) -> TimeLimit | None:
    far = tuple(job for job in family.jobs if LIMIT_RULE in job.conclusions.rules)
    if not far or any(job.state == "TIMEOUT" for job in family.jobs):
        return None
    ended = [job for job in family.jobs if job.state == "COMPLETED" and job.elapsed_s is not None]
    if not ended:  # only where a site's rule is also for jobs that did not complete
        return None
    longest_s = max(job.next_limit_s or 2**31 for job in ended)
    limits_s = [job.limit_s or 0 for job in far]
    if longest_s >= min(limits_s):
        return None
    asked = sum(job.gpu_count * (job.limit_s or 0) / 3600 for job in far)
    return TimeLimit(family.name, far, asked, sum_hours(job.gpu_hours for job in far))


def _span(seconds: Sequence[int]) -> str:
    return span_text(format_duration(min(seconds)), format_duration(max(seconds)))
