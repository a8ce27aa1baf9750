"""The GPUs that jobs had, by telemetry's own labels too, and the small tables of allocations, GPU models, and jobs."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from almanac.config import Config, Filters
from almanac.hardware import (
    UNKNOWN_MAX_POWER_W,
    GpuModel,
    engines_of,
    find_gpu_model,
    gpu_models,
    model_text,
    real_profile,
)
from telemetry.attribution.allocations import ALLOCATIONS, Attribution, JobRun, attribute, shared_jobs
from telemetry.attribution.seen_units import Binding, InstanceSpan, Inventory, Unit
from telemetry.counters import PIPES
from telemetry.metrics import use
from telemetry.metrics.arrays import DAY_MS, Array, Files, each_hour
from telemetry.metrics.data_quality import exclusion, host_filter, steady_span_ms
from telemetry.metrics.inventory import Survey
from telemetry.metrics.partials import each_chunk
from telemetry.metrics.samples import NO_LABEL, Allocations, GpuSamples
from telemetry.store.schema import schema_of, table_of

_HARDWARE = schema_of(
    "gpu_model string, mig_profile string, engines double, hbm_capacity_mib double, max_power_w double, "
    f"{', '.join(f'{name}_{pipe} double' for name in ('ridge', 'clock_mhz') for pipe in PIPES)}"
)
ALLOCATION_FRAME = pa.schema(
    [
        *schema_of(
            "allocation int32, job int32, host string, gpu int16, mig string, start_ms int64, end_ms int64, "
            "steady_from_ms int64, steady_until_ms int64, interval_ms double, window_ms int64, label int64, "
            "has_card bool"
        ),
        *_HARDWARE,
    ]
)
MODEL_FRAME = schema_of(
    f"gpu_model string, hbm_bytes_per_s double, {', '.join(f'{pipe}_flops double' for pipe in PIPES)}"
)
JOB_FRAME = schema_of(
    "job int32, job_id int64, submit_s int64, start_s int64, elapsed_s int64, gpu_count int64, expected double, "
    "exclusion string, attributed_by string"
)


_COLUMNS = schema_of("host string, gpu int16, mig string, time_ms int64, uuid string")
_NAMES = """
SELECT DISTINCT host, time_ms // 86400000 AS day, uuid, gpu, mig
FROM (SELECT * FROM read_parquet($files, union_by_name=true, hive_partitioning=false)
      UNION ALL BY NAME SELECT * FROM no_samples)
