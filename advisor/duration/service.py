"""Predict durations, and from them places in the queue (Hu et al., SC'21, 4.2), of a site or a simulated cluster.

`predict` takes less than a second for 10,000 submissions, and less than 2 ms for one. On a simulated cluster,
OnlinePredictor knows as much as a live one: the events so far, in their order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from advisor.backtest import Scores
from advisor.duration.backtest import predictions_of, scores_of
from advisor.duration.features import (
    HISTORY_COLUMNS,
    AdviceRequest,
    EndedJob,
    Event,
    SubmittedJob,
    features_of,
    has_ended,
    known_at,
    outcomes,
    submission_of,
)
from advisor.duration.model import DurationModel, Fitted, PredictedDurations, fit, learned_rows, split, untrained
from advisor.duration.rank import DEFAULT_RANK, ChooseRank, RankChoice, RankRule, ReplayedJobs, expected_s, queue_s
from advisor.duration.replay import (
    DurationEvidence,
    DurationReplay,
    SiteHistory,
    observed_history,
    replay_durations,
)
from advisor.duration.rolling import SiteMeans
from advisor.priority import NO_OVERRUN, Overrun, decide_priority
from almanac.config import Config, Priority
from almanac.records import Duration, JobRequest, PriorityAdvice
from almanac.units import DAY_S


@dataclass(frozen=True)
class Prediction:
    """A predicted duration. queue_gpu_time_s: the GPU-time that counts in the queue, GPU-seconds.

    rule: turns it into the GPU-time that ranks the job.
    """

    duration: Duration
    queue_gpu_time_s: float
    gpu_count: int
    rule: RankRule

    def ranked(self, gpu_time_s: float) -> float:
        """The GPU-time that ranks the job, GPU-seconds, if gpu_time_s is predicted for it."""
        if not self.gpu_count:
            return 0.0
        return float(self.rule.ranked(self.gpu_count, gpu_time_s / self.gpu_count))


def predict(
    jobs: Sequence[SubmittedJob],
    known: Sequence[DurationEvidence],
    model: DurationModel | None,
    rule: RankRule = DEFAULT_RANK,
) -> list[Prediction | None]:
    """Predict each job; None for a job without a rolling estimate if there is no model.

    known: as SiteHistory.known gives them, one a job. rule: the order of the queue.
    """
    features = features_of(jobs, [each.features for each in known])
    rolling_s = np.array([each.rolling.duration_s if each.rolling else math.nan for each in known], dtype="float64")
    predicted = model.predict_all(features, rolling_s) if model else untrained(features, rolling_s)
    counted_s = queue_s(rule.by, features, predicted.rank_s, predicted.high_s, model is not None)
    return [
        None
        if model is None and math.isnan(rolling_s[place])
        else _prediction(job, known[place], predicted, place, float(counted_s[place]), rule)
        for place, job in enumerate(jobs)
    ]


def _prediction(
    job: SubmittedJob,
    known: DurationEvidence,
    predicted: PredictedDurations,
    place: int,
    queue_s: float,
    rule: RankRule,
) -> Prediction:
    duration_s = float(predicted.duration_s[place])
    model_s, low_s, high_s = (
        None if math.isnan(each[place]) else float(each[place])
        for each in (predicted.model_s, predicted.low_s, predicted.high_s)
    )
    duration = Duration(
        duration_s=duration_s,
        gpu_time_s=duration_s * job.gpu_count,
        rolling_s=known.rolling.duration_s if known.rolling else duration_s,
        model_s=model_s,
        case=known.rolling.case if known.rolling else "site",
        runs=known.rolling.runs if known.rolling else 0,
        low_s=low_s,
        high_s=high_s,
    )
    return Prediction(duration, queue_s * job.gpu_count, job.gpu_count, rule)


QUANTILES = 101


@dataclass(frozen=True)
class LearnedDurations:
    """A site's trained durations. model is None if there were too few jobs for one.

    jobs, since_s and until_s: how many ended jobs, the first submission and the last end; None without any.
    gpu_time_quantiles_s: GPU-times that rank jobs, of the newest jobs at evenly spaced quantiles; () without any.
    rank: the order chosen for the queue; None if it could not be judged.
    """

    jobs: int
    since_s: int | None
    until_s: int | None
    site: SiteMeans
    model: DurationModel | None
    gpu_time_quantiles_s: tuple[float, ...]
    scores: Mapping[str, Scores]
    rank: RankChoice | None = field(default=None, kw_only=True)

    @property
    def rule(self) -> RankRule:
        """The order of the queue; the default one until another is chosen."""
        return self.rank.rule if self.rank else DEFAULT_RANK


def learn_durations(
    history: pd.DataFrame,
    previous: LearnedDurations | None,
    config: Config,
    now_s: int,
    choose_rank: ChooseRank | None = None,
) -> LearnedDurations:
    """Learn from the jobs that ended before now_s; few or no jobs give as much as can be learned.

    choose_rank: replays the newest jobs to choose the order of the queue.
    """
    # The model's random row samples depend on the order of rows: known_at gives one, whatever the frame's.
    known = known_at(history[list(HISTORY_COLUMNS)], now_s)
    model = previous.model if previous else None
    ended = known[has_ended(known)]
    job_id, submit_s, end_s = (ended[name].to_numpy(dtype="int64") for name in ("job_id", "submit_s", "end_s"))
    rows = np.flatnonzero(has_ended(known))[learned_rows(job_id, submit_s, end_s, model)]
    past = replay_durations(known, rows)
    fitted = fit(past, config.training, now_s, model)
    rank = chosen_rank(fitted, previous.rank if previous else None, choose_rank, now_s)
    before, newest = (fitted.before, fitted.newest) if fitted else split(past)
    site = SiteMeans()
    site.add_all(ended["gpu_count"].fillna(0).to_numpy(dtype="int64"), outcomes(ended)[0])
    return LearnedDurations(
        jobs=len(ended),
        since_s=int(ended["submit_s"].min()) if len(ended) else None,
        until_s=int(ended["end_s"].max()) if len(ended) else None,
        site=site,
        model=fitted.model if fitted else None,
        gpu_time_quantiles_s=_gpu_time_quantiles(newest, fitted.model if fitted else None, rank),
        rank=rank,
        scores=scores_of(predictions_of(_judged(fitted), newest, before), newest),
    )


RANK_S = 7 * DAY_S
"""An order is kept at least this long: jobs that wait longer are few, and each change moves all that wait."""


def chosen_rank(
    fitted: Fitted | None, previous: RankChoice | None, choose: ChooseRank | None, now_s: float
) -> RankChoice | None:
    """The order of the queue from now_s on: the previous one for RANK_S, then the one that `choose` gives."""
    is_due = previous is None or not previous.chosen_s <= now_s < previous.chosen_s + RANK_S
    told = _judged(fitted)
    if choose is None or fitted is None or told is None or not is_due:
        return previous
    newest = fitted.newest
    jobs = ReplayedJobs(
        submit_s=newest.submit_s.astype("float64"),
        gpu_count=newest.features.number("gpu_count"),
        run_s=newest.duration_s,
        wait_s=newest.end_s - newest.duration_s - newest.submit_s,
        limit_s=np.exp(newest.features.number("log_time_limit")),
        mean_s=expected_s(newest.features, told.rank_s),
        high_s=told.high_s,
        user=np.array(newest.features.category("user"), dtype=str),
    )
    found = choose(jobs)
    return dataclasses.replace(found, chosen_s=int(now_s)) if found else previous


def advise_durations(
    asked: Sequence[AdviceRequest], learned: LearnedDurations | None
) -> list[tuple[Duration | None, PriorityAdvice | None]]:
    """Predict the durations, and from them the places in the queue; None without ended jobs of the user or the site.

    In the order of `asked`, which all have the same history, settings, and submit_s. Pure.
    """
    jobs, first = [each.job for each in asked], asked[0]
    # Untrained, no user's runs speak for another: the site's means stay empty.
    site = learned.site if learned else SiteMeans()
    users = {job.user for job in jobs}
    observed = observed_history(users, first.history, first.request.submit_s, site)
    model, rule = (learned.model, learned.rule) if learned else (None, DEFAULT_RANK)
    predictions = predict(jobs, [observed.known(job) for job in jobs], model, rule)
    quantiles_s = learned.gpu_time_quantiles_s if learned else ()
    return [
        (prediction.duration, priority_of(job, prediction, quantiles_s, first.config.priority))
        if prediction
        else (None, None)
        for job, prediction in zip(jobs, predictions, strict=True)
    ]


def priority_of(
    job: SubmittedJob,
    prediction: Prediction,
    quantiles_s: tuple[float, ...],
    priority: Priority,
    overran: Overrun = NO_OVERRUN,
) -> PriorityAdvice | None:
    """Return the priority advice of a predicted job; None for a job without GPUs, which has no GPU-time.

    quantiles_s: as in LearnedDurations.
    """
    if not job.gpu_count:
        return None
    duration = prediction.duration
    cautious_s = (duration.high_s or duration.duration_s) * job.gpu_count
    return decide_priority(prediction.queue_gpu_time_s, cautious_s, overran, quantiles_s, priority, prediction.ranked)


def priorities_of(
    requests: Sequence[JobRequest],
    history: pd.DataFrame,
    trained: LearnedDurations | None,
    config: Config,
    now_s: int,
    overran: Mapping[str, Overrun] | None = None,
) -> list[PriorityAdvice | None]:
    """The priorities of many waiting jobs, from what is known at now_s.

    overran: by user, of their newest runs. None where nothing is known, and without GPUs.
    """
    jobs, predictions = _predictions_of(requests, history, trained, config, now_s)
    quantiles_s = trained.gpu_time_quantiles_s if trained else ()
    return [
        None
        if prediction is None
        else priority_of(job, prediction, quantiles_s, config.priority, (overran or {}).get(job.user, NO_OVERRUN))
        for job, prediction in zip(jobs, predictions, strict=True)
    ]


def durations_of(
    requests: Sequence[JobRequest], history: pd.DataFrame, trained: LearnedDurations | None, config: Config, now_s: int
) -> list[Duration | None]:
    """The run times of many queued or running jobs, from what is known at now_s. None: nothing is known."""
    _, predictions = _predictions_of(requests, history, trained, config, now_s)
    return [prediction.duration if prediction else None for prediction in predictions]


def _predictions_of(
    requests: Sequence[JobRequest], history: pd.DataFrame, trained: LearnedDurations | None, config: Config, now_s: int
) -> tuple[list[SubmittedJob], list[Prediction | None]]:
    jobs = [submission_of(request, config.tiers) for request in requests]
    observed = observed_history({job.user for job in jobs}, history, now_s, trained.site if trained else SiteMeans())
    model, rule = (trained.model, trained.rule) if trained else (None, DEFAULT_RANK)
    return jobs, predict(jobs, [observed.known(job, now_s) for job in jobs], model, rule)


def _judged(fitted: Fitted | None) -> PredictedDurations | None:
    """Predict the newest jobs from what LightGBM predicted for them before it had seen them."""
    return fitted.model.blend(fitted.parts, fitted.newest.features) if fitted and fitted.parts else None


def _gpu_time_quantiles(
    newest: DurationReplay, model: DurationModel | None, rank: RankChoice | None
) -> tuple[float, ...]:
    if not len(newest):
        return ()
    rule, features, rolling_s = rank.rule if rank else DEFAULT_RANK, newest.features, newest.rolling_s
    predicted = model.predict_all(features, rolling_s) if model else untrained(features, rolling_s)
    counted_s, gpu_count = (
        queue_s(rule.by, features, predicted.rank_s, predicted.high_s, model is not None),
        features.number("gpu_count"),
    )
    is_in = (gpu_count > 0) & np.isfinite(counted_s)
    if not is_in.any():
        return ()
    gpu_time_s = rule.ranked(gpu_count[is_in], counted_s[is_in])
    return tuple(np.quantile(gpu_time_s, np.linspace(0, 1, QUANTILES)).tolist())


@dataclass
class _SimulatedJob:
    submission: SubmittedJob
    known: DurationEvidence
    at_start: tuple[float, ...]
    start_s: float = math.nan
    ended: EndedJob | None = None


class OnlinePredictor:
    """Observe submissions, starts and ends in order of time. Trains every training.retrain_hours.

    trainings: number of models trained so far. rule: the order of the queue, instead of one that trainings choose.
    """

    def __init__(self, config: Config, choose_rank: ChooseRank | None = None, rule: RankRule | None = None) -> None:
        self._config, self._choose_rank, self._rule = config, choose_rank, rule
        self.rank: RankChoice | None = None
        self._observed = SiteHistory()
        self._jobs: dict[Hashable, _SimulatedJob] = {}
        self._model: DurationModel | None = None
        self.trainings = 0
        self._next_training_s = -math.inf

    def submit(self, submitted: Sequence[tuple[Hashable, SubmittedJob]]) -> list[Prediction | None]:
        """Predictions for jobs that are submitted now; the key names a job when it starts and ends."""
        if submitted and submitted[0][1].submit_s >= self._next_training_s:
            self._train(submitted[0][1].submit_s)
        known = [self._observed.known(job) for _, job in submitted]
        for (key, job), each in zip(submitted, known, strict=True):
            self._jobs[key] = _SimulatedJob(job, each, each.features)
        return predict([job for _, job in submitted], known, self._model, self.rule)

    @property
    def rule(self) -> RankRule:
        return self._rule or (self.rank.rule if self.rank else DEFAULT_RANK)

    def predict_again(self, keys: Sequence[Hashable], now_s: int) -> list[Prediction | None]:
        """The newest model's predictions from what is known now, as `almanac reprioritize` makes them."""
        jobs = [self._jobs[key].submission for key in keys]
        return predict(jobs, [self._observed.known(job, now_s) for job in jobs], self._model, self.rule)

    def start(self, key: Hashable, start_s: int) -> None:
        job = self._jobs[key]
        job.start_s = float(start_s)
        if start_s > job.submission.submit_s:
            job.at_start = self._observed.features(job.submission, start_s)
        self._observed.observe(Event.START, job.submission, job.start_s, None)

    def end(self, key: Hashable, end_s: int, is_failed: bool) -> None:
        """Observe the end of a job that has started."""
        job = self._jobs[key]
        job.ended = EndedJob(job.submission, end_s, max(end_s - job.start_s, 1.0), is_failed)
        self._observed.observe(Event.END, job.submission, job.start_s, job.ended)

    def _train(self, now_s: int) -> None:
        self._next_training_s = now_s + self._config.training.retrain_hours * 3600
        known = enumerate(self._jobs.values())
        numbered = [(number, job) for number, job in known if job.ended is not None and job.ended.end_s < now_s]
        jobs = [job for _, job in numbered]
        ended = [job.ended for job in jobs if job.ended is not None]
        rolling = [job.known.rolling for job in jobs]
        submitted = [job.submission for job in jobs]
        past = DurationReplay(
            features=features_of(submitted, [job.known.features for job in jobs]),
            at_start=features_of(submitted, [job.at_start for job in jobs]),
            rolling_s=np.array([each.duration_s if each else math.nan for each in rolling], dtype="float64"),
            duration_s=np.array([each.duration_s for each in ended], dtype="float64"),
            submit_s=np.array([job.submission.submit_s for job in jobs], dtype="int64"),
            end_s=np.array([each.end_s for each in ended], dtype="float64"),
            job_id=np.array([number for number, _ in numbered], dtype="int64"),
        )
        past = past.select(learned_rows(past.job_id, past.submit_s, past.end_s, self._model))
        fitted = fit(past, self._config.training, now_s, self._model)
        if self._rule is None:
            self.rank = chosen_rank(fitted, self.rank, self._choose_rank, now_s)
        self._model = fitted.model if fitted else None
        self.trainings += fitted is not None
