"""The rolling estimate of a duration (Hu et al., SC'21, 4.2.2 and algorithm 1, lines 14 to 19).

Three cases: an unknown user gets the site's mean at the same GPU count; a known user without a similar job name
gets their own mean at that GPU count; similar names give an exponentially decayed mean, newest heaviest.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from advisor.duration.features import EndedJob, SubmittedJob, outcomes, texts_of
from advisor.duration.past import by_number
from almanac.names import is_family
from almanac.records import DurationCase

SIMILARITY = 0.8
"""Smallest normalized Levenshtein similarity of similar names (Hu et al., SC'21)."""
DECAY = 0.8
"""Weight of a matched run relative to the next newer one (Hu et al., SC'21, algorithm 1)."""
MAX_RUNS = 50
"""Newest matched runs to use: with this decay, older ones weigh less than 0.002% of the newest."""
MAX_FAMILIES = 400
"""Families remembered per user; the one whose last run is oldest is forgotten first."""


@dataclass(frozen=True)
class Estimate:
    """case is "name", or "user" or "site": of as many GPUs, or with ", any size". runs: jobs looked at."""

    duration_s: float
    case: DurationCase
    runs: int


@dataclass(slots=True)
class Mean:
    """A running mean."""

    total: float = 0.0
    number: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.number += 1

    def add_all(self, values: npt.NDArray[np.float64]) -> None:
        """add() of each: summed one by one, as a sum in pairs has other last bits."""
        self.total = float(np.cumsum(np.concatenate([[self.total], values]))[-1])
        self.number += len(values)

    @property
    def value(self) -> float:
        return self.total / self.number


@dataclass
class SiteMeans:
    """Mean duration of a site's ended jobs, by GPU count and overall."""

    by_gpus: dict[int, Mean] = field(default_factory=dict)
    overall: Mean = field(default_factory=Mean)

    def add(self, gpu_count: int, duration_s: float) -> None:
        if gpu_count not in self.by_gpus:
            self.by_gpus[gpu_count] = Mean()
        self.by_gpus[gpu_count].add(duration_s)
        self.overall.add(duration_s)

    def add_all(self, gpu_counts: npt.NDArray[np.int64], durations_s: npt.NDArray[np.float64]) -> None:
        """Add each one, as add() does."""
        for gpu_count in np.unique(gpu_counts).tolist():
            self.by_gpus.setdefault(gpu_count, Mean()).add_all(durations_s[gpu_counts == gpu_count])
        self.overall.add_all(durations_s)

    def estimate(self, gpu_count: int, case: Literal["user", "site"]) -> Estimate | None:
        """The mean of as many GPUs, else of any number; None before a job has ended."""
        if not self.overall.number:
            return None
        if gpu_count in self.by_gpus:
            mean = self.by_gpus[gpu_count]
            return Estimate(mean.value, case, mean.number)
        any_size: DurationCase = "user, any size" if case == "user" else "site, any size"
        return Estimate(self.overall.value, any_size, self.overall.number)

    def to_json(self) -> dict[str, object]:
        counts = {str(gpus): [mean.total, mean.number] for gpus, mean in sorted(self.by_gpus.items())}
        return {"by_gpus": counts, "overall": [self.overall.total, self.overall.number]}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> SiteMeans:
        """Rebuild the means from to_json's data. Raises KeyError, TypeError, or ValueError for other data."""
        by_gpus, overall = data["by_gpus"], data["overall"]
        if not isinstance(by_gpus, dict):
            raise TypeError("by_gpus is not a table")
        return cls({int(gpus): _mean(pair) for gpus, pair in by_gpus.items()}, _mean(overall))


def _mean(pair: object) -> Mean:
    if not isinstance(pair, list) or len(pair) != 2:
        raise TypeError(f"not a total and a number: {pair!r}")
    return Mean(float(pair[0]), int(pair[1]))


class _UserPast:
    """One user's ended jobs: means, and the newest runs of each family."""

    def __init__(self, max_runs: int) -> None:
        self.means = SiteMeans()
        self.families: OrderedDict[str, deque[tuple[int, float]]] = OrderedDict()
        self._similar: dict[str, list[str]] = {}
        self._max_runs = max_runs
        self._absorbed = 0

    def add(self, keys: Sequence[str], durations_s: Sequence[float]) -> None:
        """Add to the families alone, oldest first; means are added apart."""
        families = self.families
        for key, run in zip(keys, enumerate(durations_s, self._absorbed), strict=True):
            runs = families.get(key)
            if runs is None:
                runs = families[key] = deque(maxlen=self._max_runs)
                self._similar.clear()
                if len(families) > MAX_FAMILIES:
                    families.popitem(last=False)
            else:
                families.move_to_end(key)
            runs.append(run)
        self._absorbed += len(durations_s)

    def similar(self, key: str) -> list[str]:
        """Families whose key is at least this similar; remembered until a new family appears."""
        if key not in self._similar:
            keys, scorer = list(self.families), Levenshtein.normalized_similarity
            found = process.extract_iter(key, keys, scorer=scorer, processor=None, score_cutoff=SIMILARITY)
            if len(self._similar) == MAX_FAMILIES:
                self._similar.clear()
            self._similar[key] = [name for name, _, _ in found]
        return self._similar[key]

    def newest(self, keys: list[str], number: int) -> list[float]:
        """Durations of the newest runs of these families, newest first."""
        keys = sorted(keys, key=lambda key: self.families[key][-1], reverse=True)[:number]
        runs = heapq.merge(*(reversed(self.families[key]) for key in keys), reverse=True)
        return [duration_s for _, duration_s in islice(runs, number)]


class RollingEstimator:
    """Absorbs ended jobs in the order of their ends, and estimates the duration of the next one."""

    def __init__(self, site: SiteMeans | None = None) -> None:
        """site: the site's means where they are known from elsewhere (a trained model); else they are gathered."""
        self.site = site or SiteMeans()
        self._gathers_site = site is None
        self._users: dict[str, _UserPast] = {}

    def absorb(self, job: EndedJob) -> None:
        user = self._user(job.submission.user)
        user.add((job.submission.name_key,), (job.duration_s,))
        user.means.add(job.submission.gpu_count, job.duration_s)
        if self._gathers_site:
            self.site.add(job.submission.gpu_count, job.duration_s)

    def absorb_all(self, ended: pd.DataFrame) -> None:
        """Observe the ends of these rows of the history frame, oldest first, as absorb() does, but quicker."""
        keys = np.array(texts_of(ended["name_key"]), dtype=object)
        gpu_counts = ended["gpu_count"].fillna(0).to_numpy(dtype="int64")
        durations_s, _ = outcomes(ended)
        codes, names = pd.factorize(ended["user"].fillna(""))
        order, edges = by_number(codes)
        for name, first, last in zip(names.tolist(), edges[:-1], edges[1:], strict=True):
            user, rows = self._user(str(name)), order[first:last]
            user.add(keys[rows].tolist(), durations_s[rows].tolist())
            user.means.add_all(gpu_counts[rows], durations_s[rows])
        if self._gathers_site:
            self.site.add_all(gpu_counts, durations_s)

    def _user(self, name: str) -> _UserPast:
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = _UserPast(MAX_RUNS)
        return user

    def estimate(self, job: SubmittedJob) -> Estimate | None:
        """Estimate a job's duration; None before any job of the user or the site has ended."""
        user = self._users.get(job.user)
        if user is None:
            return self.site.estimate(job.gpu_count, "site")
        matched = user.similar(job.name_key) if is_family(job.name_key) else []
        if not matched:
            return user.means.estimate(job.gpu_count, "user")
        durations = user.newest(matched, MAX_RUNS)
        return Estimate(decayed_mean(durations, DECAY), "name", len(durations))


def decayed_mean(newest_first: list[float], decay: float) -> float:
    """Mean weighted by 1, decay, decay^2, ...; with decay 0 it is the newest value."""
    weights = [decay**age for age in range(len(newest_first))]
    return sum(weight * value for weight, value in zip(weights, newest_first, strict=True)) / sum(weights)
