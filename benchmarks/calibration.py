"""Does the memory advice hold at the risk it states? On sites with known needs, and on real memory of named jobs.

Run: make bench-calibration. The sites are those of hostile_site.toml, seeds 1 and up, which no
part of the bound was made on; from the history frame on, the path is the product's own. Rates are over advised jobs, by
the need that the generator knows, an array counted once, a batch of a sweep or a burst as one job; 95% intervals by
bootstrap over users. The oracle knows each job's true peak.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from figures import Figure, at_least, at_most, main
from hostile_site import BATCHES, KINDS, NEW_USER, PREALLOCATING, followed, hostile_profile, proof_shape, record_of
from rich.console import Console
from rich.table import Table
from traces import DATA, TRACES, load_trace

from advisor.backtest import Rate, rate_of
from advisor.memory.backtest import DOWN, SILENT, replay_tiers, score_group
from advisor.memory.peak_store import Case, replay_peaks
from advisor.memory.runs import FAILED_SHARE
from almanac.config import AdviceSection, Config, Tier
from telemetry.store.store import Store

TIERS = (Tier("hbm40g", 40960, "A100-40", constraint="hbm40g"), Tier("hbm80g", 81920, "A100-80", constraint="hbm80g"))
SMALLER, LARGER = (tier.name for tier in TIERS)
RISKS = (0.005, 0.01, 0.05)
JUDGED = (0.005, 0.01)
"""The risks that goals are set for."""
KINDS_JUDGED = (*KINDS, PREALLOCATING, NEW_USER)
LEAST_JOBS = 2_000
"""A kind with fewer advised jobs over all seeds is not judged."""
TIER_GOAL, BOUND_GOAL, KIND_GOAL = 1.25, 1.5, 2.0
MOVED_GOAL, PLAIN_MOVED_GOAL, DEATHS_GOAL, BURST_GOAL = 0.55, 0.85, 0.9, 0.05
MASON_RISK, MASON_GOAL, MASON_MOVED_GOAL = 0.01, 2.0, 0.4
BURST_S, BURST_JOBS, BURST_DAYS = 60, 200, 2


def outcomes_of(seed: int) -> tuple[dict[float, pd.DataFrame], pd.DataFrame]:
    """Return the outcome of each risk's advice after the warm-up, and the deaths of memory that telemetry saw."""
    advice, shape = AdviceSection(), proof_shape(seed)
    history, truth = record_of(shape)
    truth = truth.assign(asked=history["tier"])
    since_s = shape.start_s + round(hostile_profile()["site"]["warmup_days"] * 86_400)
    found = {}
    for risk in RISKS:
        config = Config(tiers=TIERS, advice=dataclasses.replace(advice, risk=risk))
        if risk in JUDGED:
            closed, known = followed(history, truth, config, since_s, seed)
            found[risk] = judged(closed, known, config, since_s, seed)
        else:
            found[risk] = judged(history, truth, config, since_s, seed)
    return found, deaths(history, truth, replay_peaks(history, advice, TIERS), advice)


def judged(history: pd.DataFrame, truth: pd.DataFrame, config: Config, since_s: int, seed: int) -> pd.DataFrame:
    """The outcomes of the advice since since_s by the true needs, with kind, batch and is_movable.

    A job whose user has followed the advice counts as moved, although its request says so already.
    """
    rows = replay_tiers(history, config)
    known = truth.iloc[rows["row"]].reset_index(drop=True)
    is_followed = rows["asked"].eq(SMALLER) & known["asked"].eq(LARGER) & rows["advised"].eq(SMALLER)
    batch = known["family"].astype(str) + "/" + known["batch"].astype(str)
    rows = rows.assign(
        need_mib=known["need_mib"], is_known=True, kind=known["kind"], user=f"{seed}/" + rows["user"],
        batch=f"{seed}/" + batch.where(known["batch"] >= 0, "job " + rows["row"].astype(str)),
        asked=known["asked"], move=rows["move"].mask(is_followed, DOWN),
    )  # fmt: skip
    usable_mib = TIERS[0].capacity_mib - config.advice.headroom_mib
    rows["is_movable"] = (rows["asked"] == LARGER) & (rows["need_mib"] <= usable_mib)
    return rows[rows["submit_s"] >= since_s]


