"""The two things the advisor does: learn from a site's history, and advise one submission."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from advisor.decisions.memory import decide_memory
from advisor.decisions.priority import decide_priority
from advisor.features import Submission, submission_of
from advisor.models.calibration import Calibration
from advisor.models.duration import DurationModel, clip_to_limit, fit, score_all
from advisor.models.hbm import calibrate
from advisor.models.peak_store import evidence_now
from advisor.models.rolling import SiteMeans
from advisor.models.waits import Waits, learn_waits
from advisor.replay import Known, Replay, know_now, replay_durations
from advisor.scores import Floats, Scores
from almanac.config import Config
from almanac.records import Advice, Duration, Request

QUANTILES = 101


@dataclass(frozen=True)
class Trained:
    """What was learned from a site's jobs. model is None where there were too few for one.

    jobs, since_s and until_s: how many ended jobs, the first submission and the last end; None without any.
    gpu_time_quantiles_s: ranking GPU-times of the newest jobs at evenly spaced quantiles; () without any.
    """

    trained_s: int
    jobs: int
    since_s: int | None
    until_s: int | None
    site: SiteMeans
    model: DurationModel | None
    gpu_time_quantiles_s: tuple[float, ...]
    calibration: Calibration
    scores: Mapping[str, Scores]
    waits: Waits = field(default_factory=Waits)


def train(history: pd.DataFrame, config: Config, now_s: int) -> Trained:
    """Learns from the jobs that ended before now_s; with few or none, what can be learned from them."""
    # The model's random row samples depend on the order of rows: the same jobs give the same model in any order.
    ended = history[history["end_s"] < now_s].sort_values(["end_s", "job_id", "submit_s"], ignore_index=True)
    past = replay_durations(ended, config.rolling)
    known = np.isfinite(past.duration_s)
    past, ended = past.select(known), ended[known].reset_index(drop=True)
    site = SiteMeans()
    for gpu_count, duration_s in zip(ended["gpu_count"].tolist(), past.duration_s.tolist(), strict=True):
        site.add(int(gpu_count), duration_s)
    fitted = fit(past, config.training)
    model, scores = fitted if fitted else (None, _scores_of_rolling(past, config))
    return Trained(
        trained_s=now_s,
        jobs=len(ended),
        since_s=int(past.submit_s.min()) if len(ended) else None,
        until_s=int(past.end_s.max()) if len(ended) else None,
        site=site,
        model=model,
        gpu_time_quantiles_s=_gpu_time_quantiles(past, model, config.training.validation_share),
        calibration=calibrate(ended, config.advice, config.tiers),
        scores=scores,
        waits=learn_waits(ended, now_s),
    )


def _newest(past: Replay, share: float) -> Replay:
    return past.select(past.submit_s >= np.quantile(past.submit_s, 1 - share)) if len(past.submit_s) else past


def _scores_of_rolling(past: Replay, config: Config) -> Mapping[str, Scores]:
    newest = _newest(past, config.training.validation_share)
    since_s = newest.submit_s.min() if len(newest.submit_s) else 0
    return score_all(None, newest, past.select(past.end_s < since_s))


def _gpu_time_quantiles(past: Replay, model: DurationModel | None, share: float) -> tuple[float, ...]:
    newest = _newest(past, share)
    rank_s: Floats = clip_to_limit(newest.rolling_s, newest.features)
    if model is not None and len(rank_s):
        rank_s = model.predict_all(newest.features, newest.rolling_s).rank_s
    gpu_time_s = rank_s * newest.features["gpu_count"].to_numpy("float64")
    gpu_time_s = gpu_time_s[gpu_time_s > 0]
    if not len(gpu_time_s):
        return ()
    return tuple(np.quantile(gpu_time_s, np.linspace(0, 1, QUANTILES)).tolist())


def advise(request: Request, history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int) -> Advice:
    """Everything almanac has to say of a submission at now_s. Pure.

    history: the user's own jobs; rows of others, and jobs that had not ended before now_s, are passed over.
    """
    request = dataclasses.replace(request, submit_s=now_s)
    job = submission_of(request, config.tiers)
    evidence = evidence_now(job, history, config.advice, config.tiers)
    memory = decide_memory(request, evidence, trained.calibration if trained else None, config)
    predicted = predict_duration(job, history, trained, config)
    quantiles_s = trained.gpu_time_quantiles_s if trained else ()
    return Advice(
        request=request,
        tier=memory.tier,
        bound=memory.bound,
        duration=predicted[0] if predicted else None,
        priority=decide_priority(predicted[1], quantiles_s, config.priority.span) if predicted else None,
        set_aside=dict(evidence.set_aside),
        evidence=memory.evidence,
        waits=trained.waits.expected(config.tiers, request.node_count) if trained else (),
    )


def predict_duration(
    job: Submission, history: pd.DataFrame, trained: Trained | None, config: Config
) -> tuple[Duration, float] | None:
    """The duration, and the GPU-time (GPU-seconds) that ranks the job in the queue.

    None where nothing is known of the user or the site, and no model is trained.
    """
    known = know_now(job, history, config.rolling, trained.site if trained else None)
    rolling_s = np.array([known.rolling.duration_s if known.rolling else math.nan])
    if trained is not None and trained.model is not None:
        predicted = trained.model.predict_all(known.features, rolling_s)
        duration = _duration(job, known, float(predicted.duration_s[0]), float(predicted.model_s[0]))
        return duration, float(predicted.rank_s[0]) * job.gpu_count
    if known.rolling is None:
        return None
    duration = _duration(job, known, float(clip_to_limit(rolling_s, known.features)[0]), None)
    return duration, duration.gpu_time_s


def _duration(job: Submission, known: Known, predicted_s: float, model_s: float | None) -> Duration:
    return Duration(
        duration_s=predicted_s,
        gpu_time_s=predicted_s * job.gpu_count,
        rolling_s=known.rolling.duration_s if known.rolling else predicted_s,
        model_s=model_s,
        case=known.rolling.case if known.rolling else "site",
        runs=known.rolling.runs if known.rolling else 0,
    )