WHERE uuid IS NOT NULL AND host IN (SELECT host FROM wanted)
"""


def allocation_frame(jobs: Sequence[JobRun], attribution: Attribution, seen: Survey) -> pa.Table:
    """Allocations with the data that metrics need: the job's steady span, the GPU's capacity and ridges, and so on.

    The model of a GPU is the first known one during the allocation. Profile and capacity of a MIG instance are those
    that telemetry shows within the allocation: another day or hour can show another instance with the same id.
    engines: compute slices of a MIG instance; null for a whole GPU, and where its profile is not known.
    window_ms: length of windows. interval_ms: the scrape interval of the GPU, null if unknown. label: the job id that
    the exporter's label gave to the allocation, NO_LABEL if another source names its GPUs. has_card: see
    `_have_cards`.
    """
    table, held = attribution.allocations, _held_hardware(jobs, attribution.allocations, seen)
    spans = np.array([steady_span_ms(job.start_s, job.end_s) for job in jobs], np.int64).reshape(-1, 2)
    steady_from_ms, steady_until_ms = spans[table["job"].to_numpy()].T
    interval_ms = 1000 * _intervals_s(jobs, table, seen)
    by_label = [job.job_id if attribution.origin.get(n) == "label" else NO_LABEL for n, job in enumerate(jobs)]
    columns = {
        "allocation": np.arange(table.num_rows),
        **{name: table[name] for name in table.column_names},
        "steady_from_ms": steady_from_ms,
        "steady_until_ms": steady_until_ms,
        "interval_ms": pa.array(interval_ms, from_pandas=True),
        "window_ms": use.widths_ms(table["job"].to_numpy(), interval_ms),
        "label": np.array(by_label, np.int64)[table["job"].to_numpy()],
        "has_card": _have_cards(table, seen),
        **{name: held[name] for name in held.column_names},
    }
    return pa.table(columns).cast(ALLOCATION_FRAME)


def _held_hardware(jobs: Sequence[JobRun], table: pa.Table, seen: Survey) -> pa.Table:
    """The hardware of each allocation."""
    units, inventory = _units(seen), seen.inventory() if seen.split.num_rows else None
    hardware: list[tuple[str | float | None, ...]] = []

    @functools.cache
    def place(host: str, gpu: int, mig: str, gres: str, start_ms: int, end_ms: int) -> int:
        days = ((host, gpu, mig, day) for day in range(start_ms // DAY_MS, (end_ms - 1) // DAY_MS + 1))
        unit = _first_known([units[key] for key in days if key in units])
        if mig:
            span = inventory.instance(host, gpu, mig, start_ms, end_ms) if inventory else None
            hardware.append(_slice(unit, span, gres))
        else:
            hardware.append(_hardware(unit))
        return len(hardware) - 1

    def spans() -> Iterator[tuple[str, int, str, str, int, int]]:
        columns = (table[name].to_pylist() for name in ("host", "gpu", "mig", "job", "start_ms", "end_ms"))
        for host, gpu, mig, job, start_ms, end_ms in zip(*columns, strict=True):
            # The hardware of a whole GPU is that of its days, so that many allocations share it.
            days = (start_ms // DAY_MS * DAY_MS, -(-end_ms // DAY_MS) * DAY_MS)
            gres, span = (jobs[job].gpu_type, (start_ms, end_ms)) if mig else ("", days)
            yield host, gpu, mig, gres, *span

    places = [place(*span) for span in spans()]
    return table_of(_HARDWARE, hardware).take(pa.array(places, pa.int64()))


def _have_cards(allocations: pa.Table, seen: Survey) -> list[bool]:
    """Return True for allocations whose job has the whole card: all its MIG instances that telemetry shows then.

    For an allocation of a whole GPU, it is always true.
    """
    if not seen.split.num_rows:
        return [True] * allocations.num_rows
    names, inventory = ("host", "gpu", "mig"), seen.inventory()
    keys = list(zip(*(allocations[name].to_pylist() for name in ("job", *names)), strict=True))
    own: dict[tuple[int, str, int], set[str]] = defaultdict(set)
    for job, host, gpu, mig in keys:
        own[job, host, gpu].add(mig)

    @functools.cache
    def has_card(job: int, host: str, gpu: int, start_ms: int, end_ms: int) -> bool:
        mine = own[job, host, gpu]
        return "" in mine or {m for n, m in inventory.of(host, start_ms // 1000, end_ms // 1000) if n == gpu} <= mine

    times = (allocations[name].to_pylist() for name in ("start_ms", "end_ms"))
    return [
        has_card(job, host, gpu, start_ms, end_ms)
        for (job, host, gpu, _), start_ms, end_ms in zip(keys, *times, strict=True)
    ]


def _intervals_s(jobs: Sequence[JobRun], table: pa.Table, seen: Survey) -> Array:
    """The scrape interval of each allocation's GPU, in s; NaN if unknown."""
    columns = (table[name].to_pylist() for name in ("host", "gpu", "mig", "job"))
    spans = [(job.start_s, job.end_s) for job in jobs]
    found = [seen.intervals.of((host, gpu, mig), *spans[job]) for host, gpu, mig, job in zip(*columns, strict=True)]
    return np.array(found, np.float64)


def _hardware(unit: _Unit) -> tuple[str | float | None, ...]:
    """The columns of _HARDWARE of a whole GPU: its measured capacity, else that of its model."""
    model, capacity_mib = unit.model, unit.total_mib
    if model is None:
        return (unit.text, None, None, capacity_mib, UNKNOWN_MAX_POWER_W, *_NO_PEAKS)
    bandwidth = model.hbm_bytes_per_s
    ridges = (peak / bandwidth if peak and bandwidth else None for peak in _peaks(model))
    return (model.name, None, None, capacity_mib or float(model.hbm_mib), _power_w(model), *ridges, *_clocks_mhz(model))


