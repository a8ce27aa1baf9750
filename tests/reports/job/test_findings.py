"""The headline of a report, and the sentences of its pictures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from almanac.config import Tier
from reports.job.conclusions import NOTHING_TO_CHANGE, conclude, report_of
from reports.job.evidence import JobContext, rank_text
from reports.job.facts import facts_of
from reports.job.job_report import ChartFinding, Rank
from reports.job.render import subject_of
from reports.job.rules import packaged


def changed(context: JobContext, job: Any = None, metrics: Any = None, **more: Any) -> JobContext:
    return dataclasses.replace(
        context, job={**context.job, **(job or {})}, metrics={**context.metrics, **(metrics or {})}, **more
    )


def headline(context: JobContext) -> str:
    return conclude(facts_of(context)).headline


def test_a_job_that_ran_out_of_memory_is_sent_to_larger_gpus(reported: Any) -> None:
    large = Tier("hbm141g", 141 * 1024)
    context = changed(reported.contexts["out-of-memory"], tiers=(*reported.config.tiers, large))
    conclusions = conclude(facts_of(context))
    assert conclusions.headline == "probably ran out of GPU memory; ask for 141 GB GPUs"
    assert conclusions.suggestions[0].advice.startswith("Ask for hbm141g, or use less GPU memory")
    assert not any("too_small" in rule for rule in conclusions.rules), "one rule speaks about the tier"


@pytest.mark.parametrize(
    ("state", "said"),
    [("OUT_OF_MEMORY", "ran out of host memory; ask for more (--mem)"),
     ("NODE_FAIL", "stopped after 1 h, because n1 failed; submit it again with --exclude=n1"),
     ("PREEMPTED", "preempted after 1 h; 40 GB GPUs are enough (peak 21 of 80 GiB)"),
     ("COMPLETED", "40 GB GPUs are enough (peak 21 of 80 GiB)")],
)  # fmt: skip
def test_how_the_job_ended_goes_first(reported: Any, state: str, said: str) -> None:
    """Slurm's OUT_OF_MEMORY is about the memory of the host, also if the GPUs were full."""
    assert headline(changed(reported.contexts["balanced"], {"state": state})) == said


def test_a_job_without_a_fault_is_fine_and_only_then(reported: Any) -> None:
    """A job that was not measured is never called fine."""
    context = changed(reported.contexts["balanced"], {"time_limit_s": 3600}, {"job_class": None}, advice=None)
    assert headline(context) == NOTHING_TO_CHANGE
    for verdict in ("no telemetry", "low coverage", "short", "shared node", "a word of a later release"):
        measured = {"verdict": verdict, "spatial_imbalance": None, "temporal_imbalance": None}
        assert headline(changed(context, None, measured)).startswith("not measured"), verdict
    assert headline(changed(context, {"state": "FAILED"})).startswith("failed")
    tips = {rule.headline for rule in packaged().rules if rule.is_fine}
    bound = changed(reported.contexts["balanced"], {"time_limit_s": 3600}, advice=None)
    assert headline(bound) in tips and "OK" not in headline(changed(bound, {"state": "TIMEOUT"}))


def test_gpus_that_all_do_little_are_not_called_uneven(reported: Any) -> None:
    uneven = reported.contexts["timeout"]
    assert "uneven" in conclude(facts_of(uneven)).rules
    gpus = tuple({**row, "mean_gpu_util_pct": pct} for row, pct in zip(uneven.gpus, (4.0, 20.0), strict=True))
    low = changed(uneven, {"state": "COMPLETED"}, {"mean_gpu_util_pct": 12.0}, gpus=gpus)
    assert headline(low) == "GPUs busy only 12% of the time; find out what they wait for"


@pytest.mark.parametrize("name", ["", None, "   ", "\n\x1b[31m", "x" * 10_000])
def test_the_subject_keeps_the_job_id_and_the_first_line_a_name(reported: Any, name: str | None) -> None:
    context = changed(reported.contexts["half"], {"name": name, "array_job_id": 10**18, "array_task_id": 10**9})
    report = report_of(context)
    subject = subject_of(report)
    assert subject.endswith(f" [job {10**18}_{10**9}]") and len(subject) <= 150 and subject.isprintable()
    assert not report.title.startswith(":") and "not fully measured" in subject


def balance(context: JobContext, *pcts: float | None) -> ChartFinding:
    gpus = tuple(
        {**context.gpus[0], "gpu": gpu, "mean_gpu_util_pct": pct, "mean_gr_engine_active_frac": None}
        for gpu, pct in enumerate(pcts)
    )
    [found] = [each for each in report_of(changed(context, gpus=gpus)).findings if each.picture == "timeline"]
    return found


def test_the_balance_of_the_gpus_is_a_sentence(reported: Any) -> None:
    context = reported.contexts["balanced"]
    assert balance(context, 90, 90, 90, 90).text == (
        "Your 4 GPUs shared the work evenly: each was busy 90% of the time, steadily."
    )
    assert "mostly evenly: they were busy 10% to 90% of the time (n1:1 the least)" in (
        balance(context, 90, 10, 90, 90).text
    )
    assert balance(context, 90, 90, 90).text.endswith(" 1 of 4 GPUs was not measured.")
    assert balance(context, 90, None, 90, 90).text.endswith(" 1 of 4 GPUs was not measured.")
    uneven = changed(context, None, {"spatial_imbalance": 0.6})
    assert balance(uneven, 90, 10, 50, 50).text == (
        "Your 4 GPUs did not share the work evenly: n1:0 was busy 90% of the time, and n1:1 10%."
    )
    assert "each was busy 48% to 52% of the time, but at different times" in balance(uneven, 50, 52, 48, 50).text
    unknown = changed(context, None, {"spatial_imbalance": None, "coverage_frac": 0.5})
    assert "were busy 10% to 90% of the measured time" in balance(unknown, 90, 10, 50, 50).text


def test_a_picture_is_described_for_those_who_do_not_see_it(reported: Any) -> None:
    idle = {each.picture: each.alt for each in report_of(reported.contexts["idle"]).findings}
    assert idle["timeline"] == "How busy each of your 4 GPUs was over time: n2:1 80% busy, the others idle"
    said = "GPU memory over time: peak 12.5 GiB of 80.0 GiB; tiers of this site: hbm40g 40 GiB, hbm80g 80 GiB"
    assert idle["memory"] == said
    assert idle["roofline"] == "Roofline of one A100-80: most work lies left of the ridge, limited by GPU memory"
    many = {each.picture: each.alt for each in report_of(reported.contexts["64-gpus"]).findings}
    assert many["timeline"].endswith("10% to 90% busy on average")


@pytest.mark.parametrize(
    ("below", "above", "said"),
    [(0.2, 0.7, "70% of 40 jobs here use their GPUs more"), (0.7, 0.2, "70% of 40 jobs here use their GPUs less"),
     (0.996, 0.0, "more than 99% of 40 jobs here use their GPUs less"), (0.1, 0.2, "in the middle of 40 jobs here"),
     (0.0, 0.0, "in the middle of 40 jobs here")],
)  # fmt: skip
def test_a_rank_names_the_larger_side(below: float, above: float, said: str) -> None:
    """Jobs with the same figure count on neither side."""
    assert rank_text({"mean_gpu_util_pct": Rank(below, above, 40)}, "mean_gpu_util_pct") == said
    assert rank_text({}, "mean_gpu_util_pct") == ""
