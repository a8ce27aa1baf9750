"""Outcomes of each job: completion time, queueing delay, and slowdown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.record import CANCELED, Record
from simulator.workload import Workload

Floats = npt.NDArray[np.float64]
BOUND_S = 10
"""Shorter run times count as this in the bounded slowdown (Feitelson et al., 1997)."""


@dataclass(frozen=True)
class JobOutcomes:
    """By job number; NaN for jobs that did not end.

    jct_s: job completion time, from submission to end. delay_s: queueing delay, all of that time in which the job did
    not run. slowdown: jct_s divided by the run time. bounded_slowdown: the same for run times of BOUND_S or more.
    is_canceled: canceled by its user while it waited.
    """

    jct_s: Floats
    delay_s: Floats
    slowdown: Floats
    bounded_slowdown: Floats
    is_canceled: npt.NDArray[np.bool_]

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether the job ended."""
        return np.isfinite(self.jct_s)


def job_outcomes(workload: Workload, record: Record) -> JobOutcomes:
    jct_s = np.where(record.end_s >= 0, record.end_s - workload.array("submit_s"), np.nan)
    ran_s = (record.end_s - record.last_start_s).astype("float64")
    for segment in record.segments:
        ran_s[segment.job] += segment.end_s - segment.start_s
    run_s = workload.array("run_s").astype("float64")
    return JobOutcomes(
        jct_s=jct_s,
        delay_s=jct_s - ran_s,
        slowdown=jct_s / run_s,
        bounded_slowdown=np.maximum(jct_s / np.maximum(run_s, BOUND_S), 1.0),
        is_canceled=record.state == CANCELED,
    )
