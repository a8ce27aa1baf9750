"""Node-hours, energy, and wake-ups of node power saving in the span of a site report, by node set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from almanac.config import Config, Cost, Power
from almanac.units import format_count, printable
from reports.site.words import NOT_KNOWN, PageTable, energy, hours, money, percent
from telemetry.characterize.table import columns
from telemetry.power.demand import NodeUse, load_node_use
from telemetry.site import Site

TABLE = columns(
    ("node_set", "text"),
    ("known_share", "real", "share of the span that counts cover; all other values are of this share"),
    ("node_hours", "real", "of all nodes of the set"),
    ("active_node_hours", "real", "of nodes in use"),
    ("asleep_node_hours", "real", "of nodes powered down"),
    ("saved_kwh", "real", "asleep node-hours x (power.idle_watts - power.asleep_watts) / 1000 x power.pue"),
    ("saved_cost", "real", "by cost.per_kwh; null: not configured"),
    ("saved_co2_kg", "real", "by power.co2_kg_per_kwh"),
    ("wakeups", "count", "times that fewer nodes were asleep than at the count before"),
    ("short_min", "real", "minutes with nodes asleep while jobs wanted more nodes than were idle"),
)


@dataclass(frozen=True)
class NodeSetPower:
    """A node set. use: None if there are no counts of it in the span. The savings are None then.

    saved_cost is None, too, if electricity has no price.
    """

    name: str
    use: NodeUse | None
    saved_kwh: float | None
    saved_cost: float | None
    saved_co2_kg: float | None


def load_power(site: Site, span_s: tuple[int, int]) -> list[NodeSetPower]:
    """Every node set that is configured or has counts in the span, sorted by name. Raises StoreError."""
    uses = load_node_use(site.store, span_s)
    names = sorted({*uses, *(node_set.name for node_set in site.config.node_sets)})
    return [_savings(name, uses.get(name), site.config) for name in names]


def _savings(name: str, use: NodeUse | None, config: Config) -> NodeSetPower:
    if use is None:
        return NodeSetPower(name, None, None, None, None)
    power, per_kwh = config.power, config.cost.per_kwh
    kwh = use.asleep_hours * (power.idle_watts - power.asleep_watts) / 1000 * power.pue
    return NodeSetPower(name, use, kwh, None if per_kwh < 0 else kwh * per_kwh, kwh * power.co2_kg_per_kwh)


def power_rows(found: Sequence[NodeSetPower]) -> pa.Table:
    """The rows of the CSV file; null for unknown values."""
    rows = []
    for each in found:
        use = each.use
        known = (None,) * 4 if use is None else (use.coverage, use.total_hours, use.active_hours, use.asleep_hours)
        counted = (None,) * 2 if use is None else (len(use.wake_times_s), use.short_min)
        values = (each.name, *known, each.saved_kwh, each.saved_cost, each.saved_co2_kg, *counted)
        rows.append(dict(zip(TABLE.names, values, strict=True)))
    return pa.Table.from_pylist(rows, schema=TABLE)


def power_table(found: Sequence[NodeSetPower], config: Config) -> PageTable | str:
    """Return the table of node sets; a sentence if no set has counts, and "" if the site has no node sets."""
    if not found:
        return ""
    if all(each.use is None for each in found):
        names = printable(", ".join(each.name for each in found), 200)
        return f"No data on {names}: no power run counted nodes in this span."
    cost = ("Cost saved",) if config.cost.per_kwh >= 0 else ()
    headers = ("Node set", "Known", "Node-hours", "In use", "Asleep", "Energy saved", *cost, "CO2", "Wake-ups",
               "Short minutes")  # fmt: skip
    return PageTable(headers, [_cells(each, config.cost) for each in found], _note(config.power))


def _cells(each: NodeSetPower, cost: Cost) -> list[str]:
    name, use, is_priced = printable(each.name, 64), each.use, cost.per_kwh >= 0
    if use is None:
        return [name, percent(0.0), *[NOT_KNOWN] * (7 + is_priced)]
    return [
        name, percent(use.coverage), hours(use.total_hours), _of(use.active_hours, use.total_hours),
        _of(use.asleep_hours, use.total_hours), energy(each.saved_kwh),
        *([money(each.saved_cost, cost)] if is_priced else ()),
        f"{hours(each.saved_co2_kg)} kg", _daily(len(use.wake_times_s), use), _daily(round(use.short_min), use),
    ]  # fmt: skip


def _of(part: float, whole: float) -> str:
    return f"{hours(part)} ({percent(part / whole if whole else None)})"


def _daily(number: int, use: NodeUse) -> str:
    return f"{format_count(number)} ({number / use.known_days:.1f} a day)" if use.known_s else format_count(number)


def _note(power: Power) -> str:
    return (
        "Known: the share of this span with counts of the nodes; all other values are of this share, and of all jobs, "
        "not only those of the other tables. "
        f"Energy saved: node-hours asleep x ({power.idle_watts:g} W - {power.asleep_watts:g} W) x PUE {power.pue:g}, "
        f"with {power.co2_kg_per_kwh:g} kg of CO2 per kWh; set these in [power]. The energy of booting is not "
        "subtracted. Nodes are counted at each power run, so two wake-ups between two runs count as one."
    )
