"""Scores of the predictors on the real traces, and the bound on the generated site, beside simple baselines.

Run: make bench-predictors. Rolling origin on the last 40% of each trace. A trace that is not here is named.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pandas as pd
from figures import Figure, report

from advisor.backtest.tier import replay_tiers, score_group
from advisor.evaluation import evaluate
from advisor.service import advise, train
from almanac.config import Config, parse_config
from almanac.records import Request
from cli.demo import CONFIG
from telemetry.history import load_history
from telemetry.ingest import IngestResult, ingest
from telemetry.sources.files import FileSource
from telemetry.sources.generated import GeneratedSource, SiteShape
from telemetry.store import Store
from telemetry.summary import summarize

DATA = Path(os.environ.get("ALMANAC_SHARED_DATA") or Path(__file__).parents[1].parent / "shared" / "data")
TRACES = {"helios": ("helios_jobs_15k.parquet", 0.60), "mason": ("mason_named_jobs_oct_nov.parquet", 0.65)}
FOREVER = 2**40


def load_trace(path: Path, folder: Path) -> pd.DataFrame:
    """The trace's jobs, through the same import and history as an operator's; CPU-only jobs count as one GPU a slot."""
    store = Store.create(folder)
    source = FileSource(path, "jobs")
    for batch in source.read(-FOREVER, FOREVER):
        rows = batch.rows
        if not any(rows["gpu_count"].to_pylist()):
            at = rows.schema.get_field_index("gpu_count")
            rows = rows.set_column(at, rows.schema.field(at), rows["cpu_count"])
        store.write("jobs", "trace", rows)
    return load_history(store, "trace")


def durations(config: Config, folder: Path) -> list[Figure]:
    figures = []
    for name, (file, goal) in TRACES.items():
        path = DATA / file
        if not path.exists():
            figures.append(Figure(f"{name}: the trace is not here", file))
            continue
        scores = evaluate(load_trace(path, folder / name), config)
        simple = {k: v for k, v in scores.items() if k not in ("almanac", "ranking", "rolling", "model")}
        best = min(s.median_abs_log_error for s in simple.values() if s.median_abs_log_error == s.median_abs_log_error)
        ours, rank = scores["almanac"], scores["ranking"].spearman
        figures.append(Figure(f"{name}: Spearman of duration, ranking value", rank, f">= {goal}", rank >= goal))
        ratio = ours.median_abs_log_error / best
        figures.append(Figure(f"{name}: median |log error| / best simple median's", ratio, "<= 1.0", ratio <= 1.0))
        figures += [Figure(f"{name}: {k}: Spearman", v.spearman) for k, v in scores.items() if k != "ranking"]
        figures += [Figure(f"{name}: {k}: median |log error|", v.median_abs_log_error) for k, v in scores.items()]
    return figures


def memory(folder: Path) -> list[Figure]:
    path = folder / "almanac.toml"
    path.write_text(CONFIG)
    import tomllib

    config = parse_config(tomllib.loads(path.read_text()))
    store, shape = Store.create(folder / "site"), SiteShape.demo()
    result = IngestResult("generated", shape.start_s, shape.end_s)
    ingest(GeneratedSource(shape), store, "demo", shape.start_s, shape.end_s, result, lambda rows, reached_s: None)
    summarize(store, "demo", config, 0, FOREVER)
    history = load_history(store, "demo")
    bounds = score_group("generated", replay_tiers(history, config))
    started = time.perf_counter()
    trained = train(history, config, shape.end_s)
    train_s = time.perf_counter() - started
    row = history[history["tier"] == "hbm80g"].iloc[-1]
    own = history[history["user"] == row["user"]]
    request = Request(user=row["user"], job_name=row["name"], gpu_count=4, constraints="gpu&hbm80g")
    advise(request, own, trained, config, shape.end_s)
    started = time.perf_counter()
    for _ in range(20):
        advise(request, own, trained, config, shape.end_s)
    each_ms = (time.perf_counter() - started) / 20 * 1000
    return [
        Figure("generated site: jobs advised on memory", bounds.advised),
        Figure("generated site: share of peaks above the bound (accepted risk 0.01)", bounds.exceeded_bound.share),
        Figure("generated site: share of peaks above the tier", bounds.exceeded_tier.share),
        Figure(f"training on {len(history)} jobs, s", train_s, "<= 30", train_s <= 30),
        Figure(f"one advice from {len(own)} own jobs, warm, ms", each_ms),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = [*durations(Config(), folder), *memory(folder)]
        known = [figure for figure in figures if figure.value == figure.value]
        report("predictors", known, "Predictors, rolling origin")


if __name__ == "__main__":
    main()
