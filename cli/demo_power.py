"""The last step of `almanac demo`: what node power saving would do on the generated site."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from almanac.config import NodeSet
from almanac.units import format_moment
from cli.app import App
from cli.output import show_table

if TYPE_CHECKING:
    from advisor.demand.model import PowerDecision

QUANTILES = (0.5, 0.8, 0.95)
QUIET_DAYS = 3
"""Days without a wake-up before the plan, because the plan depends on the rest of the budget."""
COLUMNS = ("node set", "nodes", "in use", "50%", "80%", "95%", "keep on", "power down", "why")


def show_power(app: App) -> None:
    """A back-test of the first node set, and the plan of each set at the end of its record."""
    from advisor.demand.features import STEP_MIN
    from advisor.demand.forecast import HORIZON
    from cli.backtest_power import power

    backtest = ["--node-set", app.config.node_sets[0].name]
    click.echo(click.style(f"\n  $ almanac backtest power {' '.join(backtest)}", dim=True))
    power.main(args=backtest, standalone_mode=False, obj=app)
    rows, until_s = [], 0
    for node_set in app.config.node_sets:
        row, end_s = _plan(app, node_set)
        rows.append(row)
        until_s = max(until_s, end_s)
    hours = HORIZON * STEP_MIN // 60
    click.echo(f"\nPlan at {format_moment(until_s)}, if all nodes are on and no node woke for {QUIET_DAYS} days.")
    click.echo(f"50%, 80%, and 95%: quantiles of the highest number of nodes in use within {hours} h.")
    show_table(COLUMNS, rows, right=COLUMNS[1:-1])


def _plan(app: App, node_set: NodeSet) -> tuple[list[str], int]:
    """A row of the table, and the end of the record, s since 1970."""
    from advisor.decisions.power import Spent
    from advisor.demand.lifecycle import usable_demand
    from advisor.demand.model import TAIL_MIN
    from cli.train_demand import node_names
    from telemetry.nodes.counts import demand_series

    store, names = app.cluster_store(), node_names(app, node_set)
    trained, why = usable_demand(store.models_dir, node_set, app.config, app.now_s())
    if trained is None:
        return [node_set.name, str(len(names)), *["-"] * 6, why], 0
    since_s = trained.until_s - TAIL_MIN * 60
    series = demand_series(store, node_set, names, since_s, trained.until_s)
    decision = trained.model.decide(series, len(names), Spent(since_s=trained.until_s - QUIET_DAYS * 86_400))
    return [node_set.name, str(len(names)), f"{series.active[-1]:.0f}", *_numbers(decision, len(names)),
            decision.reason], trained.until_s  # fmt: skip


def _numbers(decision: PowerDecision, total: int) -> list[str]:
    from advisor.demand.features import STEP_MIN
    from advisor.demand.forecast import HORIZON

    forecast = [decision.forecast.get((HORIZON * STEP_MIN, quantile)) for quantile in QUANTILES]
    shown = ["-" if nodes is None else f"{min(nodes, total):.0f}" for nodes in forecast]
    kept = total if decision.target is None else decision.target
    return [*shown, str(kept), str(max(total - kept, 0))]
