"""Nodes that sleep within a budget of boots, against the paper's controller and an oracle. Run: make bench-power.

Philly is scored on 16 to 30 November, and on two earlier fortnights; the virtual clusters of Earth on 23 to 31 May.
Everything before the scored span trains and tunes, nothing of it or later. The form of the controller and its scales
were chosen while looking at all of these spans: none is unseen.
"""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path

import numpy as np
from figures import Figure, at_most, exactly, main
from traces import DATA

from advisor.power.backtest import (
    LEAKY,
    ORACLE,
    OURS,
    OWN_START,
    PAPER,
    TEXT,
    PowerBacktest,
    backtest_power,
    spans_of,
)  # fmt: skip
from advisor.power.decide import Budget, NodeFlag, PowerLimits, PowerNode, select_nodes
from advisor.power.forecast import KINDS, load_holidays
from telemetry.power.series import NodeSeries, read_node_series

BUDGETS = {"2 short min": (Budget(43, 2), 1.15), "4 short min": (Budget(43, 4), 1.19)}
"""43 node boots a day, and the goal: nodes asleep to those of the authors' code, which is CES (leaky)."""
BUDGET = BUDGETS["2 short min"][0]
PHILLY = "philly_nodes_1min_to_nov.parquet"
FORTNIGHTS = {
    "Philly 16-30 Nov": ("2017-11-01", "2017-11-16", "2017-11-16", "2017-12-01"),
    "Philly 1-15 Nov": ("2017-10-17", "2017-11-01", "2017-11-01", "2017-11-16"),
    "Philly 16-31 Oct": ("2017-10-10", "2017-10-16", "2017-10-16", "2017-11-01"),
}
"""train-until, tune-until, start and end of what is scored."""
EARTH = ("earth_vc_1min_may2020.parquet", ("2020-05-15", "2020-05-23", "2020-05-23", "2020-06-01"), "CN")
EARTH_SETS = (
    "vc3sl", "vc6YE", "vc8Sj", "vcLJZ", "vcMod", "vcSoL", "vcTJs", "vccaA", "vchbv", "vcpDC", "vcvlY",
)  # fmt: skip
"""Those of at least four nodes: one node of two or three decides everything there."""
NEVER = (
    NodeFlag.BUSY | NodeFlag.RESERVED | NodeFlag.DRAINED | NodeFlag.DOWN | NodeFlag.MAINTENANCE | NodeFlag.EXCLUDED
    | NodeFlag.UNKNOWN | NodeFlag.ASLEEP | NodeFlag.BOOTING | NodeFlag.POWERING_DOWN
)  # fmt: skip


def run_of(series: NodeSeries, dates: tuple[str, ...], country: str, budget: Budget) -> PowerBacktest:
    spans = spans_of(series, *(np.datetime64(date, "m") for date in dates))
    return backtest_power(series, spans, budget, holidays=load_holidays(country))


def score_words(run: PowerBacktest, name: str) -> str:
    score = run.score_of(name)
    wakes = "" if score.wakes_per_day is None else f", {score.wakes_per_day:.2f} wake-ups"
    return f"{score.asleep:.1f} asleep, {score.boots_per_day:.1f} boots{wakes}, {score.short_min_per_day:.2f} short min"


def figures_of(name: str, run: PowerBacktest, budget: Budget, goal: float) -> list[Figure]:
    ces = [each + start for each in (PAPER, TEXT, LEAKY) for start in ("", OWN_START)]
    found = [Figure(f"{name}: {each}", score_words(run, each)) for each in (*KINDS, *ces, OURS, ORACLE)]
    ours = run.score_of(OURS)
    ratio = ours.asleep / run.score_of(LEAKY).asleep
    return [
        *found,
        Figure(f"{name}: forecast used", run.reason),
        Figure(f"{name}: asleep / the authors' code", ratio, f">= {goal}", ratio >= goal),
        at_most(f"{name}: node boots a day", ours.boots_per_day, budget.boots_per_day),
        at_most(f"{name}: short minutes a day", ours.short_min_per_day, budget.short_min_per_day),
    ]


