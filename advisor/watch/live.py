"""Rounds of the real site: squeue, the counters of the newest minutes, whose GPUs are whose, and the state's file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from advisor.watch.decide import RULES, WatchState, decide
from advisor.watch.round import GPU_COUNTERS, GPUS, JOBS, Round, WatchFinding
from almanac.atomic import make_folders, write_atomically
from almanac.errors import AlmanacError, ServerError
from almanac.files import read_plain
from almanac.names import is_family, name_key
from slurm.hostlist import fold
from slurm.nodes import node_shapes
from slurm.running import read_running_text
from telemetry.attribution.allocations import Attribution, JobRun, attribute, match_hosts, parse_hosts
from telemetry.attribution.seen_units import Binding, Inventory, Unit, days_of
from telemetry.history import load_history
from telemetry.site import Site
from telemetry.sources.live import joined, live_sources

SPAN_S, LONGEST_SPAN_S = 120, 600
"""Seconds of counters that a round reads: since the round before, but no less and no more than these."""
_MOST_BYTES = 256 << 20
_LATE_S = 300
"""Records of a prolog are this much older than the start that slurmctld states (attribution/allocations.py)."""
Rows = Sequence[Mapping[str, Any]]
_Unit = tuple[str, int, str]
"""Host, GPU, and MIG instance."""


class LiveWatch:
    """The rounds of a site, one after another. Each method raises AlmanacError if Slurm or the store does not answer.

    notes: what the last round lacks, in words.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._path: Path = site.store.root / "watch" / f"{site.store.cluster}.json"
        self.notes: list[str] = []
        self.state = self._read()

    def look(self) -> tuple[Round, list[WatchFinding]]:
        """Read a round and judge it. `save` keeps what it found for the next process."""
        self.notes.clear()
        servers = live_sources(self._site.config.prometheus, self._site.store.cluster)
        at_s = self._site.now_s() - max((each.config.delay_s for each in servers), default=0)
        since_s = at_s - self.state.at_s
        round_ = self._round(servers, at_s, min(max(since_s, SPAN_S), LONGEST_SPAN_S))
        self.state, findings = decide(self.state, round_)
        return round_, findings

    def save(self) -> None:
        make_folders(self._path.parent)
        write_atomically(self._path, msgspec.json.encode(self.state))

    def _read(self) -> WatchState:
        try:
            state = msgspec.json.decode(read_plain(self._path, _MOST_BYTES), type=WatchState)
        except FileNotFoundError:
            return WatchState()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = f"cannot be read ({type(error).__name__})"
        else:
            if state.is_whole:
                return state
            why = "is of another release"
        self.notes.append(f"{self._path} {why}: the watch begins again")
        return WatchState()

    def _round(self, servers: Sequence[Any], at_s: int, span_s: int) -> Round:
        rows, unreadable = read_running_text(self._site.commands)
        if unreadable:
            self.notes.append(f"records of squeue that cannot be read: {unreadable}")
        hosts = [parse_hosts(row["node_list"]) for row in rows]
        tables, faults = list[pa.Table](), list[str]()
        serving, memory = set[str](), dict[int, tuple[float, float]]()
        for each in servers:
            try:
                tables.append(each.live_counters(at_s, span_s))
                serving |= each.serving_hosts(at_s, span_s)
                memory |= each.host_memory(at_s, span_s)
            except ServerError as error:
                faults.append(str(error))
        self.notes += faults
        unknown = "no Prometheus is configured" if not servers else "; ".join(faults) if not tables else ""
        gpus = self._gpus(rows, hosts, joined(tables), at_s) if tables else GPUS.empty_table()
        chances = self._chances(rows, at_s)
        # A server that did not answer, or a node list that cannot be read, may hide an inference server.
        serves = [
            any(host.lower() in serving for host in each) or (None if faults or not each else False) for each in hosts
        ]
        more: dict[str, list[Any]] = {
            "is_serving": serves,
            "host_used_mib": [memory.get(row["job_id"], (None, None))[0] for row in rows],
            "host_limit_mib": [memory.get(row["job_id"], (None, None))[1] for row in rows],
            "over_limit_prob": [chances.get(row["job_id"]) for row in rows],
        }
        jobs = pa.Table.from_pylist(list(rows), JOBS)
        for name, values in more.items():
            field = JOBS.field(name)
            jobs = jobs.set_column(JOBS.get_field_index(name), field, pa.array(values, field.type))
        return Round(at_s, span_s, jobs, gpus, unknown)

    def _gpus(self, rows: Rows, hosts: Sequence[tuple[str, ...]], counters: pa.Table, at_s: int) -> pa.Table:
        return _gpu_table(self._owned(rows, hosts, counters, at_s), counters)

    def _owned(
        self, rows: Rows, hosts: Sequence[tuple[str, ...]], counters: pa.Table, at_s: int
    ) -> list[tuple[int, str, str, int]]:
        """The GPUs of jobs as `_gpu_table` takes them: whose they are is decided by the rules of ended jobs.

        Without those that Slurm contradicts: of a host under two names, and of a GPU whose label names another job.
        """
        seen = {str(host) for host in counters["host"].to_pylist()}
        nodes = match_hosts(seen, {host for each in hosts for host in each}).nodes
        names = Counter(nodes.get(host, host) for host in seen)
        if doubled := sorted(node for node, number in names.items() if number > 1):
            self.notes.append(f"nodes that counters show under several names, which are not judged: {fold(doubled)}")
        columns = (counters[name].to_pylist() for name in ("host", "gpu", "mig", "uuid", "job_label"))
        places, labeled = dict[tuple[str, Unit], int](), defaultdict[int, set[tuple[str, int, str]]](set)
        units, named = defaultdict[str, set[Unit]](set), defaultdict[str, set[tuple[str, Unit]]](set)
        for place, (host, gpu, mig, uuid, label) in enumerate(zip(*columns, strict=True)):
            node = nodes.get(host, host)
            if names[node] > 1:
                continue
            places[node, (gpu, mig)] = place
            units[node].add((gpu, mig))
            if uuid:
                named[node].add((uuid, (gpu, mig)))
            if label:
                labeled[label].add((node, gpu, mig))
        day = days_of(at_s - 1, at_s)[0]
        inventory = Inventory(
            {(node, day): frozenset(each) for node, each in units.items()},
            {(node, day): frozenset(each) for node, each in named.items()},
        )
        # Attribution by time needs this moment only, and no other day of a long job.
        runs = [
            JobRun(row["job_id"], row["submit_s"], at_s - 1, at_s, row["gpu_count"], each)
            for row, each in zip(rows, hosts, strict=True)
        ]
        if not self._site.config.bindings.use_labels:
            labeled.clear()
        by_label = {number: labeled.get(row["job_id"], ()) for number, row in enumerate(rows)}
        shapes = node_shapes(self._site.commands)
        sizes = {node: shape.gpus for node, shape in shapes.items() if shape.gpus is not None}
        records = self._bindings(rows, at_s)
        owners = _owners(attribute(runs, inventory, by_label, records, sizes))
        if labeled:
            by_slurm = _owners(attribute(runs, inventory, {}, records, sizes))
            owners = _agreed(owners, by_slurm, {unit: job for job, units in labeled.items() for unit in units}, rows)
        return [
            (job, host, f"{gpu}:{mig}" if mig else str(gpu), places[host, (gpu, mig)])
            for (host, gpu, mig), job in owners.items()
        ]

    def _bindings(self, rows: Rows, at_s: int) -> list[Binding]:
        """Records of a prolog and of squeue, of these runs of the jobs, as of now."""
        starts = {row["job_id"]: row["start_s"] for row in rows}
        if not starts:
            return []
        since_s, wanted = min(starts.values()) - _LATE_S, pa.array(starts, pa.int64())
        table = self._site.store.read("bindings", None, since_s, at_s, among={"job_id": wanted})
        return [
            Binding(each["job_id"], each["host"], each["gpu"], each["origin"], at_s - 1, each["uuid"], each["mig"])
            for each in table.to_pylist()
            if each["seen_s"] >= starts[each["job_id"]] - _LATE_S
        ]

    def _chances(self, rows: Rows, at_s: int) -> dict[int, float]:
        """Chance that a job which runs now needs more than its limit, for those that meet it soon, by job_id.

        Of the runs of its family that lasted as long as it has so far: the share that reached this limit. Runs that a
        shorter limit ended before say neither.
        """
        near = [row for row in rows if 0 < (row["limit_end_s"] or 0) - at_s <= 2 * RULES.tell_limit_s]
        if not near:
            return {}
        try:
            past = load_history(self._site.store, user={row["user"] for row in near})
        except AlmanacError as error:
            self.notes.append(f"ends before the limit are not predicted: {error}")
            return {}
        found = {}
        families = past.groupby(["user", "name_key", "gpu_count"])
        for row in near:
            key = (row["user"], name_key(row["name"] or ""), row["gpu_count"])
            if not is_family(key[1]) or key not in families.groups:
                continue
            runs = families.get_group(key)
            reached = runs["elapsed_s"] >= row["limit_end_s"] - row["start_s"] - _NEAR_LIMIT_S
            lasted = reached | ((runs["elapsed_s"] >= at_s - row["start_s"]) & (runs["state"] != "TIMEOUT"))
            if lasted.sum() >= LEAST_RUNS:
                found[row["job_id"]] = (float(reached.sum()) + 0.5) / (float(lasted.sum()) + 1)
        return found


