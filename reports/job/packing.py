"""Which jobs like a reported one can share a GPU, as `almanac advise` would say now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from advisor.decisions.packing import PackingAdvice
from advisor.packing.text import packing_command, packing_evidence, packing_headline, packing_sentence
from almanac.config import Config
from almanac.records import Advice, Request
from reports.job.rules import Fact

if TYPE_CHECKING:
    import pandas as pd

    from advisor.service import Trained
Run = tuple[int, int]
"""job_id and submit_s."""


def packing_by_run(
    advices: Mapping[Run, Advice], history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int
) -> dict[Run, PackingAdvice]:
    """The advice for the jobs of one GPU that can share it; others are not there. A task of almanac-pack has one GPU.

    history: all jobs of the users, as load_history(..., running=True) has them.
    """
    asked = {run: advice for run, advice in advices.items() if advice.request.gpu_count == 1}
    if trained is None or not asked or not config.packing.advise:
        return {}
    from advisor.packing.evidence import packing_families, rules_of
    from advisor.packing.site import packing_of_request

    rules, known = rules_of(config), dict[tuple[Request, str | None], PackingAdvice | None]()
    families = packing_families(history[history["gpu_count"] == 1], trained.calibration, config, now_s)
    found = {}
    for run, advice in asked.items():
        # The tasks of an array ask for the same.
        request = replace(advice.request, job_name=advice.request.name_key, submit_s=0, script_key="", rule="")
        key = replace(request, time_limit_s=None), advice.tier.tier
        if key not in known:
            each = packing_of_request(key[0], families, rules, config.tiers, now_s, key[1])
            known[key] = each.best if each and each.best.is_advised else None
        best = known[key]
        if best is not None:
            found[run] = best
    return found


def packing_facts(advice: PackingAdvice | None) -> dict[str, Fact]:
    """packing_gain: the low end; None where nothing is advised."""
    return {"packing_gain": advice.gain.low if advice and advice.is_advised and advice.gain else None}


def packing_words(advice: PackingAdvice | None, is_array: bool) -> dict[str, str]:
    """Words by name, without control characters; "" without advice. is_array: whether the job is of a job array."""
    if advice is None or not advice.is_advised:
        return dict.fromkeys(("packing_headline", "packing", "packing_evidence"), "")
    return {
        "packing_headline": packing_headline(advice),
        "packing": f"{packing_sentence(advice)} Use: {packing_command(advice, is_array)}",
        "packing_evidence": packing_evidence(advice),
    }
