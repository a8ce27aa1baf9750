"""A site of 30 days whose jobs idle, hang, load, serve, pause, and fail, as the watch sees it every two minutes.

Written before the rules of the watch, from published shares; what nobody publishes is marked "chosen", and was drawn
once. The jobs, users, sizes, and limits are those of demo/ (the Perlmutter paper, arXiv 2502.18680), run times twice
as long so that their mean is Helios' (6,652 s; SC'21, table 2).

GPU use. Perlmutter VI: 12% of the four-GPU jobs never use three of their GPUs (families of demo/). Philly, by
affinode.io's study of its 93,451 jobs: all GPUs of a job at 0% for 49% of the minutes of jobs under 6 h and 25% of
those above 24 h, and 65% of the idle periods lie inside a job: so most jobs pause, and go on. Here it is 28% and 18% of
the regular jobs' minutes, and 40% and 64% of all, since forgotten jobs last to their limits. The length of a pause is
not published; chosen, as are loading times. job_defense_shield (docs/alert/cancel_gpu_jobs.md) warns after 60 and 105
minutes at 0% and cancels after 120; Northeastern's IdleBot warns after 15 and cancels after 60: pauses of an hour are
rare at such sites. It knows interactive jobs by the names `interactive` and `sys/dashboard` (Open OnDemand, whose jobs
are batch scripts): here half of them each. Issue 41 sets 5% idle jobs, 1% hangs, and 3 lemon nodes of 200.

Failures. Meta (HPCA'25, arXiv 2410.21680) models the failures of nodes as Poisson, and finds few lemon nodes; the
issue sets 0.2 failures of a node in 30 days, and 15 of a lemon. Delta (arXiv 2503.11901): errors of the GSP are the
commonest of hardware, NVLink errors do not always end a job, and memory is far more reliable than the rest; the shares
of XIDS follow this order and are chosen. A GPU's XID gauge keeps its last value: the same XID again shows no change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from advisor.watch.round import GPU_COUNTERS, GPUS, JOBS, Round
from demo.shape import GPUS_PER_NODE, Arrays, Bools, Floats, Ints, SiteShape
from demo.site import FAILED, NODE_FAIL, STATES, jobs_table, plan_site
from slurm.hostlist import fold
from telemetry.counters import GPU_METRICS
from telemetry.store.schema import TELEMETRY
from telemetry.store.store import ClusterStore

SPAN_S, ROUNDS_A_DAY, DAY_S = 120, 720, 86_400
KINDS = ("regular", "never used", "idle after work", "hang", "serving", "preprocessing", "bursty", "interactive")
REGULAR, NEVER, AFTER, HANG, SERVING, PREPROCESSING, BURSTY, INTERACTIVE = range(len(KINDS))
SHARES = (0.0, 0.025, 0.025, 0.01, 0.02, 0.003, 0.08, 0.04)
"""Of the jobs, by kind; the rest is regular. Idle (two kinds) and hang: issue 41; the others: chosen."""
FORGOTTEN = 0.8
"""Chosen: idle and hanging jobs that last to their limit; the owner of the others notices before."""
SAYS = {SERVING: (0.7, "almanac:serving"), PREPROCESSING: (0.5, "almanac:loading:90m")}
"""Chosen: jobs whose comment says what they do, by kind."""
PAUSING, PAUSE_MIN, LOAD_MIN, CHECKPOINT_MIN = 0.6, (2.0, 1.0), (1.5, 0.9), (1.0, 0.5)
"""Chosen: regular jobs that wait for data; median (min) and sigma of the logarithm of one wait, load, checkpoint."""
HUMAN_MIN, PREPARE_MIN = (6.0, 1.3), (45.0, 0.8)
"""Chosen: pauses of a person at an interactive job, and work on the CPUs before the GPUs are used."""
PERSON = ("interactive", "sys/dashboard/sys/jupyter")
"""Names of interactive jobs: of salloc, and of Open OnDemand's batch scripts."""
NODE_FAILURES, LEMON_FAILURES, LEMONS = 0.2, 15.0, 3
USER_FAILURES_H = 0.004
"""Chosen: failures of a typical user's code with an XID, for each hour of a job."""
XIDS = {0: 0.25, 119: 0.25, 79: 0.15, 74: 0.15, 122: 0.08, 48: 0.06, 94: 0.03, 64: 0.03}
USER_XIDS = {31: 0.6, 13: 0.3, 43: 0.1}
HOLES_A_DAY = {"node": 4.0, "server": 0.15, "counter": 1.0, "counter everywhere": 0.05}
HOLE_MIN = (15.0, 1.2)
"""Chosen: holes in telemetry of the site of 200 nodes; median (min) and sigma: minutes to hours."""


