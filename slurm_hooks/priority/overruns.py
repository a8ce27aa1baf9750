"""Users whose jobs take longer than the predictions in the record of site factors.

A user can change a job's name while it waits or runs. The prediction in the record stays.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping

import pandas as pd

from advisor.duration.features import without_parts
from advisor.duration.overrun import MIN_RUNS, Overrun, overrun_of
from advisor.duration.past import NEWEST
from slurm_hooks.priority.action_log import LoggedAction


def overruns(lines: Mapping[int, LoggedAction], history: pd.DataFrame, least_gpu_time_s: float) -> dict[str, Overrun]:
    """By user, how the ended jobs compare with the GPU-times behind their site factors.

    Of each user the newest NEWEST jobs on record count. Users with fewer than MIN_RUNS of them are left out.
    lines: of ActionLog.newest. history: of telemetry.history.load_history. least_gpu_time_s: shorter GPU-times have the
    same site factor as this one.
    """
    newest: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))
    told = {
        (line.job_id, line.submit_s): line.gpu_time_s
        for line in lines.values()
        if line.what in ("set", "agreed") and line.gpu_time_s is not None
    }
    ended = without_parts(history)
    ended = ended[ended["job_id"].isin(lines) & ended["end_s"].notna() & ended["elapsed_s"].notna()]
    columns = ended.sort_values(["end_s", "job_id"])[["job_id", "submit_s", "user", "elapsed_s", "gpu_count"]]
    for job_id, submit_s, user, elapsed_s, gpus in columns.itertuples(index=False, name=None):
        believed_s = told.get((job_id, submit_s))
        if believed_s is not None and pd.notna(gpus):
            taken_s = max(elapsed_s * gpus, least_gpu_time_s)
            newest[user].append(math.log(taken_s / max(believed_s, least_gpu_time_s)))
    return {user: overrun_of(each) for user, each in newest.items() if len(each) >= MIN_RUNS}