def deaths(history: pd.DataFrame, truth: pd.DataFrame, cases: Iterable[Case], advice: AdviceSection) -> pd.DataFrame:
    """Deaths of memory whose highest sample is near the capacity: row, is_recognized."""
    is_near = history["hbm_max_mib"] >= FAILED_SHARE * history["hbm_capacity_mib"]
    wanted = set(np.flatnonzero(truth["is_death"] & is_near))
    rows = [(case.row, bool(case.run and case.run.is_oom)) for case in cases if case.row in wanted]
    return pd.DataFrame(rows, columns=["row", "is_recognized"])


def burst_effect(seed: int, risk: float) -> float:
    """Return the fall of other users' advised share, on its worst day, after one user's burst of larger jobs."""
    config = Config(tiers=TIERS, advice=AdviceSection(risk=risk))
    shape = proof_shape(seed)
    history, _ = record_of(shape)
    at_s = shape.start_s + 60 * 86_400
    past = replay_tiers(history[history["submit_s"] < at_s].reset_index(drop=True), config)
    is_advised = past["move"].ne(SILENT) & past["bound_mib"].notna()
    row = history[history["submit_s"] < at_s].reset_index(drop=True).loc[past["row"][is_advised].iloc[-1]]
    burst = pd.DataFrame([row.to_dict()] * BURST_JOBS).assign(
        job_id=np.arange(BURST_JOBS) + 10**9, submit_s=at_s + 5 * np.arange(BURST_JOBS), is_array=False,
        hbm_peak_mib=min(2.5 * row["hbm_peak_mib"], 79_000.0), hbm_capacity_mib=81920.0, hbm_evidence="telemetry",
        state="COMPLETED", verdict="ok", constraints="gpu&hbm80g", tier="hbm80g", elapsed_s=3600.0,
    )  # fmt: skip
    burst = burst.assign(start_s=burst["submit_s"] + 60, end_s=burst["submit_s"] + 3660)
    with_burst = pd.concat([history, burst.astype(history.dtypes.to_dict())], ignore_index=True)
    shares = []
    for record in (history, with_burst):
        rows = replay_tiers(record, config)
        rows = rows[(rows["user"] != row["user"]) & (rows["submit_s"] >= at_s)]
        day = (rows["submit_s"] - at_s) // 86_400
        shares.append(rows["move"].ne(SILENT).groupby(day).mean()[: BURST_DAYS + 1])
    return float((shares[0] - shares[1]).max())


def prove(seeds: int) -> tuple[list[Figure], list[dict[str, Any]]]:
    parts, seen, lowered = [], [], dict.fromkeys(JUDGED, 0.0)
    for seed in range(1, seeds + 1):
        part, found = outcomes_of(seed)
        parts.append(part)
        seen.append(found)
        for risk in JUDGED if seed <= 2 else ():
            lowered[risk] = max(lowered[risk], burst_effect(seed, risk))
        print(f"seed {seed} of {seeds}", file=sys.stderr)
    recognized = pd.concat(seen)["is_recognized"]
    share = float(recognized.mean())
    figures = [
        Figure("deaths near capacity that telemetry saw", len(recognized)),
        at_least("of them recognized", share, DEATHS_GOAL),
    ]
    for risk, fall in lowered.items():
        about = f"risk {risk:.1%}: others' advised share lowered by one user's burst, worst day"
        figures.append(at_most(about, fall, BURST_GOAL))
    table: list[dict[str, Any]] = []
    for risk in RISKS:
        rows = pd.concat([part[risk] for part in parts], ignore_index=True)
        table.append(_line(risk, "all", rows, BOUND_GOAL, TIER_GOAL))
        table += [_line(risk, kind, rows[rows["kind"] == kind], KIND_GOAL, KIND_GOAL) for kind in KINDS_JUDGED]
        table += [
            _line(risk, f"evidence: {scope}", rows[rows["scope"] == scope]) for scope in sorted(rows["scope"].unique())
        ]
        plain = rows[rows["kind"] == KINDS[0]]
        for group, those, goal in (("all", rows, MOVED_GOAL), ("plain families", plain, PLAIN_MOVED_GOAL)):
            moved = ((those["move"] == DOWN) & those["is_movable"]).sum() / those["is_movable"].sum()
            is_met = bool(moved >= goal) if risk in JUDGED else None
            said, about = f">= {goal}" if risk in JUDGED else "", f"80 GB requests moved / by the oracle, {group}"
            figures.append(Figure(f"risk {risk:.1%}: {about}", float(moved), said, is_met))
    return figures, table


