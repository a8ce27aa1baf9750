"""Jobs of many users that a rule about CPUs, host memory, nodes, or time limits is for, in one query, by user and rule.

The facts are those of reports/job/host.py, and the limits those of the site's rules. Jobs with GPUs that did nothing
are left out: that is their fault. Time limits are judged of jobs without GPUs; reports/site/faults.py has the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from almanac.config import Config
from reports.job.facts import LIMIT_MARGIN, LIMITS_S
from reports.job.host import SPARE_MEMORY
from reports.job.rules import Rule, choices_of
from slurm.states import PART_OF_JOB
from telemetry.metrics.data_quality import EXCLUDED_BY_SITE, IDLE
from telemetry.store.store import ClusterStore

TOPICS = ("cpus", "host_memory", "nodes", "time")
"""Topics of faults on the host's side, in the order of rules.toml."""
COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "elapsed_s", "user", "account", "partition", "state", "gpu_count",
    "gpu_count_req", "gpu_share_count", "node_count", "cpu_count", "cpu_count_req", "cpu_time_s", "host_mem_alloc_mib",
    "host_mem_peak_mib", "node_cpu_count", "node_gpu_count", "node_memory_mib", "node_threads",
    "time_limit_s",
)  # fmt: skip
"""Columns of the table jobs that the query needs."""
_REAL = ("cpu_time_s", "host_mem_alloc_mib", "host_mem_peak_mib")
_FACTS = f"""
WITH ran AS (
  SELECT * REPLACE ({", ".join(f"CASE WHEN isfinite({name}) THEN {name} END AS {name}" for name in _REAL)}),
         coalesce(elapsed_s, end_s - start_s) AS ran_s, coalesce(gpu_count, gpu_count_req, 0) AS gpus FROM jobs
  WHERE start_s IS NOT NULL AND end_s >= $since_s AND end_s < $until_s AND coalesce(state, '') NOT IN $parts
    AND ($user IS NULL OR "user" = $user) AND coalesce(account, '') NOT IN $staff
    AND (len($partitions) = 0 OR "partition" IN $partitions)),
sized AS (
  SELECT *, CASE WHEN gpus > 0 THEN gpus / nullif(node_gpu_count, 0) ELSE cpu_count / nullif(node_cpu_count, 0)
            END AS part,
         cpu_time_s / nullif(ran_s, 0) AS busy,
         nullif(host_mem_alloc_mib, 0) AS alloc_mib,
         CASE WHEN host_mem_peak_mib IS NULL THEN host_mem_alloc_mib
              ELSE least({SPARE_MEMORY} * host_mem_peak_mib, nullif(host_mem_alloc_mib, 0)) END AS kept_mib
  FROM ran),
facts AS (
  SELECT job_id, submit_s, "user", state, ran_s AS elapsed_s, gpus, node_count AS nodes, cpu_count AS cpus,
         node_cpu_count, node_gpu_count,
         coalesce(gpu_count, gpu_count_req) IS NOT NULL AND gpus = 0 AND coalesce(gpu_count_req, 0) = 0
           AND coalesce(gpu_share_count, 0) = 0 AS is_cpu_only,
         gpus = 0 AND coalesce(gpu_share_count, 0) > 0 AS is_shared,
         CASE WHEN cpu_count > 0 THEN busy END AS busy_cpus, busy / nullif(cpu_count, 0) AS cpu_efficiency,
         nullif(cpu_count, 0) * ran_s / 3600.0 AS cpu_hours,
         host_mem_alloc_mib, host_mem_peak_mib, host_mem_peak_mib / alloc_mib AS host_mem_share,
         nullif(cpu_count, 0) / nullif(gpus, 0) AS cpus_per_gpu,
         least(nullif(cpu_count, 0), coalesce(nullif(cpu_count_req, 0), cpu_count)) / nullif(part * node_cpu_count, 0)
           AS cpu_part,
         CASE WHEN cpu_count > 0 THEN busy END / nullif(part * node_cpu_count, 0) AS cpu_used_part,
         host_mem_alloc_mib / nullif(part * node_memory_mib, 0) AS host_mem_part,
         host_mem_peak_mib / nullif(part * node_memory_mib, 0) AS host_mem_used_part,
         CASE WHEN cpu_count > 0 AND node_threads > 0 AND busy IS NOT NULL
              THEN least(busy / cpu_count * node_threads, 1) END AS core_efficiency,
         cpu_count / nullif(node_threads, 0) AS cores,
         CASE WHEN cpu_count IS NOT NULL AND node_cpu_count > 0 AND kept_mib IS NOT NULL AND node_memory_mib > 0
               AND (gpus = 0 OR node_gpu_count > 0)
              THEN greatest(ceil(greatest(cpu_count / node_cpu_count, kept_mib / node_memory_mib,
                                          CASE WHEN gpus > 0 THEN gpus / node_gpu_count END)), 1) END AS nodes_enough,
         node_count - nodes_enough AS nodes_spare, time_limit_s AS limit_s,
         ran_s / nullif(time_limit_s, 0) AS limit_share,
         list_min([each FOR each IN {list(LIMITS_S)} IF each >= {LIMIT_MARGIN} * ran_s]) AS limit_next_s,
         limit_next_s / nullif(time_limit_s, 0) AS limit_next_share
  FROM sized),
judged AS (
  SELECT f.* FROM facts f LEFT JOIN job_metrics m USING (job_id, submit_s)
  WHERE NOT is_shared AND NOT coalesce(list_contains($excluded, m.verdict), false)
    AND NOT coalesce(m.verdict = '{IDLE}' OR len(m.idle_gpus) > 0, false))
"""
FACTS = frozenset({
    "state", "elapsed_s", "gpus", "nodes", "cpus", "is_cpu_only", "busy_cpus", "cpu_efficiency", "cpu_hours",
    "host_mem_alloc_mib", "host_mem_peak_mib", "host_mem_share", "cpus_per_gpu", "cpu_part", "cpu_used_part",
    "host_mem_part", "host_mem_used_part", "core_efficiency", "cores", "nodes_enough", "nodes_spare",
    "limit_s", "limit_share", "limit_next_s", "limit_next_share",
})  # fmt: skip
"""Facts that the query knows. A rule that a site lets test another one is left out."""
_UNUSED = ("greatest(cpu_hours - busy_cpus * elapsed_s / 3600, 0)", "CPU-hours", "node_cpu_count")
LIMIT_FAR = "limit_far"
"""The rule on time limits. It comes last: nobody loses its amount, but jobs start later."""
_AMOUNTS = {
    "cpus_idle": _UNUSED,
    "serial_program": _UNUSED,
    "low_cpu_use": _UNUSED,
    "cpus_per_gpu": ("(cpu_part - 1) * gpus * elapsed_s / 3600", "GPU-hours", "node_gpu_count"),
    "memory_per_gpu": ("(host_mem_part - 1) * gpus * elapsed_s / 3600", "GPU-hours", "node_gpu_count"),
    "host_memory_spare": ("(host_mem_part - 1) * cpu_hours", "CPU-hours", "node_cpu_count"),
    "spread_gpus": ("nodes_spare * elapsed_s / 3600", "node-hours", "1"),
    "spread_cpus": ("nodes_spare * elapsed_s / 3600", "node-hours", "1"),
    LIMIT_FAR: ("CASE WHEN is_cpu_only THEN (limit_s - elapsed_s) / 3600.0 * cpus END", "CPU-hours", "node_cpu_count"),
}
"""By rule: the amount that is not used, or that others cannot use meanwhile; its unit; and how much of it is a node."""

