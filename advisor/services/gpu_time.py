"""GPU-time: how long jobs run, and from it the place in the queue (helios-qssf-ces, 4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from advisor.decisions.priority import decide_priority
from advisor.duration.baselines import predictions_of, scores_of
from advisor.duration.blend import clip_to_limit
from advisor.duration.features import HISTORY_COLUMNS, Submission, has_ended, known_at, submission_of
from advisor.duration.model import DurationModel, Fitted, Predicted, fit, learned_rows, split
from advisor.duration.overrun import NO_OVERRUN, Overrun
from advisor.duration.prediction import Prediction, predict
from advisor.duration.rank_scale import PREDICTED_AS_IT_IS, ChooseExponent, default_exponent
from advisor.duration.rolling import SiteMeans
from advisor.evaluation.replay import DurationReplay, known_of_pending, observed_history, replay_durations
from advisor.evaluation.scores import Floats, Scores
from advisor.services.base import AdviceRequest
from almanac.config import Config, Priority
from almanac.records import Duration, PriorityAdvice, Request

QUANTILES = 101


@dataclass(frozen=True)
class LearnedDurations:
    """What was learned of durations. model is None where there were too few jobs for one.

    jobs, since_s and until_s: how many ended jobs, the first submission and the last end; None without any.
    gpu_time_quantiles_s: GPU-times that rank jobs, of the newest jobs at evenly spaced quantiles; () without any.
    """

    jobs: int
    since_s: int | None
    until_s: int | None
    site: SiteMeans
    model: DurationModel | None
    gpu_time_quantiles_s: tuple[float, ...]
    scores: Mapping[str, Scores]


@dataclass(frozen=True)
class AdvisedDuration:
    """A predicted duration, and from it the place in the queue; None if nothing is known of the user or the site."""

    duration: Duration | None
    priority: PriorityAdvice | None


def learn_durations(
    history: pd.DataFrame,
    previous: LearnedDurations | None,
    config: Config,
    now_s: int,
    choose_exponent: ChooseExponent = default_exponent,
) -> LearnedDurations:
    """From the jobs that ended before now_s; few or no jobs give as much as can be learned."""
    # The model's random row samples depend on the order of rows: known_at gives one, whatever the frame's.
    known = known_at(history[list(HISTORY_COLUMNS)], now_s)
    model = previous.model if previous else None
    ended = known[has_ended(known)]
    job_id, submit_s, end_s = (ended[name].to_numpy(dtype="int64") for name in ("job_id", "submit_s", "end_s"))
    rows = np.flatnonzero(has_ended(known))[learned_rows(job_id, submit_s, end_s, model)]
    past = replay_durations(known, rows)
    fitted = fit(past, config.training, now_s, model, choose_exponent)
    before, newest = (fitted.before, fitted.newest) if fitted else split(past)
    return LearnedDurations(
        jobs=len(ended),
        since_s=int(ended["submit_s"].min()) if len(ended) else None,
        until_s=int(ended["end_s"].max()) if len(ended) else None,
        site=_site_means(ended),
        model=fitted.model if fitted else None,
        gpu_time_quantiles_s=_gpu_time_quantiles(newest, fitted.model if fitted else None),
        scores=scores_of(predictions_of(_judged(fitted), newest, before), newest),
    )


def advise_durations(asked: Sequence[AdviceRequest], learned: LearnedDurations | None) -> list[AdvisedDuration]:
    """In the order of `asked`, which all have the same history, settings, and submit_s. Pure."""
    jobs, first = [each.job for each in asked], asked[0]
    # Untrained, no user's runs speak for another: the site's means stay empty.
    site = learned.site if learned else SiteMeans()
    users = {job.user for job in jobs}
    observed = observed_history(users, first.history, first.request.submit_s, site)
    predictions = predict(jobs, [observed.known_at_submit(job) for job in jobs], learned.model if learned else None)
    quantiles_s = learned.gpu_time_quantiles_s if learned else ()
    return [
        AdvisedDuration(None, None)
        if prediction is None
        else AdvisedDuration(prediction.duration, priority_of(job, prediction, quantiles_s, first.config.priority))
        for job, prediction in zip(jobs, predictions, strict=True)
    ]


def priority_of(
    job: Submission,
    prediction: Prediction,
    quantiles_s: tuple[float, ...],
    priority: Priority,
    overran: Overrun = NO_OVERRUN,
) -> PriorityAdvice | None:
    """None for a job without GPUs: it has no GPU-time. quantiles_s: as in LearnedDurations."""
    if not job.gpu_count:
        return None
    duration = prediction.duration
    cautious_s = (duration.high_s or duration.duration_s) * job.gpu_count
    return decide_priority(
        prediction.queue_gpu_time_s, cautious_s, overran, job.user, quantiles_s, priority, prediction.ranked
    )


def priorities_of(
    requests: Sequence[Request],
    history: pd.DataFrame,
    trained: LearnedDurations | None,
    config: Config,
    overran: Mapping[str, Overrun] | None = None,
) -> list[PriorityAdvice | None]:
    """The priorities of many submissions, each from what was known when it was submitted.

    overran: by user, of their newest runs. None where nothing is known, and without GPUs.
    """
    jobs, predictions = _predictions_of(requests, history, trained, config)
    quantiles_s = trained.gpu_time_quantiles_s if trained else ()
    return [
        None
        if prediction is None
        else priority_of(job, prediction, quantiles_s, config.priority, (overran or {}).get(job.user, NO_OVERRUN))
        for job, prediction in zip(jobs, predictions, strict=True)
    ]


def durations_of(
    requests: Sequence[Request], history: pd.DataFrame, trained: LearnedDurations | None, config: Config
) -> list[Duration | None]:
    """The run times of many submissions, each from what was known when it was submitted. None: nothing is known."""
    _, predictions = _predictions_of(requests, history, trained, config)
    return [prediction.duration if prediction else None for prediction in predictions]


def _predictions_of(
    requests: Sequence[Request], history: pd.DataFrame, trained: LearnedDurations | None, config: Config
) -> tuple[list[Submission], list[Prediction | None]]:
    jobs = [submission_of(request, config.tiers) for request in requests]
    known = known_of_pending(jobs, history, trained.site if trained else SiteMeans())
    return jobs, predict(jobs, known, trained.model if trained else None)


def _judged(fitted: Fitted | None) -> Predicted | None:
    """What is said of the newest jobs by what LightGBM said of them before it had seen them."""
    return fitted.model.blend(fitted.parts, fitted.newest.features) if fitted and fitted.parts else None


def _site_means(ended: pd.DataFrame) -> SiteMeans:
    site = SiteMeans()
    durations_s = ended["elapsed_s"].astype("float64").clip(lower=1.0)
    for gpu_count, duration_s in zip(ended["gpu_count"].fillna(0).tolist(), durations_s.tolist(), strict=True):
        site.add(int(gpu_count), duration_s)
    return site


def _gpu_time_quantiles(newest: DurationReplay, model: DurationModel | None) -> tuple[float, ...]:
    rank_s: Floats = clip_to_limit(newest.rolling_s, newest.features)
    if model is not None and len(rank_s):
        rank_s = model.predict_all(newest.features, newest.rolling_s).rank_s
    scale = model.rank_scale if model else PREDICTED_AS_IT_IS
    gpu_count = newest.features.number("gpu_count")
    is_in = (gpu_count > 0) & np.isfinite(rank_s)
    if not is_in.any():
        return ()
    gpu_time_s = scale.ranked(gpu_count[is_in], rank_s[is_in])
    return tuple(np.quantile(gpu_time_s, np.linspace(0, 1, QUANTILES)).tolist())