def rates_of(group: str, rows: pd.DataFrame) -> dict[str, Rate]:
    """Return the exceedance rates of the bound and of the tier.

    A batch of a sweep or a burst counts as one job, by its mean.
    """
    if group not in BATCHES:
        scores = score_group(group, rows)
        return {"bound": scores.exceeded_bound, "tier": scores.exceeded_tier}
    advised = rows[rows["move"].ne(SILENT)]
    stated = advised[advised["bound_mib"].notna()]
    over = {"bound": stated["need_mib"] > stated["bound_mib"], "tier": advised["need_mib"] > advised["usable_mib"]}
    users = advised.groupby("batch")["user"].first()
    return {name: rate_of(each.groupby(advised["batch"]).mean(), users) for name, each in over.items()}


def _line(
    risk: float, group: str, rows: pd.DataFrame, bound_goal: float = 0.0, tier_goal: float = 0.0
) -> dict[str, Any]:
    """One group at one risk. `judged` is None if no goal is set, or too few are advised: abstained.

    Over all the upper end of the interval must meet the goal, in a kind the share itself.
    """
    scores, rates = score_group(group, rows), rates_of(group, rows)
    has_goal = bound_goal > 0 and risk in JUDGED
    is_judged = has_goal and scores.advised >= LEAST_JOBS
    goals = {"bound": bound_goal, "tier": tier_goal}
    return {
        "risk": risk,
        "group": group,
        "jobs": scores.jobs,
        "advised": scores.advised,
        "moved_down": scores.moved_down,
        "moved_up": scores.moved_up,
        "oracle": int(rows["is_movable"].sum()),
        "freed_gpu_hours": round(scores.freed_gpu_hours),
        **{
            f"{name}_{field}": getattr(rate, field)
            for name, rate in rates.items()
            for field in ("share", "low", "high")
        },
        "goals": goals,
        **{
            f"{name}_judged": (rate.high if group == "all" else rate.share) / risk if is_judged else None
            for name, rate in rates.items()
        },
        "abstained": has_goal and not is_judged,
    }


def goals_of(line: dict[str, Any]) -> list[Figure]:
    return [
        at_most(f"risk {line['risk']:.1%}, {line['group']}: share above the {name} / risk", value, goal)
        for name, goal in line["goals"].items()
        if (value := line[f"{name}_judged"]) is not None
    ]


def show(table: list[dict[str, Any]]) -> None:
    columns = (
        "risk",
        "group",
        "jobs",
        "advised",
        "down",
        "oracle",
        "above bound / risk",
        "met",
        "above tier / risk",
        "met",
    )
    shown = Table(*columns, title="Advised jobs that needed more, as a multiple of the risk, 95% interval")
    marks = {True: "yes", False: "NO", None: ""}
    for line in table:
        cells = [
            f"{line['risk']:.1%}",
            line["group"],
            *(f"{line[n]:,}" for n in ("jobs", "advised", "moved_down", "oracle")),
        ]
        for name in ("bound", "tier"):
            share, low, high = (line[f"{name}_{field}"] / line["risk"] for field in ("share", "low", "high"))
            cells.append(f"{share:.2f} [{low:.2f}, {high:.2f}]" if share == share else "-")
            cells.append("abstained" if line["abstained"] else marks[line[f"{name}_met"]])
        shown.add_row(*cells)
    Console(width=150).print(shown)


