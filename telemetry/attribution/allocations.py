"""Attribute GPUs to jobs: which GPU belonged to which job, and when.

sacct says which nodes a job had and how many GPUs in all, but not which ones. A job that had every GPU of its nodes
owns them by host and time; any other needs a binding: the exporter's label, a prolog record or squeue's gres_detail,
in this order. GPUs that nothing assigns belong to no job.
A job with a part of a GPU (shard, MPS) owns the GPU only if no other job had a part of it at any time of the job.

Slurm and an exporter may write one host in two ways: nl2 and NL2, nid001 and nid001.cluster.example, n1 and n1:9400.
So names are compared without case, port, and domain. Hosts that differ only in their domain stay separate.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations

import pyarrow as pa
import pyarrow.compute as pc

from slurm.hostlist import expand
from telemetry.attribution.seen_units import CONTRADICTED, Binding, Inventory, Unit, days_of, units_of
from telemetry.store.schema import schema_of, table_of

UNBOUND = "shared node without GPU binding"
UNBOUND_COUNT = f"{UNBOUND} (GPUs per node unknown)"
DOUBLY_BOUND = "GPU bound to two jobs at once"
NO_NODES = "node list missing or unreadable"
SHARED_GPU = "GPU shared with another job"

# A prolog runs just before the start that accounting records.
_PROLOG_LEAD_S = 300


@dataclass(frozen=True)
class JobRun:
    """One run of a GPU job that has ended: half-open [start_s, end_s). A requeued run is a job of its own.

    hosts is () where the node list cannot be read. gpu_type: GRES type that it was given or asked for; "" for none.
    shares: shards, or parts under MPS, of one GPU on each host; gpu_count is then the number of these GPUs.
    """

    job_id: int
    submit_s: int
    start_s: int
    end_s: int
    gpu_count: int
    hosts: tuple[str, ...]
    user: str = ""
    account: str = ""
    partition: str = ""
    gpu_type: str = ""
    shares: int = 0

    @property
    def elapsed_s(self) -> int:
        return self.end_s - self.start_s


@dataclass
class Attribution:
    """The owner of each GPU. Jobs are named by their place in the list that was given.

    allocations: one row per job and unit: job, host, gpu, mig, start_ms, end_ms. No two allocations of a unit overlap.
    origin: where a job's allocations come from: "whole node", "label", "prolog" or "squeue".
    failed: why a job has no allocations.
    """

    allocations: pa.Table
    origin: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def of_first(self, number: int) -> Attribution:
        """Return the attribution of the jobs before place `number`."""
        return Attribution(
            self.allocations.filter(pc.field("job") < number),
            {place: origin for place, origin in self.origin.items() if place < number},
            {place: why for place, why in self.failed.items() if place < number},
        )


ALLOCATIONS = schema_of("job int32, host string, gpu int16, mig string, start_ms int64, end_ms int64")

_Allocations = dict[int, list[tuple[str, Unit]]]
_Place = tuple[str, int, str]
"""Host, GPU index and MIG instance id."""


@dataclass
class _Bound:
    """The units in the records of a job, by origin, and why records were not believed."""

    units: dict[str, set[_Place]] = field(default_factory=lambda: defaultdict(set))
    doubts: set[str] = field(default_factory=set)


def parse_hosts(node_list: str | None) -> tuple[str, ...]:
    """Hosts of a Slurm hostlist such as "n[1-3,7]", sorted; () where there are none or it cannot be read."""
    try:
        return tuple(sorted(expand(node_list or "")))
    except ValueError:
        return ()


def attribute(
    jobs: Sequence[JobRun],
    inventory: Inventory,
    labeled: Mapping[int, Iterable[tuple[str, int, str]]],
    bindings: Sequence[Binding],
    sizes: Mapping[str, int] | None = None,
) -> Attribution:
    """Allocations of every job whose GPUs are known.

    labeled: units (host, gpu, mig) that carry the job's own label on its own hosts and in its own time
    (`shared_jobs` says for which jobs it is looked at). sizes: as `shared_jobs` takes them.
    """
    shared = set(shared_jobs(jobs, inventory, sizes))
    result = Attribution(ALLOCATIONS.empty_table())
    records = _records_by_job(jobs, inventory, bindings) if shared else {}
    allocations: _Allocations = {}
    for number, job in enumerate(jobs):
        if not job.hosts:
            result.failed[number] = NO_NODES
        elif number not in shared:
            seen = ((host, inventory.of(host, job.start_s, job.end_s)) for host in job.hosts)
            allocations[number] = [(host, unit) for host, units in seen for unit in sorted(units)]
            result.origin[number] = "whole node"
        else:
            bound = records.get(number, _Bound())
            bound.units["label"] = set(labeled.get(number, ()))
            _allocate_bound(number, job, inventory, bound, allocations, result)
    for number in _beside_unknown(jobs, allocations) | _overlapping(jobs, allocations):
        del allocations[number]
        del result.origin[number]
        result.failed[number] = SHARED_GPU if jobs[number].shares else DOUBLY_BOUND
    result.allocations = _table(jobs, allocations)
    return result


def shared_jobs(jobs: Sequence[JobRun], inventory: Inventory, sizes: Mapping[str, int] | None = None) -> list[int]:
    """Places of the jobs that cannot be told to own every GPU of their nodes.

    A job owns its nodes where its GPUs are as many as those of all its nodes (hosts without telemetry are taken to
    be as large as the largest seen), and no other job with GPUs was there at any time of it. sizes: GPUs of each host
    as Slurm has them at this time; without them all hosts count as seen, with them no job owns another host.
    """
    largest: dict[tuple[str, int], int] = defaultdict(int)
    for job in jobs:
        # MIG instances are counted as GPUs: they say nothing of the node's GPUs at another time.
        if len(job.hosts) == 1 and not any(mig for _, mig in inventory.of(job.hosts[0], job.start_s, job.end_s)):
            for place in _places(job, job.hosts[0]):
                largest[place] = max(largest[place], job.gpu_count)
    crowded = _crowded(jobs)
    found = []
    for number, job in enumerate(jobs):
        seen = [
            _size(
                inventory.of(host, job.start_s, job.end_s), max(largest.get(place, 0) for place in _places(job, host))
            )
            for host in job.hosts
        ]
        needed = sum(size or max(seen) for size in seen)
        if sizes is not None:
            by_slurm = [sizes.get(host, sys.maxsize) for host in job.hosts]
            needed = sum(map(max, seen, by_slurm))
        if job.hosts and (number in crowded or job.gpu_count < needed):
            found.append(number)
    return found


def _places(job: JobRun, host: str) -> Iterator[tuple[str, int]]:
    return ((host, day) for day in days_of(job.start_s, job.end_s))


def _size(units: frozenset[Unit], known: int) -> int:
    """Count the GPUs of a host: those seen, up to the highest index, or as many as one job had; 0 if none was seen.

    known: the most that a single-node job had there on these days.
    """
    if not units:
        return 0
    if any(mig for _, mig in units):
        return len(units)
    return max(len(units), 1 + max(gpu for gpu, _ in units), known)


def _crowded(jobs: Sequence[JobRun]) -> set[int]:
    """Jobs that share a host with another job for some time."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        for host in job.hosts:
            by_host[host].append(number)
    crowded: set[int] = set()
    for numbers in by_host.values():
        crowded |= overlaps([(jobs[n].start_s, jobs[n].end_s, n) for n in numbers])
    return crowded


