"""Are the verdicts of `almanac trial` right? On generated sites where nothing pays, and on others built to pay.

Run: make bench-trial. Each site has five weeks of jobs. On a site built to pay, run times, peaks of GPU memory, speeds,
and GPU activity belong to job families, and nodes in use have a strong pattern of days. Where nothing pays, the same
values are shuffled over all jobs, and nodes in use wander. The sites of OTHER were made once, after the first ones, and
neither they nor the rules were changed since. MIG is judged where nothing pays alone: its best static layout knows the
scored weeks. The last rows judge the interval: how often gains over shuffled predictions lie above 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from figures import Figure, at_least, at_most, main

from advisor.memory.backtest import trial_tiers
from advisor.packing.backtest import trial_packing
from advisor.trial import SWITCH_ON, Gain, TrialResult, judge
from advisor.types.backtest import trial_types
from advisor.types.runs import COLUMNS
from almanac.config import Config, Power, Tier, Training
from almanac.units import DAY_S, HOUR_S
from reports.replay_plots import render_trial_plot
from simulator.cluster import uniform
from simulator.trial import SiteOrder, mig_trial, power_trial, priority_trial
from simulator.workload import Workload, make_workload
from telemetry.history import _BASE
from telemetry.power.series import NodeSeries

DAYS, JOBS_A_DAY = 36, 90
NODES, GPUS_PER_NODE, LOAD = 3, 4, 0.9
START_S = 1_740_960_000
TIERS = (Tier("hbm40g", 40960, "A100-40", constraint="hbm40g"), Tier("hbm80g", 81920, "A100-80", constraint="hbm80g"))
NULL, PAYS, OTHER = "where nothing pays", "built to pay", "of the second kind, built to pay"
FEW, SECONDS = 0.2, 0.3
"""Shares of the sites: for subjects that take seconds each, and of the second kind."""
RESAMPLES = 2000


@dataclass(frozen=True)
class SiteKind:
    """Jobs of families, users in turn. longest_s: usual run times are spread evenly in logarithm up to there.

    noise: of run times in a family. fast: speed of a family on its own GPU type. hours: of the submissions. weekend:
    jobs on its days, as a share of those on others. wander: noise of the nodes in use.
    """

    families: int
    users: int
    longest_s: float
    noise: float
    fast: float
    hours: tuple[float, float]
    weekend: float
    most_gpus: int
    night_nodes: int
    ramp_h: float
    wander: float


FIRST = SiteKind(36, 12, 12_000, 0.15, 2.5, (9, 17), 1.0, 2, 8, 2.0, 0.25)
SECOND = SiteKind(24, 7, 40_000, 0.35, 1.8, (6, 22), 0.4, 4, 15, 1.0, 0.4)


def config_of() -> Config:
    """Return a configuration without LightGBM, whose trainings would take minutes.

    Predictions are then those of the last runs. Half of the nodes may boot each day: the made sites wake them daily.
    """
    training, power = Training(min_jobs=10**6), Power(boots_per_node=0.5)
    return dataclasses.replace(Config(tiers=TIERS), training=training, power=power)


def made_record(seed: int, kind: str) -> pd.DataFrame:
    """One job a row, with the columns of the history; shuffled over the jobs where nothing pays."""
    rng, site = np.random.default_rng([seed, [NULL, PAYS, OTHER].index(kind)]), SECOND if kind == OTHER else FIRST
    jobs, families = DAYS * JOBS_A_DAY, site.families
    family = rng.integers(0, families, jobs)
    middle_s, is_wild = rng.permutation(np.geomspace(120, site.longest_s, families)), rng.random(families) < 0.4
    peak_mib = np.where(is_wild, rng.uniform(14_000, 22_000, families), rng.uniform(24_000, 45_000, families))
    gpus = rng.permutation(np.where(np.arange(families) % 5 == 4, site.most_gpus, 1))[family]
    is_h100, likes_h100 = rng.random(jobs) < 0.5, rng.random(families) < 0.5
    is_low = (rng.random(families) < 0.5)[family]
    run_s = middle_s[family] * np.exp(rng.normal(0, site.noise, jobs))
    need_mib = peak_mib[family] * np.exp(np.where(is_wild[family], 0.6, 0.02) * rng.normal(0, 1, jobs))
    speed = np.where(is_h100 == likes_h100[family], site.fast, 1.0)
    if kind == NULL:
        run_s, need_mib, is_low = (rng.permutation(each) for each in (run_s, need_mib, is_low))
        speed = np.ones(jobs)
    run_s *= LOAD * NODES * GPUS_PER_NODE * DAYS * DAY_S / float((run_s * gpus).sum())
    weight = np.where(np.arange(DAYS) % 7 < 5, 1.0, site.weekend)
    days, hours = rng.choice(DAYS, jobs, p=weight / weight.sum()), rng.uniform(*site.hours, jobs)
    submit_s = START_S + np.sort(days * DAY_S + hours * HOUR_S).astype("int64")
    elapsed_s = np.maximum(run_s / speed, 30).round()
    known = {
        "job_id": np.arange(1, jobs + 1), "submit_s": submit_s, "start_s": submit_s,
        "end_s": submit_s + elapsed_s.astype("int64"), "elapsed_s": elapsed_s,
        "time_limit_s": float(2 * elapsed_s.max()),
        "user": [f"u{each % site.users}" for each in family], "name": [f"job-{each}-x" for each in family],
        "name_key": [f"job-{chr(97 + each // 26)}{chr(97 + each % 26)}" for each in family],
        "gpu_count": gpus, "node_count": 1, "cpu_count": gpus, "state": "COMPLETED", "verdict": "ok",
        "gpu_type": np.where(is_h100, "h100", "a100"), "tier": "hbm80g", "constraints": "hbm80g",
        "hbm_peak_mib": np.minimum(need_mib, 79_000), "hbm_max_mib": np.minimum(need_mib, 79_000),
        "hbm_capacity_mib": 81_920.0, "hbm_evidence": "telemetry", "is_array": False, "is_packed": False,
        "has_profiling_fault": False, "coverage_frac": 1.0, "mean_gpu_util_pct": 80.0,
        "mean_sm_active_frac": np.where(is_low, 0.12, 0.75), "mean_dram_active_frac": np.where(is_low, 0.05, 0.5),
        "coverage_sm_active_frac": 1.0, "coverage_dram_active_frac": 1.0,
    }  # fmt: skip
    frame = pd.DataFrame(
        {name: known.get(name) for name in dict.fromkeys((*_BASE, *COLUMNS, *known))}, index=range(jobs)
    )
    texts = ("account", "partition", "qos", "script_key", "gpu_type_req", "gpu_model", "mig_profile", "job_class",
             "main_pipe")  # fmt: skip
    for name in frame.columns:
        if frame[name].isna().all():
            frame[name] = "" if name in texts else np.nan
    return frame


def workload_of(record: pd.DataFrame) -> Workload:
    """The jobs with one GPU type: run times as on an a100."""
    columns = ("job_id", "submit_s", "gpu_count", "user", "name", "time_limit_s", "state")
    return make_workload(pd.DataFrame({**{name: record[name] for name in columns}, "run_s": record["elapsed_s"]}))


def part_of(record: pd.DataFrame, step: int) -> pd.DataFrame:
    """One job of so many, oldest end first: enough without a queue."""
    return record.iloc[::step].sort_values("end_s", kind="stable", ignore_index=True)


def made_pairs(seed: int, kind: str) -> pd.DataFrame:
    """Jobs of one GPU that run for hours, a family each user: of low use and little memory, or neither."""
    record = part_of(made_record(seed, kind), 2)
    noise = np.exp(np.random.default_rng([seed, 9]).normal(0, 0.02, len(record)))
    peak_mib = np.where(record["mean_sm_active_frac"] < 0.5, 8_000, 60_000) * noise
    hours = {"elapsed_s": 3.0 * HOUR_S, "end_s": record["start_s"] + 3 * HOUR_S}
    known = {"hbm_peak_mib": peak_mib, "hbm_max_mib": peak_mib, "gpu_model": "A100-80", "gpu_type": "a100"}
    pairs = record.assign(user=record["name_key"], gpu_count=1, **hours, **known)
    return pairs.sort_values("end_s", kind="stable", ignore_index=True)


def made_series(seed: int, kind: str, nodes: int = 40) -> NodeSeries:
    """Nodes in use per minute: few at night and many by day, or a walk without a pattern."""
    rng, site, minutes = np.random.default_rng([seed, 5]), SECOND if kind == OTHER else FIRST, DAYS * 1440
    walk = np.zeros(minutes // 10)
    for place, step in enumerate(rng.normal(0, 0.2, len(walk) - 1), 1):
        walk[place] = 0.98 * walk[place - 1] + step
    hour, day = np.arange(minutes) % 1440 / 60, np.arange(minutes) // 1440
    share = np.clip(np.minimum((hour - 8) / site.ramp_h, (20 - hour) / site.ramp_h), 0, 1)
    share *= np.where(day % 7 < 5, 1.0, site.weekend)
    level = site.night_nodes + 20 * share + site.wander * np.repeat(walk, 10)
    if kind == NULL:
        level = 18 + 6 * np.repeat(walk, 10)
    active = np.clip(np.round(level), 0, nodes)
    known = (np.full(minutes, float(nodes)), np.full(minutes, np.nan), np.ones(minutes, dtype=bool))
    return NodeSeries(np.datetime64("2025-03-03T00:00"), active, *known)


def made_slices(seed: int) -> pd.DataFrame:
    """Jobs of two slice sizes, shuffled over time: one layout fits all weeks."""
    rng, jobs = np.random.default_rng([seed, 7]), 14 * DAYS
    submit_s = START_S + np.sort(rng.uniform(0, DAYS * DAY_S, jobs))
    is_small = rng.random(jobs) < 0.6
    return pd.DataFrame(
        {
            "submit_s": submit_s, "elapsed_s": np.where(is_small, 4, 3) * HOUR_S * np.exp(rng.normal(0, 0.1, jobs)),
            "gpu_type": "", "mig_profile": np.where(is_small, "3g.40gb", "7g.80gb"), "gpu_model": "A100-80",
            "user": [f"u{each}" for each in rng.integers(0, 6, jobs)], "gpu_count": 1,
        }
    )  # fmt: skip


def _quiet(share: float, note: str) -> None:
    """Tell nothing."""


def _priority(seed: int, kind: str) -> TrialResult:
    cluster = uniform(NODES, GPUS_PER_NODE)
    return priority_trial(workload_of(made_record(seed, kind)), cluster, SiteOrder(), config_of(), _quiet)


SUBJECTS: dict[str, tuple[Callable[[int, str], TrialResult], float]] = {
    "tiers": (lambda seed, kind: trial_tiers(part_of(made_record(seed, kind), 2), config_of()), 1),
    "packing": (lambda seed, kind: trial_packing(made_pairs(seed, kind), config_of()), 1),
    "priority": (_priority, 1),
    "types": (lambda seed, kind: trial_types(part_of(made_record(seed, kind), 4), config_of()), 1),
    "power": (lambda seed, kind: power_trial(made_series(seed, kind), None, config_of(), (), _quiet), FEW),
    "mig": (lambda seed, kind: mig_trial(made_slices(seed), config_of(), _quiet), FEW),
}
"""The trial of one site by subject, and the share of the sites that it judges."""


def result_of(subject: str, seed: int, kind: str) -> TrialResult:
    return SUBJECTS[subject][0](seed, kind)


def false_shares(gains: list[Gain]) -> Iterator[tuple[str, float]]:
    """The share of gains whose lower end is above 0, by the way that the interval is made."""
    rng = np.random.default_rng(1)
    found = Counter({"Student's t, as in the verdict": sum(each.low > 0 for each in gains)})
    for each in gains:
        weekly = np.array(each.by_week)
        draws = weekly[rng.integers(0, len(weekly), (RESAMPLES, len(weekly)))].mean(axis=1)
        low = float(np.percentile(draws, 2.5))
        found["block bootstrap"] += low > 0
        wider = np.sqrt(len(weekly) / (len(weekly) - 1)) * 4.303 / 1.96 if len(weekly) == 3 else 1.0
        found["block bootstrap, t-corrected"] += weekly.mean() - wider * (weekly.mean() - low) > 0
    for name, count in found.items():
        yield name, count / max(1, len(gains))


def measure() -> Iterator[Figure]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=100, help="of each kind")
    parser.add_argument("--first", type=int, default=1, help="seed of the first site")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--subjects", default=",".join(SUBJECTS), help="comma-separated")
    parser.add_argument("--plot", type=Path, help="only draw the weeks of the first site built to pay, for the docs")
    given = parser.parse_args()
    subjects = given.subjects.split(",")
    if given.plot:
        verdicts = [judge(result_of(each, given.first, PAYS), config_of().trial) for each in subjects]
        given.plot.write_bytes(render_trial_plot(verdicts, given.plot.suffix.removeprefix(".")))
        return
    with ProcessPoolExecutor(given.jobs) as pool:
        yield from figures_of(subjects, given.first, given.sites, pool)


def figures_of(subjects: list[str], first: int, sites: int, pool: ProcessPoolExecutor) -> Iterator[Figure]:
    """Verdicts `switch on` by subject, printed as each ends, and the errors of the interval."""
    rules, gains = config_of().trial, list[Gain]()
    for subject in subjects:
        started_s = time.monotonic()
        for kind in (NULL,) if subject == "mig" else (NULL, PAYS, OTHER):
            number = max(1, round(SUBJECTS[subject][1] * sites * (SECONDS if kind == OTHER else 1)))
            seeds = range(first, first + number)
            results = list(pool.map(result_of, [subject] * number, seeds, [kind] * number))
            verdicts = [judge(each, rules) for each in results]
            count = sum(each.answer == SWITCH_ON for each in verdicts)
            said = f"{subject}: switch on, of {number} sites {kind}"
            found = at_most(said, count, 0.05 * number) if kind == NULL else at_least(said, count, 0.8 * number)
            found = Figure(said, count) if kind == OTHER else found
            reasons = Counter(each.reason for each in verdicts if each.answer != SWITCH_ON) if kind != NULL else {}
            print(f"{found.figure}: {count}", *(f"  {each} {reason}" for reason, each in reasons.items()), sep="\n",
                  flush=True)  # fmt: skip
            yield found
            if kind == NULL:
                known = [gain for each in results if each.gains for gain in each.gains.controls]
                gains += [gain for gain in known if gain.over.startswith("shuffled") and any(gain.by_week)]
        yield Figure(f"{subject}: time of these sites, s", time.monotonic() - started_s)
    for name, share in false_shares(gains):
        yield Figure(f"where nothing pays: gain over shuffled above 0, {name}", share)


if __name__ == "__main__":
    main(measure)