@dataclass(frozen=True)
class SiteRound:
    """A round as the watch sees it, and the number of the run behind each row of its jobs."""

    seen: Round
    runs: Ints


class WatchSite:
    """The site of a seed, and the truth: kind, last_busy_s, and hang_s of each run, and `failures`.

    failures: time_s, node, gpu, xid (0: none), is_node, run (-1: no job was there), one row each, by time.
    """

    def __init__(self, seed: int = 1, days: int = 30, nodes: int = 200, lemon_failures: float = LEMON_FAILURES) -> None:
        self.days, self.nodes, self._seed = days, nodes, seed
        shape = SiteShape(
            seed=seed, days=days, nodes_40=nodes - nodes // 5, nodes_80=nodes // 5, users=max(20, nodes * 3 // 4),
            jobs_per_day=4.5 * nodes, max_nodes=max(1, nodes // 12), duration_scale=2.0,
        )  # fmt: skip
        self._kind = np.zeros(0, dtype=np.int64)
        self.plan = plan_site(shape, self._changed, self._named)
        rng = np.random.default_rng([seed, 41])
        self.lemons = np.sort(rng.choice(nodes, LEMONS, replace=False))
        self.node_rates = np.full(nodes, NODE_FAILURES)
        self.node_rates[self.lemons] = lemon_failures
        self._whole_runs = self._started()
        on = [self.plan.nodes[row] for row in self._whole_runs.row.tolist()]
        run, node = np.repeat(np.arange(len(on)), [len(each) for each in on]), np.concatenate(on)
        self._runs_of = [run[node == each] for each in range(nodes)]
        self.runs, self.failures = self.failed(rng)
        self._knots = [self._busy(run, rng) for run in range(len(self.runs.job))]
        hang_s = np.array([knots[2] for knots in self._knots])
        self.runs = self.runs.replaced(last_busy_s=np.array([each[0][-1] for each in self._knots]), hang_s=hang_s)
        self.holes = self._holes(rng)

    def _changed(self, families: Arrays, jobs: Arrays) -> Arrays:
        """Kinds of the jobs; forgotten ones last to their limit."""
        rng, number = np.random.default_rng([self._seed, 40]), len(jobs.job_id)
        chances = np.array(SHARES)
        chances[REGULAR] = 1 - chances.sum()
        self._kind = rng.choice(len(KINDS), number, p=chances)
        lasts = np.isin(self._kind, (NEVER, AFTER, HANG, SERVING)) & (rng.random(number) < FORGOTTEN)
        state = np.where(lasts, STATES.index("TIMEOUT"), jobs.state)
        return jobs.replaced(run_s=np.where(lasts, jobs.limit_s, jobs.run_s), state=state)

    def _named(self, jobs: Arrays, names: list[str]) -> list[str]:
        return [PERSON[n % 2] if kind == INTERACTIVE else names[n] for n, kind in enumerate(self._kind.tolist())]

    def _started(self) -> Arrays:
        """The runs that start, with their kinds, comments, and uses."""
        plan, rng = self.plan, np.random.default_rng([self._seed, 42])
        at = np.flatnonzero((plan.runs.start_s >= 0) & (plan.runs.end_s > plan.runs.start_s))
        runs, job = plan.runs.take(at), plan.runs.job[at]
        kind, number = self._kind[job], len(at)
        says = rng.random(number)
        comment = [SAYS[k][1] if k in SAYS and s < SAYS[k][0] else "" for k, s in zip(kind.tolist(), says, strict=True)]
        family = plan.jobs.family[job]
        return runs.replaced(
            kind=kind, comment=np.array(comment, dtype=object), user=plan.families.user[family], row=at,
            nodes=plan.jobs.nodes[job], limit_end_s=runs.start_s + plan.jobs.limit_s[job],
            is_one_gpu=plan.families.is_one_gpu[family],
            level=rng.uniform(0.3, 1.0, number), need_mib=np.minimum(plan.jobs.need_mib[job], 0.97 * runs.capacity_mib),
            sm=rng.uniform(0.2, 0.9, number), dram=rng.uniform(0.05, 0.6, number), math=rng.uniform(0.02, 0.5, number),
            pipe=rng.choice(4, number, p=[0.5, 0.4, 0.08, 0.02]),
        )  # fmt: skip

    def failed(self, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
        """The runs, cut at their first failure by a node (node_rates, in 30 days) or by the user's code; all failures.

        A node's failure without a job is one, too.
        """
        runs, shape = self._whole_runs, self.plan.shape
        times = [(t, node) for node, count in enumerate(rng.poisson(self.node_rates * self.days / 30))
                 for t in rng.integers(shape.start_s, shape.end_s, count).tolist()]  # fmt: skip
        end_s, state, rows = runs.end_s.copy(), runs.state.copy(), []
        after_s = rng.exponential(3600 / (USER_FAILURES_H * rng.gamma(0.5, 2.0, shape.users)[runs.user] + 1e-9))
        for run in np.flatnonzero(after_s < end_s - runs.start_s).tolist():
            end_s[run], state[run] = runs.start_s[run] + max(1, int(after_s[run])), FAILED
        is_user = end_s < runs.end_s
        for time_s, node in sorted(times):
            held = self._runs_of[node]
            held = held[(runs.start_s[held] <= time_s) & (time_s < end_s[held])]
            xid = int(rng.choice(list(XIDS), p=list(XIDS.values())))
            rows.append((time_s, node, int(rng.integers(GPUS_PER_NODE)), xid, True, int(held[0]) if len(held) else -1))
            if len(held):
                end_s[held], is_user[held] = max(time_s, int(runs.start_s[held[0]]) + 1), False
                state[held] = NODE_FAIL if not xid or rng.random() < 0.4 else FAILED
        for run in np.flatnonzero(is_user).tolist():
            xid = int(rng.choice(list(USER_XIDS), p=list(USER_XIDS.values())))
            gpu = 0 if runs.is_one_gpu[run] else int(rng.integers(GPUS_PER_NODE))
            rows.append((int(end_s[run]) - 1, int(self.plan.nodes[runs.row[run]][0]), gpu, xid, False, run))
        names, columns = ("time_s", "node", "gpu", "xid", "is_node", "run"), zip(*sorted(rows), strict=True)
        failures = Arrays(**dict(zip(names, map(np.array, columns), strict=True)))
        return runs.replaced(end_s=end_s, state=state, planned_end_s=runs.end_s), failures

    def _busy(self, run: int, rng: np.random.Generator) -> tuple[Floats, Floats, float]:
        """Knots of the seconds with GPU work up to each time: (times, cumulated), and when it hangs (inf: never)."""
        runs = self.runs
        start, end, kind = float(runs.start_s[run]), float(runs.end_s[run]), int(runs.kind[run])
        whole = float(runs.planned_end_s[run]) - start
        if kind == NEVER:
            return np.array([start]), np.zeros(1), np.inf
        load = 60 * _lognormal(rng, LOAD_MIN if kind != PREPROCESSING else PREPARE_MIN)
        begin = start + min(load, 0.9 * whole)
        if begin >= end:
            return np.array([start]), np.zeros(1), np.inf
        stop = begin + (start + whole - begin) * rng.uniform(0.05, 0.9) if kind in (AFTER, HANG) else end
        on, off = self._pattern(kind, whole, rng)
        number = min(100_000, int(2 * (stop - begin) / (on + off[0] * 60)) + 20)
        length = np.empty(2 * number)
        length[0::2] = rng.exponential(on, number) + 5
        length[1::2] = 60 * off[0] * np.exp(off[1] * rng.standard_normal(number))
        edges = np.concatenate([[begin], begin + np.cumsum(length)])
        busy = np.concatenate([[0.0], np.cumsum(np.where(np.arange(2 * number) % 2 == 0, length, 0.0))])
        last = min(stop, end)
        kept = int(np.searchsorted(edges, last))
        total = float(np.interp(last, edges, busy))
        times, cumulated = np.append(edges[:kept], last), np.append(busy[:kept], total)
        if kept >= 1 and cumulated[-1] == cumulated[kept - 1]:  # ends in a pause
            times, cumulated = times[:kept], cumulated[:kept]
        return times, cumulated, float(stop) if kind == HANG and stop < end else np.inf

    @staticmethod
    def _pattern(kind: int, whole_s: float, rng: np.random.Generator) -> tuple[float, tuple[float, float]]:
        """Mean seconds of a stretch of work; median minutes and sigma of the pause after it."""
        if kind == SERVING:  # a request a minute at a typical server, some quiet for long: chosen
            return 15.0, (_lognormal(rng, (1.0, 1.2)), 1.0)
        if kind == BURSTY:
            return float(rng.uniform(10, 60)), (float(rng.uniform(2, 15)), 0.7)
        if kind == INTERACTIVE:
            return float(rng.uniform(30, 300)), HUMAN_MIN
        if rng.random() < PAUSING:  # pauses take 20 to 50% of the time, less in long jobs, as in Philly
            share = rng.uniform(0.3, 0.6) if whole_s < 6 * 3600 else rng.uniform(0.15, 0.35)
            median, sigma = PAUSE_MIN
            return 60 * median * float(np.exp(sigma**2 / 2)) * (1 - share) / share, PAUSE_MIN
        return float(rng.uniform(1800, 7200)), CHECKPOINT_MIN

    def _holes(self, rng: np.random.Generator) -> list[tuple[str, float, float, int, int]]:
        """(kind, from, to, node, column of GPU_COUNTERS) of the holes; the node is -1 where they cover all."""
        found, plan = [], self.plan.shape
        for kind, a_day in HOLES_A_DAY.items():
            share = self.nodes / 200 if kind in ("node", "counter") else 1.0
            for _ in range(rng.poisson(a_day * share * self.days)):
                from_s = float(rng.uniform(plan.start_s, plan.end_s))
                node = int(rng.integers(self.nodes)) if kind in ("node", "counter") else -1
                to_s = from_s + 60 * _lognormal(rng, HOLE_MIN)
                found.append((kind, from_s, to_s, node, int(rng.integers(10))))
        return found

    @cached_property
    def hosts(self) -> list[str]:
        return self.plan.hosts

    @cached_property
    def _jobs(self) -> pa.Table:
        """All runs as squeue has them, columns of round.JOBS, for a round to take its rows of."""
        runs, plan, hosts = self.runs, self.plan, self.hosts
        number, job = len(runs.job), runs.job
        array = plan.jobs.array_job_id[job]
        columns: dict[str, Any] = {
            "job_id": plan.jobs.job_id[job], "submit_s": runs.submit_s, "restarts": runs.restarts,
            "array_job_id": pa.array(array, mask=array < 0),
            "array_task_id": pa.array(plan.jobs.task[job].astype(np.int64), mask=array < 0),
            "user": plan.users.name[runs.user], "account": plan.users.account[runs.user], "partition": ["gpu"] * number,
            "name": [plan.names[j] for j in job.tolist()],
            "node_list": [fold([hosts[n] for n in plan.nodes[r].tolist()]) for r in runs.row.tolist()],
            "node_count": runs.nodes, "gpu_count": runs.nodes * GPUS_PER_NODE, "start_s": runs.start_s,
            "limit_end_s": runs.limit_end_s, "is_interactive": runs.kind == INTERACTIVE,
            "comment": runs.comment, **{name: np.zeros(number, dtype=bool) for name in ("is_shared", "is_serving")},
        }  # fmt: skip
        return _table(columns, JOBS, number)

    def accounting(self) -> pa.Table:
        """The ended runs, columns of schema JOBS, with the kinds' names, comments, and failures."""
        plan, runs = self.plan, self.runs
        end_s, state = plan.runs.end_s.copy(), plan.runs.state.copy()
        end_s[runs.row], state[runs.row] = runs.end_s, runs.state
        return jobs_table(replace(plan, runs=plan.runs.replaced(end_s=end_s, state=state)))

    def write(self, store: ClusterStore) -> None:
        """Write the record of the site: its jobs, a sample every two minutes, and each job's GPUs."""
        store.write("jobs", self.accounting())
        for day in range(self.days):
            parts = [(each.seen.at_s, each.seen.gpus) for each in self.rounds(day)]
            gpus = pa.concat_tables([rows for _, rows in parts])
            at_s = np.repeat([at_s for at_s, _ in parts], [len(rows) for _, rows in parts])
            columns: dict[str, Any] = {name: gpus[name] for name in gpus.column_names if name in TELEMETRY.names}
            columns |= {"time_ms": (at_s - SPAN_S // 2) * 1000, "gpu": pc.cast(gpus["gpu"], pa.int16())}
            store.write("telemetry", _table(columns | {"mig": [""] * len(gpus)}, TELEMETRY, len(gpus)))
        runs, job_id = self.runs, self.plan.jobs.job_id[self.runs.job]
        nodes = [self.plan.nodes[row] for row in runs.row.tolist()]
        run = np.repeat(np.arange(len(nodes)), [GPUS_PER_NODE * len(each) for each in nodes])
        host = np.repeat(np.array(self.hosts)[np.concatenate(nodes)], GPUS_PER_NODE)
        columns = {"job_id": job_id[run], "submit_s": runs.submit_s[run], "host": host,
                   "gpu": np.tile(np.arange(GPUS_PER_NODE, dtype=np.int16), len(host) // GPUS_PER_NODE),
                   "mig": [""] * len(run)}  # fmt: skip
        store.write("gpu_metrics", _table(columns, GPU_METRICS, len(run)))

    def rounds(self, day: int) -> Iterator[SiteRound]:
        """The rounds of a day, counted from 0."""
        first_s = self.plan.shape.start_s + day * DAY_S
        grid = first_s + SPAN_S * np.arange(ROUNDS_A_DAY + 1)
        runs, parts = self.runs, []
        for run in np.flatnonzero((runs.start_s < grid[-1]) & (runs.end_s > grid[1])).tolist():
            at = np.flatnonzero((grid[1:] > runs.start_s[run]) & (grid[1:] <= runs.end_s[run]))
            if len(at):
                parts.append((run, at, np.diff(np.interp(grid, *self._knots[run][:2], left=0))[at] / SPAN_S))
        run = np.repeat([p[0] for p in parts], [len(p[1]) for p in parts])
        at, busy = (np.concatenate([p[n] for p in parts]) for n in (1, 2))
        order = np.lexsort((self.plan.jobs.job_id[runs.job[run]], at))
        jobs = Arrays(round=at[order], run=run[order], busy=busy[order])
        where = np.searchsorted(jobs.round, np.arange(ROUNDS_A_DAY + 1))
        of, gpus = self._gpus(jobs, grid, np.random.default_rng([self._seed, 43, day]), where)
        edges = np.searchsorted(jobs.round[of], np.arange(ROUNDS_A_DAY + 1))
        for number, at_s in enumerate(grid[1:].tolist()):
            chosen = jobs.run[where[number] : where[number + 1]]
            is_out = any(kind == "server" and from_s < at_s <= to_s for kind, from_s, to_s, _, _ in self.holes)
            rows = gpus.slice(edges[number], 0 if is_out else edges[number + 1] - edges[number])
            why = "Prometheus did not answer" if is_out else ""
            yield SiteRound(Round(at_s, SPAN_S, self._jobs.take(chosen), rows, why), chosen)

    def _gpus(self, jobs: Arrays, grid: Ints, rng: np.random.Generator, where: Ints) -> tuple[Ints, pa.Table]:
        """The row of jobs behind each GPU's, and the GPUs of all rounds, columns of round.GPUS."""
        runs, per = self.runs, self.runs.nodes[jobs.run] * GPUS_PER_NODE
        of = np.repeat(np.arange(len(per)), per)
        run, at = jobs.run[of], jobs.round[of]
        place = np.arange(len(of)) - np.repeat(np.cumsum(per) - per, per)
        starts = np.concatenate([[0], np.cumsum(runs.nodes)])
        flat = np.concatenate([self.plan.nodes[row] for row in runs.row.tolist()])
        node, gpu = flat[starts[run] + place // GPUS_PER_NODE], place % GPUS_PER_NODE
        end_s = grid[at + 1]
        is_used = ~runs.is_one_gpu[run] | (place == 0)
        busy = np.where(is_used, jobs.busy[of], 0.0)
        is_hung = (end_s - SPAN_S >= runs.hang_s[run]) & is_used
        noise = rng.uniform(0.9, 1.1, len(of))
        work = busy * runs.level[run] * noise
        util = np.where(is_hung, 100.0, np.rint(np.minimum(100 * runs.level[run] * noise, 100) * (busy > 0)))
        pipes = [work * runs.math[run] * (runs.pipe[run] == n) for n in range(4)]
        age = np.minimum(1.0, (end_s - runs.start_s[run]) / 300)
        holds = np.where(runs.kind[run] == NEVER, np.where(run % 2, 3.0, 0.3 * runs.need_mib[run]), runs.need_mib[run])
        power = np.where(is_hung, 120.0, 60 + 240 * work * runs.sm[run] + 100 * work) * noise
        columns = {
            "gpu_util_pct": util, "gr_engine_active_frac": np.where(is_hung, 1.0, work),
            "sm_active_frac": np.where(is_hung, 0.15, work * runs.sm[run]),
            "tensor_active_frac": pipes[1], "dram_active_frac": np.where(is_hung, 0.0, work * runs.dram[run]),
            "fp64_active_frac": pipes[0], "fp32_active_frac": pipes[2], "fp16_active_frac": pipes[3],
            "nvlink_bytes_s": work * 2e10 * ~runs.is_one_gpu[run], "hbm_used_mib": np.where(is_used, holds * age, 3.0),
            "hbm_total_mib": runs.capacity_mib[run] * 1.0, "power_w": power,
            "sm_clock_mhz": 1410 - 100.0 * (work > 0.9),
            "throttle_reasons": np.where(util == 0, 1.0, np.where(power > 330, 4.0, 0.0)),
            **dict.fromkeys(("ecc_uncorrected", "row_remap_failures"), np.zeros(len(of))),
            **self._xids(node, gpu, end_s),
        }  # fmt: skip
        seen = np.full(len(of), 4.0) - (rng.random(len(of)) < 0.002)  # a sample each 30 s; a scrape now and then fails
        is_lost = np.zeros(len(of), dtype=bool)
        for kind, from_s, to_s, host, column in self.holes:
            inside: Bools = (end_s > from_s) & (end_s - SPAN_S < to_s) & ((host < 0) | (node == host))
            if kind == "node":
                is_lost |= inside
            elif inside.any():
                name = GPU_COUNTERS[column]
                columns[name] = np.where(inside, np.nan, columns[name])
        columns |= {"job": of - where[at], "host": np.array(self.hosts)[node], "sample_count": seen,
                    "gpu": np.array([str(n) for n in range(GPUS_PER_NODE)])[gpu]}  # fmt: skip
        kept = np.flatnonzero(~is_lost)
        return of[kept], _table({name: values[kept] for name, values in columns.items()}, GPUS, len(kept))

    def _xids(self, node: Ints, gpu: Ints, end_s: Ints) -> dict[str, Floats]:
        """The gauge, which keeps its value after the job, and its changes: the same XID again changes nothing."""
        gauge, changes, f = np.zeros(len(node)), np.zeros(len(node)), self.failures
        last: dict[tuple[int, int], int] = {}
        for time_s, host, unit, xid in zip(*(x.tolist() for x in (f.time_s, f.node, f.gpu, f.xid)), strict=True):
            if xid and last.get((host, unit)) != xid and time_s < end_s.max():
                last[host, unit] = xid
                is_after: Bools = (node == host) & (gpu == unit) & (end_s > time_s)
                gauge[is_after], changes[is_after & (end_s - SPAN_S <= time_s)] = xid, 1.0
        return {"xid": gauge, "xid_changes": changes}


def _table(columns: dict[str, Any], schema: pa.Schema, rows: int) -> pa.Table:
    """The table of a schema; what has no column is null."""
    return pa.table({f.name: columns.get(f.name, pa.nulls(rows, f.type)) for f in schema}).cast(schema)


def _lognormal(rng: np.random.Generator, shape: tuple[float, float]) -> float:
    """A draw by median and sigma of the logarithm."""
    return float(shape[0] * np.exp(shape[1] * rng.standard_normal()))