def overlaps(spans: list[tuple[int, int, int]]) -> set[int]:
    """Numbers of the half-open spans (start, end, number) that overlap one of another number."""
    spans.sort()
    found: set[int] = set()
    last_end, last_number = -(2**62), -1
    for start, end, number in spans:
        if start < last_end and number != last_number:
            found |= {number, last_number}
        if end > last_end:
            last_end, last_number = end, number
    return found


def _allocate_bound(
    number: int, job: JobRun, inventory: Inventory, bound: _Bound, allocations: _Allocations, result: Attribution
) -> None:
    """Allocation what the first origin names that names no more GPUs than the job has.

    Where a record contradicts itself no other record is believed either, such as squeue's, which has no UUID.
    """
    known = {(host, *unit) for host in job.hosts for unit in inventory.of(host, job.start_s, job.end_s)}
    for origin in ("label",) if CONTRADICTED in bound.doubts else ("label", "prolog", "squeue"):
        units = bound.units.get(origin, set()) & known
        if units and len(units) <= job.gpu_count:
            allocations[number] = [(host, (gpu, mig)) for host, gpu, mig in sorted(units)]
            result.origin[number] = origin
            return
    divisible = job.gpu_count % len(job.hosts) == 0
    result.failed[number] = min(bound.doubts, default=UNBOUND if divisible else UNBOUND_COUNT)


