"""GPUs of a site in running jobs and in service, per minute and partition (Hu et al., SC'21, section 3.1).

GPUs in use in a minute are the GPU-seconds of its running jobs, divided by 60. A node is in service for the 30 days
before and after a job on it, with as many GPUs as accounting shows; where power runs counted the nodes of a node set,
with the share of them that was in use or usable. A minute without accounting is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import duckdb
import numpy as np
from numpy.typing import NDArray

from almanac.actions_config import NodeSet
from almanac.units import DAY_S
from slurm.host_index import HostIndex, Places
from slurm.hostlist import expand
from telemetry.power.demand import RUNAWAY_S, TOTAL_HOLD_MIN, held, known_span, read_counts, silences
from telemetry.power.series import MINUTE_S, Floats, Ints
from telemetry.store.store import ClusterStore

_Found = TypeVar("_Found")
SEEN_DAYS = 30
MOST_CELLS = 30_000_000
"""Minutes times partitions: three years of 20 partitions, 240 MB for each array. Earlier minutes are left out."""
_MOST_EXPANDED = 2_000
"""Host lists of several nodes that are written out for the names in them, largest first; others are looked up."""
GPUS = "coalesce(nullif(gpu_count, 0), gpu_count_req, 0)"
PLACE = "coalesce(partition, '')"
COLUMNS = (
    "user", "partition", "state", "submit_s", "eligible_s", "start_s", "end_s", "elapsed_s", "time_limit_s",
    "node_list", "node_count", "gpu_count", "gpu_count_req", "cpu_count", "cpu_count_req", "node_gpu_count",
)  # fmt: skip
_RUNS = f"""
SELECT {PLACE} AS place, {GPUS} AS gpus, coalesce(node_list, '') AS nodes, start_s, until_s AS end_s,
       coalesce(node_gpu_count, ceil({GPUS} / greatest(coalesce(node_count, 1), 1)), 0)::BIGINT AS gpus_of_node,
       coalesce(node_count, 1) AS node_count
FROM (SELECT *, CASE WHEN end_s IS NOT NULL THEN end_s
                     WHEN time_limit_s > 0 AND start_s + time_limit_s + {RUNAWAY_S} < $known_s
                     THEN start_s + time_limit_s ELSE greatest($known_s, start_s) END AS until_s FROM jobs)
WHERE start_s IS NOT NULL AND until_s > start_s AND gpus > 0
  AND start_s < $until_s + {SEEN_DAYS * DAY_S} AND until_s > $since_s - {SEEN_DAYS * DAY_S}
