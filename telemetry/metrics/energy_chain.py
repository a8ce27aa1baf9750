"""Join the stretches of energy counters into the energy of each allocation.

Stretches are linked if the step between them is known. A dip or a spike that recovers is rejected. If the counter falls
to a small value and goes on from there, it was reset: the reading after it is the energy used since then
(docs/formulas.md, Energy readings). Any other step is a gap, for example to a replaced card. The time in which a
counter is frozen is a gap too, unless the next reading catches up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from telemetry.metrics.arrays import Array, RowRuns, Rows
from telemetry.metrics.energy import KINDS, LEAST_W, SLACK_MS, STILL_MS, stands_still
from telemetry.store.schema import schema_of

ENERGY = schema_of(
    "allocation int32, raw_energy_j double, energy_measured_ms int64, energy_resets int64, energy_rejected int64"
)

END_MS = 60_000
"""The power sample of the first or last reading counts for at most this time before or after it."""
_MOST_AHEAD = 16
"""Number of stretches that are searched for one in which the counter recovers."""
_MOST_FAULTY, _DIP_MS = 3, 600_000
"""A faulty stretch that rises normally has few readings, or the counter is back on the old line this soon."""


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
    mean_w: float

    @property
    def used_mj(self) -> float:
        return self.until_mj - self.from_mj

    @property
    def length_ms(self) -> int:
        return self.until_ms - self.from_ms

    def stands_still(self, most_ms: int) -> bool:
        return bool(stands_still(self.used_mj, self.length_ms, most_ms))

    @property
    def shows_use(self) -> bool:
        return self.readings > 1 and not self.stands_still(SLACK_MS)

    @property
    def is_frozen(self) -> bool:
        return self.stands_still(STILL_MS)

    @property
    def power_w(self) -> float:
        """The mean power by the power samples, W; the mean of the first and last sample if that is unknown."""
        return (self.from_w + self.until_w) / 2 if math.isnan(self.mean_w) else self.mean_w

    def without_first(self) -> Stretch:
        return self._replace(from_ms=self.second_ms, from_mj=self.second_mj, readings=self.readings - 1)

    def with_later(self, later: Stretch) -> Stretch:
        """Join this stretch and a later one."""
        known = [(each.mean_w, each.readings) for each in (self, later) if not math.isnan(each.mean_w)]
        mean_w = sum(w * number for w, number in known) / sum(number for _, number in known) if known else math.nan
        until = {name: getattr(later, name) for name in ("until_ms", "until_mj", "until_w")}
        return self._replace(**until, readings=self.readings + later.readings, mean_w=mean_w)


@dataclass(frozen=True)
class ChainLink:
    """The step between two stretches. used_mj: None if unknown.

    catches_up: the first stretch is frozen, and the step holds the energy of its time too.
    """

    used_mj: float | None
    is_reset: bool = False
    rejected: int = 0
    catches_up: bool = False


@dataclass
class MeasuredEnergy:
    """The result of an allocation's readings. first, last: the stretches at the ends of the known time.

    filled_mj: the energy of filled_ms by the power samples, without a step.
    """

    first: Stretch
    last: Stretch
    used_mj: float = 0.0
    measured_ms: int = 0
    filled_mj: float = 0.0
    filled_ms: float = 0.0
    resets: int = 0
    rejected: int = 0

    def fill(self, power_w: float, time_ms: float) -> None:
        if not math.isnan(power_w):
            self.filled_mj += power_w * time_ms
            self.filled_ms += time_ms


def energies(given: Rows, allocations: pa.Table) -> pa.Table:
    """A row of ENERGY for each allocation with a reading; raw_energy_j is null without a possible step.

    Time that no step covers counts too. Time in which the counter is frozen counts with the mean power sample. Up to
    END_MS before the first and after the last reading count with the power sample of that reading. The rest counts
    with the mean power of the measured time.
    """
    rows, _ = given.by("allocation", "from_ms")
    row = {name: rows[name] for name in KINDS}
    runs = RowRuns.of(row["allocation"])
    first = {name: row[name][runs.starts] for name in KINDS}
    found: dict[str, Array] = {
        "used_mj": first["until_mj"] - first["from_mj"],
        "measured_ms": first["until_ms"] - first["from_ms"],
        **{name: np.zeros(len(runs.starts), np.int64) for name in ("resets", "rejected")},
        **{name: np.zeros(len(runs.starts)) for name in ("filled_mj", "filled_ms")},
        **{name: first[name] for name in ("from_ms", "until_ms", "from_w", "until_w")},
    }
    still = stands_still(found["used_mj"], found["measured_ms"], SLACK_MS)
    for place in np.flatnonzero((runs.lengths > 1) | still).tolist():
        rows_of = slice(runs.starts[place], runs.ends[place])
        chosen = (row[name][rows_of].tolist() for name in Stretch._fields)
        measured = linked_energy([Stretch(*values) for values in zip(*chosen, strict=True)])
        for name in ("used_mj", "measured_ms", "filled_mj", "filled_ms", "resets", "rejected"):
            found[name][place] = getattr(measured, name)
        for name, stretch in (("from", measured.first), ("until", measured.last)):
            for unit in ("ms", "w"):
                found[f"{name}_{unit}"][place] = getattr(stretch, f"{name}_{unit}")
    numbers = first["allocation"]
    length_ms = (allocations["end_ms"].to_numpy() - allocations["start_ms"].to_numpy())[numbers]
    columns: dict[str, Any] = {
        "allocation": numbers,
        "raw_energy_j": pa.array(_whole_mj(found, length_ms) / 1000, from_pandas=True),
        **{f"energy_{name}": found[name] for name in ("measured_ms", "resets", "rejected")},
    }
    return pa.table(columns).cast(ENERGY)


def _whole_mj(found: dict[str, Array], length_ms: Array) -> Array:
    """The energy of the whole allocation; NaN where nothing was measured."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_w = np.where(found["measured_ms"] > 0, found["used_mj"] / found["measured_ms"], np.nan)
    gaps_ms = found["until_ms"] - found["from_ms"] - found["measured_ms"] - found["filled_ms"]
    whole: Array = found["used_mj"] + found["filled_mj"] + mean_w * gaps_ms
    for end_ms, power_w in ((found["from_ms"], found["from_w"]), (length_ms - found["until_ms"], found["until_w"])):
        near_ms = np.minimum(end_ms, END_MS)
        whole = whole + np.where(np.isnan(power_w), mean_w, power_w) * near_ms + mean_w * (end_ms - near_ms)
    return whole


