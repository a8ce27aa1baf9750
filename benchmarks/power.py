"""Nodes that sleep within a budget, against the paper's controller and an oracle. Run: make bench-power.

Philly is scored on 16 to 30 November, and on two earlier fortnights; the virtual clusters of Earth on 23 to 31 May.
Everything before the scored span trains and tunes, nothing of it or later. These spans were fixed before the first
scoring. Every constant of the controllers was chosen on Philly before 16 November and on the sum of the virtual
clusters of Earth. The two earlier fortnights and Earth are part of that: only 16 to 30 November is unseen.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from pathlib import Path

import numpy as np
from figures import Figure, at_most, exactly, main
from traces import DATA

from advisor.power.backtest import LEAKY, ORACLE, OURS, PAPER, TEXT, PowerBacktest, backtest_power, spans_of
from advisor.power.decide import Budget, NodeFlag, PowerLimits, PowerNode, select_nodes
from advisor.power.forecast import PERSISTENCE, SHUFFLED, load_holidays
from telemetry.power.series import NodeSeries, read_node_series

SEEDS = range(5)
BUDGET = Budget(wakes_per_day=1, short_min_per_day=2)
PAPER_GOAL, ORACLE_GOAL = 1.12, 0.87
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


def runs_of(series: NodeSeries, dates: tuple[str, ...], country: str) -> list[PowerBacktest]:
    spans = spans_of(series, *(np.datetime64(date, "m") for date in dates))
    return [backtest_power(series, spans, BUDGET, seed=seed, holidays=load_holidays(country)) for seed in SEEDS]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def ratio(run: PowerBacktest, other: str) -> float:
    theirs = run.score_of(other).asleep
    return run.score_of(OURS).asleep / theirs if theirs else float("nan")


def figures_of(name: str, runs: list[PowerBacktest]) -> list[Figure]:
    found = []
    for controller in (OURS, PERSISTENCE, SHUFFLED, PAPER, TEXT, LEAKY, ORACLE):
        scores = [run.score_of(controller) for run in runs]
        for field in ("asleep", "wakes_per_day", "short_min_per_day"):
            found.append(Figure(f"{name}: {controller}, {field}", spread([getattr(s, field) for s in scores])))
    ours = [run.score_of(OURS) for run in runs]
    paper = [ratio(run, PAPER) for run in runs]
    text, leaky = ([ratio(run, other) for run in runs] for other in (TEXT, LEAKY))
    more = [run.score_of(OURS).wakes_per_day - run.score_of(PAPER).wakes_per_day for run in runs]
    oracle = [ratio(run, ORACLE) for run in runs]
    control = [ratio(run, SHUFFLED) for run in runs]
    wakes, short = ([getattr(s, field) for s in ours] for field in ("wakes_per_day", "short_min_per_day"))
    return [
        *found,
        Figure(f"{name}: asleep / CES", spread(paper), f">= {PAPER_GOAL}", statistics.median(paper) >= PAPER_GOAL),
        Figure(f"{name}: asleep / CES as the text has it", spread(text)),
        Figure(f"{name}: asleep / leaky CES", spread(leaky)),
        Figure(f"{name}: wake-ups a day above CES", spread(more), "<= 1", statistics.median(more) <= 1),
        Figure(
            f"{name}: asleep / oracle", spread(oracle), f">= {ORACLE_GOAL}", statistics.median(oracle) >= ORACLE_GOAL
        ),
        Figure(f"{name}: asleep / shuffled", spread(control), "> 1.02", statistics.median(control) > 1.02),
        Figure(f"{name}: wake-ups a day", spread(wakes), "<= 1", statistics.median(wakes) <= BUDGET.wakes_per_day),
        Figure(f"{name}: short minutes a day", spread(short), "<= 2", statistics.median(short) <= 2),
        Figure(f"{name}: model used, of 6 forecasts", spread([sum(k.is_model_used for k in r.skills) for r in runs])),
    ]  # fmt: skip


def earth_figures(path: Path) -> list[Figure]:
    """One row a virtual cluster, and the goals by how many of them meet each."""
    found, met = [], {"CES": 0, "oracle": 0, "budget": 0}
    for name in EARTH_SETS:
        runs = runs_of(read_node_series(path, name), *EARTH[1:])
        paper = statistics.median(ratio(run, PAPER) for run in runs)
        oracle = statistics.median(ratio(run, ORACLE) for run in runs)
        ours = [run.score_of(OURS) for run in runs]
        wakes, short = (statistics.median(getattr(s, f) for s in ours) for f in ("wakes_per_day", "short_min_per_day"))
        more = statistics.median(r.score_of(OURS).wakes_per_day - r.score_of(PAPER).wakes_per_day for r in runs)
        is_above = all(r.score_of(OURS).asleep >= PAPER_GOAL * r.score_of(PAPER).asleep for r in runs)
        met["CES"] += is_above and more <= 1
        met["oracle"] += oracle >= ORACLE_GOAL
        met["budget"] += wakes <= BUDGET.wakes_per_day and short <= BUDGET.short_min_per_day
        control = statistics.median(ratio(run, SHUFFLED) for run in runs)
        words = (
            f"{statistics.median(s.asleep for s in ours):.2f} asleep, {wakes:.2f} wake-ups, {short:.1f} short min; "
            f"CES {runs[0].score_of(PAPER).asleep:.2f}, {runs[0].score_of(PAPER).wakes_per_day:.2f}; "
            f"/ CES {paper:.2f}, / oracle {oracle:.2f}, / shuffled {control:.2f}"
        )
        found.append(Figure(f"Earth {name}", words))
    goals = {
        "CES": f">= {PAPER_GOAL} x CES, <= 1 wake-up more",
        "oracle": f">= {ORACLE_GOAL} x oracle",
        "budget": "within the budget",
    }
    return found + [
        Figure(f"Earth: sets {goals[key]}", f"{number} of {len(EARTH_SETS)}", "all", number == len(EARTH_SETS))
        for key, number in met.items()
    ]


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
            figures += figures_of(about, runs_of(series, dates, "US"))
    else:
        figures.append(Figure("Philly: the trace is not here", PHILLY))
    if (DATA / EARTH[0]).exists():
        figures += earth_figures(DATA / EARTH[0])
    return figures


if __name__ == "__main__":
    main(measure)