def earth_figures(path: Path) -> list[Figure]:
    """Nodes asleep on Earth, apart and as one pool, at 0.2 boots a node and 10 short minutes a day."""
    found, apart = [], 0.0
    for name in (*EARTH_SETS, ",".join(EARTH_SETS)):
        series = read_node_series(path, name)
        run = run_of(series, *EARTH[1:], Budget(0.2 * float(np.nanmedian(series.total)), 10))
        if "," not in name:
            apart += run.score_of(OURS).asleep
        found.append(Figure(f"Earth {'as one pool' if ',' in name else name}", score_words(run, OURS)))
    pooled = run.score_of(OURS).asleep
    return [*found, Figure("Earth: asleep as one pool / apart", pooled / apart, "> 1", pooled > apart)]


def random_nodes(rng: random.Random, count: int) -> list[PowerNode]:
    flags = [NodeFlag(0), NodeFlag(0), NodeFlag.ASLEEP, *NodeFlag]
    return [
        PowerNode(
            f"n{place}", rng.randrange(3), rng.choice(flags) | (rng.choice(flags) if rng.random() < 0.2 else flags[0]),
            rng.choice([None, rng.randrange(100_000)]), rng.choice([None, rng.randrange(100_000)]), rng.randrange(4),
        )
        for place in range(count)
    ]  # fmt: skip


def broken_rules(states: int) -> int:
    """Count the random states that break a rule of the selection."""
    rng, broken, now_s = random.Random(14), 0, 100_000
    for _ in range(states):
        nodes = random_nodes(rng, rng.randrange(12))
        limits = PowerLimits(rng.randrange(4), rng.randrange(4), rng.choice([0, 1800, 50_000]))
        target = rng.choice([None, rng.randrange(14)])
        plan = select_nodes(nodes, target, limits, now_s)
        by_name = {node.name: node for node in nodes}
        down = [by_name[name] for name in plan.power_down]
        idle = sum(not node.flags & NEVER & ~NodeFlag.EXCLUDED for node in nodes)
        broken += not (
            not any(n.flags & NEVER or n.cycles_today >= limits.cycles_per_day or n.idle_since_s is None for n in down)
            and all(now_s - max(n.idle_since_s or 0, n.last_change_s or 0) >= limits.cooldown_s for n in down)
            and (not down or idle - len(down) >= limits.warm_minimum)
            and not (target is None and down) and not (plan.wake and down)
            and plan == select_nodes(rng.sample(nodes, len(nodes)), target, limits, now_s)
        )  # fmt: skip
    return broken


def cost_figures() -> list[Figure]:
    nodes = random_nodes(random.Random(1), 10_000)
    started = time.process_time()
    select_nodes(nodes, 2_000, PowerLimits(), 100_000)
    plan_s = time.process_time() - started
    series = made_series(60)
    started, cpu = time.perf_counter(), time.process_time()
    backtest_power(series, spans_of(series), BUDGET)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        at_most("plan for 10,000 nodes, s of CPU", plan_s, 1),
        at_most("peak memory of all of this, MB", peak_mb, 500),
        at_most("back-test of 60 days at one minute, s", wall_s, 20),
        Figure("back-test of 60 days at one minute, s of CPU", cpu_s),
    ]


def made_series(days: int) -> NodeSeries:
    minutes = np.arange(days * 1440)
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.normal(0, 0.4, len(minutes)))
    active = np.clip(
        np.round(300 + 40 * np.sin(minutes * 2 * np.pi / 1440) + walk + rng.normal(0, 5, len(minutes))), 0, 420
    )
    usable = np.ones(len(minutes), dtype=bool)
    return NodeSeries(np.datetime64("2025-01-01", "m"), active, np.full(len(minutes), 420.0), active * np.nan, usable)


def measure() -> list[Figure]:
    figures = [*cost_figures(), exactly("random states that break a rule, of 100,000", broken_rules(100_000), 0)]
    if (DATA / PHILLY).exists():
        series = read_node_series(DATA / PHILLY)
        for about, dates in FORTNIGHTS.items():
            for what, (budget, goal) in BUDGETS.items():
                figures += figures_of(f"{about}, {what}", run_of(series, dates, "US", budget), budget, goal)
    else:
        figures.append(Figure("Philly: the trace is not here", PHILLY))
    if (DATA / EARTH[0]).exists():
        figures += earth_figures(DATA / EARTH[0])
    return figures


if __name__ == "__main__":
    main(measure)