LEAST_RUNS = 3
"""Runs of a family, as long as the job has run, before its end is predicted."""
_NEAR_LIMIT_S = 60


def _owners(found: Attribution) -> dict[_Unit, int]:
    """Return the row of the job of each unit."""
    job, *unit = (found.allocations[name].to_pylist() for name in found.allocations.column_names[:4])
    return dict(zip(zip(*unit, strict=True), job, strict=True))


def _agreed(
    owners: Mapping[_Unit, int], by_slurm: Mapping[_Unit, int], labels: Mapping[_Unit, int], rows: Rows
) -> dict[_Unit, int]:
    """Return the owners without the jobs of whose GPUs the exporter's labels and Slurm's records say different things.

    owners: by labels first. by_slurm: without labels. labels: the job_id of each unit's label.
    """
    own, recorded = defaultdict[int, set[_Unit]](set), defaultdict[int, set[_Unit]](set)
    for found, units in ((owners, own), (by_slurm, recorded)):
        for unit, row in found.items():
            units[row].add(unit)
    doubted = {row for row in own.keys() & recorded.keys() if own[row] != recorded[row]}
    for unit in owners.keys() & by_slurm.keys():
        if owners[unit] != by_slurm[unit]:
            doubted |= {owners[unit], by_slurm[unit]}
    return {
        unit: row for unit, row in owners.items()
        if row not in doubted and labels.get(unit, rows[row]["job_id"]) == rows[row]["job_id"]
    }  # fmt: skip


def _gpu_table(owned: Iterable[tuple[int, str, str, int]], counters: pa.Table) -> pa.Table:
    """The rows of GPUS. owned: row of the job, node, name of the GPU, and row of its counters."""
    rows = sorted(owned)
    job, host, gpu, place = ([row[at] for row in rows] for at in range(4))
    taken = counters.take(pa.array(place, pa.int64()))

    def values(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        if name not in taken.column_names:
            return np.full(len(rows), np.nan)
        return np.asarray(pc.cast(taken[name], pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)

    both = np.stack([values("nvlink_tx_bytes_s"), values("nvlink_rx_bytes_s")])
    linked = np.where(np.isnan(both).all(axis=0), np.nan, np.nansum(both, axis=0))
    columns: dict[str, Any] = {"job": job, "host": host, "gpu": gpu}
    for name in GPU_COUNTERS:
        columns[name] = linked if name == "nvlink_bytes_s" else values(name)
    columns["sample_count"] = np.nan_to_num(values("sample_count"))
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in GPUS}, GPUS)