def linked_energy(stretches: Sequence[Stretch]) -> MeasuredEnergy:
    """Link the stretches of one allocation, given in time order."""
    kept, links = _linked(_whole_still(stretches))
    before = [ChainLink(None), *links]
    after = [*links, ChainLink(None)]
    is_used = [
        stretch.shows_use or left.used_mj is not None or right.used_mj is not None
        for stretch, left, right in zip(kept, before, after, strict=True)
    ]
    known = [stretch for stretch, flag in zip(kept, is_used, strict=True) if flag or not math.isnan(stretch.power_w)]
    found = MeasuredEnergy(known[0] if known else kept[0], known[-1] if known else kept[0])
    found.rejected = sum(each.readings for each in stretches)
    for stretch, flag, right in zip(kept, is_used, after, strict=True):
        if flag and (right.catches_up or not stretch.is_frozen):
            found.used_mj += stretch.used_mj
            found.measured_ms += stretch.length_ms
        else:
            found.fill(stretch.power_w, stretch.length_ms)
        if flag:
            found.rejected -= 1 if stretch.is_frozen else stretch.readings
    for link, last, later in zip(links, kept, kept[1:], strict=False):
        if link.used_mj is not None:
            found.used_mj += link.used_mj
            found.measured_ms += later.from_ms - last.until_ms
        else:
            near_ms = min((later.from_ms - last.until_ms) / 2, END_MS)
            found.fill(last.until_w, near_ms)
            found.fill(later.from_w, near_ms)
        found.resets += link.is_reset
        found.rejected += link.rejected
    found.used_mj = max(found.used_mj, 0.0)
    return found


