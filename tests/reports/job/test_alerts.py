"""Every alert of job_defense_shield is a rule of ours: both inputs of docs/alerts.toml, through the rules."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))

from alerts import alerts, context_of

from almanac.config import Config
from reports.job.conclusions import conclude
from reports.job.evidence import JobContext
from reports.job.facts import facts_of
from reports.job.host_faults import LIMIT_FAR, TOPICS, load_host_faults
from reports.job.job_report import JobRow
from reports.job.rules import first_of_topics, packaged
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

ALERTS = alerts()


@pytest.mark.parametrize("alert", ALERTS["alert"], ids=lambda alert: alert["page"])
def test_an_alert_fires_for_one_input_and_is_silent_for_the_other(alert: dict[str, Any]) -> None:
    for which in ("fires", "silent"):
        conclusions = conclude(facts_of(context_of(ALERTS, alert[which])))
        said = {each.rule for each in conclusions.suggestions} & {*alert["rules"]}
        assert bool(said) is (which == "fires"), (which, conclusions)
        for each in conclusions.suggestions:
            assert "  " not in each.advice and "()" not in each.reason and not set("{}") & set(each.reason), each


def test_nothing_is_said_of_a_job_whose_nodes_have_an_unknown_size() -> None:
    for alert in ALERTS["alert"]:
        sizes = dict.fromkeys(("node_cpu_count", "node_gpu_count", "node_memory_mib", "node_threads"), "unknown")
        changes = alert["fires"] | {"job": alert["fires"].get("job", {}) | sizes}
        rules = set(conclude(facts_of(context_of(ALERTS, changes))).rules)
        assert not rules & {"spread_gpus", "spread_cpus", "cpus_per_gpu", "memory_per_gpu", "host_memory_spare"}
        assert not rules & {"serial_program", "low_cpu_use"}, "two threads of a core count as one"


def test_the_usual_job_of_the_table_has_no_fault() -> None:
    assert conclude(facts_of(context_of(ALERTS, {}))).suggestions == ()


COUNTS = st.sampled_from([None, 0, 1, 2, 4, 8, 16, 32, 64, 128])
MIB = st.sampled_from([None, math.nan, math.inf, 0.0, 1.0, 8_192.0, 100_000.0, 262_144.0, 600_000.0])
JOB = st.fixed_dictionaries({
    "state": st.sampled_from(["COMPLETED", "FAILED"]), "elapsed_s": st.sampled_from([0, 600, 3600, 36_000]),
    **dict.fromkeys(("cpu_count", "cpu_count_req", "gpu_count", "gpu_count_req", "node_cpu_count"), COUNTS),
    "node_count": st.integers(1, 9), "node_gpu_count": COUNTS, "node_threads": st.sampled_from([None, 1, 2]),
    "gpu_share_count": st.sampled_from([None, 1]), "host_mem_alloc_mib": MIB, "host_mem_peak_mib": MIB,
    "node_memory_mib": st.sampled_from([None, 262_144]),
    "time_limit_s": st.sampled_from([None, 0, 600, 3600, 7200, 86_400, 864_000]),
    "cpu_time_s": st.sampled_from([None, math.nan, 1.0, 3600.0, 36_000.0, 500_000.0]),
})  # fmt: skip


@examples(0.5)
@given(st.lists(JOB, min_size=1, max_size=20))
def test_the_query_over_many_jobs_finds_what_the_rules_say_of_each(
    tmp_path_factory: pytest.TempPathFactory, given_jobs: list[dict[str, Any]]
) -> None:
    empty = dict.fromkeys(JobRow.__annotations__)
    jobs = [
        empty | job | {"job_id": number, "submit_s": 1, "start_s": 10, "end_s": 90_000, "user": f"u{number}"}
        for number, job in enumerate(given_jobs)
    ]
    said = set()
    for job in jobs:
        context = JobContext("c", 100_000, cast(JobRow, job), ())
        rules = first_of_topics(packaged().rules, facts_of(context).values)
        own = [rule for rule in rules if rule.topic in TOPICS]
        is_left = own and own[-1].name == LIMIT_FAR and (not context.is_cpu_only or not job["cpu_count"])
        said |= {(job["user"], rule.name) for rule in (own[:-1] if is_left else own)}
    store = Store.create(tmp_path_factory.mktemp("store")).of("c")
    store.write("jobs", pa.Table.from_pylist(jobs, schema=TABLES["jobs"].schema))
    span_s = (0, 100_000)
    found = load_host_faults(store, Config(), span_s, span_s)
    assert {(each.user, each.rule) for each in found} == said
    own = load_host_faults(store, Config(), span_s, span_s, user="u0")
    assert own == [each for each in found if each.user == "u0"]


def test_a_site_s_own_limits_count_for_many_jobs_too(tmp_path: Path) -> None:
    """A limit of another type than the fact is met by no job, and one of a fact of GPUs leaves the rule out."""
    serial = ALERTS["job"] | {"gpu_count": 0, "gpu_count_req": 0, "cpu_time_s": 36_000.0, "job_id": 1, "submit_s": 1}
    store = Store.create(tmp_path / "store").of("c")
    store.write("jobs", pa.Table.from_pylist([serial | {"user": "ann"}], schema=TABLES["jobs"].schema))
    (tmp_path / "almanac.toml").touch()
    config = Config(source=str(tmp_path / "almanac.toml"))

    def rules_with(when: str) -> list[str]:
        text = (
            f'[[rule]]\nname = "serial_program"\nwhen = {{ {when} }}\n[[rule]]\nname = "low_cpu_use"\nenabled = false'
        )
        (tmp_path / "rules.toml").write_text(text)
        span_s = (0, 2_000_000)
        return [each.rule for each in load_host_faults(store, config, span_s, span_s)]

    assert rules_with("cores = { min = 8 }") == ["serial_program"]
    injected = 'state = { is = "\'; DROP TABLE jobs" }'
    others = ("cores = { min = 9 }", "state = { is = true }", "cores = { one_of = ['a'] }", "util_pct = { min = 0 }")
    for other in (*others, "is_cpu_only = { is = 'x' }", injected):
        assert rules_with(other) == [], other
