"""Falls of MFU: runs that reached clearly less of the GPU's peak than the newest runs of their family before.

Noise makes no fall. A run must be below all of LEAST_RUNS to NEWEST_RUNS comparable runs, by a share and by points, and
far outside of their spread. The run itself counts for the next one, so the same fall is found once.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from almanac.names import is_family
from almanac.units import span_text
from reports.job.job_report import FigureRow, MetricsRow
from slurm.states import ENDED_WELL
from telemetry.metrics.data_quality import OK

LEAST_RUNS, NEWEST_RUNS = 5, 10
_LOOKED_AT = 200
"""Runs of a family among which comparable ones are looked for: families of an array can have 100,000."""
HISTORY_DAYS = 120
LEAST_SHARE, LEAST_POINTS = 0.15, 0.02
"""A fall is at least so much of the lowest earlier MFU, and so much in itself."""
SIGMAS, LEAST_SPREAD = 6.0, 0.02
"""A fall is so many spreads of the earlier logarithms below their mean; a spread is at least LEAST_SPREAD."""
ALIKE, LEAST_S = 2.0, 600
"""Comparable runs took at most ALIKE times as long, or as short, and LEAST_S or more: start-up makes up short runs."""
_SAME = ("user", "name_key", "gpu_count", "gpu_model", "mig_profile", "main_pipe")
COLUMNS = ("job_id", "submit_s", "start_s", "end_s", "elapsed_s", "state", "verdict", "mfu_frac", *_SAME)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class MfuFall:
    """mfu: of the run; low, high: of `runs` comparable runs before it."""

    mfu: float
    low: float
    high: float
    runs: int

    @property
    def share(self) -> float:
        """The fall as a share of the lowest MFU before."""
        return 1 - self.mfu / self.low

    @property
    def before(self) -> str:
        """ "44% to 47%"."""
        return span_text(f"{100 * self.low:.0f}%", f"{100 * self.high:.0f}%")


def find_falls(rows: Iterable[Row]) -> dict[tuple[int, int], MfuFall]:
    """Falls by run (job_id, submit_s). rows: runs with COLUMNS, in any order."""
    families: dict[tuple[Any, ...], deque[Row]] = defaultdict(partial(deque, maxlen=_LOOKED_AT))
    found = {}
    for row in sorted(rows, key=lambda each: (each["end_s"], each["job_id"], each["submit_s"])):
        if _is_measured(row):
            before = families[tuple(row[name] for name in _SAME)]
            fall = fall_of(row, before)
            if fall is not None:
                found[row["job_id"], row["submit_s"]] = fall
            before.append(row)
    return found


def fall_of(run: Row, before: Sequence[Row]) -> MfuFall | None:
    """The fall of a run; None without one, or with too few comparable runs. before: of its family, oldest first."""
    ratios = ((row, row["elapsed_s"] / run["elapsed_s"]) for row in reversed(before))
    alike = list(islice((row for row, ratio in ratios if 1 / ALIKE <= ratio <= ALIKE), NEWEST_RUNS))
    if len(alike) < LEAST_RUNS:
        return None
    values = [row["mfu_frac"] for row in alike]
    fall = MfuFall(run["mfu_frac"], min(values), max(values), len(values))
    if fall.share < LEAST_SHARE or fall.low - fall.mfu < LEAST_POINTS:
        return None
    logs = [math.log(value) for value in values]
    mean = math.fsum(logs) / len(logs)
    spread = math.sqrt(math.fsum([(value - mean) ** 2 for value in logs]) / (len(logs) - 1))
    scale = max(spread, LEAST_SPREAD) * math.sqrt(1 + 1 / len(logs))
    return fall if mean - math.log(max(fall.mfu, 1e-9)) >= SIGMAS * scale else None


def _is_measured(row: Row) -> bool:
    mfu, elapsed_s = row["mfu_frac"], row["elapsed_s"]
    is_known = mfu is not None and 0 < mfu < math.inf and elapsed_s is not None and elapsed_s >= LEAST_S
    ended = (row["state"] or "").startswith(ENDED_WELL)
    return is_known and ended and row["verdict"] == OK and is_family(row["name_key"] or "")


def mfu_rows(metrics: MetricsRow, fall: MfuFall | None) -> list[FigureRow]:
    """The report's line; none where MFU is not known."""
    mfu = metrics.get("mfu_frac")
    if mfu is None:
        return []
    about = f"of the peak of the {pipe_text(metrics.get('main_pipe'))}, by activity and clock"
    if fall is not None:
        about = f"your last {fall.runs} runs reached {fall.before}"
    return [FigureRow("MFU", f"{100 * mfu:.0f}%" if mfu >= 0.1 else f"{100 * mfu:.1f}%", about)]


def pipe_text(name: str | None) -> str:
    """ "FP64 units" or "tensor cores"; "" if it is not known."""
    return "tensor cores" if name == "tensor" else f"{name.upper()} units" if name else ""
