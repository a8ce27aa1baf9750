"""The next step in a few words: as the job's report says, without its models and samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.cells import cell_len

from reports.job.conclusions import next_steps
from reports.job.facts import facts_of
from reports.job.rules import first_of_topics, packaged
from reports.published.caller import NEXT_COLUMNS, StoreJobs
from telemetry.site import Site

STEPS = {
    "balanced": "try hbm40g", "idle": "use 1 GPU", "no-telemetry": "shorter --time", "half": "try hbm40g",
    "out-of-memory": "cut memory use", "64-gpus": "try hbm40g", "cancelled": "try hbm40g", "requeued": "try hbm40g",
    "array-task": "raise GPU use", "failed": "exit code 2", "timeout": "longer --time", "reserved": "measure memory",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(reported: Any) -> dict[int, dict[str, Any]]:
    found = stored(reported).history(["job_id", "submit_s", "job", *NEXT_COLUMNS])
    return {row["job_id"]: dict(row) for row in found}


def stored(reported: Any) -> StoreJobs:
    return StoreJobs(Site.of(reported.store.of("test"), reported.config, 0), None)


def steps(reported: Any, rows: list[dict[str, Any]]) -> list[str]:
    return next_steps(rows, reported.config.tiers, stored(reported).history, 0)


def test_a_row_says_what_its_report_says_first(reported: Any, rows: dict[int, dict[str, Any]]) -> None:
    known = {case: context for case, context in reported.contexts.items() if context.job_id in rows}
    said = steps(reported, [rows[context.job_id] for context in known.values()])
    found = {case: step or "-" for case, step in zip(known, said, strict=True)}
    assert {case: found[case] for case in STEPS} == STEPS
    for case, context in known.items():
        facts = facts_of(dataclasses.replace(context, advice=None))
        rules = first_of_topics(packaged().rules, facts.values | {"tier_reason": "no evidence"})
        shorts = [rule.short.format_map(facts.words) for rule in sorted(rules, key=lambda rule: not rule.advice)]
        assert found[case] == next(filter(None, shorts), "-"), case
        assert rows[context.job_id]["job"] == context.shown_id


def test_a_smaller_tier_must_hold_every_run_of_the_family(reported: Any, rows: dict[int, dict[str, Any]]) -> None:
    row = rows[101]
    for highest, expected in ((39_000.0, False), (30_000.0, True)):
        other = {"user": row["user"], "name_key": row["name_key"], "gpu_count": 4, "hbm_max_mib": highest}
        strangers = [{**other, "user": "eve", "hbm_max_mib": 80_000.0}, {**other, "hbm_max_mib": None}]

        def history(columns: Any, *asked: Any, runs: Any = (other, *strangers)) -> list[dict[str, Any]]:
            assert asked[-1]["name_key"] == [row["name_key"]]
            return list(runs)

        [step] = next_steps([row], reported.config.tiers, history, 0)
        assert (step == "try hbm40g") is expected


@pytest.mark.parametrize(
    ("given", "unasked", "step"),
    [(4, 4, "avoid GPU nodes"), (4, 3, "check the GPUs"), (4, 0, "check the GPUs"), (None, None, "check the GPUs")],
)
def test_gpus_that_came_unasked_are_told_apart(
    reported: Any, rows: dict[int, dict[str, Any]], given: int | None, unasked: int | None, step: str
) -> None:
    idle = {"verdict": "idle", "mean_gpu_util_pct": 0.0, "hbm_peak_mib": None}
    row = {**rows[101], **idle, "gpu_count_alloc": given, "unasked_gpu_count": unasked}
    assert steps(reported, [row]) == [step]


def test_short_texts_fit_their_column(reported: Any) -> None:
    words = facts_of(reported.contexts["balanced"]).words | {
        "used_named": "128 GPUs", "larger_tier": "hbm80g", "smaller_tier": "hbm80g"
    }  # fmt: skip
    shorts = [rule.short.format_map(words) for rule in packaged().rules if rule.short]
    assert shorts and max(map(cell_len, shorts)) <= 16
    assert all(rule.short for rule in packaged().rules if rule.advice and rule.topic in ("outcome", "use", "time"))
