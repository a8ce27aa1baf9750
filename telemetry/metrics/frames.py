"""The small tables beside the samples: allocations, GPU models and jobs."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from almanac.config import Filters
from almanac.hardware import UNKNOWN_MAX_POWER_W, GpuModel, find_gpu_model, gpu_models, model_text
from almanac.mig import engines_of, real_profile
from telemetry.attribution.allocations import Attribution, JobRun
from telemetry.attribution.instances import InstanceSpan
from telemetry.metrics import spatial
from telemetry.metrics.allocation_arrays import NO_LABEL
from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.filters import exclusion, host_filter
from telemetry.metrics.hours import DAY_MS
from telemetry.metrics.inventory import Survey
from telemetry.metrics.options import Options
from telemetry.metrics.preallocation import steady_span_ms
from telemetry.metrics.runs import Array
from telemetry.store.schema import schema_of, table_of

_HARDWARE = schema_of(
    {
        "gpu_model": pa.string(),
        "mig_profile": pa.string(),
        "engines": pa.float64(),
        "hbm_capacity_mib": pa.float64(),
        "max_power_w": pa.float64(),
        **{f"ridge_{pipe}": pa.float64() for pipe in PIPES},
    }
)
ALLOCATION_FRAME = schema_of(
    {
        "allocation": pa.int32(),
        "job": pa.int32(),
        "host": pa.string(),
        "gpu": pa.int16(),
        "mig": pa.string(),
        "start_ms": pa.int64(),
        "end_ms": pa.int64(),
        "steady_from_ms": pa.int64(),
        "steady_until_ms": pa.int64(),
        "interval_ms": pa.float64(),
        "window_ms": pa.int64(),
        "label": pa.int64(),
        "has_card": pa.bool_(),
        **{field.name: field.type for field in _HARDWARE},
    }
)
MODEL_FRAME = schema_of(
    {
        "gpu_model": pa.string(),
        "hbm_bytes_per_s": pa.float64(),
        **{f"{pipe}_flops": pa.float64() for pipe in PIPES},
    }
)
JOB_FRAME = schema_of(
    {
        "job": pa.int32(),
        "job_id": pa.int64(),
        "submit_s": pa.int64(),
        "start_s": pa.int64(),
        "elapsed_s": pa.int64(),
        "gpu_count": pa.int64(),
        "expected": pa.float64(),
        "exclusion": pa.string(),
        "attributed_by": pa.string(),
    }
)


def allocation_frame(
    jobs: Sequence[JobRun], attribution: Attribution, seen: Survey, options: Options | None = None
) -> pa.Table:
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
        "window_ms": spatial.widths_ms(table["job"].to_numpy(), interval_ms, (options or Options()).window_ms),
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
            gres, span = (jobs[job].gpu_type, (start_ms, end_ms)) if mig else ("", _whole_days(start_ms, end_ms))
            yield host, gpu, mig, gres, *span

    places = [place(*span) for span in spans()]
    return table_of(_HARDWARE, hardware).take(pa.array(places, pa.int64()))


def _whole_days(start_ms: int, end_ms: int) -> tuple[int, int]:
    return start_ms // DAY_MS * DAY_MS, -(-end_ms // DAY_MS) * DAY_MS


def _have_cards(allocations: pa.Table, seen: Survey) -> list[bool]:
    """Whether the job of each allocation has the whole card: all its MIG instances that telemetry shows in its time.

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
    """The scrape interval of each allocation's GPU, in s; NaN where it is not known."""
    columns = (table[name].to_pylist() for name in ("host", "gpu", "mig", "job"))
    spans = [(job.start_s, job.end_s) for job in jobs]
    found = [seen.intervals.of((host, gpu, mig), *spans[job]) for host, gpu, mig, job in zip(*columns, strict=True)]
    return np.array(found, np.float64)


def _hardware(unit: _Unit) -> tuple[str | float | None, ...]:
    """The columns of _HARDWARE of a whole GPU: its measured capacity, else that of its model."""
    model, capacity_mib = unit.model, unit.total_mib
    if model is None:
        return (unit.text, None, None, capacity_mib, UNKNOWN_MAX_POWER_W, *(None for _ in PIPES))
    ridges = (None if peak is None else peak / model.hbm_bytes_per_s for peak in _peaks(model))
    return (model.name, None, None, capacity_mib or float(model.hbm_mib), model.max_power_w, *ridges)


def _slice(unit: _Unit, span: InstanceSpan | None, gres: str) -> tuple[str | float | None, ...]:
    """The same of a MIG instance: the card's model and power, its own profile, engines, and measured capacity.

    It has no ridges: the peaks of the card are not those of its share.
    """
    name, power_w = (unit.model.name, unit.model.max_power_w) if unit.model else (unit.text, UNKNOWN_MAX_POWER_W)
    profile = real_profile(span.profile if span else None, name, gres)
    total_mib = span.total_mib if span else None
    return (name, profile, engines_of(profile, name, total_mib), total_mib, power_w, *(None for _ in PIPES))


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
