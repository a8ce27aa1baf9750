"""From the stretches of the energy counter to the energy of each allocation.

Stretches are linked where the step between them is known. A dip or a spike that recovers is rejected. If the counter
falls to a small value and goes on from there, it was reset: the reading after it is the energy used since then
(paper-constants, Energy). Any other step is a gap, for example to a replaced card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from telemetry.metrics.columns import Rows
from telemetry.metrics.energy import KINDS, SLACK_MS
from telemetry.metrics.runs import Array, RowRuns
from telemetry.store.schema import schema_of

ENERGY = schema_of(
    {
        "allocation": pa.int32(),
        "raw_energy_j": pa.float64(),
        "energy_measured_ms": pa.int64(),
        "energy_resets": pa.int64(),
        "energy_rejected": pa.int64(),
    }
)

END_MS = 60_000
"""The power sample of the first or last reading counts for at most this time before or after it."""
_MOST_AHEAD = 16
"""Number of stretches that are searched for one in which the counter recovers."""
_MOST_FAULTY = 3
"""Most readings of a faulty stretch, unless they stand still. More readings that rise normally are not a fault."""


class Stretch(NamedTuple):
    """A row of `energy.KINDS`."""

    allocation: int
    from_ms: int
    second_ms: int
    until_ms: int
    from_mj: float
    second_mj: float
    until_mj: float
    from_w: float
    until_w: float
    limit_w: float
    readings: int
    card: int

    @property
    def shows_use(self) -> bool:
        return self.readings > 1 and not bool(stands_still(self.until_mj - self.from_mj, self.until_ms - self.from_ms))

    def without_first(self) -> Stretch:
        return self._replace(from_ms=self.second_ms, from_mj=self.second_mj, readings=self.readings - 1)


def stands_still(used_mj: Array | float, time_ms: Array | int) -> Array | bool:
    """Whether readings do not rise for so long that the counter must be faulty: every card that is on uses energy."""
    return (time_ms > SLACK_MS) & (used_mj <= 0)


@dataclass(frozen=True)
class Link:
    """The step between two stretches; used_mj: None where it is unknown."""

    used_mj: float | None
    is_reset: bool = False
    rejected: int = 0


@dataclass
class Measured:
    """The result of an allocation's readings. first, last: the stretches at the ends of the measured time."""

    first: Stretch
    last: Stretch
    used_mj: float = 0.0
    measured_ms: int = 0
    resets: int = 0
    rejected: int = 0


def energies(given: Rows, allocations: pa.Table) -> pa.Table:
    """A row of ENERGY for each allocation with a reading; raw_energy_j is null without a possible step.

    Time that no step covers counts too. Up to END_MS before the first and after the last reading count with the power
    sample of that reading. The rest counts with the mean power of the measured time.
    """
    rows, _ = given.by("allocation", "from_ms")
    row = {name: rows[name] for name in KINDS}
    runs = RowRuns.of(row["allocation"])
    first = {name: row[name][runs.starts] for name in KINDS}
    found: dict[str, Array] = {
        "used_mj": first["until_mj"] - first["from_mj"],
        "measured_ms": first["until_ms"] - first["from_ms"],
        "resets": np.zeros(len(runs.starts), np.int64),
        "rejected": np.zeros(len(runs.starts), np.int64),
        **{name: first[name] for name in ("from_ms", "until_ms", "from_w", "until_w")},
    }
    still = stands_still(found["used_mj"], found["measured_ms"])
    for place in np.flatnonzero((runs.lengths > 1) | still).tolist():
        rows_of = slice(runs.starts[place], runs.ends[place])
        chosen = (row[name][rows_of].tolist() for name in Stretch._fields)
        measured = measure([Stretch(*values) for values in zip(*chosen, strict=True)])
        for name in ("used_mj", "measured_ms", "resets", "rejected"):
            found[name][place] = getattr(measured, name)
        for name, stretch in (("from", measured.first), ("until", measured.last)):
            for unit in ("ms", "w"):
                found[f"{name}_{unit}"][place] = getattr(stretch, f"{name}_{unit}")
    numbers = first["allocation"]
    length_ms = (allocations["end_ms"].to_numpy() - allocations["start_ms"].to_numpy())[numbers]
    columns: dict[str, Any] = {
        "allocation": numbers,
        "raw_energy_j": pa.array(_whole_mj(found, length_ms) / 1000, from_pandas=True),
        "energy_measured_ms": found["measured_ms"],
        "energy_resets": found["resets"],
        "energy_rejected": found["rejected"],
    }
    return pa.table(columns).cast(ENERGY)