def real_memory(folder: Path) -> list[Figure]:
    """Named jobs' host memory, with tiers at its quartiles: everybody asks for the largest."""
    path = DATA / TRACES["mason"][0]
    if not path.exists():
        return [Figure("mason: the trace is not here", path.name)]
    history = load_trace(path, folder)
    jobs = Store.open(folder).of("trace").read("jobs", ["job_id", "submit_s", "used_mem_mib"]).to_pandas()
    history = history.merge(jobs, on=["job_id", "submit_s"])
    is_known = (history["used_mem_mib"] > 0) & (history["elapsed_s"] >= Config().filters.min_elapsed_s)
    peaks = history["used_mem_mib"].where(is_known)
    edges = [*np.quantile(peaks.dropna(), [0.25, 0.5, 0.75]), 1.1 * peaks.max()]
    tiers = tuple(Tier(f"q{n}", int(edge) + 1, "-", constraint=f"q{n}") for n, edge in enumerate(edges, start=1))
    history = history.assign(
        hbm_peak_mib=peaks,
        hbm_evidence=np.where(is_known, "telemetry", "none"),
        verdict="ok",
        tier="q4",
        constraints="q4",
    )
    figures = []
    for risk in RISKS[1:]:
        config = Config(tiers=tiers, advice=AdviceSection(risk=risk, headroom_mib=0))
        rows = replay_tiers(history, config)
        scores = score_group("mason", rows)
        is_movable = rows["is_known"] & (rows["need_mib"] <= tiers[-2].capacity_mib)
        moved = float((is_movable & rows["move"].eq(DOWN)).sum() / is_movable.sum())
        is_judged = risk == MASON_RISK
        bursts = first_of_bursts(rows, history)
        over = bursts["need_mib"] > bursts["bound_mib"]
        by_burst = rate_of(over, bursts["user"])
        others = without_worst_family(rows, history)
        about = f"mason, risk {risk:.0%}"
        figures += [
            Figure(f"{about}: jobs with a stated bound and a known need", scores.exceeded_bound.jobs),
            *(
                Figure(
                    f"{about}: share above the {name}",
                    _or_none(rate.share),
                    f"<= {MASON_GOAL * risk:g}" if is_judged else "",
                    rate.share <= MASON_GOAL * risk if is_judged and rate.jobs else None,
                )
                for name, rate in (("bound", scores.exceeded_bound), ("tier", scores.exceeded_tier))
            ),
            at_least(f"{about}: requests moved / by the oracle", moved, MASON_MOVED_GOAL if is_judged else None),
            Figure(f"{about}: 95% interval over users, from", _or_none(scores.exceeded_bound.low)),
            Figure(f"{about}: 95% interval over users, to", _or_none(scores.exceeded_bound.high)),
            Figure(f"{about}: share above the bound, without the family that exceeded it most often", _or_none(others)),
            Figure(f"{about}: bursts of one family, each counted once", by_burst.jobs),
            Figure(f"{about}: share above the bound, bursts counted once", _or_none(by_burst.share)),
        ]
    return figures


def _or_none(share: float) -> float | str:
    return share if share == share else "none stated"


def without_worst_family(rows: pd.DataFrame, history: pd.DataFrame) -> float:
    """The share above the bound without the family that exceeded it most often."""
    over = rows["need_mib"] > rows["bound_mib"]
    family = rows["user"] + "/" + history["name_key"].to_numpy()[rows["row"]]
    worst = family[over].mode()
    return score_group("others", rows[~family.isin(worst[:1])]).exceeded_bound.share


def first_of_bursts(rows: pd.DataFrame, history: pd.DataFrame) -> pd.DataFrame:
    """Advised rows with a known need; of those of one family submitted within BURST_S of each other only the first."""
    judged = rows[(rows["move"] != SILENT) & rows["bound_mib"].notna() & rows["is_known"]]
    judged = judged.assign(key=history["name_key"].to_numpy()[judged["row"]]).sort_values("submit_s")
    gap_s = judged.groupby(["user", "key"])["submit_s"].diff()
    return judged[~(gap_s <= BURST_S)]


def measure() -> list[Figure]:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else int(hostile_profile()["site"]["seeds"])
    started = time.perf_counter()
    figures, table = prove(seeds)
    show(table)
    figures += [goal for line in table for goal in goals_of(line)]
    figures.append(Figure(f"proof over {seeds} seeds, s", time.perf_counter() - started))
    with tempfile.TemporaryDirectory() as name:
        return figures + real_memory(Path(name) / "mason")


if __name__ == "__main__":
    main(measure)
