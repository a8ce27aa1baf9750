"""Replay the past: each submission as a request with the jobs known then, by the code that serves a live request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.backtest import Floats
from advisor.duration.features import (
    HISTORY_COLUMNS,
    NUMBERS,
    EndedJob,
    Event,
    Features,
    Rows,
    SubmittedJob,
    ended_jobs,
    event_times,
    features_of,
    has_ended,
    in_order,
    submissions,
)
from advisor.duration.past import SubmissionHistory, by_number
from advisor.duration.rolling import Estimate, RollingEstimator, SiteMeans
from almanac.config import Tier
from almanac.names import is_family, name_key
from almanac.records import JobRequest
from almanac.tiers import requested_tier

BURST_S = 1800
_TEXTS = ("user", "name", "account", "partition", "qos", "constraints")
_COUNTS = ("gpu_count", "node_count", "cpu_count", "submit_s")


@dataclass(frozen=True)
class DurationReplay:
    """Row by row of the history frame. NaN where there is no estimate; a running job's duration and end are NaN.

    features: known at submission. at_start: known when the job started; the same if it did not wait.
    """

    features: Features
    at_start: Features
    rolling_s: Floats
    duration_s: Floats
    submit_s: npt.NDArray[np.int64]
    end_s: Floats
    job_id: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.submit_s)

    def select(self, rows: Rows) -> DurationReplay:
        return DurationReplay(
            self.features.select(rows),
            self.at_start.select(rows),
            self.rolling_s[rows],
            self.duration_s[rows],
            self.submit_s[rows],
            self.end_s[rows],
            self.job_id[rows],
        )

    def bursts(self) -> npt.NDArray[np.int64]:
        """Number of the burst that each job belongs to: of one user, each submitted at most BURST_S after the last."""
        users = np.unique(np.array(self.features.category("user"), dtype=str), return_inverse=True)[1]
        order = np.lexsort((self.submit_s, users))
        is_first = (np.diff(users[order]) != 0) | (np.diff(self.submit_s[order]) > BURST_S)
        numbers = np.zeros(len(self), dtype="int64")
        numbers[order[1:]] = np.cumsum(is_first)
        return numbers


@dataclass(frozen=True)
class DurationEvidence:
    """Features and rolling estimate of one job, from the runs known at a time."""

    features: tuple[float, ...]
    rolling: Estimate | None


class SiteHistory:
    """The jobs that started and ended up to a time, for features and rolling estimates."""

    def __init__(self, site: SiteMeans | None = None) -> None:
        """site: the site's means where they are known from elsewhere (a trained model); else they are gathered."""
        self._past, self._rolling = SubmissionHistory(), RollingEstimator(site)

    def observe(self, event: Event, job: SubmittedJob, start_s: float, ended: EndedJob | None) -> None:
        """A start or an end, in order of time; a start_s of NaN is a job that is not known to have run."""
        started_s = None if math.isnan(start_s) else int(start_s)
        if event is Event.END and ended is not None:
            self._past.absorb(ended, started_s)
            self._rolling.absorb(ended)
        elif started_s is not None:
            (self._past.start if event is Event.START else self._past.stop)(job, started_s)

    def absorb_all(self, ended: pd.DataFrame) -> None:
        """Observe the ends of these rows of the history frame, oldest first, without their starts."""
        self._past.absorb_all(ended)
        self._rolling.absorb_all(ended)

    def known(self, job: SubmittedJob, at_s: int | None = None) -> DurationEvidence:
        """Return what has been observed for a job, at its submission or, while it waits, at at_s."""
        return DurationEvidence(self.features(job, job.submit_s if at_s is None else at_s), self._rolling.estimate(job))

    def features(self, job: SubmittedJob, at_s: int) -> tuple[float, ...]:
        """The features alone, in the order of NUMBERS."""
        return self._past.features(job, at_s)


def replay_durations(history: pd.DataFrame, rows: Rows | None = None) -> DurationReplay:
    """Features and rolling estimate of every job, each from what had started and ended before its submission.

    rows: of these rows alone, in the order of the frame. Their values are the same as without `rows`.
    """
    jobs = submissions(history)
    ended, times = ended_jobs(history, jobs), event_times(history)
    wanted = np.arange(len(jobs)) if rows is None else np.unique(np.arange(len(jobs))[rows])
    times[Event.LOOK] = np.where(times[Event.START] > times[Event.SUBMIT], times[Event.START], math.nan)
    times[: Event.START, np.setdiff1d(np.arange(len(jobs)), wanted)] = math.nan
    times[Event.START, ~_is_met(history, times, wanted)] = math.nan
    starts, look_s = times[Event.START].tolist(), np.nan_to_num(times[Event.LOOK]).astype("int64").tolist()
    places = np.full(len(jobs), -1)
    places[wanted] = np.arange(len(wanted))
    place_of: list[int] = places.tolist()
    observed = SiteHistory()
    # Filled row by row: as tuples of floats, the features of 400,000 jobs would take a gigabyte.
    numbers, rolling_s = np.full((2, len(wanted), len(NUMBERS)), math.nan), np.full(len(wanted), math.nan)
    for row, event in in_order(history, times):
        if event is Event.SUBMIT:
            known = observed.known(jobs[row])
            numbers[:, place_of[row]] = known.features
            rolling_s[place_of[row]] = known.rolling.duration_s if known.rolling else math.nan
        elif event is Event.LOOK:
            numbers[1, place_of[row]] = observed.features(jobs[row], look_s[row])
        else:
            observed.observe(event, jobs[row], starts[row], ended[row])
    asked = [jobs[row] for row in wanted.tolist()]
    features = features_of(asked, numbers[0])
    over = [ended[row] for row in wanted.tolist()]
    return DurationReplay(
        features=features,
        at_start=dataclasses.replace(features, numbers=numbers[1]),
        rolling_s=rolling_s,
        duration_s=np.array([job.duration_s if job else math.nan for job in over], dtype="float64"),
        submit_s=np.array([job.submit_s for job in asked], dtype="int64"),
        end_s=np.array([job.end_s if job else math.nan for job in over], dtype="float64"),
        job_id=history["job_id"].to_numpy(dtype="int64")[wanted],
    )


