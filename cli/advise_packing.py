"""What `almanac advise` says of jobs that can share a GPU."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from almanac.errors import AlmanacError
from cli.app import App

if TYPE_CHECKING:
    from advisor.packing.site import PackingFinding
    from almanac.records import Advice


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
