"""What `almanac advise` says of jobs that can share a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from almanac.errors import AlmanacError
from cli.app import App

if TYPE_CHECKING:
    from advisor.packing.site import PackingFinding
    from almanac.records import Advice
    from slurm_hooks.advice.shown import Shown
    from telemetry.slurm.sbatch import SbatchRequest


def may_pack(typed: SbatchRequest, scripts: Sequence[str]) -> bool:
    """Whether almanac-pack can take the job: it does not run it already, and an array is one range of several tasks.

    scripts: texts of the job's scripts.
    """
    from slurm_hooks.submit.packing_note import PROGRAM, is_sweep

    return PROGRAM not in _command(typed, scripts) and (
        "array" not in typed.options or is_sweep(_option(typed, "array"))
    )


def published_packing(app: App, shown: Shown, typed: SbatchRequest, scripts: Sequence[str]) -> str:
    """The note in the caller's own published file, as a terminal shows it for an array; "" without one."""
    from slurm_hooks.advice.packing_file import NAME, usable_packing
    from slurm_hooks.submit.packing_note import find_note

    file = usable_packing(f"{app.config.hooks.advice_dir}/user/{os.getuid()}/{NAME}", app.now_s())
    if file is None or shown.found is None:
        return ""
    tiers = shown.found.file.tiers
    row = find_note(shown.request, _option(typed, "array"), _command(typed, scripts), tiers, file)
    return row.text if row else ""


def _command(typed: SbatchRequest, scripts: Sequence[str]) -> str:
    return "\n".join([_option(typed, "wrap"), *scripts])


def _option(typed: SbatchRequest, name: str) -> str:
    option = typed.options.get(name)
    return option.value or "" if option else ""


def stored_packing_finding(app: App, advice: Advice) -> PackingFinding | None:
    """By the runs in the store. None where the site wants no such advice, and for what the store does not know."""
    request = advice.request
    if not app.config.packing.advise or request.gpu_count <= 0:
        return None
    from advisor.artefacts import load
    from advisor.packing.site import stored_packing

    with contextlib.suppress(AlmanacError):
        store = app.cluster_store()
        trained = load(store.models_dir)
        if trained is not None:
            tier = advice.tier.tier
            return stored_packing(store, request, trained.calibration, app.config, app.now_s(), tier)
    return None


def packing_text(found: PackingFinding, is_array: bool, why: bool) -> str:
    """Lines of at most 80 columns, without a newline at the end; "" where nothing is advised and `why` is False."""
    from advisor.explain import wrapped
    from advisor.packing.text import packing_lines, why_silent

    lines = packing_lines(found.best, 80, "  ", is_array)
    return "\n".join(lines) if lines else wrapped([f"  {why_silent(found.alone)}"]) if why else ""


def packing_json(found: PackingFinding | None, is_array: bool) -> dict[str, Any] | None:
    """For JSON; None without runs to tell."""
    if found is None:
        return None
    from advisor.packing.text import packing_sentence, packing_table, why_silent

    best = found.best
    return {**packing_table(best, is_array), "text": packing_sentence(best) or why_silent(best)}
