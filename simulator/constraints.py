"""Node features that jobs ask for, as far as the simulated cluster knows them."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping

from simulator.cluster import Cluster
from simulator.workload import Workload

_FEATURE = re.compile(r"[\w.:-]+")


def plain_features(constraint: str) -> tuple[str, ...]:
    """Features that every node of a job must have: those of "a&b". Alternatives, counts, and negations are left out."""
    parts = (part.strip() for part in constraint.split("&"))
    return tuple(part for part in parts if _FEATURE.fullmatch(part))


def keep_known_features(workload: Workload, cluster: Cluster) -> tuple[Workload, Mapping[str, int]]:
    """The workload without features that no node set has, and the number of jobs by dropped text.

    A trace can come from another cluster than the simulated one: an unknown feature would hold up a job forever.
    """
    known = frozenset[str]().union(*(each.features for each in cluster.node_sets))
    kept: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for text, count in workload.jobs["constraint"].value_counts().items():
        features = [name for name in plain_features(str(text)) if name in known]
        kept[str(text)] = "&".join(features)
        if len(features) < len([part for part in str(text).split("&") if part]):
            dropped[str(text)] += int(count)
    if not dropped:
        return workload, {}
    jobs = workload.jobs.assign(constraint=workload.jobs["constraint"].map(kept))
    return dataclasses.replace(workload, jobs=jobs), dropped