def _is_met(
    history: pd.DataFrame, times: npt.NDArray[np.float64], wanted: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Row by row, True if its user submits one of the wanted rows, or has it looked at, while it runs.

    times: of event_times, with LOOK.
    """
    users, (submits, looks, start_s, end_s) = pd.factorize(history["user"], use_na_sentinel=False)[0], times
    order, edges = by_number(users[wanted])
    asks = np.stack([submits, looks], axis=1)[wanted[order]]
    asked = [np.sort(asks[first:last], axis=None) for first, last in pairwise(edges)]
    asked_of = {int(users[wanted[order[first]]]): each for first, each in zip(edges, asked, strict=False)}
    met = np.full(len(history), False)
    order, edges = by_number(users)
    for first, last in pairwise(edges):
        own = order[first:last]
        submitted = asked_of.get(int(users[own[0]]), np.array([]))
        # A NaN sorts last: a job without an end runs on.
        met[own] = np.searchsorted(submitted, start_s[own], "right") < np.searchsorted(submitted, end_s[own], "right")
    return met


def observed_history(
    users: Collection[str], history: pd.DataFrame, until_s: int, site: SiteMeans | None
) -> SiteHistory:
    """Observe these users' jobs up to until_s. Without `site`, the means are those of the rows."""
    own = history.loc[history["user"].isin(users) & (history["submit_s"] < until_s), list(HISTORY_COLUMNS)]
    observed, is_over = SiteHistory(site), own["end_s"].to_numpy(dtype="float64", na_value=math.nan) < until_s
    rows = np.flatnonzero(is_over & has_ended(own))
    order = np.lexsort([own[name].to_numpy()[rows] for name in ("submit_s", "job_id", "end_s")])
    observed.absorb_all(own.iloc[rows[order]])
    left = own[~is_over].reset_index(drop=True)
    if left.empty:
        return observed
    # These have no end before until_s: they run, if they have started.
    jobs, times = submissions(left), event_times(left)
    times[[Event.SUBMIT, Event.END]] = math.nan
    times[times >= until_s] = math.nan
    starts = times[Event.START].tolist()
    for row, event in in_order(left, times):
        observed.observe(event, jobs[row], starts[row], None)
    return observed


def recorded_requests(history: pd.DataFrame, tiers: Sequence[Tier]) -> list[JobRequest]:
    """One per row of the history frame, in its order, as far as accounting tells: the tier asked for is recorded."""
    by_name = {tier.name: tier for tier in tiers}
    texts = [history[name].fillna("").astype(str).tolist() for name in _TEXTS]
    counts = [history[name].fillna(0).astype("int64").tolist() for name in _COUNTS]
    limits = history["time_limit_s"].astype("float64").tolist()
    arrays = history["is_array"].fillna(False).astype(bool).tolist()
    asked = [by_name.get(name) for name in history["tier"].fillna("").astype(str)]
    none = pd.Series("", history.index)
    maybe = ("gpu_type_req", "script_key", "name_key")
    types, scripts, keys = (history.get(name, none).fillna("").astype(str) for name in maybe)
    return [
        _request(
            dict(zip((*_TEXTS, *_COUNTS, "script_key", "rule"), row, strict=True)),
            limit_s,
            is_array,
            gpu_type,
            tier,
            tiers,
        )
        for *row, limit_s, is_array, gpu_type, tier in zip(
            *texts, *counts, scripts, keys, limits, arrays, types, asked, strict=True
        )
    ]


def _request(
    row: dict[str, object], limit_s: float, is_array: bool, gpu_type: str, tier: Tier | None, tiers: Sequence[Tier]
) -> JobRequest:
    """gpu_type: as recorded; where an older record does not have it, that of the tier. A rule is recorded as key."""
    gres = tier.gres if tier else ""
    known = {"job_name": row.pop("name"), **row, "is_array": is_array}
    if not row["rule"] or is_family(name_key(str(known["job_name"]))):
        known["rule"] = ""
    known["time_limit_s"] = int(limit_s) if limit_s > 0 else None
    known |= {"gpu_type": gpu_type or gres, "gres": f"gpu:{gres}:{row['gpu_count']}" if gres else ""}
    request = JobRequest(**known)  # type: ignore[arg-type]
    if tier is None or not tier.constraint:
        return request
    # Accounting can lack the constraint, and the partition can stand for another tier.
    if requested_tier(request, tiers) != tier:
        request = dataclasses.replace(request, constraints=tier.constraint)
    if requested_tier(request, tiers) != tier:
        request = dataclasses.replace(request, partition="")
    if requested_tier(request, tiers) != tier:
        request = dataclasses.replace(request, gpu_type="")
    return request
