"""Which pending jobs waited for nodes of a node set, when, and for how many: as it could be known at each time. Pure.

What a job becomes later decides nothing: neither the nodes that it gets, nor whether it starts at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from almanac.actions_config import NodeSet
from almanac.tiers import required_features
from telemetry.nodes.runs import Floats, highest_per_minute
from telemetry.store.job_columns import Bools, Ints, JobColumns

Split = Callable[[str], Iterable[str]]

NEVER_S, ALWAYS_S = 2**62, -(2**62)


@dataclass(frozen=True)
class NodeWaits:
    """Waits for nodes of the set: [begin_s, until_s), nodes that the job fills, and which of the jobs it is; (n,)."""

    begin_s: Ints
    until_s: Ints
    nodes: Floats
    job: Ints


def waits_of(jobs: JobColumns, is_started: Bools, ran: JobColumns, node_set: NodeSet, until_s: int) -> NodeWaits:
    """Waits of these jobs. ran: runs on nodes of the set. until_s: up to here what is still pending waits.

    A job waits from when it is eligible until it starts or is canceled. It counts where a run on the set's nodes had
    one of its partitions before, and where runs there required all features that it requires.
    """
    start, end = jobs.number["start_s"], jobs.number["end_s"]
    given_up = np.where(start >= 0, start, np.where(end >= 0, end, until_s))
    begin = np.maximum(np.maximum(jobs.number["eligible_s"], jobs.number["submit_s"]), _fits_from(jobs, ran, node_set))
    until = np.where(is_started, start, given_up)
    waited = np.flatnonzero(begin < until)
    return NodeWaits(begin[waited], until[waited], _filled(jobs, ran, waited, begin[waited]), waited)


def queued_per_minute(waits: NodeWaits, run_min: Floats, most: int, start_s: int, end_s: int) -> Floats:
    """(n_minutes,) node-minutes of the waits in each minute of [start_s, end_s): nodes, at most `most`, x run time.

    run_min: (n_waits,) minutes that each job will likely run for. NaN while one of them is not known.
    """
    is_known = ~np.isnan(run_min)
    amount = np.where(is_known, np.minimum(waits.nodes, most) * np.where(is_known, run_min, 0.0), 0.0)
    level = highest_per_minute(waits.begin_s, waits.until_s, amount, start_s, end_s)
    unknown = highest_per_minute(waits.begin_s, waits.until_s, (~is_known).astype(float), start_s, end_s)
    return np.where(unknown > 0, np.nan, np.maximum(level, 0.0))


def _fits_from(jobs: JobColumns, ran: JobColumns, node_set: NodeSet) -> Ints:
    """(n,) second from which it is known that a job can run on the set: the begin of the first runs like it there."""
    partitions = _first_seen(ran, "partition", lambda text: text.split(","), node_set.partition)
    features = _first_seen(ran, "constraints", required_features, node_set.feature)
    names, constraints = jobs.text["partition"], jobs.text["constraints"]
    in_partition = [
        min((partitions.get(name, NEVER_S) for name in text.split(",")), default=NEVER_S) if text else ALWAYS_S
        for text in names.texts
    ]
    has_features = [
        max((features.get(name, NEVER_S) for name in required_features(text)), default=ALWAYS_S)
        for text in constraints.texts
    ]
    return np.asarray(np.maximum(names.spread(in_partition), constraints.spread(has_features)), dtype=np.int64)


def _first_seen(ran: JobColumns, column: str, split: Split, always: str) -> dict[str, int]:
    """When the first run began whose text in this column holds the name; of the set's own name, always."""
    texts = ran.text[column]
    first = np.full(len(texts.texts), NEVER_S)
    np.minimum.at(first, texts.codes, ran.number["start_s"])
    found = {always: ALWAYS_S} if always else {}
    for text, begin_s in zip(texts.texts, first.tolist(), strict=True):
        for name in split(text):
            found[name] = min(found.get(name, NEVER_S), begin_s)
    return found


def _filled(jobs: JobColumns, ran: JobColumns, waited: Ints, begin_s: Ints) -> Floats:
    """Nodes that each job that waited fills: whole ones if it takes several, else its share, as of pending jobs now."""
    nodes = np.maximum(jobs.number["node_count"][waited], 1)
    share = np.zeros(len(nodes))
    for name in ("gpus", "gpu_share_count", "cpu_count"):
        used, most = jobs.number[name][waited], _largest_before(ran, name, begin_s)
        is_known = (most > 0) & (used > 0)
        fitting = np.maximum(1, most // np.maximum(used, 1))
        share = np.maximum(share, np.where(is_known, 1 / fitting, 0.0))
    return np.where((nodes > 1) | (share == 0), nodes, share)


def _largest_before(ran: JobColumns, name: str, times_s: Ints) -> Ints:
    """(n,) GPUs, their shards, or CPUs of a node of the set: the most that a run had per node up to each time; 0: not
    known.
    """
    order = np.argsort(ran.number["start_s"], kind="stable")
    per_node = (ran.number[name] // np.maximum(ran.number["node_count"], 1))[order]
    largest = np.concatenate([[0], np.maximum.accumulate(per_node)]) if len(order) else np.zeros(1, dtype=np.int64)
    return np.asarray(largest[np.searchsorted(ran.number["start_s"][order], times_s, side="right")])
