"""Nodes in use per minute, from a Parquet or CSV file: one regular series with missing and unusable minutes marked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from almanac.errors import FileFormatError
from almanac.records import Counts
from telemetry.store.probe import require_readable

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GPU_COLUMNS = {"active": "running_gpu_num", "total": "total_gpu_num", "wanted": "pending_gpu_num"}
"""Columns of GPU counts (Helios, MIT) that stand in for node counts."""
WANTED_NAMES = ("wanted", "pending")
QUEUED_NAME = "queued_node_min"
MAX_HOLD_MIN = 10
"""A value holds for at most this long; a longer gap is missing."""
MAX_SPAN_DAYS = 3 * 366
OUTAGE_FRACTION, RECOVERED_FRACTION = 0.1, 0.5
SMALLEST_FOR_OUTAGE = 20.0
"""Below this many nodes an empty set is ordinary, not an outage."""
TYPICAL_MIN, MAX_OUTAGE_MIN = 1440, 1440
TOTAL_JUMP, MAX_JUMP_MIN = 0.1, 4320
OUTAGE, TOTAL_CHANGED, MISSING = "outage: active near zero, then back", "total jumps, then back", "missing"


@dataclass(frozen=True)
class NodeSeries:
    """Nodes of one node set per minute, from `start` on.

    active, total, wanted: (n_minutes,) nodes; NaN where missing, wanted NaN throughout if the file has none.
    queued: (n_minutes,) node-minutes that pending jobs will likely run for, NaN where not known; None: no such column.
    is_usable: minutes to train on and to score. marks: unusable minutes by reason. counts: rows of the file.
    """

    start: np.datetime64
    active: Floats
    total: Floats
    wanted: Floats
    is_usable: Bools
    marks: dict[str, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    queued: Floats | None = None

    def __len__(self) -> int:
        return len(self.active)

    def part(self, first: int, end: int) -> NodeSeries:
        """Minutes first .. end-1."""
        return NodeSeries(
            self.start + np.timedelta64(first, "m"), self.active[first:end], self.total[first:end],
            self.wanted[first:end], self.is_usable[first:end], self.marks, self.counts,
            None if self.queued is None else self.queued[first:end],
        )  # fmt: skip

    def times(self) -> NDArray[np.datetime64]:
        return self.start + np.arange(len(self)).astype("timedelta64[m]")

    def minute_of(self, when: np.datetime64) -> int:
        """Index of a timestamp, clipped to 0 .. n_minutes."""
        minutes = (when - self.start) / np.timedelta64(1, "m")
        return int(np.clip(np.ceil(minutes), 0, len(self)))


def read_node_series(path: Path, node_set: str = "", gpus_per_node: int = 8) -> NodeSeries:
    """Read `time`, `active`, `total` and, if present, `wanted` or `pending`, and `queued_node_min` from a file.

    It ends in .parquet or .csv.

    node_set: rows whose `vc` column has this value. Without `active` and `total`, GPU counts are divided by
    gpus_per_node and rounded up. Rows without a valid time or with impossible counts are dropped and counted.
    Raises FileFormatError.
    """
    frame = _node_columns(_of_set(_read(path), path, node_set), path, gpus_per_node)
    counts = Counts(seen=len(frame))
    frame = _good_rows(frame, counts)
    if frame.empty:
        raise FileFormatError(
            f"{path.name}: none of the {counts.seen} rows can be used ({_reasons(counts)})",
            "give rows with a time, and 0 <= active, 0 < total",
        )
    return _regular(frame, counts, path)


def _reasons(counts: Counts) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in counts.dropped.items()) or "the file is empty"


def _read(path: Path) -> pd.DataFrame:
    import pandas as pd

    readers: dict[str, Any] = {".parquet": pd.read_parquet, ".csv": pd.read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise FileFormatError(f"{path.name} ends in {path.suffix!r}", "give a .parquet or .csv file")
    if path.exists() and not path.is_file():
        raise FileFormatError(f"{path.name} is not a regular file", "give a .parquet or .csv file")
    if path.exists() and reader is pd.read_parquet:
        require_readable(path)
    try:
        frame: pd.DataFrame = reader(path)
    except (OSError, ValueError, ImportError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileFormatError(
            f"{path.name} cannot be read: {detail}", "check that it is a valid .parquet or .csv file"
        ) from error
    return frame


def _of_set(frame: pd.DataFrame, path: Path, node_set: str) -> pd.DataFrame:
    if "vc" not in frame:
        if node_set:
            raise FileFormatError(f"{path.name} has no column vc", "leave out --vc")
        return frame
    names = sorted(str(name) for name in frame["vc"].dropna().unique())
    if not node_set and len(names) == 1:
        return frame
    if node_set not in names:
        said = f"has no vc {node_set!r}" if node_set else f"holds {len(names)} virtual clusters"
        raise FileFormatError(f"{path.name} {said}", f"give --vc with one of: {', '.join(names[:40])}")
    return frame[frame["vc"].astype(str) == node_set]


def _node_columns(frame: pd.DataFrame, path: Path, gpus_per_node: int) -> pd.DataFrame:
    import pandas as pd

    if "time" not in frame:
        raise FileFormatError(f"{path.name} has no column time", "name the column of timestamps time")
    numbers = frame.drop(columns="time")
    is_nodes = {"active", "total"} <= set(frame)
    if not is_nodes and {GPU_COLUMNS["active"], GPU_COLUMNS["total"]} <= set(frame):
        numbers = pd.DataFrame({name: frame.get(column) for name, column in GPU_COLUMNS.items()})
        numbers = numbers.apply(pd.to_numeric, errors="coerce")
        numbers = np.ceil(numbers / gpus_per_node)
    elif not is_nodes:
        raise FileFormatError(
            f"{path.name} has columns {', '.join(map(str, frame.columns[:12]))}",
            "name the columns of nodes in use and of all nodes active and total",
        )
    wanted = next((numbers[name] for name in WANTED_NAMES if name in numbers), np.nan)
    found: pd.DataFrame = pd.DataFrame({"active": numbers["active"], "total": numbers["total"]}).assign(wanted=wanted)
    if QUEUED_NAME in numbers:
        found[QUEUED_NAME] = numbers[QUEUED_NAME]
    found = found.apply(pd.to_numeric, errors="coerce").astype(float)
    if QUEUED_NAME in found:
        found[QUEUED_NAME] = found[QUEUED_NAME].where(np.isfinite(found[QUEUED_NAME]) & (found[QUEUED_NAME] >= 0))
    found["time"] = _as_times(frame["time"])
    return found


def _as_times(values: pd.Series[Any]) -> pd.Series[Any]:
    """UTC without a zone; numbers are unix seconds; NaT where it is no time."""
    import pandas as pd

    unit: Any = "s" if pd.api.types.is_numeric_dtype(values) else None
    return pd.to_datetime(
        values, errors="coerce", utc=True, unit=unit, format=None if unit else "ISO8601"
    ).dt.tz_localize(None)


def _good_rows(frame: pd.DataFrame, counts: Counts) -> pd.DataFrame:
    numbers = frame[["active", "total"]]
    checks = {
        "without a valid time": frame["time"].isna().to_numpy(),
        "without active or total": ~np.isfinite(numbers.to_numpy()).all(axis=1),
        "with active below 0 or total below 1": ((frame["active"] < 0) | (frame["total"] < 1)).to_numpy(),
        "with active above total": (frame["active"] > frame["total"]).to_numpy(),
    }
    is_bad = np.zeros(len(frame), dtype=bool)
    for reason, failed in checks.items():
        hit = failed & ~is_bad
        if hit.any():
            counts.drop(reason, int(hit.sum()), " ".join(str(v) for v in frame[hit].iloc[0]))
        is_bad |= hit
    good = frame[~is_bad].sort_values("time", kind="stable")
    is_again = good.duplicated("time", keep="last").to_numpy()
    counts.drop("of a timestamp that occurs again later", int(is_again.sum()))
    good = good[~is_again]
    counts.kept = len(good)
    return good


def _regular(frame: pd.DataFrame, counts: Counts, path: Path) -> NodeSeries:
    """One value a minute: the highest of a minute with several rows, the last one held up to MAX_HOLD_MIN."""
    frame = frame.assign(minute=frame["time"].dt.floor("min"))
    days = (frame["minute"].iloc[-1] - frame["minute"].iloc[0]).days
    if days > MAX_SPAN_DAYS:
        raise FileFormatError(f"{path.name} spans {days} days", "check the time column, or cut the file")
    by_minute = frame.drop(columns="time").groupby("minute").max()
    regular = by_minute.asfreq("min").ffill(limit=MAX_HOLD_MIN - 1)
    columns = {str(name): regular[name].to_numpy(dtype=float) for name in regular}
    return marked_series(
        np.datetime64(regular.index[0].to_datetime64(), "m"), columns["active"], columns["total"], columns["wanted"],
        counts, columns.get(QUEUED_NAME),
    )  # fmt: skip


def marked_series(
    start: np.datetime64, active: Floats, total: Floats, wanted: Floats, counts: Counts, queued: Floats | None = None
) -> NodeSeries:
    """The series of these minutes, with missing and unusable ones marked."""
    marks = {MISSING: np.isnan(active), OUTAGE: find_outages(active), TOTAL_CHANGED: find_total_jumps(total)}
    return NodeSeries(
        start=start, active=active, total=total, wanted=wanted,
        is_usable=~np.logical_or.reduce(list(marks.values())),
        marks={reason: int(is_marked.sum()) for reason, is_marked in marks.items() if is_marked.any()}, counts=counts,
        queued=queued,
    )  # fmt: skip


def find_outages(active: Floats) -> Bools:
    """Minutes of a drop to at most 10% of the median of the day before that is back above half of it within a day.

    The fall and the climb next to it, below half of that median, are marked too. Sets that typically have fewer than
    20 nodes in use are left alone: there an empty set is ordinary.
    """
    import pandas as pd

    is_out = np.zeros(len(active), dtype=bool)
    typical = pd.Series(active).rolling(TYPICAL_MIN, min_periods=60).median().shift(1).to_numpy()
    low = np.flatnonzero((active <= OUTAGE_FRACTION * typical) & (typical >= SMALLEST_FOR_OUTAGE))
    done = -1
    for first in low.tolist():
        if first <= done:
            continue
        half = RECOVERED_FRACTION * typical[first]
        later = active[first : first + MAX_OUTAGE_MIN + 1]
        back = np.flatnonzero(later >= half)
        if not len(back):
            done = first + len(later)  # it did not come back: it may be the new normal
            continue
        done = first + int(back[0])
        begin = first
        while begin > 0 and active[begin - 1] < half:
            begin -= 1
        is_out[begin:done] = True
    return is_out


def find_total_jumps(total: Floats) -> Bools:
    """Minutes whose total differs by more than 10% from that before, and that end within 3 days where they began."""
    is_jump = np.zeros(len(total), dtype=bool)
    known = np.flatnonzero(~np.isnan(total))
    values = total[known]
    edges = np.flatnonzero(np.diff(values)) + 1
    bounds = np.concatenate([[0], edges, [len(values)]])
    usual = values[0]
    for begin, end in itertools.pairwise(bounds.tolist()):
        if abs(values[begin] - usual) <= TOTAL_JUMP * usual:
            usual = values[begin]
            continue
        limit = known[begin] + MAX_JUMP_MIN
        later = values[end:][known[end:] <= limit]
        if np.any(np.abs(later - usual) <= TOTAL_JUMP * usual):
            is_jump[known[begin] : known[end - 1] + 1] = True
        else:
            usual = values[begin]
    return is_jump
