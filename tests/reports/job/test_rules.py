"""The rules as data, and which of them speak."""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import pytest

from almanac.names import FRAMEWORKS
from reports.job.conclusions import conclude
from reports.job.evidence import figure_rows
from reports.job.facts import facts_of
from reports.job.rules import Rule, first_of_topics, merged, packaged, rule_of

HOST = {"cpu_time_s": 6912.0, "host_mem_peak_mib": 40.0, "host_mem_alloc_mib": 1024.0, "host_mem_task_peak_mib": 40.0}
EXPECTED = {
    "balanced": {"well_used", "tier_too_large", "limit_far", "memory_bound"},
    "idle": {"idle_gpus", "memory_spare", "limit_far"},
    "no-telemetry": {"no_telemetry", "limit_far"},
    "out-of-memory": {"memory_full_on_the_largest", "well_used", "tensor_unused"},
    "cancelled": {"cancelled", "well_used", "memory_spare", "memory_bound"},
    "failed": {"failed", "well_used", "memory_plain", "memory_bound"},
    "timeout": {"timeout", "uneven", "memory_spare", "memory_bound"},
    "reserved": {"well_used", "preallocated", "limit_far", "memory_bound"},
    "array-task": {"low_use", "memory_spare", "limit_far"},
    "half": {"partly_measured"},
    "never-started": {"never_started"},
    "requeued": {"well_used", "memory_spare", "limit_far", "tensor_unused"},
}


@pytest.mark.parametrize("case", EXPECTED)
def test_the_rules_that_speak(reported: Any, case: str) -> None:
    assert set(conclude(facts_of(reported.contexts[case])).rules) >= EXPECTED[case]


def test_every_fact_and_word_of_a_rule_exists(reported: Any) -> None:
    facts = facts_of(reported.contexts["balanced"])
    for rule in packaged().rules:
        assert set(rule.when) <= set(facts.values), rule.name
        assert {test for tests in rule.when.values() for test in tests} <= {"min", "max", "is", "one_of"}, rule.name
        assert set(rule.covers) <= {each.topic for each in packaged().rules}, rule.name
        for text in (rule.headline, rule.summary, rule.advice, rule.reason):
            words = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
            assert words <= set(facts.words), rule.name


OPTIONS = {
    "pytorch": ("torch", "DataLoader"), "jax": ("jax", "XLA_"), "gromacs": ("gmx", "-ntmpi"),
    "tensorflow": ("tf.", "TF_"), "vllm": ("--gpu-memory-utilization",),
}  # fmt: skip
"""Words that only advice for the framework may hold."""


def test_a_framework_has_its_own_options_only(reported: Any) -> None:
    rules, words = packaged(), set(facts_of(reported.contexts["balanced"]).words)
    advice = {rule.name: rule.advice for rule in rules.rules}
    assert rules.frameworks.keys() == OPTIONS.keys() == FRAMEWORKS.keys()
    for name, own in rules.frameworks.items():
        others = [word for other, options in OPTIONS.items() if other != name for word in options]
        for rule, text in own.advice.items():
            assert advice[rule], f"{rule} has no advice"
            assert not [word for word in others if word in text], f"{name}: {rule}"
            assert {each for _, each, _, _ in string.Formatter().parse(text) if each is not None} <= words


@pytest.mark.parametrize(
    ("job_name", "framework"),
    [("gmx_md-1", "gromacs"), ("MD_GROMACS", "gromacs"), ("train-torch2.sh", "pytorch"), ("ddp64", "pytorch"),
     ("maxtext_7b", "jax"), ("torch-vs-jax", None), ("torchlight", None), ("", None), ("\x1b]0;gmx\x07", "gromacs")],
)  # fmt: skip
def test_a_jobs_name_shows_its_framework(reported: Any, job_name: str, framework: str | None) -> None:
    context = reported.contexts["reserved"]
    facts = facts_of(dataclasses.replace(context, job={**context.job, "name": job_name}))
    assert facts.values["framework"] == framework
    [said] = [each.advice for each in conclude(facts).suggestions if each.rule == "preallocated"]
    assert ("vLLM" in said) == (framework != "jax")
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in said


def test_a_jobs_command_says_more_of_its_framework_than_its_name(reported: Any) -> None:
    context = reported.contexts["reserved"]
    job = {**context.job, "name": "torch-vs-old", "framework": "jax"}
    assert facts_of(dataclasses.replace(context, job=job)).values["framework"] == "jax"


def test_a_sites_own_advice_stands_for_all_frameworks() -> None:
    own = merged(packaged(), {"rule": [{"name": "all_idle", "advice": "Ask us."}]}, "rules.toml")
    [rule] = [each for each in own.rules if each.name == "all_idle"]
    assert own.advice_of(rule, "jax") == own.advice_of(rule, None) == "Ask us."
    [other] = [each for each in own.rules if each.name == "idle_gpus"]
    assert "jax.devices()" in own.advice_of(other, "jax")


def test_every_rule_says_why_and_names_its_source() -> None:
    assert len({rule.name for rule in packaged().rules}) == len(packaged().rules)
    for rule in packaged().rules:
        assert rule.source and rule.when
        assert rule.summary or rule.advice
        assert bool(rule.advice) == bool(rule.reason) or not rule.advice


def test_texts_leave_no_braces_and_no_gaps(reported: Any) -> None:
    for name, context in reported.contexts.items():
        conclusions = conclude(facts_of(context))
        for text in (*conclusions.sentences, *(text for s in conclusions.suggestions for text in (s.advice, s.reason))):
            assert "  " not in text and not set("{}") & set(text), (name, text)
            assert text and not text[0].islower() and text.endswith((".", ")")), (name, text)


