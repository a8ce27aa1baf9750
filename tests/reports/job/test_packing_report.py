"""Packing in job reports: said in every format, once, and not with advice that contradicts it."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from advisor.packing import evidence
from advisor.packing.decide import PackingAdvice, PackingFamily, PackingRules, decide_packing
from advisor.packing.evidence import packing_by_run
from almanac.config_file import parse_config
from almanac.records import Advice, JobRequest, TierAdvice
from reports.job.conclusions import report_of
from reports.job.evidence import JobContext
from reports.job.render import json_of, render_email, render_page, render_terminal
from reports.published.caller import REPORT

HOSTILE = '<script>alert(1)</script>"{0}%s\x1b[31m\u202e' + "A" * 200
FAMILY = PackingFamily(
    "alice", "tune-#", 1, sm=(0.3,) * 9, dram=(0.2,) * 9, coverage=0.98, bounds_mib={2: 12_000.0, 3: 12_500.0},
    is_preallocated=False, gpu_model="NVIDIA A100-SXM4-80GB", capacity_mib=81_920.0, newest_s=1,
)  # fmt: skip
WITH_ITSELF = decide_packing([FAMILY, FAMILY], PackingRules())
WITH_OTHER = decide_packing([FAMILY, replace(FAMILY, name_key="eval-#")], PackingRules())


def context_of(
    reported: Any, case: str = "balanced", packing: PackingAdvice | None = WITH_ITSELF, **more: Any
) -> JobContext:
    """Without advice on memory, unless `more` has some."""
    found: JobContext = replace(reported.contexts[case], packing=packing, **{"advice": None, "tiers": (), **more})
    return found


def rules_of(context: JobContext) -> list[str]:
    return [each.rule for each in report_of(context).suggestions]


def shown(context: JobContext, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(render_terminal(report_of(context), width))
    return out.getvalue()


def test_the_advice_is_in_the_mail_on_the_terminal_on_the_page_and_in_json(reported: Any) -> None:
    assert WITH_ITSELF.is_advised
    context = context_of(reported)
    advice = next(each for each in report_of(context).suggestions if each.rule == "can_share")
    assert advice.advice.startswith("Pack two on one GPU: each likely 0.")
    assert "times the work per GPU-hour (9 runs)" in advice.advice
    assert advice.advice.endswith("Use: almanac-pack --items A-B -- CMD {}")
    assert advice.reason == (
        "Together they need about 60% of a GPU's multiprocessors and 40% of its memory bandwidth. About 1 in 100 "
        "such pairs needs more than 24.4 GiB of its memory; 79.0 GiB can be used. With MPS, each may need up to 1.6 "
        "times its run time: raise --time."
    )
    mail = render_email(report_of(context))
    for text in (mail.text, mail.html, render_page(report_of(context)), shown(context)):
        assert "almanac-pack" in text
    assert all(len(line) <= 80 for text in (mail.text, shown(context)) for line in text.splitlines())
    found = json.loads(json.dumps(json_of(report_of(context))))
    assert found["packing"]["is_advised"] is True
    assert found["packing"]["tasks"] == 2
    assert "can_share" in found["rules"]
    assert json_of(report_of(reported.contexts["balanced"]))["packing"] is None


def test_a_task_of_an_array_is_told_the_step_that_packing_needs(reported: Any) -> None:
    context = context_of(reported, "array-task")
    context = replace(context, job={**context.job, "state": "COMPLETED"})
    assert context.is_array
    [advice] = [each for each in report_of(context).suggestions if each.rule == "can_share"]
    assert advice.advice.endswith("Use: --array=A-B:2 and almanac-pack -- CMD {}")
    assert json_of(report_of(context))["packing"]["command"] == "--array=A-B:2 and almanac-pack -- CMD {}"
    assert json_of(report_of(context_of(reported)))["packing"]["command"] == "almanac-pack --items A-B -- CMD {}"


def test_a_partner_is_named_and_inert(reported: Any) -> None:
    other = decide_packing([FAMILY, replace(FAMILY, name_key=HOSTILE)], PackingRules())
    context = context_of(reported, packing=other)
    mail, page = render_email(report_of(context)), render_page(report_of(context))
    for text in (mail.subject, mail.text, mail.html, page, shown(context)):
        assert not {"\x1b", "\u202e"} & set(text)
    assert "<script>alert" not in mail.html + page and "&lt;script&gt;" in page
    assert "\n" not in mail.subject
    plain = report_of(context_of(reported, packing=WITH_OTHER))
    assert any('Share a GPU with "eval-#"' in each.advice for each in plain.suggestions)


def test_the_headline_says_it_where_nothing_else_is_to_do(reported: Any) -> None:
    context = context_of(reported)
    assert report_of(context).headline.startswith("two of these can share a GPU (1.")
    other = context_of(reported, packing=WITH_OTHER)
    assert report_of(other).headline.startswith('can share a GPU with "eval-#" (1.')


@pytest.mark.parametrize(
    ("tier_reason", "is_told"),
    [("smaller", False), ("larger", False), ("ran out", False), ("fits", True), ("no tiers", True), ("choice", True)],
)
def test_one_change_of_the_gpu_at_a_time(reported: Any, tier_reason: str, is_told: bool) -> None:
    advice = reported.contexts["balanced"].advice
    changed = replace(advice, tier=replace(advice.tier, reason=tier_reason, rewrite="--constraint=hbm40g"))
    assert ("can_share" in rules_of(context_of(reported, advice=changed))) is is_told


@pytest.mark.parametrize("case", ["idle", "failed", "cancelled", "out-of-memory", "never-started", "timeout"])
def test_a_job_that_went_wrong_or_left_gpus_unused_is_not_told(reported: Any, case: str) -> None:
    assert "can_share" not in rules_of(context_of(reported, case))


def test_a_job_that_is_told_to_raise_its_time_limit_is_not_told_to_lower_it(reported: Any) -> None:
    job = {**reported.contexts["balanced"].job, "time_limit_s": 40 * 3600}
    assert "limit_far" in rules_of(context_of(reported, packing=None, job=job))
    said = rules_of(context_of(reported, job=job))
    assert "can_share" in said and "limit_far" not in said
    silent = decide_packing([FAMILY, replace(FAMILY, user="bob")], PackingRules())
    assert not silent.is_advised
    assert "can_share" not in rules_of(context_of(reported, packing=silent))
    assert "can_share" not in rules_of(context_of(reported, packing=None))


def test_a_published_report_keeps_it(reported: Any) -> None:
    family = replace(FAMILY, sm=(0.3, float("nan")) * 9, dram=(0.2,) * 18, coverage=float("nan"))
    report = report_of(context_of(reported, packing=decide_packing([family, family], PackingRules())))
    assert REPORT.parse(REPORT.render(report)).value == report


def asked(user: str, name: str, number: int, tier: str | None = None, **more: Any) -> tuple[tuple[int, int], Advice]:
    request = JobRequest(user, name, gpu_count=more.pop("gpu_count", 1), submit_s=number, **more)
    return (number, number), Advice(request, TierAdvice(tier, "fits" if tier else "no tiers"))


def trained_stub() -> Any:
    return dataclasses.make_dataclass("Trained", [("calibration", Any, None)])()


def test_each_job_gets_the_partners_of_its_own_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """bob's families are such that alice's would gain most with them."""
    light = replace(FAMILY, sm=(0.01,) * 9, dram=(0.01,) * 9, bounds_mib={2: 10.0, 3: 10.0, 4: 10.0})
    families = [replace(light, user="bob", name_key=f"tiny-{number}", newest_s=99) for number in range(300)]
    families.append(replace(FAMILY, newest_s=99))
    monkeypatch.setattr("advisor.packing.evidence.packing_families", lambda *_: families)
    asked_for, real = [], evidence.packing_of_request
    counted = lambda request, *rest: asked_for.append(request) or real(request, *rest)  # noqa: E731
    monkeypatch.setattr(evidence, "packing_of_request", counted)
    advices = dict(
        [asked("alice", f"tune-{number}", number, is_array=True) for number in range(1, 400)]
        + [asked("alice", "tune-1", 900, gpu_count=2), asked("alice", "other", 901), asked("carol", "tune-1", 902)]
    )
    trained, history = trained_stub(), pd.DataFrame({"gpu_count": [1]})
    found = packing_by_run(advices, history, trained, parse_config({}), 100)
    assert set(found) == {(number, number) for number in range(1, 400)}
    assert {member.user for advice in found.values() for member in advice.members} == {"alice"}
    assert len(asked_for) == 3  # an array's tasks are looked at once
    off = parse_config({"packing": {"advise": False}})
    assert packing_by_run(advices, history, trained, off, 100) == {}
    assert packing_by_run(advices, history, None, parse_config({}), 100) == {}


def test_a_slice_or_a_tier_that_holds_one_run_only_goes_before_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.packing.evidence.packing_families", lambda *_: [FAMILY])
    tiers = [
        {"name": "large", "capacity_mib": 81_920, "constraint": "large"},
        {"name": "small", "capacity_mib": 20_480, "constraint": "small"},  # two need 25,000 MiB
        {"name": "slice", "capacity_mib": 40_960, "gres": "3g.40gb", "compute_slices": 3},
    ]
    requested = {"large": {"constraints": "large"}, "small": {"constraints": "small"}, "slice": {"gpu_type": "3g.40gb"}}
    advices = dict(
        asked("alice", "tune-1", number, tier, **words) for number, (tier, words) in enumerate(requested.items(), 1)
    )
    found = packing_by_run(advices, pd.DataFrame({"gpu_count": [1]}), trained_stub(), parse_config({"tiers": tiers}), 9)
    assert set(found) == {(1, 1)}