def _slice(unit: _Unit, span: InstanceSpan | None, gres: str) -> tuple[str | float | None, ...]:
    """The same of a MIG instance: the card's model and power, its own profile, engines, and measured capacity.

    It has no ridges: the peaks of the card are not those of its share. Its clock is the card's.
    """
    name, power_w = (unit.model.name, _power_w(unit.model)) if unit.model else (unit.text, UNKNOWN_MAX_POWER_W)
    profile = real_profile(span.profile if span else None, name, gres)
    total_mib = span.total_mib if span else None
    clocks_mhz = _clocks_mhz(unit.model) if unit.model else _NO_PEAKS[: len(PIPES)]
    engines = engines_of(profile, name, total_mib)
    return (name, profile, engines, total_mib, power_w, *_NO_PEAKS[: len(PIPES)], *clocks_mhz)


_NO_PEAKS = (None,) * (2 * len(PIPES))


def _power_w(model: GpuModel) -> float:
    return model.max_power_w or UNKNOWN_MAX_POWER_W


def _clocks_mhz(model: GpuModel) -> tuple[float | None, ...]:
    return tuple(model.clock_mhz(pipe) for pipe in PIPES)


def _peaks(model: GpuModel) -> tuple[float | None, ...]:
    return (model.fp64_flops, model.fp32_flops, model.fp16_flops, model.tensor_flops)


class _Unit(NamedTuple):
    """A GPU or instance as telemetry shows it. text: the exporter's name of the model; None without one."""

    model: GpuModel | None = None
    text: str | None = None
    total_mib: float | None = None


def _first_known(days: Sequence[_Unit]) -> _Unit:
    """The first known value of each day in turn."""
    return _Unit(*(next((value for value in values if value), None) for values in zip(*days, strict=True)))


def _units(seen: Survey) -> dict[tuple[str, int, str, int], _Unit]:
    """Each unit on each day: its model, by its label and the memory that it reports, where they are known."""
    find = functools.cache(find_gpu_model)
    names = ("host", "gpu", "mig", "day", "model", "total_mib")
    return {
        (host, gpu, mig, day): _Unit(
            find(label, total, is_slice=bool(mig)) if label else None, model_text(label or "") or None, total
        )
        for host, gpu, mig, day, label, total in zip(*(seen.units[name].to_pylist() for name in names), strict=True)
    }


def model_frame() -> pa.Table:
    """Peaks of every known model."""
    return table_of(
        MODEL_FRAME, [(name, model.hbm_bytes_per_s, *_peaks(model)) for name, model in gpu_models().items()]
    )


def job_frame(
    jobs: Sequence[JobRun], attribution: Attribution, seen: Survey, allocations: pa.Table, filters: Filters
) -> pa.Table:
    """The data of each job that `finish` needs.

    expected: samples that one of its GPUs should have, on average. exclusion: a reason that is known before any sample
    is read.
    """
    login_nodes = host_filter(filters.login_nodes)
    expected = _expected(jobs, seen, allocations)
    rows = [
        (
            number,
            job.job_id,
            job.submit_s,
            job.start_s,
            job.elapsed_s,
            job.gpu_count,
            expected[number],
            exclusion(job, filters, login_nodes) or attribution.failed.get(number),
            attribution.origin.get(number),
        )
        for number, job in enumerate(jobs)
    ]
    return table_of(JOB_FRAME, rows)


def _expected(jobs: Sequence[JobRun], seen: Survey, allocations: pa.Table) -> list[float | None]:
    """The mean over a job's GPUs of run time / scrape interval; without GPUs, that of its first host's typical GPU."""
    found: list[float | None] = []
    number, interval_ms = (allocations[name].to_numpy() for name in ("job", "interval_ms"))
    gpus = np.bincount(number, minlength=len(jobs))
    rate = np.bincount(number, 1000 / interval_ms, minlength=len(jobs)) / np.maximum(gpus, 1)
    for job, per_s in zip(jobs, rate.tolist(), strict=True):
        interval_s = None if per_s > 0 else seen.intervals.of(((*job.hosts, "")[0], -1, ""), job.start_s, job.end_s)
        found.append(job.elapsed_s * per_s if per_s > 0 else None if interval_s is None else job.elapsed_s / interval_s)
    return found


