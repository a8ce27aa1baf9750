"""Memory of running jobs that fills up: points of each job's fullest GPU, and the jobs that will run out of it.

The law of growth is that of almanac-restart (advisor/memory/restart.py), which restarts no job that is not sure to run
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.memory.restart import ExpectedEnd, GrowthWatch

MOST_GROWING, MOST_FITTED, MOST_POINTS = 1000, 100, 48
"""Jobs whose memory is noted, those that are fitted in one round (the fullest), and points of each."""
GROWING_SHARE, FITTED_SHARE = 0.5, 0.8
Points = dict[str, list[tuple[float, float]]]
"""By run of a job, "job_id.start_s": times since its start, s, and MiB."""


@dataclass(frozen=True)
class WatchedMemory:
    """Memory of the GPUs of a round. keys: the run of each job. job: place of each GPU's job.

    used_mib, total_mib: NaN if unknown. is_seen: flags of the GPUs with samples of their job's own time.
    """

    keys: Sequence[str]
    job: npt.NDArray[np.int64]
    used_mib: npt.NDArray[np.float64]
    total_mib: npt.NDArray[np.float64]
    is_seen: npt.NDArray[np.bool_]


def growing(
    memory: WatchedMemory, jobs: Mapping[str, Sequence[Any]], at_s: int, before: Mapping[str, list[tuple[float, float]]]
) -> tuple[Points, list[tuple[int, dict[str, Any]]]]:
    """Note the memory of the fullest GPU of jobs that use most of theirs.

    jobs: columns of round.JOBS. before: as noted until now. Return what is noted, and rows of GPUs that run full, with
    numbers about them.
    """
    used, total, keys = memory.used_mib, memory.total_mib, memory.keys
    full = np.where(used <= total, used / total, np.nan)
    rows = np.flatnonzero((full >= GROWING_SHARE) & memory.is_seen)
    fullest = {int(memory.job[row]): int(row) for row in rows[np.argsort(full[rows])].tolist()}
    growth: Points = {key: before[key] for job, key in enumerate(keys) if key in before and job not in fullest}
    found, fitted = list[tuple[int, dict[str, Any]]](), 0
    for job in sorted(fullest, key=lambda each: -full[fullest[each]])[:MOST_GROWING]:
        start_s, row = jobs["start_s"][job], fullest[job]
        points = _thinned([*before.get(keys[job], ()), (float(at_s - start_s), float(used[row]))])
        growth[keys[job]] = points
        if full[row] < FITTED_SHARE or points[-1][1] <= points[len(points) // 2][1] or fitted >= MOST_FITTED:
            continue
        fitted += 1
        end_s = jobs["limit_end_s"][job]
        watch = GrowthWatch(float(total[row]), ExpectedEnd(limit_s=end_s - start_s if end_s is not None else None))
        full_s = [watch.observe(*point) for point in points][-1]
        if full_s is not None:
            numbers = {"full_s": int(start_s + full_s), "of_mib": float(total[row]), "used_mib": float(used[row])}
            found.append((row, numbers))
    return growth, found


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points; past MOST_POINTS, of each two neighbors the higher one, but for the newest."""
    if len(points) <= MOST_POINTS:
        return points
    pairs = zip(points[:-1:2], points[1:-1:2], strict=False)
    return [*(max(pair, key=lambda point: point[1]) for pair in pairs), points[-1]]
