"""What `almanac advise` says of the GPU type: run times and waits now."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from almanac.errors import AlmanacError
from cli.app import App

if TYPE_CHECKING:
    from advisor.decisions.gpu_type import RunTime
    from almanac.records import Advice, Request
    from slurm_hooks.submit.type_proposal import TypeFinding


def published_finding(app: App, request: Request) -> TypeFinding | None:
    """By the caller's own published run times."""
    from slurm_hooks.advice.times_file import NAME, usable_times

    root = app.config.hooks.advice_dir
    own = usable_times(f"{root}/user/{os.getuid()}/{NAME}", app.now_s())
    family = request.name_key, request.gpu_count
    return _finding(app, request, own.times.get(family, ()) if own else ())


def stored_finding(app: App, advice: Advice) -> TypeFinding | None:
    """By the runs in the store. None where no model is trained, or no waits are published."""
    from slurm_hooks.advice.waits_file import usable_waits

    request = advice.request
    if request.gpu_count <= 0 or usable_waits(app.config.hooks.advice_dir, app.now_s()) is None:
        return None
    from advisor.artefacts import load
    from advisor.lifecycle import trusted
    from advisor.speed.site import stored_times

    times: Sequence[RunTime] = ()
    with contextlib.suppress(AlmanacError):
        store = app.cluster_store()
        trained = trusted(load(store.models_dir), app.config, app.now_s())
        if trained is not None:
            times = stored_times(store, request, trained.speeds, advice.bound, app.config, app.now_s())
    return _finding(app, request, times)


def _finding(app: App, request: Request, times: Sequence[RunTime]) -> TypeFinding | None:
    from slurm_hooks.advice.waits_file import usable_waits
    from slurm_hooks.submit.type_proposal import find_type

    waits = usable_waits(app.config.hooks.advice_dir, app.now_s())
    return None if waits is None else find_type(request, times, waits, app.now_s())


def finding_text(found: TypeFinding) -> str:
    """Lines of at most 80 columns, without a newline at the end."""
    from advisor.explain import wrapped
    from slurm_hooks.submit.proposal import typed

    how = f"ask for it with {typed(found.change)}" if found.change.value else f"not rewritten: {found.change.why_not}"
    return wrapped([f"  GPU type: {found.text}", f"    {how}"])


def finding_table(found: TypeFinding | None) -> dict[str, Any] | None:
    """For JSON; None without advice on the type."""
    if found is None:
        return None
    return {"type": found.target.name, "text": found.text, "rewrite": dataclasses.asdict(found.change)}
