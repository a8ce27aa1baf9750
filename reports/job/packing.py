"""Which jobs like a reported one can share a GPU, as `almanac advise` would say now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from advisor.decisions.packing import PackingAdvice
from advisor.packing.text import packing_command, packing_evidence, packing_headline, packing_sentence
from almanac.config import Config
from almanac.names import name_key
from almanac.records import Advice, Request
from reports.job.rules import Fact

if TYPE_CHECKING:
    import pandas as pd

    from advisor.service import Trained
    from reports.job.context import JobContext

Run = tuple[int, int]
"""job_id and submit_s."""


def packing_by_run(
    advices: Mapping[Run, Advice], history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int
) -> dict[Run, PackingAdvice]:
    """The advice for the jobs of one GPU that can share it; others are not there. A task of almanac-pack has one GPU.

    history: all jobs of the users, as load_history(..., running=True) has them.
    """
    asked = {run: advice.request for run, advice in advices.items() if advice.request.gpu_count == 1}
    if trained is None or not asked or not config.packing.advise:
        return {}
    from advisor.packing.evidence import packing_families, rules_of
    from advisor.packing.site import packing_of_request

    rules, known = rules_of(config), dict[Request, PackingAdvice | None]()
    families = packing_families(history[history["gpu_count"] == 1], trained.calibration, config, now_s)
    found = {}
    for run, request in asked.items():
        # The tasks of an array ask for the same.
        same = replace(request, job_name=name_key(request.job_name), submit_s=0, script_key="", time_limit_s=None)
        if same not in known:
            each = packing_of_request(same, families, rules, config.tiers, now_s)
            known[same] = each.best if each and each.best.is_advised else None
        advice = known[same]
        if advice is not None:
            found[run] = advice
    return found


def packing_facts(context: JobContext) -> dict[str, Fact]:
    """packing_gain: the low end; None without advice, and where a MIG slice is enough: that frees the rest of the GPU,
    and the job need not change.
    """
    advice, tier = context.packing, context.advice.tier.tier if context.advice else None
    is_told = advice is not None and not any(each.is_slice for each in context.tiers if each.name == tier)
    return {
        "packing_gain": advice.gain.low if advice and advice.is_advised and advice.gain and is_told else None,
    }


def packing_words(advice: PackingAdvice | None) -> dict[str, str]:
    """Words by name, without control characters; "" without advice."""
    if advice is None or not advice.is_advised:
        return dict.fromkeys(("packing_headline", "packing", "packing_evidence"), "")
    return {
        "packing_headline": packing_headline(advice),
        "packing": f"{packing_sentence(advice)} Use: {packing_command(advice)}",
        "packing_evidence": packing_evidence(advice),
    }
