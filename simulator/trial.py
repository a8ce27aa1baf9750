"""The subjects of `almanac trial`: each replays the site's record, and gives almanac's gains week by week."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.mig.states import Sizes, sizes_of
from advisor.power.backtest import KEEP_WARM, OURS, backtest_power, compared, delays_in, spans_of
from advisor.power.forecast import PERSISTENCE, SHUFFLED
from advisor.power.lifecycle import budget_of, typical_nodes
from advisor.power.replay import Plant
from advisor.trial import (
    Losers,
    TooShortError,
    TrialResult,
    gains_by_week,
    lacking,
    losers_of,
    record_span,
    size_classes,
    trial_span,
)
from almanac.config import Config, Tier
from almanac.hardware import mig_models, profile_name
from almanac.units import DAY_S, HOUR_S
from simulator.cluster import Cluster
from simulator.comparison import draws_name, draws_of, run_policies
from simulator.policies.mig.comparison import ALONE, FULL, PLANNER_RAISES, STATIC, best_static, run_mig
from simulator.policies.mig.layouts import MigSite
from simulator.requests import keep_known_features
from simulator.traces.mig import SliceRequest, pool_jobs, split_days
from simulator.workload import Workload, part_of, split_history
from slurm.commands import Settings
from telemetry.power.series import MINUTE_S, NodeRuns, NodeSeries

Tell = Callable[[float, str], None]
"""Takes the share of the work that is done, and what is done now."""
PRIORITY_OURS = "qssf-aged"
SEEDS = 3
PRIORITY_CONTROLS = (
    "gpu-count", "gpu-count:aged=1", "gpu-limit",
    *(f"qssf-shuffled:aged=1:seed={seed}" for seed in range(SEEDS)),
)  # fmt: skip
"""Orders that predict nothing: fewest GPUs, the same with almanac's aging, fewest GPUs x time limit, and almanac's own
with the prediction of a random other job."""
WORDS = {
    "fifo": "first in, first out", "multifactor": "Slurm's multifactor order", "gpu-count": "order by GPU count",
    "gpu-count:aged=1": "order by GPU count, aged", "gpu-limit": "order by GPUs x limit",
    "qssf-shuffled:aged=1": "shuffled predictions", KEEP_WARM: "a fixed number of idle nodes",
    PERSISTENCE: "persistence", SHUFFLED: "shuffled forecasts", PLANNER_RAISES: "almanac", ALONE: "unchanged layouts",
    STATIC: "the best static layout in hindsight", FULL: "whole GPUs",
}  # fmt: skip
WARM_UP_S = 2 * DAY_S
"""Simulated before the first scored job, so that it finds a busy cluster."""
LONGER = 0.05
"""A user whose mean time to the end grows by more than this share is worse off: less is noise of a simulation."""


@dataclass(frozen=True)
class SiteOrder:
    """The order of the queue now. policy: of the simulator. said: for people."""

    policy: str = "fifo"
    backfill: str = "+easy"
    said: str = "first in, first out, with EASY backfill"


BF_RANGES = {
    "bf_window": (1440, 1, 43_200), "bf_resolution": (60, 1, 3600), "bf_max_job_test": (500, 1, 1_000_000),
    "bf_max_job_user": (0, 0, 1_000_000), "bf_job_part_count_reserve": (0, 0, 100_000), "bf_interval": (30, 1, 10_800),
}  # fmt: skip
"""slurmctld's default and range (man slurm.conf, 22.05). It takes the default in place of a value out of range."""


def site_order(settings: Settings | None) -> SiteOrder:
    """The site's own order and backfill from slurm.conf; FIFO with EASY backfill where Slurm does not answer."""
    if settings is None:
        return SiteOrder()
    backfill, said = site_backfill(settings)
    if settings.get("PriorityType") != "priority/multifactor":
        return SiteOrder("fifo", backfill, f"first in, first out, {said}")
    names = {"age": "PriorityWeightAge", "fair_share": "PriorityWeightFairShare", "size": "PriorityWeightJobSize"}
    weights = {name: _number(settings.get(key, "")) for name, key in names.items()}
    options = "".join(f":{name}={weight:g}" for name, weight in weights.items())
    return SiteOrder(f"multifactor{options}", backfill, f"Slurm's multifactor order, {said}")


def site_backfill(settings: Settings) -> tuple[str, str]:
    """The backfill of slurm.conf as the end of a policy's name, and in words."""
    given = settings.numbers("SchedulerParameters")
    if settings.get("SchedulerType") == "sched/builtin" or "bf_interval=-1" in settings.words("SchedulerParameters"):
        return "", "without backfill"
    limits = {
        name: given[name] if least <= given.get(name, -1) <= most else default
        for name, (default, least, most) in BF_RANGES.items()
    }
    known = {name: limit for name, limit in limits.items() if limit}
    options = "".join(f":{name}={limit}" for name, limit in known.items())
    return f"+conservative{options}", f"with sched/backfill ({', '.join(f'{k} {v}' for k, v in known.items())})"


