"""The watch, replayed over a site's record: jobs that it would have cancelled, and whether they used their GPUs later.

Owners are taken to get each warning at once and to do nothing. The record holds no comments of jobs and no times of
warnings: a job that said almanac:keep counts as any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from advisor.backtest import Floats
from advisor.trial import (
    TooShortError,
    TrialResult,
    TrialSpan,
    gains_by_week,
    lacking,
    losers_of,
    record_span,
    size_classes,
)
from advisor.watch.actions import PastStep, Run, due_steps, run_of
from advisor.watch.decide import WatchState, decide
from advisor.watch.round import GPU_COUNTERS, GPUS, JOBS, Round, WatchFinding
from almanac.actions_config import WatchSection
from almanac.config import Config
from almanac.units import DAY_S, HOUR_S
from slurm.running import SESSIONS
from telemetry.counters import HIGHEST
from telemetry.store.database import arrow
from telemetry.store.schema import JOBS as STORED
from telemetry.store.schema import TELEMETRY
from telemetry.store.store import ClusterStore

SPAN_S = 600
"""Of a round: five times as long as at a live watch, so that a month takes minutes. Idle times come out shorter."""
MOST_KEPT = 1000
"""Runs with steps; above this, those of jobs that have ended are forgotten."""
NOTHING, SHUFFLED = "no cancels", "the same cancels of other jobs"


def replay(rounds: Iterable[Round], settings: WatchSection) -> Iterator[tuple[Round, list[WatchFinding], list[Run]]]:
    """Each round, its findings, and the runs whose cancel was due in it."""
    state: WatchState | None = None
    past: dict[Run, list[PastStep]] = {}
    gone = set[tuple[int, int]]()
    for each in rounds:
        state, findings = decide(state, each)
        live = [found for found in findings if (found.job_id, found.start_s) not in gone]
        steps, _ = due_steps(each, live, past, settings)
        for step in steps:
            what = "warned" if step.what == "warn" else step.what
            past.setdefault(run_of(step.job), []).append(PastStep(what, step.finding.kind, each.at_s, step.cancel_s))
        cancelled = [step for step in steps if step.what == "cancel"]
        gone |= {(step.finding.job_id, step.finding.start_s) for step in cancelled}
        if len(past) > MOST_KEPT:
            running, hour_s = set(each.jobs["job_id"].to_pylist()), each.at_s - HOUR_S
            past = {run: own for run, own in past.items() if run[0] in running or own[-1].time_s > hour_s}
        yield each, findings, [run_of(step.job) for step in cancelled]


def trial_watch(store: ClusterStore, config: Config) -> TrialResult:
    """Judge the GPU-hours that cancels of idle jobs would have freed, and the work that they would have lost."""
    rules = config.trial
    try:
        runs = _runs(store, config.watch.cancel_min * 60)
        span = record_span(runs["start_s"], rules)
        cancel = config.watch.cancel or ("idle",)
        partitions = config.watch.partitions or tuple(sorted({str(each) for each in runs["partition"].to_pylist()}))
        settings = replace(config.watch, cancel=cancel, partitions=partitions)
        cancels_s, used_s, seen = _replayed(store, runs, span, settings)
        if not seen.any():
            raise TooShortError("no job that ran so long has telemetry in the store")
        start_s, end_s, gpus = (runs[name].to_numpy() for name in ("start_s", "end_s", "gpu_count"))
        age_s = np.random.default_rng(1).permutation(cancels_s - start_s)
        shuffled_s = np.where(age_s < end_s - start_s, start_s + age_s, np.nan)
        freed, other = (_freed(at_s, used_s, start_s, end_s, gpus) for at_s in (cancels_s, shuffled_s))
        measured = {"almanac": freed, NOTHING: np.zeros(len(freed)), SHUFFLED: other}
        measured = {name: np.where(seen, each, np.nan) for name, each in measured.items()}
        gains = gains_by_week("GPU-h freed a job", "almanac", NOTHING, measured, start_s, span, rules)
    except TooShortError as error:
        return lacking("watch", error)
    losers = losers_of(
        np.where(seen, np.minimum(freed, 0.0), np.nan), runs["user"].to_numpy(), size_classes(gpus), "GPU-h",
        who="of the users lose a job that would have used its GPUs later",
    )  # fmt: skip
    is_cut, is_wrong = np.isfinite(cancels_s), used_s > cancels_s
    all_h = float(((end_s - start_s) * gpus / HOUR_S)[seen].sum())
    gone_h = float(freed[is_cut & ~is_wrong].sum())
    lines = ("[watch]", f"cancel = {_list(cancel)}", f"partitions = {_list(partitions)}")
    notes = (
        *span.notes,
        f"{is_cut.sum():,} cancels free {gone_h:,.0f} GPU-h, {gone_h / max(all_h, 1):.1%} of the time of jobs over "
        f"{config.watch.cancel_min} min",
        f"{is_wrong.sum():,} of these jobs used a GPU later: what they had done by then counts as lost",
        "owners are taken to ignore the warnings; the record has no comments, such as almanac:keep",
    )
    return TrialResult("watch", gains, losers, settings=lines, notes=notes)


def _list(names: Iterable[str]) -> str:
    return f"[{', '.join(json.dumps(name) for name in names)}]"


def _freed(at_s: Floats, used_s: Floats, start_s: Floats, end_s: Floats, gpus: Floats) -> Floats:
    """GPU-hours that a cancel of each job frees; below 0 for the work of a job that used a GPU later; 0 for none."""
    hours = np.where(used_s > at_s, start_s - at_s, end_s - at_s) * gpus / HOUR_S
    return np.where(np.isfinite(at_s), hours, 0.0)


_COLUMNS = {
    **{name: f"""coalesce("{name}", '')""" for name in ("user", "account", "partition")},
    "restarts": "coalesce(restarts, 0)",
    "node_count": "coalesce(node_count, 1)",
    "limit_end_s": "start_s + time_limit_s",
    "is_interactive": "regexp_matches(coalesce(name, ''), $sessions)",
    "is_shared": "coalesce(gpu_share_count, 0) > 0",
    "comment": "''",
    "is_serving": "false",
}
"""SQL of the columns of round.JOBS that are not those of the store."""


def _runs(store: ClusterStore, least_s: int) -> pa.Table:
    """The ended runs with GPUs that lasted so long, columns of round.JOBS and end_s, by job_id."""
    names = [name for name in JOBS.names if name in STORED.names]
    sql = ", ".join(f'{_COLUMNS.get(n, n if n in names else "NULL")} AS "{n}"' for n in JOBS.names)
    sql = f"SELECT {sql}, end_s FROM jobs WHERE end_s - start_s >= $least_s AND gpu_count > 0 ORDER BY jobs.job_id"
    with store.connect() as db:
        store.view(db, "jobs", [*names, "end_s", "time_limit_s", "gpu_share_count"])
        return arrow(db, sql, {"least_s": least_s, "sessions": SESSIONS})


def _replayed(
    store: ClusterStore, runs: pa.Table, span: TrialSpan, settings: WatchSection
) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """The time of each run's cancel, NaN for none; the last time a GPU of it worked, 0 for never; and whether it has
    samples."""
    cancels_s, used_s, seen = np.full(len(runs), np.nan), np.zeros(len(runs)), np.zeros(len(runs), dtype=bool)
    ids, starts = (runs[name].to_pylist() for name in ("job_id", "submit_s"))
    rows_of = {run: row for row, run in enumerate(zip(ids, starts, strict=True))}
    in_round: list[npt.NDArray[np.int64]] = []

    def rounds() -> Iterator[Round]:
        for each, chosen in _stored_rounds(store, runs, span):
            in_round[:] = [chosen]
            yield each

    for each, _, cancelled in replay(rounds(), settings):
        row = in_round[0][each.gpus["job"].to_numpy()]
        seen[row] = True
        used_s[row[each.gpus["gpu_util_pct"].to_numpy() > 0]] = each.at_s
        for job_id, submit_s, _ in cancelled:
            cancels_s[rows_of[job_id, submit_s]] = each.at_s
    return cancels_s, used_s, seen


def _stored_rounds(
    store: ClusterStore, runs: pa.Table, span: TrialSpan
) -> Iterator[tuple[Round, npt.NDArray[np.int64]]]:
    """The rounds of a span, and the row of runs behind each of their jobs."""
    start_s, end_s = runs["start_s"].to_numpy(), runs["end_s"].to_numpy()
    jobs = runs.select(JOBS.names).cast(JOBS).combine_chunks()
    first_s = int(min(start_s[(start_s >= span.start_s) & (start_s < span.end_s)], default=span.end_s))
    units = _units(store, runs)
    for day_s in range(first_s, span.end_s, DAY_S):
        gpus = _samples(store, units, day_s)
        at = gpus["bin"].to_numpy()
        for number in range(DAY_S // SPAN_S):
            at_s = day_s + (number + 1) * SPAN_S
            chosen = np.flatnonzero((start_s < at_s) & (end_s >= at_s) & (start_s >= span.start_s))
            if not len(chosen):
                continue
            low, high = np.searchsorted(at, [number, number + 1])
            part = gpus.slice(low, high - low)
            row = part["run"].to_numpy()
            place = np.searchsorted(chosen, row)
            is_in = (place < len(chosen)) & (chosen[np.minimum(place, len(chosen) - 1)] == row)
            columns = [pa.array(place, pa.int32()), *(part[name].combine_chunks() for name in GPUS.names[1:])]
            yield Round(at_s, SPAN_S, jobs.take(chosen), pa.table(columns, schema=GPUS).filter(pa.array(is_in))), chosen


def _units(store: ClusterStore, runs: pa.Table) -> pa.Table:
    """The GPUs of the runs by telemetry, with the row and the times of the run."""
    own = runs.select(["job_id", "submit_s", "start_s", "end_s"]).append_column("run", pa.array(np.arange(len(runs))))
    with store.connect() as db:
        store.view(db, "gpu_metrics", ["job_id", "submit_s", "host", "gpu", "mig"])
        db.register("runs", own)
        return arrow(db, "SELECT * FROM gpu_metrics JOIN runs USING (job_id, submit_s)")


def _samples(store: ClusterStore, units: pa.Table, day_s: int) -> pa.Table:
    """The counters of a day in bins of SPAN_S: bin, run, and the columns of round.GPUS but for job."""
    both = ("nvlink_tx_bytes_s", "nvlink_rx_bytes_s")
    named = [name for name in GPU_COUNTERS if name in TELEMETRY.names]
    values = {name: f"{'max' if name in HIGHEST else 'avg'}(t.{name}) FILTER (NOT isnan(t.{name}))" for name in named}
    values["xid"] = "arg_max(t.xid, t.time_ms) FILTER (NOT isnan(t.xid))"
    values["nvlink_bytes_s"] = f"avg({' + '.join(both)}) FILTER (NOT isnan({' + '.join(both)}))"
    counters = ", ".join(f"coalesce({values.get(name, 'NULL')}, 'nan'::DOUBLE) AS {name}" for name in GPU_COUNTERS)
    sql = f"""
    SELECT (t.time_ms - $day_ms) // {SPAN_S * 1000} AS bin, u.run, t.host,
           t.gpu || CASE WHEN t.mig = '' THEN '' ELSE ':' || t.mig END AS gpu, {counters},
           count(*)::DOUBLE AS sample_count
    FROM telemetry t JOIN units u ON t.host = u.host AND t.gpu = u.gpu AND t.mig = u.mig
    WHERE t.time_ms >= u.start_s * 1000 AND t.time_ms < u.end_s * 1000
    GROUP BY ALL ORDER BY bin, u.run, t.host, gpu
    """
    with store.connect() as db:
        store.view(db, "telemetry", ["host", "gpu", "mig", "time_ms", *named, *both], day_s, day_s + DAY_S)
        db.register("units", units)
        return arrow(db, sql, {"day_ms": day_s * 1000})