_KEPT = frozenset({"cpus_per_gpu", "memory_per_gpu", "host_memory_spare"})
"""Rules whose amount other jobs cannot use, at most: their GPUs or CPUs are free, and the rest of the node is not."""


@dataclass(frozen=True)
class HostFault:
    """A user's jobs with one fault. example: job_id and submit_s of the one with the largest amount."""

    rule: str
    user: str
    jobs: int
    amount: float
    unit: str
    example: tuple[int, int]

    @property
    def lost(self) -> str:
        """ "CPU-hours not used": the unit of the amount, and what became of it."""
        if self.rule == LIMIT_FAR:
            return f"{self.unit} requested and not used"
        if self.rule in _KEPT:
            return f"{self.unit} kept from other jobs"
        return f"{self.unit} {'not used' if self.unit == 'CPU-hours' else 'more than needed'}"


def load_host_faults(
    store: ClusterStore,
    config: Config,
    submitted_s: tuple[int, int],
    ended_s: tuple[int, int],
    *,
    user: str | None = None,
    is_cpu_only: bool = False,
    most: int = 1000,
) -> list[HostFault]:
    """The faults of the jobs submitted in one span that ended in another.

    The largest user of each rule comes first, then the second, each in the order of node-hours. Raises StoreError.

    user: only this user's jobs. is_cpu_only: only jobs without GPUs.
    """
    rules = [rule for rule in choices_of(config).rules.rules if rule.topic in TOPICS and rule.name in _AMOUNTS]
    usable = [rule for rule in rules if set(rule.when) <= FACTS]
    if not usable:
        return []
    filters = config.filters
    given: dict[str, Any] = {
        "since_s": ended_s[0], "until_s": ended_s[1], "parts": sorted(PART_OF_JOB), "excluded": list(EXCLUDED_BY_SITE),
        "staff": list(filters.staff_accounts), "partitions": list(filters.partitions), "user": user, "most": most,
    }  # fmt: skip
    with store.connect() as db:
        store.view(db, "jobs", COLUMNS, *submitted_s)
        store.view(db, "job_metrics", ("job_id", "submit_s", "verdict", "idle_gpus"), *submitted_s)
        rows = db.execute(_query(usable, is_cpu_only, given), given).fetchall()
    return [
        HostFault(rule, user, jobs, amount, _AMOUNTS[rule][1], (job_id, submit_s))
        for rule, user, jobs, amount, job_id, submit_s in rows
    ]