def _records_by_job(jobs: Sequence[JobRun], inventory: Inventory, bindings: Sequence[Binding]) -> dict[int, _Bound]:
    """Map jobs to the GPUs that prolog and squeue records name. Each record goes to one run of its job."""
    runs: dict[int, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        runs[job.job_id].append(number)
    hosts = functools.cache(lambda number: frozenset(jobs[number].hosts))  # each host of a large job has a record
    found: dict[int, _Bound] = defaultdict(_Bound)
    for record in bindings:
        run = _run_of(record.seen_s, [(jobs[n].start_s, jobs[n].end_s, n) for n in runs.get(record.job_id, ())])
        if run is not None and record.host in hosts(run):
            span_s = (jobs[run].start_s, jobs[run].end_s)
            units = units_of(record, inventory.of(record.host, *span_s), inventory.names(record.host, *span_s))
            if isinstance(units, str):
                found[run].doubts.add(units)
            else:
                found[run].units[record.origin] |= {(record.host, *unit) for unit in units}
    return found


def _run_of(seen_s: int, runs: list[tuple[int, int, int]]) -> int | None:
    """The run (start, end, number) in which a record was made, or that started soon after; None: neither."""
    for start, end, number in sorted(runs):
        if seen_s < start - _PROLOG_LEAD_S:
            return None
        if seen_s < end:
            return number
    return None


def _overlapping(jobs: Sequence[JobRun], allocations: _Allocations) -> set[int]:
    """Jobs with an allocation that overlaps an allocation of another job."""
    by_unit: dict[tuple[str, Unit], list[tuple[int, int, int]]] = defaultdict(list)
    for number, units in allocations.items():
        for unit in units:
            by_unit[unit].append((jobs[number].start_s, jobs[number].end_s, number))
    return set().union(*(overlaps(spans) for spans in by_unit.values() if len(spans) > 1))


def _beside_unknown(jobs: Sequence[JobRun], allocations: _Allocations) -> set[int]:
    """Jobs with a part of a GPU, while another such job had a part of an unknown GPU of the host."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        for host in job.hosts if job.shares else ():
            by_host[host].append(number)
    found: set[int] = set()
    for numbers in by_host.values():
        unknown = sorted((jobs[n].start_s, jobs[n].end_s) for n in numbers if n not in allocations)
        latest = list(accumulate((end_s for _, end_s in unknown), max))
        for number in numbers:
            before = bisect_left(unknown, (jobs[number].end_s, 0))
            if number in allocations and before and latest[before - 1] > jobs[number].start_s:
                found.add(number)
    return found


def _table(jobs: Sequence[JobRun], allocations: _Allocations) -> pa.Table:
    rows = [
        (number, host, gpu, mig, jobs[number].start_s * 1000, jobs[number].end_s * 1000)
        for number, units in allocations.items()
        for host, (gpu, mig) in units
    ]
    return table_of(ALLOCATIONS, rows)


_PORT = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:]*))(?::[0-9]{1,5})?")


@dataclass(frozen=True)
class HostNames:
    """The Slurm node of each host that has another name in telemetry. unclear: hosts that may be one of several."""

    nodes: Mapping[str, str]
    unclear: frozenset[str] = frozenset()


def match_hosts(hosts: Collection[str], nodes: Collection[str]) -> HostNames:
    """The Slurm nodes of telemetry's hosts. A host is matched only if no other host or node fits its name."""
    groups: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((hosts, nodes)):
        for name in sorted(set(names)):
            groups[name_parts(name)[0]][side].append(name)
    found, unclear = dict[str, str](), set[str]()
    for ours, theirs in groups.values():
        for host in ours if theirs and ours != theirs else ():
            node = _node_of(host, ours, theirs)
            if node is None:
                unclear.add(host)
            elif node != host:
                found[host] = node
    return HostNames(found, frozenset(unclear))


def match_days(hosts: Mapping[int, Collection[str]], jobs: Iterable[JobRun]) -> dict[int, HostNames]:
    """Match hosts for each day since 1970: the hosts seen on it, and the nodes of the jobs that ran on it."""
    nodes: dict[int, set[str]] = defaultdict(set)
    for job in jobs:
        for day in days_of(job.start_s, job.end_s):
            if day in hosts:
                nodes[day].update(job.hosts)
    return {day: match_hosts(names, nodes[day]) for day, names in hosts.items() if day in nodes}


@functools.lru_cache(maxsize=1 << 17)
def name_parts(name: str) -> tuple[str, ...]:
    """The labels of a host name in lower case, without a port; an address is one label."""
    match = _PORT.fullmatch(name)
    host = name if match is None else match["v6"] or match["host"] or name
    host = host.lower().rstrip(".")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return tuple(host.split("."))
    return (host,)


def may_be_one(one: str, other: str) -> bool:
    """Return True if two names can mean one host: the parts that both have are equal."""
    return all(a == b for a, b in zip(name_parts(one), name_parts(other), strict=False))


def _node_of(host: str, hosts: Collection[str], nodes: Collection[str]) -> str | None:
    """hosts, nodes: those that share their first part with the host."""
    if host in nodes:
        return host
    near = [node for node in nodes if name_parts(node) == name_parts(host)]
    near = near or [node for node in nodes if may_be_one(host, node)]
    if len(near) != 1:
        return None
    rivals = [other for other in hosts if may_be_one(other, host) or may_be_one(other, near[0])]
    return near[0] if all(may_be_one(a, b) for a, b in combinations([*rivals, near[0]], 2)) else None