def _whole_still(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Stretches, with those that stand still together as one."""
    found = [stretches[0]]
    for later in stretches[1:]:
        whole = found[-1].with_later(later)
        is_still = not found[-1].shows_use and not later.shows_use
        if is_still and _is_same_card(found[-1], later) and 0 <= whole.used_mj <= LEAST_W * whole.length_ms:
            found[-1] = whole
        else:
            found.append(later)
    return found


def _linked(stretches: Sequence[Stretch]) -> tuple[list[Stretch], list[ChainLink]]:
    """The stretches that are kept, and the links between them."""
    kept, links, place = [stretches[0]], list[ChainLink](), 1
    length_ms = sum(each.length_ms for each in stretches if each.shows_use)
    usual_w = sum(each.used_mj for each in stretches if each.shows_use) / length_ms if length_ms else 0.0
    while place < len(stretches):
        ahead = _recovery(kept[-1], stretches, place)
        if ahead is not None:
            place = ahead
        later = stretches[place]
        if not _joins(kept[-1], later) and later.readings > 1 and _joins(kept[-1], later.without_first()):
            later = later.without_first()
        is_confirmed = later.shows_use or _recovery(later, stretches, place + 1) is not None
        links.append(_link(kept[-1], later, len(kept) > 1, is_confirmed, usual_w))
        kept.append(later)
        place += 1
    return kept, links


def _recovery(last: Stretch, stretches: Sequence[Stretch], place: int) -> int | None:
    """The first stretch from `place` on that joins the last one, with only faulty stretches between them."""
    for number, later in enumerate(stretches[place : place + _MOST_AHEAD], place):
        if _joins(last, later):
            return number
        if later.shows_use and later.readings > _MOST_FAULTY and later.until_ms - last.until_ms > _DIP_MS:
            return None
    return None


def _is_same_card(last: Stretch, later: Stretch) -> bool:
    return last.card == later.card or not (last.card and later.card)


def _joins(last: Stretch, later: Stretch) -> bool:
    """Return True if a card can have used the energy between two stretches; from the begin of one that stands still."""
    step_mj, step_ms = later.from_mj - last.until_mj, later.from_ms - last.until_ms
    is_enough = step_mj >= 0 and not stands_still(step_mj, step_ms, STILL_MS)
    since_ms = step_ms if last.shows_use else later.from_ms - last.from_ms
    return _is_same_card(last, later) and is_enough and step_mj <= last.limit_w * (since_ms + SLACK_MS)


def _link(last: Stretch, later: Stretch, is_dated: bool, is_confirmed: bool, usual_w: float) -> ChainLink:
    """The step between two stretches.

    is_dated: the last one is no first one, so that its begin is known. is_confirmed: the later one is no faulty
    reading. usual_w: the power without frozen stretches; 0: not known.
    """
    step_mj, step_ms = later.from_mj - last.until_mj, later.from_ms - last.until_ms
    most_mj = last.limit_w * (step_ms + SLACK_MS)
    if _joins(last, later):
        mean_w = usual_w if math.isnan(last.mean_w) else last.mean_w
        is_late = step_mj > min(most_mj, mean_w * (last.length_ms / 2 + step_ms))
        if not last.is_frozen or not is_late:
            return ChainLink(step_mj)
        return ChainLink(step_mj, catches_up=True) if is_dated else ChainLink(None)
    if not _is_same_card(last, later) or step_mj >= 0:
        return ChainLink(None)
    if later.from_mj <= most_mj:
        return ChainLink(later.from_mj, is_reset=True) if is_confirmed else ChainLink(None)
    # A spike too small to be distinguished from a step. The readings after it are right.
    return ChainLink(step_mj, rejected=1) if step_mj >= -most_mj else ChainLink(None)
