"""Advice from a store's jobs and trained version, and whether that version may still be believed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from advisor.artefacts import load, load_learned
from advisor.backtest import NOTHING, Scores, score
from advisor.duration.blend import at_limit
from advisor.duration.features import AdviceRequest, has_ended, known_at
from advisor.duration.replay import replay_durations
from advisor.service import Learned, Trained, advise, own_advice
from almanac.config import Config
from almanac.errors import AlmanacError
from almanac.records import Advice, JobRequest
from slurm.nodes import tiers_now, with_defaults
from telemetry.history import load_history
from telemetry.site import Site

SIMPLEST = "user last 5 median"
WORSE_BY = 1.1
MAX_AGE_DAYS = 14
"""Age above which a model is not used, and the last runs predict: two weeks of failed trainings."""
DRIFT_BY = 1.3
MIN_JOBS_SINCE = 100
MAX_LOST_COVERAGE = 0.15


def advise_from_store(site: Site, request: JobRequest, typed: Collection[str] | None = None) -> Advice:
    """Advise the request's user from their jobs; a site's own services add their advice.

    typed: options that the submission names. Slurm is asked for its defaults of the others, because the job's record
    has them too, and for the GPU types of its nodes, if a tier is a MIG slice. None: Slurm is not asked. Raises
    StoreError.
    """
    store, config, now_s = site.store, site.config, site.now_s()
    if typed is not None:
        request = with_defaults(request, typed, config.tiers, store.cluster, site.commands)
        config = dataclasses.replace(config, tiers=tiers_now(config.tiers, site.commands).tiers)
    # All of the user's jobs, as in training: features count a user's runs from the first one on.
    history = load_history(store, user=request.user, running=True)
    models_dir = store.models_dir
    trained = load_usable(models_dir, now_s)
    advice = advise(request, history, trained, config, now_s)
    if not config.services.extra:
        return advice
    return dataclasses.replace(advice, services=_extra(advice.request, history, config, models_dir))


def _extra(request: JobRequest, history: pd.DataFrame, config: Config, models_dir: Path) -> dict[str, dict[str, Any]]:
    """The advice of the site's own services. They start as new if their learned state cannot be read."""
    learned: dict[str, Learned] = {}
    fault = None
    try:
        learned = load_learned(models_dir)
    except AlmanacError as error:
        fault = str(error)
    said = own_advice(AdviceRequest(request, history, config), learned)
    return {name: {**each, "error": each["error"] or fault} for name, each in said.items()}


def faults_of(trained: Trained, now_s: int) -> list[str]:
    """Faults that forbid to use the duration model at now_s, in words; empty without a model."""
    if trained.model is None:
        return []
    faults = []
    age_days = (now_s - trained.trained_s) / 86_400
    if age_days < -1:
        faults.append(f"trained {-age_days:.0f} days in the future, by a clock that was ahead: train again")
    if age_days > MAX_AGE_DAYS:
        faults.append(f"trained {age_days:.0f} days ago, the limit is {MAX_AGE_DAYS}")
    ours, simplest = trained.scores.get("almanac", NOTHING), trained.scores.get(SIMPLEST, NOTHING)
    if ours.median_abs_log_error > WORSE_BY * simplest.median_abs_log_error:
        faults.append(
            f"its median |log error| was {ours.median_abs_log_error:.2f} on the newest jobs, that of the user's last 5 "
            f"runs {simplest.median_abs_log_error:.2f}"
        )
    return faults


def trusted(trained: Trained | None, now_s: int) -> Trained | None:
    """The trained models, without the duration model if it has faults: then the last runs of the same job predict."""
    if trained is None or not faults_of(trained, now_s):
        return trained
    return dataclasses.replace(trained, model=None)


def load_usable(models_dir: Path, now_s: int) -> Trained | None:
    """The version in use, as far as it can be trusted; None if nothing was trained yet. Raises StoreError."""
    return trusted(load(models_dir), now_s)


@dataclass(frozen=True)
class Drift:
    """The model's scores on the jobs since its training. alarms: in words; empty if all is well."""

    since: Scores
    coverage: float
    alarms: tuple[str, ...]


def drift_of(trained: Trained, history: pd.DataFrame, now_s: int) -> Drift | None:
    """Judge the model by the jobs that were submitted since its training and have ended.

    None without a model, and below MIN_JOBS_SINCE such jobs.
    """
    if trained.model is None:
        return None
    known = known_at(history, now_s)
    is_since = has_ended(known) & (known["submit_s"].to_numpy() >= trained.trained_s)
    if is_since.sum() < MIN_JOBS_SINCE:
        return None
    past = replay_durations(known, is_since)
    predicted = trained.model.predict_all(past.features, past.rolling_s)
    since = score(predicted.duration_s, past.duration_s, past.features.number("gpu_count"))
    known_s = at_limit(past.duration_s, past.features)
    coverage = float(np.mean((known_s >= predicted.low_s) & (known_s <= predicted.high_s)))
    then = trained.scores.get("almanac", NOTHING).median_abs_log_error
    alarms = []
    if not math.isnan(then) and since.median_abs_log_error > DRIFT_BY * then:
        alarms.append(
            f"the median |log error| is {since.median_abs_log_error:.2f} since the training, {then:.2f} before"
        )
    if coverage < trained.model.coverage - MAX_LOST_COVERAGE:
        alarms.append(f"{coverage:.0%} of jobs ran within their interval, the goal was {trained.model.coverage:.0%}")
    return Drift(since, coverage, tuple(alarms))