IDLE = ["n1:0", "n1:1", "n1:2", "n1:3"]


@pytest.mark.parametrize(
    ("asked", "idle", "rule", "said"),
    [
        (0, 4, "unasked_idle", "asked for no GPU"), (1, 4, "all_idle_unasked", "You asked for 1 GPU"),
        (None, 4, "all_idle", "did nothing"), (4, 4, "all_idle", "did nothing"),
        (0, 3, "idle_gpus_unasked", "You asked for no GPU, and got the others"),
        (1, 3, "idle_gpus_unasked", "You asked for 1 GPU"), (4, 3, "idle_gpus", "3 of your 4 GPUs did nothing"),
        (None, 3, "idle_gpus", "3 of your 4 GPUs did nothing"), (0, 0, "well_used", "Your GPUs were busy"),
    ],
)  # fmt: skip
def test_gpus_that_nobody_asked_for_are_said_to_be_such(
    reported: Any, asked: int | None, idle: int, rule: str, said: str
) -> None:
    """Whole nodes come with all their GPUs. Unknown is not: asked for none."""
    context = reported.contexts["balanced"]
    use = {"idle_gpus": IDLE[:idle], "mean_gpu_util_pct": 0.0 if idle == 4 else 90.0, "spatial_imbalance": 0.0}
    job = {**context.job, "gpu_count_req": asked, "node_count_req": 1, "node_count": 1}
    changed = dataclasses.replace(context, job=job, metrics={**context.metrics, **use}, advice=None)
    conclusions = conclude(facts_of(changed))
    assert rule in conclusions.rules
    assert said in conclusions.summary
    is_about_exclusive = any("--exclusive" in each.advice for each in conclusions.suggestions)
    assert is_about_exclusive is rule.endswith("unasked") or rule == "unasked_idle"
    assert ("requested)" in str(figure_rows(changed))) is (asked not in (None, 4))


@pytest.mark.parametrize(("shares", "said"), [(8, "a part of a GPU (gres/shard"), (None, "of 16 CPUs busy on average")])
def test_a_part_of_a_gpu_is_not_called_no_gpu(reported: Any, shares: int | None, said: str) -> None:
    context = reported.contexts["balanced"]
    job = {**context.job, "gpu_count": 0, "gpu_count_req": 0, "gpu_share_count": shares}
    metrics = {"verdict": "GPU shared with another job"} if shares else {}
    changed = dataclasses.replace(context, job={**job, **HOST}, metrics=metrics, gpus=(), advice=None)
    summary = conclude(facts_of(changed)).summary
    rows = str(figure_rows(changed))
    assert (
        said in summary
        and ("GPU" in summary + rows) is bool(shares)
        and ("8 parts of a GPU, 16" in rows) is bool(shares)
    )


def test_an_uneven_job_without_gpu_utilization_names_no_gpu(reported: Any) -> None:
    context = reported.contexts["mig"]
    uneven = dataclasses.replace(context, metrics={**context.metrics, "spatial_imbalance": 0.5})
    [reason] = [each.reason for each in conclude(facts_of(uneven)).suggestions if each.rule == "uneven"]
    assert reason.startswith("Imbalance between GPUs is 0.50 (0 is even)") and "busy" not in reason


def test_an_unknown_fact_meets_no_limit() -> None:
    rule = Rule("r", "t", "s", {"spatial": {"min": 0.3}})
    assert not rule.holds({"spatial": None})
    assert rule.holds({"spatial": 0.3}) and not rule.holds({"spatial": 0.29})
    row = {"name": "r", "topic": "t", "source": "s", "when": {}, "verdict": "It ran."}
    assert rule_of(row).summary == "It ran.", "as in older files"


def test_of_a_topic_the_first_rule_that_holds_speaks() -> None:
    limits = (("a", "t", 5), ("b", "t", 1), ("c", "u", 0))
    made = [Rule(name, topic, "s", {"x": {"min": low}}) for name, topic, low in limits]
    assert [rule.name for rule in first_of_topics(made, {"x": 3})] == ["b", "c"]


@pytest.mark.parametrize("reason", ["name it", "fits", "no evidence"])
def test_a_job_near_the_limit_is_warned_and_told_of_no_tier_that_is_enough(reported: Any, reason: str) -> None:
    context = reported.contexts["balanced"]
    full = {"hbm_peak_mib": 38_502.0, "hbm_capacity_mib": 40_960.0, "hbm_peak_frac": 0.94}
    advice = dataclasses.replace(context.advice, tier=dataclasses.replace(context.advice.tier, reason=reason))
    context = dataclasses.replace(context, metrics={**context.metrics, **full}, advice=advice)
    conclusions = conclude(facts_of(context))
    assert "memory_tight" in conclusions.rules
    said = " ".join(conclusions.sentences)
    assert "37.6 GiB of 40.0 GiB" in said and "enough" not in said


def test_an_idle_gpu_is_not_claimed_where_it_was_hardly_measured(reported: Any) -> None:
    idle = reported.contexts["idle"]
    seen = dataclasses.replace(idle, metrics={**idle.metrics, "coverage_frac": 0.6})
    assert "idle_gpus" not in conclude(facts_of(seen)).rules
    fault = dataclasses.replace(idle, metrics={**idle.metrics, "has_profiling_fault": True})
    assert "idle_gpus" not in conclude(facts_of(fault)).rules