"""


@dataclass(frozen=True)
class MinuteUse:
    """GPUs from start_s on, a full minute, UTC. NaN where nothing is known.

    busy, capacity: (n_partitions, n_minutes), in the order of `partitions`. one_gpu: (n_minutes,), of jobs with
    one GPU. site_capacity: (n_minutes,); less than the sum of the partitions if they share nodes. is_counted: power
    runs counted some of the nodes.
    """

    start_s: int
    partitions: tuple[str, ...]
    busy: Floats
    capacity: Floats
    one_gpu: Floats
    site_capacity: Floats
    is_counted: bool = False

    def share(self) -> Floats:
        """Utilization of the site, (n_minutes,)."""
        return _ratio(self.busy.sum(axis=0), self.site_capacity)

    def shares(self) -> Floats:
        """Utilization of the partitions, (n_partitions, n_minutes)."""
        return _ratio(self.busy, self.capacity)

    def share_of_one_gpu(self) -> Floats:
        return _ratio(self.one_gpu, self.site_capacity)


def _ratio(part: Floats, whole: Floats) -> Floats:
    share: Floats = np.divide(part, whole, out=np.full(part.shape, np.nan), where=np.nan_to_num(whole) > 0)
    return share


def minute_use(store: ClusterStore, span_s: tuple[int, int], node_sets: Sequence[NodeSet] = ()) -> MinuteUse:
    """Load the use of the whole minutes of a span, or of the newest of them. Raises StoreError."""
    start_s, end_s = -(-span_s[0] // MINUTE_S) * MINUTE_S, span_s[1] // MINUTE_S * MINUTE_S
    known_s = known_span(store)
    with store.connect() as db:
        store.view(db, "jobs", COLUMNS)
        runs = _Runs.read(db, start_s, end_s, known_s[1])
        quiet = _unknown(db, known_s)
    start_s = max(start_s, end_s - MOST_CELLS // max(len(runs.places), 1) * MINUTE_S)
    size = max(0, (end_s - start_s) // MINUTE_S)
    busy = _busy(runs, runs.place, len(runs.places), start_s, size)
    one = runs.gpus == 1
    one_gpu = _busy(runs, np.where(one, 0, -1), 1, start_s, size)[0]
    counted = [(each, _counts(store, each, start_s, size)) for each in node_sets]
    capacity, site = _capacity(runs, start_s, size, counted)
    capacity = np.where(capacity > 0, np.maximum(capacity, busy), np.nan)
    site = np.where(site > 0, np.maximum(site, busy.sum(axis=0)), np.nan)
    for first_s, last_s in quiet:
        lost = slice(max(0, (first_s - start_s) // MINUTE_S), max(0, -(-(last_s - start_s) // MINUTE_S)))
        for values in (busy, capacity, one_gpu, site):
            values[..., lost] = np.nan
    is_counted = any(bool(np.isfinite(counts).any()) for _, counts in counted)
    return MinuteUse(start_s, runs.places, busy, capacity, one_gpu, site, is_counted)


def _unknown(db: duckdb.DuckDBPyConnection, known_s: tuple[int, int]) -> list[tuple[int, int]]:
    found = db.sql("SELECT submit_s, coalesce(start_s, -1) s, coalesce(end_s, -1) e FROM jobs").fetchnumpy()
    submit, start, end = (np.asarray(found[name], dtype=np.int64) for name in ("submit_s", "s", "e"))
    far = 2**40
    return [(-far, known_s[0]), (known_s[1], far), *silences(submit, start, end, known_s)]


@dataclass(frozen=True)
class _Runs:
    """Runs on GPUs, each (n,): place is a number among `places`, nodes among `node_lists`."""

    places: tuple[str, ...]
    node_lists: tuple[str, ...]
    place: Ints
    nodes: Ints
    gpus: Ints
    gpus_of_node: Ints
    node_count: Ints
    start_s: Ints
    end_s: Ints

    @classmethod
    def read(cls, db: duckdb.DuckDBPyConnection, since_s: int, until_s: int, known_s: int) -> _Runs:
        table = db.sql(_RUNS, params={"since_s": since_s, "until_s": until_s, "known_s": known_s}).to_arrow_table()
        texts, codes = list[tuple[str, ...]](), list[Ints]()
        for name in ("place", "nodes"):
            column = table[name].combine_chunks().dictionary_encode()
            texts.append(tuple(column.dictionary.to_pylist()))
            codes.append(np.asarray(column.indices, dtype=np.int64))
        names = ("gpus", "gpus_of_node", "node_count", "start_s", "end_s")
        numbers = {name: np.asarray(table[name], dtype=np.int64) for name in names}
        return cls(texts[0], texts[1], codes[0], codes[1], **numbers)


def _busy(runs: _Runs, group: Ints, groups: int, start_s: int, size: int) -> Floats:
    """GPUs in use, (groups, size). group: -1 for runs that do not count."""
    level = np.zeros(groups * (size + 2))
    chosen = group >= 0
    for times, sign in ((runs.start_s, 1.0), (runs.end_s, -1.0)):
        minute, second = np.divmod(np.clip(times[chosen] - start_s, 0, size * MINUTE_S), MINUTE_S)
        at, amount = group[chosen] * (size + 2) + minute, sign * runs.gpus[chosen]
        level += np.bincount(at, amount * (1 - second / MINUTE_S), len(level))
        level += np.bincount(at + 1, amount * (second / MINUTE_S), len(level))
    found = np.cumsum(level.reshape(groups, size + 2), axis=1)[:, :size]
    return np.where(found < 1e-6, 0.0, found)


def _capacity(runs: _Runs, start_s: int, size: int, counted: Sequence[tuple[NodeSet, Floats]]) -> tuple[Floats, Floats]:
    """GPUs of nodes in service: of each partition, and of the site."""
    index, hosts = _hosts_of(runs)
    length = np.array([len(each) for each in hosts], dtype=np.int64)[runs.nodes]
    host = np.concatenate([hosts[code] for code in runs.nodes.tolist()] or [np.empty(0, dtype=np.int32)])
    gpus = np.zeros(len(index.names))
    np.maximum.at(gpus, host, np.repeat(runs.gpus_of_node, length))
    days = size * MINUTE_S // DAY_S + 1
    first = np.clip((runs.start_s - start_s) // DAY_S - SEEN_DAYS, 0, days).repeat(length)
    last = np.clip((runs.end_s - start_s) // DAY_S + SEEN_DAYS + 1, 0, days).repeat(length)
    place = runs.place.repeat(length)
    minute_day = np.arange(size) * MINUTE_S // DAY_S
    is_any = np.zeros((len(gpus), days), dtype=np.bool_)
    found = np.zeros((len(runs.places), size))

    def of(is_seen: NDArray[np.bool_]) -> Floats:
        per_day = gpus @ is_seen
        total: Floats = per_day[minute_day]
        for node_set, counts in counted:
            is_member = _members(node_set, index, runs, place, host)
            in_set, seen = (gpus * is_member) @ is_seen, is_member @ is_any.astype(float)
            share = np.divide(counts, seen[minute_day], out=np.ones(size), where=seen[minute_day] > 0)
            total = total - in_set[minute_day] * (1 - np.clip(np.nan_to_num(share, nan=1.0), 0, 1))
        return total

    parts = []
    for number in range(len(runs.places)):
        own = place == number
        steps = np.zeros((len(gpus), days + 1), dtype=np.int32)
        np.add.at(steps, (host[own], first[own]), 1)
        np.add.at(steps, (host[own], last[own]), -1)
        parts.append(np.cumsum(steps, axis=1)[:, :days] > 0)
        is_any |= parts[-1]
    for number, is_seen in enumerate(parts):
        found[number] = of(is_seen)
    return found, of(is_any)


def _hosts_of(runs: _Runs) -> tuple[HostIndex, list[Places]]:
    """The nodes, and for each node list of the runs their places among them. A list that cannot be read has none."""
    size = dict(zip(runs.nodes.tolist(), runs.node_count.tolist(), strict=True))
    texts = runs.node_lists
    several = sorted((code for code, text in enumerate(texts) if "[" in text or "," in text), key=lambda c: -size[c])
    names = {text for text in texts if text and "[" not in text and "," not in text}
    for code in several[:_MOST_EXPANDED]:
        names.update(_tried(texts[code], expand, ()))
    index = HostIndex(names)
    nobody = np.empty(0, dtype=np.int32)
    return index, [_tried(text, index.places, nobody) for text in texts]


def _tried(text: str, read: Callable[[str], _Found], otherwise: _Found) -> _Found:
    try:
        return read(text)
    except ValueError:
        return otherwise


def _counts(store: ClusterStore, node_set: NodeSet, start_s: int, size: int) -> Floats:
    """Nodes of a set that power runs saw in use or usable, (size,); NaN without a power run in the day before."""
    live = read_counts(store, node_set.name, start_s - DAY_S, start_s + size * MINUTE_S)
    return held(live.time_s, live.total, start_s, size, TOTAL_HOLD_MIN)


def _members(node_set: NodeSet, index: HostIndex, runs: _Runs, place: Ints, host: Ints) -> NDArray[np.bool_]:
    """Flags of the nodes of a set by name or partition. Accounting does not know a node's features."""
    found = np.zeros(len(index.names), dtype=np.bool_)
    if node_set.nodes:
        found[_tried(node_set.nodes, index.places, np.empty(0, dtype=np.int32))] = True
    if node_set.partition in runs.places:
        found[host[place == runs.places.index(node_set.partition)]] = True
    return found