def _query(rules: Sequence[Rule], is_cpu_only: bool, given: dict[str, Any]) -> str:
    """Add the limits of the rules to `given`: a site's texts are no SQL."""
    columns, names = list[str](), list[str]()
    for topic in TOPICS:
        own = [rule for rule in rules if rule.topic == topic]
        if not own:
            continue
        covering = ", ".join(f"'{rule.name}'" for rule in rules if topic in rule.covers) or "''"
        free = " AND ".join(f"coalesce({name}, '-') NOT IN ({covering})" for name in names) or "true"
        cases = " ".join(f"WHEN {_holds(rule.when, given)} THEN '{rule.name}'" for rule in own)
        columns.append(f"CASE WHEN {free} THEN CASE {cases} END END AS rule_{topic}")
        names.append(f"rule_{topic}")
    amount = " ".join(f"WHEN '{rule.name}' THEN {_AMOUNTS[rule.name][0]}" for rule in rules)
    of_node = " ".join(f"WHEN '{rule.name}' THEN {_AMOUNTS[rule.name][2]}" for rule in rules)
    chosen = "WHERE is_cpu_only" if is_cpu_only else ""
    return f"""{_FACTS},
    told AS (SELECT *, {", ".join(columns)} FROM judged {chosen}),
    faults AS (SELECT *, unnest([{", ".join(names)}]) AS rule FROM told),
    amounts AS (SELECT *, CASE rule {amount} END AS amount, CASE rule {of_node} END AS of_node FROM faults
                WHERE rule IS NOT NULL AND coalesce("user", '') <> ''),
    items AS (SELECT rule, "user", count(*) AS jobs, round(sum(amount), 6) AS amount,
                arg_max((job_id, submit_s), (amount, job_id)) AS example,
                round(coalesce(sum(amount / nullif(of_node, 0)), 0), 6) AS node_h
              FROM amounts WHERE amount IS NOT NULL GROUP BY 1, 2)
    SELECT rule, "user", jobs, amount, example[1], example[2] FROM items
    ORDER BY row_number() OVER (PARTITION BY rule ORDER BY node_h DESC, "user"), rule = '{LIMIT_FAR}', node_h DESC, 1, 2
    LIMIT $most"""


def _holds(when: Mapping[str, Mapping[str, Any]], given: dict[str, Any]) -> str:
    """The condition of a rule; an unknown fact meets no limit."""
    signs = {"min": ">=", "max": "<=", "is": "=", "one_of": "IN"}
    terms = []
    for fact, tests in when.items():
        for test, limit in tests.items():
            if (test == "one_of" or isinstance(limit, str)) != (fact == "state") or (
                isinstance(limit, bool) != (fact == "is_cpu_only")
            ):
                terms.append("false")  # a site's limit of another type, which no value meets
                continue
            name = f"limit_{len(given)}"
            given[name] = limit
            terms.append(f"coalesce({fact} {signs[test]} ${name}, false)")
    return " AND ".join(terms)