def _whole_mj(found: dict[str, Array], length_ms: Array) -> Array:
    """The energy of the whole allocation; NaN where nothing was measured."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_w = np.where(found["measured_ms"] > 0, found["used_mj"] / found["measured_ms"], np.nan)
    gaps_ms = found["until_ms"] - found["from_ms"] - found["measured_ms"]
    whole: Array = found["used_mj"] + mean_w * gaps_ms
    for end_ms, power_w in ((found["from_ms"], found["from_w"]), (length_ms - found["until_ms"], found["until_w"])):
        near_ms = np.minimum(end_ms, END_MS)
        whole = whole + np.where(np.isnan(power_w), mean_w, power_w) * near_ms + mean_w * (end_ms - near_ms)
    return whole


def measure(stretches: Sequence[Stretch]) -> Measured:
    """Link the stretches of one allocation, given in time order."""
    kept, links = _linked(stretches)
    is_used = [
        stretch.shows_use or any(link.used_mj is not None for link in links[max(place - 1, 0) : place + 1])
        for place, stretch in enumerate(kept)
    ]
    used = [stretch for stretch, flag in zip(kept, is_used, strict=True) if flag]
    found = Measured(used[0] if used else kept[0], used[-1] if used else kept[0])
    found.rejected = sum(each.readings for each in stretches) - sum(each.readings for each in used)
    for stretch in used:
        found.used_mj += stretch.until_mj - stretch.from_mj
        found.measured_ms += stretch.until_ms - stretch.from_ms
    for link, before, after in zip(links, kept, kept[1:], strict=False):
        if link.used_mj is not None:
            found.used_mj += link.used_mj
            found.measured_ms += after.from_ms - before.until_ms
        found.resets += link.is_reset
        found.rejected += link.rejected
    found.used_mj = max(found.used_mj, 0.0)
    return found


def _linked(stretches: Sequence[Stretch]) -> tuple[list[Stretch], list[Link]]:
    """The stretches that are kept, and the links between them."""
    kept, links, place = [stretches[0]], list[Link](), 1
    while place < len(stretches):
        ahead = _recovery(kept[-1], stretches, place)
        if ahead is not None:
            place = ahead
        later = stretches[place]
        if not _joins(kept[-1], later) and later.readings > 1 and _joins(kept[-1], later.without_first()):
            later = later.without_first()
        is_confirmed = later.shows_use or _recovery(later, stretches, place + 1) is not None
        links.append(_link(kept[-1], later, is_confirmed))
        kept.append(later)
        place += 1
    return kept, links


def _recovery(last: Stretch, stretches: Sequence[Stretch], place: int) -> int | None:
    """The first stretch from `place` on that joins the last one, with only faulty stretches between them."""
    for number, later in enumerate(stretches[place : place + _MOST_AHEAD], place):
        if _joins(last, later):
            return number
        if later.readings > _MOST_FAULTY and later.until_mj > later.from_mj:
            return None
    return None


def _joins(last: Stretch, later: Stretch) -> bool:
    is_same_card = last.card == later.card or not (last.card and later.card)
    return is_same_card and 0 <= later.from_mj - last.until_mj <= _most_mj(last, later)


def _most_mj(last: Stretch, later: Stretch) -> float:
    return last.limit_w * (later.from_ms - last.until_ms + SLACK_MS)


def _link(last: Stretch, later: Stretch, is_confirmed: bool) -> Link:
    step_mj, most_mj = later.from_mj - last.until_mj, _most_mj(last, later)
    if _joins(last, later):
        return Link(step_mj)
    if (last.card and later.card and last.card != later.card) or step_mj > 0:
        return Link(None)
    if later.from_mj <= most_mj:
        return Link(later.from_mj, is_reset=True) if is_confirmed else Link(None)
    # A spike too small to be distinguished from a step. The readings after it are right.
    return Link(step_mj, rejected=1) if step_mj >= -most_mj else Link(None)
