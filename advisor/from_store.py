"""Advice for one submission, from the jobs and the trained version in a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd

from advisor.artefacts import load, load_learned
from advisor.lifecycle import trusted
from advisor.service import advise
from advisor.services.base import AdviceRequest, Learned
from advisor.services.own import own_advice
from almanac.config import Config
from almanac.errors import AlmanacError
from almanac.records import Advice, Request
from telemetry.history import load_history
from telemetry.slurm.commands import Runner
from telemetry.slurm.defaults import with_defaults
from telemetry.slurm.gpu_types import tiers_now
from telemetry.store.cluster_store import ClusterStore


def advise_from_store(
    store: ClusterStore,
    request: Request,
    config: Config,
    now_s: int,
    *,
    commands: Runner | None = None,
    typed: Collection[str] = (),
) -> Advice:
    """Advise the request's user at now_s (s since 1970) from their jobs; a site's own services add what they say.

    commands: asked for Slurm's defaults of the options that `typed` does not name, because the job's record has them
    too, and for the GPU types of its nodes, where a tier is a MIG slice; None asks no Slurm. Raises StoreError.
    """
    if commands is not None:
        request = with_defaults(request, typed, config.tiers, store.cluster, commands)
        config = dataclasses.replace(config, tiers=tiers_now(config.tiers, commands).tiers)
    # All of the user's jobs, as in training: features count a user's runs from the first one on.
    history = load_history(store, user=request.user, running=True)
    models_dir = store.models_dir
    trained = trusted(load(models_dir), config, now_s)
    advice = advise(request, history, trained, config, now_s)
    if not config.services.extra:
        return advice
    return dataclasses.replace(advice, services=_extra(advice.request, history, config, models_dir))


def _extra(request: Request, history: pd.DataFrame, config: Config, models_dir: Path) -> dict[str, dict[str, Any]]:
    """What the site's own services say. They start as new where their learned state cannot be read."""
    learned: dict[str, Learned] = {}
    fault = None
    try:
        learned = load_learned(models_dir)
    except AlmanacError as error:
        fault = str(error)
    said = own_advice(AdviceRequest(request, history, config), learned)
    return {name: {**each, "error": each["error"] or fault} for name, each in said.items()}
