"""The past, replayed: for each submission what was known then, by the same code that serves a live request."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.duration.features import (
    HISTORY_COLUMNS,
    NUMBERS,
    EndedJob,
    Event,
    Features,
    Rows,
    Submission,
    ended_jobs,
    event_times,
    features_of,
    has_ended,
    in_order,
    submissions,
)
from advisor.duration.past import JobHistory, by_number
from advisor.duration.rolling import Estimate, RollingEstimator, SiteMeans
from advisor.evaluation.scores import Floats

BURST_S = 1800


@dataclass(frozen=True)
class DurationReplay:
    """Row by row of the history frame. NaN where there is no estimate; a running job's duration and end are NaN."""

    features: Features
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
class KnownAtSubmit:
    """What is known of one submission."""

    features: tuple[float, ...]
    rolling: Estimate | None


class SiteHistory:
    """The jobs that started and ended up to a time, for features and rolling estimates."""

    def __init__(self, site: SiteMeans | None = None) -> None:
        """site: the site's means where they are known from elsewhere (a trained model); else they are gathered."""
        self._past, self._rolling = JobHistory(), RollingEstimator(site)

    def observe(self, event: Event, job: Submission, start_s: float, ended: EndedJob | None) -> None:
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

    def known_at_submit(self, job: Submission) -> KnownAtSubmit:
        return KnownAtSubmit(self._past.features(job), self._rolling.estimate(job))


def replay_durations(history: pd.DataFrame, rows: Rows | None = None) -> DurationReplay:
    """Features and rolling estimate of every submission, each from what had started and ended before it.

    rows: of these rows alone, in the order of the frame. What is known of them is the same as without `rows`.
    """
    jobs = submissions(history)
    ended, times = ended_jobs(history, jobs), event_times(history)
    wanted = np.arange(len(jobs)) if rows is None else np.unique(np.arange(len(jobs))[rows])
    times[Event.SUBMIT, np.setdiff1d(np.arange(len(jobs)), wanted)] = math.nan
    times[Event.START, ~_is_met(history, times, wanted)] = math.nan
    starts = times[Event.START].tolist()
    places = np.full(len(jobs), -1)
    places[wanted] = np.arange(len(wanted))
    place_of: list[int] = places.tolist()
    observed = SiteHistory()
    # Filled row by row: as tuples of floats, the features of 400,000 jobs would take a gigabyte.
    numbers, rolling_s = np.full((len(wanted), len(NUMBERS)), math.nan), np.full(len(wanted), math.nan)
    for row, event in in_order(history, times):
        if event is not Event.SUBMIT:
            observed.observe(event, jobs[row], starts[row], ended[row])
        elif (place := place_of[row]) >= 0:
            known = observed.known_at_submit(jobs[row])
            numbers[place] = known.features
            rolling_s[place] = known.rolling.duration_s if known.rolling else math.nan
    asked = [jobs[row] for row in wanted.tolist()]
    over = [ended[row] for row in wanted.tolist()]
    return DurationReplay(
        features=features_of(asked, numbers),
        rolling_s=rolling_s,
        duration_s=np.array([job.duration_s if job else math.nan for job in over], dtype="float64"),
        submit_s=np.array([job.submit_s for job in asked], dtype="int64"),
        end_s=np.array([job.end_s if job else math.nan for job in over], dtype="float64"),
        job_id=history["job_id"].to_numpy(dtype="int64")[wanted],
    )


def _is_met(
    history: pd.DataFrame, times: npt.NDArray[np.float64], wanted: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Row by row: whether its user submits one of the wanted rows while it runs; else nobody asks whether it does.

    times: of event_times.
    """
    users, (submits, start_s, end_s) = pd.factorize(history["user"], use_na_sentinel=False)[0], times
    order, edges = by_number(users[wanted])
    asked = [np.sort(submits[wanted[order[first:last]]]) for first, last in pairwise(edges)]
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
    rows = _rows_of(users, history)
    observed, own = _history_at(rows[rows["submit_s"] < until_s], until_s, site)
    for _, event, job, start_s, ended in _observations(own, until_s):
        observed.observe(event, job, start_s, ended)
    return observed


def known_of_pending(jobs: Sequence[Submission], history: pd.DataFrame, site: SiteMeans) -> list[KnownAtSubmit]:
    """As `observed_history` and `known_at_submit` for each of many submissions, in one pass over their users' rows."""
    if not jobs:
        return []
    waiting = sorted(range(len(jobs)), key=lambda place: jobs[place].submit_s)
    first_s, last_s = jobs[waiting[0]].submit_s, jobs[waiting[-1]].submit_s
    known = dict[int, KnownAtSubmit]()
    observed, own = _history_at(_rows_of({job.user for job in jobs}, history), first_s, site)
    told = _observations(own, last_s)
    ahead = next(told, None)
    for place in waiting:
        while ahead is not None and ahead[0] < jobs[place].submit_s:
            observed.observe(*ahead[1:])
            ahead = next(told, None)
        known[place] = observed.known_at_submit(jobs[place])
    return [known[place] for place in range(len(jobs))]


def _rows_of(users: Collection[str], history: pd.DataFrame) -> pd.DataFrame:
    columns, are_theirs = history[list(HISTORY_COLUMNS)], history["user"].isin(users)
    return columns if are_theirs.all() else columns[are_theirs]


def _history_at(own: pd.DataFrame, asked_s: int, site: SiteMeans | None) -> tuple[SiteHistory, pd.DataFrame]:
    """(the history up to asked_s; the rows that are left to observe)."""
    observed, is_over = SiteHistory(site), own["end_s"].to_numpy(dtype="float64", na_value=math.nan) < asked_s
    rows = np.flatnonzero(is_over & has_ended(own))
    order = np.lexsort([own[name].to_numpy()[rows] for name in ("submit_s", "job_id", "end_s")])
    observed.absorb_all(own.iloc[rows[order]])
    return observed, own[~is_over].reset_index(drop=True)


def _observations(own: pd.DataFrame, until_s: int) -> Iterator[tuple[float, Event, Submission, float, EndedJob | None]]:
    """The time and the arguments of `SiteHistory.observe` for each start and end before until_s, in order."""
    if own.empty:
        return
    jobs = submissions(own)
    ended, times = ended_jobs(own, jobs), event_times(own)
    times[Event.SUBMIT] = math.nan
    times[times >= until_s] = math.nan
    starts = times[Event.START].tolist()
    for row, event in in_order(own, times):
        yield float(times[event, row]), event, jobs[row], starts[row], ended[row]
