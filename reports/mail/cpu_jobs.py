"""A user's jobs without GPUs in the weekly digest: each fault once, with the number of its jobs and an example."""

from __future__ import annotations

from almanac.config import Config
from almanac.units import DAY_S, counted
from reports.job.build import build_runs
from reports.job.evidence import real_text
from reports.job.facts import facts_of
from reports.job.host_faults import load_host_faults
from reports.job.job_report import Suggestion
from reports.mail.week import LONGEST_DAYS, WeekSpan
from telemetry.site import Site
from telemetry.store.store import ClusterStore

MOST_FAULTS, MOST_USERS = 5, 100_000


def users_to_tell(store: ClusterStore, config: Config, week: WeekSpan) -> set[str]:
    """Users with a job without GPUs that has a fault and ended in the week. Raises StoreError."""
    return {fault.user for fault in load_host_faults(store, config, *_spans(week), is_cpu_only=True, most=MOST_USERS)}


def _spans(week: WeekSpan) -> tuple[tuple[int, int], tuple[int, int]]:
    """Spans of submission and of end of its jobs."""
    return (week.start_s - LONGEST_DAYS * DAY_S, week.end_s), (week.start_s, week.end_s)


def cpu_suggestions(site: Site, user: str, week: WeekSpan) -> tuple[Suggestion, ...]:
    """Suggestions, the largest waste of node-hours first; each is that of its largest job. Raises StoreError."""
    faults = load_host_faults(site.store, site.config, *_spans(week), user=user, is_cpu_only=True, most=MOST_FAULTS)
    contexts = build_runs(site, [each.example for each in faults], has_series=False, is_bare=True) if faults else []
    examples = {(context.job_id, context.job["submit_s"]): context for context in contexts}
    found = []
    for fault in faults:
        if (context := examples.get(fault.example)) is None:
            continue
        facts = facts_of(context)
        rule = next(rule for rule in facts.rules.rules if rule.name == fault.rule)
        advice, reason = (text.format_map(facts.words) for text in (rule.advice, rule.reason))
        why = f"{counted(fault.jobs, 'job')}; {real_text(fault.amount)} {fault.lost}. Job {context.shown_id}: {reason}"
        found.append(Suggestion(fault.rule, advice, why))
    return tuple(found)
