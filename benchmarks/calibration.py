"""Does the memory bound hold at the risk it states? On sites with known needs, and on real memory of named jobs.

Run: make bench-calibration. The sites are those of telemetry/sources/generated/hostile.toml, seeds 1 to 20, frozen
before the first scoring; from the history frame on, the path is the product's own. Rates are over advised jobs, by the
need that the generator knows, an array counted once; 95% intervals by bootstrap over users.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from figures import FOLDER, Figure, report
from predictors import DATA, TRACES, load_trace
from rich.console import Console
from rich.table import Table

from advisor.backtest.tier import DOWN, SILENT, Rate, rate_of, replay_tiers, score_group
from advisor.models.peak_store import replay_peaks
from almanac.config import AdviceSection, Config, Tier
from telemetry.sources.generated.hostile import NEW_USER, PREALLOCATING, hostile_profile, proof_shape
from telemetry.sources.generated.plan import plan_site
from telemetry.sources.generated.record import record_of
from telemetry.store import Store

RISKS = (0.005, 0.01, 0.05)
TIERS = (Tier("hbm40g", 40960, "A100-40", constraint="hbm40g"), Tier("hbm80g", 81920, "A100-80", constraint="hbm80g"))
HOSTILE = ("bimodal", "growing", PREALLOCATING, "renamed", "shared", "rare", NEW_USER)
LEAST_OVERALL, LEAST_EACH = 50_000, 5_000
OVERALL_GOAL, EACH_GOAL, MOVED_GOAL = 1.25, 2.0, 0.8
BURST_S = 60


def outcomes_of(seed: int) -> dict[float, pd.DataFrame]:
    """What each risk's advice came to after the warm-up, with the generator's truth: columns kind, chance_above."""
    advice = AdviceSection()
    usable_mib = TIERS[0].capacity_mib - advice.headroom_mib
    shape = proof_shape(seed)
    history, truth = record_of(plan_site(shape), usable_mib)
    since_s = shape.start_s + round(hostile_profile()["site"]["warmup_days"] * 86_400)
    cases = list(replay_peaks(history, advice, TIERS))
    found = {}
    for risk in RISKS:
        config = Config(tiers=TIERS, advice=dataclasses.replace(advice, risk=risk))
        rows = replay_tiers(history, config, cases)
        known = truth.iloc[rows["row"]].reset_index(drop=True)
        rows = rows.assign(
            need_mib=known["need_mib"], is_known=True, kind=known["kind"], user=f"{seed}/" + rows["user"]
        )
        rows["is_movable"] = (rows["asked"] == "hbm80g") & (known["chance_above"] <= risk)
        found[risk] = rows[rows["submit_s"] >= since_s]
    return found


def prove(seeds: int) -> tuple[list[Figure], list[dict[str, Any]]]:
    parts = []
    for seed in range(1, seeds + 1):
        parts.append(outcomes_of(seed))
        print(f"seed {seed} of {seeds}", file=sys.stderr)
    figures: list[Figure] = []
    table: list[dict[str, Any]] = []
    for risk in RISKS:
        rows = pd.concat([part[risk] for part in parts], ignore_index=True)
        table += [_line(risk, "all", rows, OVERALL_GOAL, LEAST_OVERALL)]
        table += [_line(risk, kind, rows[rows["kind"] == kind], EACH_GOAL, LEAST_EACH) for kind in ("plain", *HOSTILE)]
        table += [
            _line(risk, f"evidence: {scope}", rows[rows["scope"] == scope], 0.0, 0)
            for scope in sorted(rows["scope"].unique())
        ]
        for about, part in (("families that show memory", rows[rows["kind"] != PREALLOCATING]), ("all", rows)):
            share = (part["move"] == DOWN).sum() / part["is_movable"].sum()
            goal, is_met = (f">= {MOVED_GOAL}", bool(share >= MOVED_GOAL)) if about != "all" else ("", None)
            figures.append(
                Figure(f"risk {risk:.1%}: 80 GB requests moved / by the oracle, {about}", share, goal, is_met)
            )
    return figures, table


def _line(risk: float, group: str, rows: pd.DataFrame, goal: float, least: int) -> dict[str, Any]:
    """One group at one risk. `met` is None where no goal is set, or too few are advised: abstained."""
    scores = score_group(group, rows)
    rates = {"bound": scores.exceeded_bound, "tier": scores.exceeded_tier}
    is_judged = goal > 0 and scores.exceeded_bound.jobs >= least
    return {
        "risk": risk,
        "group": group,
        "jobs": scores.jobs,
        "advised": scores.exceeded_bound.jobs,
        "moved_down": scores.moved_down,
        "moved_up": scores.moved_up,
        "oracle": int(rows["is_movable"].sum()),
        "freed_gpu_hours": round(scores.freed_gpu_hours),
        **{
            f"{name}_{field}": getattr(rate, field)
            for name, rate in rates.items()
            for field in ("share", "low", "high")
        },
        "goal": f"<= {goal:g} x risk" if goal else "",
        **{f"{name}_met": _met(rate, goal * risk) if is_judged else None for name, rate in rates.items()},
        "abstained": goal > 0 and not is_judged,
    }


def _met(rate: Rate, most: float) -> bool:
    return bool(rate.high <= most)


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
    jobs = Store.open(folder).read("jobs", "trace", ["job_id", "submit_s", "used_mem_mib"]).to_pandas()
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
        bursts = first_of_bursts(rows, history)
        over = bursts["need_mib"] > bursts["bound_mib"]
        by_burst = rate_of(over, bursts["user"])
        others = without_worst_family(rows, history)
        about = f"mason, risk {risk:.0%}"
        figures += [
            Figure(f"{about}: jobs advised with a known need", scores.exceeded_bound.jobs),
            Figure(f"{about}: share above the bound", scores.exceeded_bound.share, f"<= {risk:g}", None),
            Figure(f"{about}: 95% interval over users, from", scores.exceeded_bound.low),
            Figure(f"{about}: 95% interval over users, to", scores.exceeded_bound.high),
            Figure(f"{about}: share above the bound, without the family that exceeded it most often", others),
            Figure(f"{about}: share above the tier", scores.exceeded_tier.share),
            Figure(f"{about}: bursts of one family, each counted once", by_burst.jobs),
            Figure(f"{about}: share above the bound, bursts counted once", by_burst.share),
        ]
    return figures


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


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else int(hostile_profile()["site"]["seeds"])
    started = time.perf_counter()
    figures, table = prove(seeds)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "calibration_groups.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    show(table)
    figures.append(Figure(f"proof over {seeds} seeds, s", time.perf_counter() - started))
    with tempfile.TemporaryDirectory() as name:
        figures += real_memory(Path(name) / "mason")
    report("calibration", figures, "Calibration of the memory bound")


if __name__ == "__main__":
    main()
