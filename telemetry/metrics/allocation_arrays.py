"""Allocations as arrays, found by the GPUs of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.hours import HOUR_MS
from telemetry.metrics.runs import Array

NO_LABEL = -1
_PLAIN = (
    "job",
    "start_ms",
    "end_ms",
    "steady_from_ms",
    "steady_until_ms",
    "interval_ms",
    "window_ms",
    "label",
    "max_power_w",
    "engines",
)


@dataclass(frozen=True)
class Allocations:
    """Columns of `frames.ALLOCATION_FRAME`. ridges: by pipe, flop per byte, NaN where not known. unit: see `_codes`."""

    number: Array
    job: Array
    start_ms: Array
    end_ms: Array
    steady_from_ms: Array
    steady_until_ms: Array
    interval_ms: Array
    window_ms: Array
    label: Array
    max_power_w: Array
    engines: Array
    is_mig: Array
    ridges: dict[str, Array]
    unit: Array
    _hosts: pa.Array[Any]
    _migs: pa.Array[Any]

    @classmethod
    def of(cls, table: pa.Table, from_ms: int, until_ms: int) -> Allocations:
        """Those of a table that touch the span [from_ms, until_ms)."""
        touching = (table["start_ms"].to_numpy() < until_ms) & (table["end_ms"].to_numpy() > from_ms)
        table = table.take(np.flatnonzero(touching))
        host, mig = (table[name].combine_chunks() for name in ("host", "mig"))
        hosts, migs = host.unique(), mig.unique()
        wanted = ("allocation", "gpu", *_PLAIN, *(f"ridge_{pipe}" for pipe in PIPES))
        column = {name: table[name].to_numpy() for name in wanted}
        return cls(
            number=column["allocation"],
            is_mig=table["mig"].to_numpy() != "",
            ridges={pipe: column[f"ridge_{pipe}"] for pipe in PIPES},
            unit=_codes(host, column["gpu"], mig, hosts, migs),
            _hosts=hosts,
            _migs=migs,
            **{name: column[name] for name in _PLAIN},
        )

    def touch(self, hour_ms: int) -> bool:
        """Whether any allocation has some time of the hour that begins then."""
        return bool(((self.start_ms < hour_ms + HOUR_MS) & (self.end_ms > hour_ms)).any())

    def find(self, hour_ms: int, host: pa.Array[Any], gpu: Array, mig: pa.Array[Any]) -> tuple[Array, Array]:
        """Places of the allocations of an hour that are of these units, and for each the place of its unit."""
        units = _codes(host, gpu, mig, self._hosts, self._migs)
        order = np.argsort(units)
        if not len(order):
            return order, order
        allocation = np.flatnonzero((self.start_ms < hour_ms + HOUR_MS) & (self.end_ms > hour_ms))
        at = order[np.minimum(np.searchsorted(units[order], self.unit[allocation]), len(order) - 1)]
        held = units[at] == self.unit[allocation]
        return allocation[held], at[held]


def _codes(host: pa.Array[Any], gpu: Array, mig: pa.Array[Any], hosts: pa.Array[Any], migs: pa.Array[Any]) -> Array:
    """One number for each host, gpu and mig; -1 where hosts or migs do not name it."""
    host_code, mig_code = (
        pc.index_in(names, known).fill_null(-1).to_numpy().astype(np.int64)
        for names, known in ((host, hosts), (mig, migs))
    )
    return np.where((host_code < 0) | (mig_code < 0), -1, (host_code << 32) + (mig_code << 16) + gpu)
