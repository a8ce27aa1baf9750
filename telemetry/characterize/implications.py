"""One sentence for each implication of Hu et al. (SC'21), with this site's number and what to set."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from almanac.units import counted, format_duration, printable

SHORT_S, DEBUG_NODES, DEBUG_S, USUAL_NODE_GPUS = 120, 2, 600, 8
"""A failed job is short up to SHORT_S. A debug partition of DEBUG_NODES and a limit of DEBUG_S is tried on the record;
its nodes have USUAL_NODE_GPUS where accounting does not know how many."""
IDLE_UTIL, BUSY_UTIL, DAILY_SPREAD, LEAST_DELAY_S = 0.5, 0.8, 0.02, 60
"""Mean utilization of an idle and of a busy partition; the least difference between hours that is a daily pattern; the
mean delay from which on jobs wait."""
_SHORT = """
SELECT submit_s, ran_s, gpus, coalesce(node_gpu_count, 0) AS node_gpus, delay_s,
       (SELECT count(*) FROM ended WHERE is_gpu)
FROM ended WHERE is_gpu AND outcome = 'failed' AND start_s IS NOT NULL AND ran_s <= $short_s ORDER BY submit_s"""


@dataclass(frozen=True)
class DebugPartition:
    """Short failed GPU jobs: their share of all, median delay (s), and the share that a debug partition would take."""

    jobs: int
    share: float
    median_delay_s: float
    node_gpus: int
    taken_share: float


def debug_partition(db: duckdb.DuckDBPyConnection) -> DebugPartition | None:
    """Replay the short failed jobs of the table `ended`: each starts at its submission, if its GPUs are free then.

    None without such jobs.
    """
    rows = db.sql(_SHORT, params={"short_s": SHORT_S}).fetchall()
    if not rows:
        return None
    sizes, delays = sorted(row[3] for row in rows if row[3]), sorted(row[4] for row in rows)
    node_gpus = sizes[len(sizes) // 2] if sizes else USUAL_NODE_GPUS
    free, taken, running = DEBUG_NODES * node_gpus, 0, list[tuple[int, int]]()
    for submit_s, ran_s, gpus, *_ in rows:
        while running and running[0][0] <= submit_s:
            free += heapq.heappop(running)[1]
        if gpus <= free:
            taken, free = taken + 1, free - gpus
            heapq.heappush(running, (submit_s + ran_s, gpus))
    return DebugPartition(len(rows), len(rows) / rows[0][5], delays[len(delays) // 2], node_gpus, taken / len(rows))


def implications(tables: Mapping[str, pa.Table], debug: DebugPartition | None) -> Iterator[tuple[str, str]]:
    """(subject, sentence) of what the tables show; nothing where they do not show it."""
    rows = {name: table.to_pylist() for name, table in tables.items()}
    hours = [row for row in rows["by_hour"] if row["weekday"] == "all" and row["mean_util"] is not None]
    if hours:
        low, high = (choose(hours, key=lambda row: row["mean_util"]) for choose in (min, max))
        said = f"{_share(low['mean_util'])} at {low['hour']:02}:00, {_share(high['mean_util'])} at {high['hour']:02}:00"
        daily = high["mean_util"] - low["mean_util"] >= DAILY_SPREAD
        then = (
            f"plan maintenance for {low['hour']:02}:00, and try `almanac trial power`" if daily else "no daily pattern"
        )
        yield "time", f"GPUs in use: {said}; {then}."
    yield from _of_partitions([row for row in rows["partitions"] if row["mean_util"] is not None and row["jobs"]])
    for row in rows["user_shares"]:
        if row["quantity"] == "gpu_time" and row["top_frac"] == 0.05 and row["share"]:
            then = "PriorityWeightFairshare decides how long others wait for them"
            yield "user", f"5% of users ({row['users']}) used {_share(row['share'])} of the GPU time: {then}."
    if marquee := rows["marquee_users"]:
        delay, gpu_time = (sum(row[name] or 0.0 for row in marquee) for name in ("delay_share", "gpu_time_share"))
        whose = f"{counted(len(marquee), 'user')} with {_share(gpu_time)} of the GPU time"
        then = "priority.relief_points lets jobs start sooner whose users wait most"
        yield "user", f"{whose} had {_share(delay)} of all waiting: {then}."
    yield from _of_states(rows, debug)


def _of_partitions(used: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    idle = min(used, key=lambda row: row["mean_util"], default=None)
    busy = max(used, key=lambda row: (row["mean_util"] > BUSY_UTIL, row["mean_delay_s"] or 0.0), default=None)
    if idle is None or busy is None or idle["mean_util"] >= IDLE_UTIL or busy["mean_util"] <= BUSY_UTIL:
        return
    if (busy["mean_delay_s"] or 0.0) > LEAST_DELAY_S:
        has = f"{_name(idle)} has {_share(idle['mean_util'])} of its {idle['gpus']:.0f} GPUs in use"
        wait = f"jobs of {_name(busy)} ({_share(busy['mean_util'])}) wait {format_duration(busy['mean_delay_s'])}"
        then = f"list the nodes of {_name(idle)} in a second partition for them (PriorityTier, PreemptMode=REQUEUE)"
        yield "partition", f"{has}, while {wait} on average: {then}."


def _of_states(rows: Mapping[str, list[dict[str, Any]]], debug: DebugPartition | None) -> Iterator[tuple[str, str]]:
    for row in rows["sizes"]:
        if row["gpus_from"] == 1 and row["gpu_time_share"] is not None:
            part = f"{_share(row['share'])} of the GPU jobs and {_share(row['gpu_time_share'])} of the GPU time"
            yield "state", f"Jobs with one GPU are {part}: what larger jobs ask for decides how much is in use."
    for row in rows["states"]:
        if row["kind"] == "GPU" and row["outcome"] == "canceled" and row["gpu_time_share"] is not None:
            then = "`almanac watch` tells which jobs idle before that"
            yield "state", f"Canceled jobs used {_share(row['gpu_time_share'])} of the GPU time: {then}."
    if debug:
        failed = f"{_share(debug.share)} of the GPU jobs failed within {format_duration(SHORT_S)}"
        wait = f"after a wait of {format_duration(debug.median_delay_s)} (median)"
        what = f"a debug partition of {DEBUG_NODES} nodes with {debug.node_gpus} GPUs each and MaxTime={DEBUG_S // 60}"
        yield "state", f"{failed}, {wait}: {what} would start {_share(debug.taken_share)} of them at once."


def _name(row: Mapping[str, Any]) -> str:
    return printable(str(row["partition"]), 40) or "(no partition)"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"
