"""A report says whose fault a failure is, and how often a large job should save a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from advisor.health.checkpoints import CheckpointAdvice
from reports.job.conclusions import conclude
from reports.job.evidence import JobContext
from reports.job.facts import facts_of
from reports.job.job_report import JobRow, MetricsRow
from reports.mail.families import job_of


def ended(reported: Any, state: str, *errors: str, case: str = "failed", **given: Any) -> JobContext:
    context = cast("JobContext", reported.contexts[case])
    job = cast("JobRow", {**context.job, "state": state, "node_list": "n12", **given})
    texts = [f"{text}:{context.job['end_s']}" for text in errors]
    return replace(context, job=job, metrics=cast("MetricsRow", {**context.metrics, "gpu_errors": texts or None}))


def headline(context: JobContext) -> str:
    return conclude(facts_of(context)).headline


def test_a_job_that_died_of_its_node_is_told_so_and_where_not_to_run(reported: Any) -> None:
    context = ended(reported, "FAILED", "n12:3:XID 31", "n12:3:XID 79")
    assert headline(context) == (
        "died of XID 79 on n12 (the GPU fell off the bus), not of your code; resubmit with --exclude=n12"
    )
    found = conclude(facts_of(context))
    assert found.suggestions[0].rule == "gpu_failed"
    assert job_of(context).is_node_failure


def test_full_memory_is_not_blamed_if_the_gpu_failed(reported: Any) -> None:
    context = ended(reported, "FAILED", "n12:0:XID 95", case="out-of-memory")
    assert "memory error that the GPU could not contain" in headline(context)
    assert "memory_full" not in conclude(facts_of(context)).rules


@pytest.mark.parametrize("errors", [(), ("n12:0:XID 45",), ("n12:0:XID 777",)])
def test_an_error_of_unknown_cause_changes_nothing(reported: Any, errors: tuple[str, ...]) -> None:
    context = ended(reported, "FAILED", *errors)
    assert "died of" not in headline(context) and "exclude" not in headline(context)
    assert not job_of(context).is_node_failure


def test_an_error_of_the_program_is_the_program_s(reported: Any) -> None:
    assert "used GPU memory that is not its own (XID 31)" in headline(ended(reported, "FAILED", "n12:0:XID 31"))


@pytest.mark.parametrize(
    ("given", "where"),
    [({"failed_node": "n2", "node_list": "n[1-2]"}, "because n2 failed; submit it again with --exclude=n2"),
     ({}, "because n12 failed; submit it again with --exclude=n12"),
     ({"node_list": "n[1-2]"}, "because a node failed; submit it again"),
     ({"node_list": "n[1-"}, "because a node failed; submit it again")],
)  # fmt: skip
def test_slurm_s_own_node_failure_names_the_node_if_it_is_known(reported: Any, given: Any, where: str) -> None:
    assert headline(ended(reported, "NODE_FAIL", **given)).endswith(where)


def test_a_large_job_is_told_how_often_to_save(reported: Any) -> None:
    context = replace(ended(reported, "COMPLETED"), checkpoints=CheckpointAdvice(0.125, 1e5, 2820, 300))
    (said,) = [each for each in conclude(facts_of(context)).suggestions if each.rule == "save_checkpoints"]
    assert said.advice == "Save a checkpoint every 47 min: that loses least time (5 min for each)."
    assert "About 1 in 8 such jobs" in said.reason
