"""The two things the advisor does: learn from a site's history, and advise one submission."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from advisor.baselines import predictions_of, scores_of
from advisor.decisions.memory import decide_memory
from advisor.decisions.priority import decide_priority
from advisor.features import Submission, known_at, submission_of, whole_runs
from advisor.models.calibration import Calibration
from advisor.models.duration import DurationModel, clip_to_limit, fit, split
from advisor.models.hbm import calibrate
from advisor.models.peak_store import evidence_now
from advisor.models.rolling import SiteMeans
from advisor.models.waits import Waits, learn_waits
from advisor.prediction import Prediction, predict
from advisor.replay import Replay, remember, replay_durations
from advisor.scores import Floats, Scores
from almanac.config import Config
from almanac.records import Advice, PriorityAdvice, Request

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
    """Learns from the jobs that ended before now_s; with few or none, what can be learned from them.

    history: load_history(..., running=True): jobs that had started and not ended are what users had running.
    """
    # The model's random row samples depend on the order of rows: known_at gives one, whatever the frame's.
    known = known_at(history, now_s)
    past = replay_durations(known, config.rolling)
    past = past.select(np.isfinite(past.duration_s))
    ended = whole_runs(known)
    site = SiteMeans()
    for gpu_count, duration_s in zip(past.features.number("gpu_count").tolist(), past.duration_s.tolist(), strict=True):
        site.add(int(gpu_count), duration_s)
    fitted = fit(past, config.training)
    before, newest = (fitted.before, fitted.newest) if fitted else split(past, config.training.validation_share)
    return Trained(
        trained_s=now_s,
        jobs=len(past),
        since_s=int(past.submit_s.min()) if len(past) else None,
        until_s=int(past.end_s.max()) if len(past) else None,
        site=site,
        model=fitted.model if fitted else None,
        gpu_time_quantiles_s=_gpu_time_quantiles(newest, fitted.model if fitted else None),
        calibration=calibrate(ended, config.advice, config.tiers),
        scores=scores_of(predictions_of(fitted.trial if fitted else None, newest, before), newest),
        waits=learn_waits(ended, now_s),
    )


def _gpu_time_quantiles(newest: Replay, model: DurationModel | None) -> tuple[float, ...]:
    rank_s: Floats = clip_to_limit(newest.rolling_s, newest.features)
    if model is not None and len(rank_s):
        rank_s = model.predict_all(newest.features, newest.rolling_s).rank_s
    gpu_time_s = rank_s * newest.features.number("gpu_count")
    gpu_time_s = gpu_time_s[gpu_time_s > 0]
    if not len(gpu_time_s):
        return ()
    return tuple(np.quantile(gpu_time_s, np.linspace(0, 1, QUANTILES)).tolist())


def advise(request: Request, history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int) -> Advice:
    """Everything almanac has to say of a submission at now_s. Pure.

    history: the user's own jobs, those that still run too; rows of others, and what came after now_s, are passed over.
    """
    request = dataclasses.replace(request, submit_s=now_s)
    job = submission_of(request, config.tiers)
    evidence = evidence_now(job, whole_runs(history), config.advice, config.tiers)
    memory = decide_memory(request, evidence, trained.calibration if trained else None, config)
    predicted = predict_duration(job, history, trained, config)
    return Advice(
        request=request,
        tier=memory.tier,
        bound=memory.bound,
        duration=predicted.duration if predicted else None,
        priority=_priority(job, predicted, trained, config) if predicted else None,
        set_aside=dict(evidence.set_aside),
        evidence=memory.evidence,
        waits=trained.waits.expected(config.tiers, request.node_count) if trained else (),
    )


def _priority(job: Submission, predicted: Prediction, trained: Trained | None, config: Config) -> PriorityAdvice | None:
    """None for a job without GPUs: it has no GPU-time."""
    if not job.gpu_count:
        return None
    quantiles_s = trained.gpu_time_quantiles_s if trained else ()
    cautious_s = (predicted.duration.high_s or predicted.duration.duration_s) * job.gpu_count
    return decide_priority(
        predicted.rank_gpu_time_s, cautious_s, predicted.overran, job.user, quantiles_s, config.priority
    )


def predict_duration(
    job: Submission, history: pd.DataFrame, trained: Trained | None, config: Config
) -> Prediction | None:
    """None where nothing is known of the user or the site, and no model is trained."""
    memory = remember(job.user, history, job.submit_s, config.rolling, trained.site if trained else None)
    return predict([job], [memory.know(job)], trained.model if trained else None)[0]