def attribute_jobs(
    db: duckdb.DuckDBPyConnection,
    jobs: Sequence[JobRun],
    seen: Survey,
    bindings: Sequence[Binding],
    config: Config,
    neighbors: Sequence[JobRun] = (),
) -> Attribution:
    """Allocations of the jobs, with the exporter's labels where the configuration believes them.

    Neighbors may crowd a job's nodes, or be bound to its GPUs; they get no allocations themselves.
    """
    everyone = [*jobs, *neighbors]
    paths = [path for files in seen.chunks for path in files.paths]
    inventory = replace(seen.inventory(), named=unit_names(db, paths, bindings, seen.nodes))
    shared = shared_jobs(everyone, inventory) if config.bindings.use_labels else []
    labeled = labelled_units(db, everyone, shared, seen, inventory) if shared else {}
    return attribute(everyone, inventory, labeled, bindings).of_first(len(jobs))


def unit_names(
    db: duckdb.DuckDBPyConnection,
    files: Sequence[Path],
    bindings: Sequence[Binding],
    nodes: Mapping[int, Mapping[str, str]],
) -> Mapping[tuple[str, int], frozenset[tuple[str, Unit]]]:
    """UUIDs of the units of each (node, day since 1970), on the nodes whose bindings have UUIDs; {} without any.

    nodes: by day, the Slurm node of each host with another name in telemetry.
    """
    wanted = {binding.host for binding in bindings if binding.uuid}
    if not wanted or not files:
        return {}
    others = {host for of_day in nodes.values() for host, node in of_day.items() if node in wanted}
    db.register("wanted", pa.table({"host": sorted(wanted | others)}))
    db.register("no_samples", _COLUMNS.empty_table())  # a file need not have every column
    rows = db.sql(_NAMES, params={"files": [str(path) for path in files]}).to_arrow_table().to_pylist()
    found: dict[tuple[str, int], set[tuple[str, Unit]]] = defaultdict(set)
    for row in rows:
        node = nodes.get(row["day"], {}).get(row["host"], row["host"])
        found[node, row["day"]].add((row["uuid"], (row["gpu"], row["mig"])))
    db.unregister("wanted")
    db.unregister("no_samples")
    return {key: frozenset(names) for key, names in found.items()}


def labelled_units(
    db: duckdb.DuckDBPyConnection, jobs: Sequence[JobRun], numbers: Sequence[int], seen: Survey, inventory: Inventory
) -> dict[int, set[tuple[str, int, str]]]:
    """Units (host, gpu, mig) that carry a job's label on its own hosts and in its own time, by place of the job."""
    rows = [
        (number, host, gpu, mig, jobs[number].start_s * 1000, jobs[number].end_s * 1000)
        for number in numbers
        for host in jobs[number].hosts
        for gpu, mig in sorted(inventory.of(host, jobs[number].start_s, jobs[number].end_s))
    ]
    job_id = np.array([jobs[row[0]].job_id for row in rows])

    def look(samples: GpuSamples) -> Array:
        label = samples.label()
        if label is None:
            return np.zeros(0, np.int64)
        number = samples.allocations.number[samples.allocation]
        return number[samples.runs.sum(label == samples.runs.spread(job_id[number])) > 0]

    candidates = allocation_frame(jobs, Attribution(table_of(ALLOCATIONS, rows)), seen)
    found: dict[int, set[tuple[str, int, str]]] = defaultdict(set)
    for place in chain.from_iterable(_each(db, seen.chunks, candidates, look)):
        number, host, gpu, mig = rows[place][:4]
        found[number].add((host, gpu, mig))
    return found


def _each(
    db: duckdb.DuckDBPyConnection, chunks: Sequence[Files], allocations: pa.Table, look: Callable[[GpuSamples], Array]
) -> list[Array]:
    """Yield the results of `look` for the samples within allocations, hour by hour."""

    def one(db: duckdb.DuckDBPyConnection, files: Files) -> list[Array]:
        held = Allocations.of(allocations, files.from_ms, files.until_ms)
        return each_hour(db, files, lambda hour: look(GpuSamples.of(hour, held)), held.touch)

    return list(chain.from_iterable(each_chunk(db, chunks, one)))