def _number(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0


def priority_trial(
    workload: Workload, cluster: Cluster, order: SiteOrder, config: Config, tell: Tell, processes: int = 1
) -> TrialResult:
    """Simulate the queue under the site factor, the site's own order, and the controls, all with the same backfill."""
    submit_s = workload.array("submit_s")
    try:
        span = record_span(submit_s, config.trial)
        first, last = np.searchsorted(submit_s, (span.first_s, span.end_s))
        workload = part_of(workload, int(first), int(last))
        past = int(np.searchsorted(workload.array("submit_s"), span.start_s - WARM_UP_S))
        workload, _ = keep_known_features(split_history(workload, (past + 0.5) / len(workload)), cluster)
        has_limits = bool((workload.array("time_limit_s") > 0).any())
        controls = [name for name in PRIORITY_CONTROLS if has_limits or name != "gpu-limit"]
        names = [f"{name}{order.backfill}" for name in (PRIORITY_OURS, order.policy, *controls)]
        runs = run_policies(workload, cluster, names, config, processes=processes, advance=tell)
        hours = {run.policy: run.jobs.jct_s / HOUR_S for run in runs}
        measured = {
            WORDS.get(name := draws_name(draws[0]).partition("+")[0], WORDS.get(name.partition(":")[0], name)): np.mean(
                [hours[draw] for draw in draws], axis=0
            )
            for draws in draws_of(names)
        }
        ours, site = list(measured)[:2]
        gains = gains_by_week(
            "h from submission to end", ours, site, measured, workload.array("submit_s"), span, config.trial,
            is_cost=True,
        )  # fmt: skip
    except TooShortError as error:
        return lacking("priority", error)
    before, after = measured[site], measured[ours]
    scored = workload.array("submit_s") >= span.start_s
    gained, sizes = np.where(scored, before - after, np.nan), size_classes(workload.array("gpu_count"))
    losers = losers_of(gained, workload.array("user"), sizes, "h", LONGER * before)
    weight = round(config.priority.points_per_e * 7 * 24 / config.priority.tau_hours)
    notes = [*span.notes, f"the site has: {order.said}"]
    if not has_limits:
        notes.append("no time limits in the record: backfill plans with the true run times")
    settings = (
        "[priority]", 'mode = "apply"', f"# slurm.conf: PriorityWeightAge={weight} with PriorityMaxAge=7-0",
    )  # fmt: skip
    return TrialResult("priority", gains, losers, settings=settings, notes=tuple(notes))


def power_trial(
    series: NodeSeries, runs: NodeRuns | None, config: Config, holidays: Iterable[np.datetime64], tell: Tell
) -> TrialResult:
    """Replay the power controllers on the demand of a node set; all nodes on is what the site has.

    almanac uses the forecast that was best before the scored weeks, as it would live; the others are not its controls.
    """
    start_s = int(series.start.astype("datetime64[s]").astype("int64"))
    power = config.power
    try:
        span = trial_span(start_s, start_s + len(series) * MINUTE_S, config.trial)
        when = np.datetime64(span.start_s, "s")
        outcome = backtest_power(
            series, spans_of(series, start=when), budget_of(power, typical_nodes(series)),
            plant=Plant.configured(power), holidays=holidays, tick=lambda done, total, note: tell(done / total, note),
        )  # fmt: skip
        rows = slice(outcome.spans.score, outcome.spans.end)
        usable = series.is_usable[rows]
        asleep = {
            WORDS.get(name, name): np.where(usable, series.total[rows] - outcome.timeline[name], np.nan)
            for name in compared(outcome.timeline)
        }
        measured = {OURS: asleep.pop(OURS), "all nodes on": np.where(usable, 0.0, np.nan), **asleep}
        times_s = start_s + (rows.start + np.arange(len(usable))) * MINUTE_S
        gains = gains_by_week("nodes asleep", OURS, "all nodes on", measured, times_s, span, config.trial)
    except TooShortError as error:
        return lacking("power", error)
    score = outcome.score_of(OURS)
    delays = delays_in(runs, series, rows, outcome.shortage)[OURS] if runs else None
    share = delays.delayed / delays.jobs if delays and delays.jobs else 0.0
    late = f"{delays.mean_min:.0f} min" if delays and delays.mean_min is not None else ""
    notes = [
        f"{score.boots_per_day:.1f} node boots and {score.short_min_per_day:.1f} min with too few nodes a day",
        f"forecast: {outcome.reason}",
    ]
    if score.short_min_per_day > power.short_min_per_day:
        notes.append(f"above the budget of {power.short_min_per_day:g} min: the forecast fails here")
        share = 1.0
    settings = ("[power]", 'mode = "apply"')
    losers = Losers(share, late, "of the jobs start late")
    return TrialResult("power", gains, losers, settings=settings, notes=tuple(notes))


def mig_trial(history: pd.DataFrame, config: Config, tell: Tell) -> TrialResult:
    """Simulate the record's jobs on slices: under the planner, unchanged, on the best static layout, and on full GPUs.

    The layout that the site has is unknown: the best static one for the weeks before the scored ones stands for it.
    """
    try:
        model, jobs, users = slice_jobs(history, config.tiers)
        span = record_span([job.submit_s for job in jobs], config.trial)
        sizes = sizes_of(mig_models()[model])
        past = [job for job in jobs if job.submit_s < span.start_s]
        gpus = _gpus_of_slices(jobs, sizes)
        if gpus > MOST_MIG_GPUS:
            raise TooShortError(f"{gpus} GPUs with slices: up to {MOST_MIG_GPUS} can be simulated")
        before = best_static(pool_jobs(past, sizes), sizes, gpus)
        site = MigSite(model, gpus, initial=tuple((sizes.gpu_layout(each),) for each in before.gpus))
        known, scored = split_days(jobs, span.start_s / DAY_S)
        names = (PLANNER_RAISES, ALONE, STATIC, FULL)
        hours = {run.policy: run.jobs.jct_s / HOUR_S for run in run_mig(scored, site, names, known, tell)}
        measured = {WORDS.get(name, name): hours[name] for name in names}
        times_s = np.array([job.submit_s for job in scored]) + span.start_s
        gains = gains_by_week(
            "h from submission to end", WORDS[PLANNER_RAISES], WORDS[ALONE], measured, times_s, span, config.trial,
            is_cost=True,
        )  # fmt: skip
    except TooShortError as error:
        return lacking("mig", error)
    gained, shapes = hours[ALONE] - hours[PLANNER_RAISES], [job.shape for job in scored]
    losers = losers_of(gained, users[len(jobs) - len(scored) :], shapes, "h", LONGER * hours[ALONE])
    notes = (
        f"{gpus} {model} GPUs",
        "the site has: the best static layout for the weeks before, since it is not recorded",
    )
    return TrialResult("mig", gains, losers, settings=("[mig]", 'mode = "apply"'), notes=notes)


MOST_MIG_GPUS = 32


def slice_jobs(history: pd.DataFrame, tiers: Sequence[Tier]) -> tuple[str, list[SliceRequest], npt.NDArray[np.object_]]:
    """The most frequent GPU model with slices, its jobs of one slice by submit time, and their users.

    A job runs as long on a larger slice as on its own. Raises TooShortError if no job ran on a slice.
    """
    by_gres = {tier.gres: tier.gpu_model for tier in tiers if tier.is_slice and tier.gres}
    found: dict[str, list[tuple[float, float, str, str]]] = {}
    columns = ("submit_s", "elapsed_s", "gpu_type", "mig_profile", "gpu_model", "user", "gpu_count")
    for submit_s, run_s, gres, profile, seen, user, gpus in zip(*(history[name] for name in columns), strict=True):
        model = mig_models().get(by_gres.get(str(gres), "") or str(seen))
        named = profile_name(str(profile or "")) or profile_name(str(gres or ""))
        size = model.profile(named) if model and named else None
        if model and size and size.shape in sizes_of(model).shapes and gpus == 1 and run_s > 0 and submit_s > 0:
            found.setdefault(model.name, []).append((float(submit_s), float(run_s), size.shape, str(user or "")))
    if not found:
        raise TooShortError("no job of the record ran on a MIG slice of a known GPU model")
    model_name = max(sorted(found), key=lambda name: len(found[name]))
    rows = sorted(found[model_name])
    requests = [SliceRequest(submit_s, run_s, shape, 0.0) for submit_s, run_s, shape, _ in rows]
    return model_name, requests, np.array([user for *_, user in rows], dtype=object)


def _gpus_of_slices(jobs: Sequence[SliceRequest], sizes: Sizes) -> int:
    """The fewest GPUs whose compute slices the jobs used at once, had none of them waited."""
    changes = []
    for job in jobs:
        used = sizes.compute[sizes.shapes.index(job.shape)]
        changes += [(job.submit_s, used), (job.submit_s + job.full_s, -used)]
    most = int(np.cumsum([used for _, used in sorted(changes)]).max())
    return max(1, math.ceil(most / sizes.compute[-1]))
