"""Gavel's traces: training jobs by type and number of steps, whose run times follow from a file of throughputs.

They become jobs of a plain workload, or jobs whose speed depends on the GPU type.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from advisor.types.placement import Floats, Ints, price
from almanac.errors import FileFormatError, RequestError
from almanac.files import parse_json
from almanac.units import DAY_S

_PLACES = {7: (4, 6, 5, None), 10: (5, 6, 9, 8)}
"""Number of fields to the places of steps, GPUs, arrival, and SLO, as the two versions of Gavel write them."""
GPU_TYPES = ("v100", "p100", "k80")


def is_gavel(start: bytes) -> bool:
    """Return True if the first line has Gavel's fields."""
    fields = start.split(b"\n")[0].decode("utf-8", "replace").split("\t")
    return _row(fields) is not None


def read_gavel(path: Path, throughputs: Path) -> tuple[pd.DataFrame, Mapping[str, int]]:
    """Records for make_workload, and reason to number of lines that are no job.

    A job runs for its steps divided by its type's steps/s on the fastest GPU type of the file of throughputs. `kind` is
    its type. Its deadline is its SLO times its run time after its arrival. Raises FileFormatError if one of the files
    cannot be used.
    """
    table, excluded = read_gavel_rates(path, throughputs, ())
    run_s = table["steps"] / table["rates"].str[0].astype(float)
    jobs = table.assign(run_s=run_s, name=table["kind"], deadline_s=deadlines_s(table, run_s))
    return jobs[["submit_s", "run_s", "gpu_count", "kind", "name", "deadline_s"]], excluded


def deadlines_s(table: pd.DataFrame, run_s: Any) -> pd.Series:
    """Return each job's deadline, seconds: its submission plus slo times run_s; -1 for jobs without an SLO."""
    found: pd.Series = (table["submit_s"] + table["slo"] * run_s).where(table["slo"] > 0, -1.0)
    return found


def read_gavel_rates(path: Path, throughputs: Path, types: Sequence[str]) -> tuple[pd.DataFrame, Mapping[str, int]]:
    """Read submit_s, steps, gpu_count, slo, kind, and rates (steps/s of the gang on each type), by submission."""
    steps_s = read_gavel_types(throughputs, types)
    excluded: Counter[str] = Counter()
    rows = []
    for line in _text(path).splitlines():
        fields = line.split("\t")
        row = _row(fields)
        if row is None:
            excluded["not a line of Gavel's fields"] += 1
            continue
        steps, gpus, submit_s, slo = row
        rates = [of_type.get((fields[0], int(gpus)), 0.0) for of_type in steps_s]
        if not any(rates):
            excluded["of an unknown type"] += 1
            continue
        rows.append((submit_s, steps, gpus, slo, fields[0], rates))
    table = pd.DataFrame(rows, columns=["submit_s", "steps", "gpu_count", "slo", "kind", "rates"])
    return table.sort_values("submit_s", kind="stable", ignore_index=True), excluded


def _row(fields: Sequence[str]) -> tuple[float, float, float, float] | None:
    places = _PLACES.get(len(fields))
    try:
        steps, gpus, submit_s, slo = (-1.0 if place is None else float(fields[place]) for place in places or ())
    except ValueError:
        return None
    return (steps, gpus, submit_s, slo) if 0 < gpus < 2**20 else None


def read_gavel_types(path: Path, types: Sequence[str]) -> list[dict[tuple[str, int], float]]:
    """Read the steps/s of each type, by kind and GPUs, of jobs alone on consolidated GPUs.

    types: () for the first of GPU_TYPES that the file has.
    """
    try:
        content = parse_json(_text(path).encode())
        known = [name for name in content if isinstance(content[name], dict)]
        wanted = types or [next(name for name in GPU_TYPES if name in content)]
        if absent := [name for name in wanted if name not in known]:
            raise FileFormatError(f"{path}: has no GPU type {absent[0]}", f"use types of {', '.join(known)}")
        return [_of_type(content[name]) for name in wanted]
    except (StopIteration, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(
            f"{path}: is not a file of Gavel's throughputs", f"give one with a table {', or '.join(GPU_TYPES)}"
        ) from error


def _of_type(table: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, int], float]:
    found = {}
    for key, rates in table.items():
        kind, gpus = key.removeprefix("('").removesuffix(")").rsplit("', ", 1)
        rate = float(rates["null"])
        found[kind, int(gpus)] = rate if 0 < rate < float("inf") else 0.0
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileFormatError(
            f"{path}: cannot be read: {error.strerror}", "check the path and its permissions"
        ) from error


NOT_GAVEL = "not a line of Gavel's fields"
LONGEST_S = 366 * DAY_S
"""Run time on the fastest type. A longer job is a fault of the trace, and its rounds would take hours."""
SHORTEST_S = 1e-3
LAST_S = 100 * LONGEST_S
"""Latest submission."""


