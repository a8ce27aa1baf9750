"""Nodes of a node set per minute: runs on them, and a series with missing and unusable minutes marked.

`read_node_series` reads one from a Parquet or CSV file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from almanac.errors import FileFormatError
from almanac.records import Counts
from almanac.units import DAY_S
from telemetry.store.database import require_readable

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
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

    node_set: rows whose `vc` column has this value; several values, separated by commas, are one pool. Without `active`
    and `total`, GPU counts are divided by gpus_per_node and rounded up. Rows without a valid time or with impossible
    counts are dropped and counted. Raises FileFormatError.
    """
    if "," in node_set:
        return pooled([read_node_series(path, name.strip(), gpus_per_node) for name in node_set.split(",")])
    frame = _node_columns(_of_set(_read(path), path, node_set), path, gpus_per_node)
    counts = Counts(seen=len(frame))
    frame = _good_rows(frame, counts)
    if frame.empty:
        reasons = ", ".join(f"{number} {reason}" for reason, number in counts.dropped.items()) or "the file is empty"
        raise FileFormatError(
            f"{path.name}: none of the {counts.seen} rows can be used ({reasons})",
            "give rows with a time, and 0 <= active, 0 < total",
        )
    return _regular(frame, counts, path)


def pooled(parts: Sequence[NodeSeries]) -> NodeSeries:
    """One series of the nodes of all parts, over the minutes that all have. Pending jobs are not pooled."""
    start = max(part.start for part in parts)
    first = [int((start - part.start) / np.timedelta64(1, "m")) for part in parts]
    size = max(0, min(len(part) - begin for part, begin in zip(parts, first, strict=True)))
    cut = [part.part(begin, begin + size) for part, begin in zip(parts, first, strict=True)]
    counts = Counts(seen=sum(part.counts.seen for part in parts), kept=sum(part.counts.kept for part in parts))
    return NodeSeries(
        start, np.sum([part.active for part in cut], axis=0), np.sum([part.total for part in cut], axis=0),
        np.full(size, np.nan), np.all([part.is_usable for part in cut], axis=0), counts=counts,
    )  # fmt: skip


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
    """UTC without a zone; numbers are unix seconds; NaT for anything but a time."""
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


Tick = Callable[[float, float, str], None]

MINUTE_S = 60
MAX_PAIRS = 4_000_000
"""Nodes of runs that are in memory at once, unless a single hour has more."""


def no_tick(done: float, total: float, note: str) -> None:
    """Shows no progress."""


@dataclass(frozen=True)
class NodeRuns:
    """Runs that used nodes of a set, in order of their start: [start_s, end_s), and which of the set's nodes.

    nodes: for each different node list the set's nodes in it, by index; node_list: (n_runs,) which of them.
    """

    start_s: Ints
    end_s: Ints
    node_list: Ints
    nodes: tuple[NDArray[np.int32], ...]

    def __len__(self) -> int:
        return len(self.start_s)

    def windows(self, start_s: int, end_s: int) -> Iterator[tuple[int, int]]:
        """Cut [start_s, end_s) at full minutes into parts of a day, or less if a part would have too many pairs."""
        sizes = np.array([len(nodes) for nodes in self.nodes], dtype=np.int64)
        low_s = start_s
        while low_s < end_s:
            length_s = DAY_S
            while length_s > MINUTE_S * 60:
                chosen = (self.start_s < low_s + length_s) & (self.end_s > low_s)
                if sizes[self.node_list[chosen]].sum() <= MAX_PAIRS:
                    break
                length_s = length_s // (2 * MINUTE_S) * MINUTE_S
            yield low_s, min(low_s + length_s, end_s)
            low_s += length_s

    def pairs(self, low_s: int, high_s: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Run, node, start, and end of each node of each run within [low_s, high_s), times cut to it."""
        chosen = np.flatnonzero((self.start_s < high_s) & (self.end_s > low_s))
        lists = [self.nodes[which] for which in self.node_list[chosen].tolist()]
        sizes = np.fromiter(map(len, lists), np.int64, len(lists))
        node = np.concatenate(lists).astype(np.int64) if lists else np.empty(0, np.int64)
        run = np.repeat(chosen, sizes)
        return run, node, np.maximum(self.start_s[run], low_s), np.minimum(self.end_s[run], high_s)


def in_use_per_minute(runs: NodeRuns, start_s: int, end_s: int, tick: Tick = no_tick) -> Floats:
    """(n_minutes,) nodes in use, the highest of the seconds of each minute of [start_s, end_s), whole minutes.

    Part by part, so that memory is bounded.
    """
    parts = []
    for low_s, high_s in runs.windows(start_s, end_s):
        tick(low_s - start_s, end_s - start_s, "nodes in use")
        _, node, begin, until = runs.pairs(low_s, high_s)
        begin, until, _ = merged(node, begin, until)
        parts.append(highest_per_minute(begin, until, np.ones(len(begin)), low_s, high_s))
    return np.concatenate(parts) if parts else np.empty(0)


def merged(node: Ints, begin: Ints, until: Ints) -> tuple[Ints, Ints, Ints]:
    """Spans in which a node is in use, of spans in which a job uses it: those that touch or overlap become one.

    Begin and end of each, and the place of the given span that begins it.
    """
    if not len(node):
        return begin, until, np.empty(0, dtype=np.int64)
    order = np.lexsort((begin, node))
    node, begin, until = node[order], begin[order], until[order]
    # Each node's times are moved above those of the nodes before it, so that one running maximum serves all.
    width = int(until.max() - begin.min()) + 1
    reached = np.maximum.accumulate(until + node * width) - node * width
    first = np.flatnonzero(np.r_[True, (node[1:] != node[:-1]) | (begin[1:] > reached[:-1])])
    return begin[first], reached[np.r_[first[1:] - 1, len(node) - 1]], order[first]


def highest_per_minute(begin: Ints, until: Ints, amount: Floats, start_s: int, end_s: int) -> Floats:
    """(n_minutes,) highest sum of the amounts of the spans [begin, until) in the seconds of each minute."""
    size = (end_s - start_s) // MINUTE_S
    inside = (begin < end_s) & (until > start_s) & (until > begin)
    begin, until, amount = np.maximum(begin[inside], start_s), until[inside], amount[inside]
    if not len(begin):
        return np.zeros(size)
    is_end = until < end_s
    times = np.concatenate([begin, until[is_end]]) - start_s
    seconds, place = np.unique(times, return_inverse=True)
    levels = np.cumsum(np.bincount(place, np.concatenate([amount, -amount[is_end]]), len(seconds)))
    highest = np.full(size, -np.inf)
    np.maximum.at(highest, seconds // MINUTE_S, levels)
    # A minute begins with the level after the last change at or before it.
    last = np.searchsorted(seconds, np.arange(size) * MINUTE_S, side="right") - 1
    carried = np.where(last >= 0, levels[np.maximum(last, 0)], 0.0)
    return np.asarray(np.maximum(highest, carried))
