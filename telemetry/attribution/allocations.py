"""Which GPU belonged to which job, and when.

sacct says which nodes a job had and how many GPUs in all, but not which ones. A job that had every GPU of its nodes
owns them by host and time; any other needs a binding: the exporter's label, a prolog record or squeue's gres_detail,
in this order. What cannot be told is attributed to nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from telemetry.attribution.bindings import CONTRADICTED, Binding, Unit, units_of
from telemetry.attribution.seen_units import Inventory, days_of
from telemetry.slurm.hostlist import expand
from telemetry.store.schema import schema_of, table_of

UNBOUND = "shared node without GPU binding"
UNBOUND_COUNT = f"{UNBOUND} (GPUs per node unknown)"
DOUBLY_BOUND = "GPU bound to two jobs at once"
NO_NODES = "node list missing or unreadable"

# A prolog runs just before the start that accounting records.
_PROLOG_LEAD_S = 300


@dataclass(frozen=True)
class JobRun:
    """One run of a GPU job that has ended: half-open [start_s, end_s). A requeued run is a job of its own.

    hosts is () where the node list cannot be read. gpu_type: GRES type that it was given or asked for; "" for none.
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

    @property
    def elapsed_s(self) -> int:
        return self.end_s - self.start_s


@dataclass
class Attribution:
    """Who owns what. Jobs are named by their place in the list that was given.

    allocations: one row per job and unit: job, host, gpu, mig, start_ms, end_ms. No two allocations of a unit overlap.
    origin: where a job's allocations come from: "whole node", "label", "prolog" or "squeue".
    failed: why a job has no allocations.
    """

    allocations: pa.Table
    origin: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def of_first(self, number: int) -> Attribution:
        """The same without the jobs from place `number` on."""
        return Attribution(
            self.allocations.filter(pc.field("job") < number),
            {place: origin for place, origin in self.origin.items() if place < number},
            {place: why for place, why in self.failed.items() if place < number},
        )


ALLOCATIONS = schema_of(
    {
        "job": pa.int32(),
        "host": pa.string(),
        "gpu": pa.int16(),
        "mig": pa.string(),
        "start_ms": pa.int64(),
        "end_ms": pa.int64(),
    }
)

_Allocations = dict[int, list[tuple[str, Unit]]]
_Place = tuple[str, int, str]
"""Host, GPU index and MIG instance id."""


@dataclass
class _Bound:
    """What the records of a job say: units by origin, and why records were not believed."""

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
) -> Attribution:
    """Allocations of every job whose GPUs are known.

    labeled: units (host, gpu, mig) that carry the job's own label on its own hosts and in its own time
    (`shared_jobs` says for which jobs it is looked at).
    """
    shared = set(shared_jobs(jobs, inventory))
    result = Attribution(ALLOCATIONS.empty_table())
    records = _records_by_job(jobs, inventory, bindings) if shared else {}
    allocations: _Allocations = {}
    for number, job in enumerate(jobs):
        if not job.hosts:
            result.failed[number] = NO_NODES
        elif number not in shared:
            allocations[number] = _whole_nodes(job, inventory)
            result.origin[number] = "whole node"
        else:
            bound = records.get(number, _Bound())
            bound.units["label"] = set(labeled.get(number, ()))
            _allocate_bound(number, job, inventory, bound, allocations, result)
    for number in _overlapping(jobs, allocations):
        del allocations[number]
        del result.origin[number]
        result.failed[number] = DOUBLY_BOUND
    result.allocations = _table(jobs, allocations)
    return result


def shared_jobs(jobs: Sequence[JobRun], inventory: Inventory) -> list[int]:
    """Places of the jobs that cannot be told to own every GPU of their nodes.

    A job owns its nodes where its GPUs are as many as those of all its nodes (hosts without telemetry are taken to
    be as large as the largest seen), and no other job with GPUs was there at any time of it.
    """
    largest: dict[tuple[str, int], int] = defaultdict(int)
    for job in jobs:
        if len(job.hosts) == 1 and not _has_instances(inventory, job):
            for place in _places(job, job.hosts[0]):
                largest[place] = max(largest[place], job.gpu_count)
    crowded = _crowded(jobs)
    found = []
    for number, job in enumerate(jobs):
        sizes = [
            _size(
                inventory.of(host, job.start_s, job.end_s), max(largest.get(place, 0) for place in _places(job, host))
            )
            for host in job.hosts
        ]
        needed = sum(size or max(sizes) for size in sizes)
        if job.hosts and (number in crowded or job.gpu_count < needed):
            found.append(number)
    return found


def _has_instances(inventory: Inventory, job: JobRun) -> bool:
    """Whether it counts MIG instances as GPUs, which say nothing of the GPUs of the same node at another time."""
    return any(mig for host in job.hosts for _, mig in inventory.of(host, job.start_s, job.end_s))


def _places(job: JobRun, host: str) -> Iterator[tuple[str, int]]:
    return ((host, day) for day in days_of(job.start_s, job.end_s))


def _size(units: frozenset[Unit], known: int) -> int:
    """GPUs of a host: those seen, counted to the highest index, or as many as one job had; 0 where none is seen.

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


def _whole_nodes(job: JobRun, inventory: Inventory) -> list[tuple[str, Unit]]:
    return [(host, unit) for host in job.hosts for unit in sorted(inventory.of(host, job.start_s, job.end_s))]


def _allocate_bound(
    number: int,
    job: JobRun,
    inventory: Inventory,
    bound: _Bound,
    allocations: _Allocations,
    result: Attribution,
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
    """What prolog and squeue records name, by job. Each record goes to one run of its job."""
    runs: dict[int, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        runs[job.job_id].append(number)
    found: dict[int, _Bound] = defaultdict(_Bound)
    for record in bindings:
        run = _run_of(record.seen_s, [(jobs[n].start_s, jobs[n].end_s, n) for n in runs.get(record.job_id, ())])
        if run is not None and record.host in jobs[run].hosts:
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


def _table(jobs: Sequence[JobRun], allocations: _Allocations) -> pa.Table:
    rows = [
        (number, host, gpu, mig, jobs[number].start_s * 1000, jobs[number].end_s * 1000)
        for number, units in allocations.items()
        for host, (gpu, mig) in units
    ]
    return table_of(ALLOCATIONS, rows)