@dataclass(frozen=True)
class PlacementProblem:
    """Rows are jobs in the order of submission, columns are GPU types.

    work: (jobs,) in units of the job's own, such as iterations. rates: (jobs, types) of the whole gang on GPUs of one
    type, units/s; 0 on types that cannot run it. capacity: (types,) GPUs. kinds: (jobs,) job type. deadline_s: (jobs,)
    -1 for none; None if no job has one.
    """

    types: tuple[str, ...]
    capacity: Ints
    submit_s: Floats
    gpus: Ints
    work: Floats
    rates: Floats
    kinds: tuple[str, ...] = ()
    deadline_s: Floats | None = None

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def best_s(self) -> Floats:
        """(jobs,) run time on the fastest type."""
        best: Floats = self.work / self.rates.max(axis=1)
        return best

    def job_table(self) -> pd.DataFrame:
        """The jobs as score_runs wants them; their run time is that on the fastest type."""
        columns = {"submit_s": self.submit_s, "run_s": self.best_s, "gpu_count": self.gpus, "user": ""}
        known = {"kind": self.kinds or None, "deadline_s": self.deadline_s}
        return pd.DataFrame({**columns, **{name: each for name, each in known.items() if each is not None}})


def read_problem(
    path: Path, throughputs: Path, capacity: Mapping[str, int]
) -> tuple[PlacementProblem, Mapping[str, int]]:
    """The jobs of a trace on GPUs of these types, and reason to number of lines that are left out.

    capacity: type to GPUs; a gang runs on one type. Raises FileFormatError for files that cannot be used, and
    RequestError if no job is left.
    """
    table, lines = read_gavel_rates(path, throughputs, tuple(capacity))
    left_out: Counter[str] = Counter(lines)
    if not len(table) and set(left_out) <= {NOT_GAVEL}:
        raise FileFormatError(f"{path}: has no line of a trace of Gavel", "give a file of 7 or 10 fields with tabs")
    sizes = np.array(list(capacity.values()), dtype=np.int64)
    rates = np.array(table["rates"].to_list(), dtype=float).reshape(len(table), len(capacity))
    gpus = table["gpu_count"].to_numpy(float)
    work, submit_s = table["steps"].to_numpy(float), table["submit_s"].to_numpy(float)
    rates = np.where(gpus[:, None] <= sizes[None, :], rates, 0.0)
    fits = (rates > 0).any(axis=1)
    with np.errstate(all="ignore"):
        best_s = np.where(fits, work / rates.max(axis=1, initial=0.0), 1.0)
    is_sound = np.isfinite(work) & (work > 0) & (submit_s >= 0) & (submit_s <= LAST_S) & (gpus == np.floor(gpus))
    is_sound &= (best_s >= SHORTEST_S) & (best_s <= LONGEST_S)
    left_out["with an impossible number of steps or GPUs, or time"] += int((~is_sound).sum())
    left_out["whose GPUs no type has"] += int((is_sound & ~fits).sum())
    kept = np.flatnonzero(is_sound & fits)
    left_out = +left_out
    if not len(kept):
        said = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise RequestError(f"{path}: no job can run on these GPU types ({said})", "check the GPU types and throughputs")
    problem = PlacementProblem(
        types=tuple(capacity),
        capacity=sizes,
        submit_s=submit_s[kept],
        gpus=gpus[kept].astype(np.int64),
        work=work[kept],
        rates=rates[kept],
        kinds=tuple(table["kind"].iloc[kept]),
        deadline_s=deadlines_s(table, best_s).to_numpy()[kept],
    )
    return problem, dict(left_out)


def poisson_arrivals(pool: PlacementProblem, load: float, jobs: int, seed: int) -> PlacementProblem:
    """Draw jobs from the pool with replacement, and let them arrive as a Poisson process."""
    if not (0 < load < float("inf") and jobs > 0):
        raise ValueError(f"a load of {load} and {jobs} jobs: both must be positive")
    generator = np.random.default_rng([seed, 21])
    drawn = generator.integers(len(pool), size=jobs)
    gpus, work, rates = pool.gpus[drawn], pool.work[drawn], pool.rates[drawn]
    makespan_s, _ = price(gpus, work, rates, pool.capacity)
    gaps = generator.exponential(makespan_s / jobs / load, size=jobs)
    return dataclasses.replace(
        pool,
        submit_s=np.concatenate([[0.0], np.cumsum(gaps)[:-1]]),
        gpus=gpus,
        work=work,
        rates=rates,
        kinds=tuple(pool.kinds[row] for row in drawn.tolist()) if pool.kinds else (),
        deadline_s=None,
    )


def believed_work(problem: PlacementProblem, sigma: float, seed: int) -> Floats | None:
    """(jobs,) the work times a lognormal error of this sigma and median 1; None where sigma is 0: it is known."""
    if not sigma:
        return None
    error = np.random.default_rng([seed, 22]).normal(0.0, sigma, len(problem))
    believed: Floats = problem.work * np.exp(error)
    return believed
