"""Run time per GPU type, on a table of measured speeds. Run: make bench-placement, or with --table for another site's.

A family is one row of the table: a model with its batch size and GPU count. Families of one model have one user. Each
model in turn is left out, or each family: the others have one run on every type, and the left-out family one run on a
single type, from which its time on the other types is estimated. The error is |ln(estimated / true)|. "Specifications
alone" is the same without any other family. The table has no noise from run to run, which the estimate cannot know
from single runs: its intervals are wider than they had to be. Type names must be ones that the hardware table knows.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import defaultdict
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
from figures import Figure, at_most, between, main
from traces import DATA

from advisor.types.learning import SpeedTable, learn_speeds
from advisor.types.runs import FamilyKey, FamilyRuns, GpuTypes, SpeedRun, families_of
from advisor.types.times import MemoryFit, TypeTime, family_times
from almanac.hardware import gpu_models

TABLE = DATA / "gavel_throughputs_k80_p100_v100.json"
TYPES = {"v100": "V100-16", "p100": "P100-16-PCIE", "k80": "K80-12"}
"""The GPUs of Gavel's table."""
WORK = 1e5
COVERAGE = 0.8
ANY = MemoryFit(is_checked=False)

Speeds = dict[FamilyKey, dict[str, float]]


def read_speeds(path: Path, types: list[str]) -> Speeds:
    """Steps/s of each family on each type; a type on which it cannot run is not there."""
    content = json.loads(path.read_text(encoding="utf-8"))
    found: Speeds = defaultdict(dict)
    for name in types:
        for key, rates in content[name].items():
            kind, gpus = re.fullmatch(r"\('(.*)', (\d+)\)", key).groups()  # type: ignore[union-attr]
            if rates["null"] > 0:
                found[FamilyKey(kind.split(" (")[0], kind, int(gpus))][name] = rates["null"]
    return dict(found)


def runs_of(speeds: Speeds, keys: list[FamilyKey], only: str | None = None) -> dict[FamilyKey, FamilyRuns]:
    """One run of each family on each type, or on one type only."""
    return families_of(
        [
            SpeedRun(key, name, 0, math.log(WORK / speed))
            for key in keys
            for name, speed in speeds[key].items()
            if only in (None, name)
        ]
    )


class Errors:
    """Signed errors of ln time by pair of types, and whether the interval held the true time."""

    def __init__(self) -> None:
        self.away: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self.held: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)

    def add(self, base: str, told: tuple[TypeTime, ...], truth: dict[str, float]) -> None:
        for each in told:
            if each.gpu_type != base and each.gpu_type in truth:
                true_s = WORK / truth[each.gpu_type]
                self.away[base, each.gpu_type].append(math.log(each.run_s / true_s))
                self.held[base, each.gpu_type].append(each.low_s <= true_s <= each.high_s)

    def median(self, *pairs: tuple[str, str]) -> float:
        return float(np.median(np.abs([away for pair in pairs or self.away for away in self.away[pair]])))

    def coverage(self, *pairs: tuple[str, str]) -> float:
        return float(np.mean([held for pair in pairs or self.held for held in self.held[pair]]))


def leave_out(speeds: Speeds, types: GpuTypes, names: list[str], key_of: int | None) -> tuple[Errors, Errors]:
    """(errors of the estimate, of specifications alone). key_of: leave out whole models (0), or single families."""
    ours, alone = Errors(), Errors()
    bare = learn_speeds({}, types, names)
    groups = sorted({key if key_of is None else key[key_of] for key in speeds}, key=str)
    for group in groups:
        left = [key for key in speeds if (key if key_of is None else key[key_of]) == group]
        others = runs_of(speeds, [key for key in speeds if key not in left])
        table = learn_speeds(others, types, names)
        for key in left:
            for base in speeds[key]:
                own = runs_of(speeds, [key], base)
                ours.add(base, family_times(key, {**others, **own}, table, ANY, COVERAGE), speeds[key])
                alone.add(base, family_times(key, own, bare, ANY, COVERAGE), speeds[key])
    return ours, alone


def peaks_alone(speeds: Speeds, names: list[str]) -> list[Figure]:
    """Ratios of one peak, for comparison."""
    found = []
    for what in ("hbm_bytes_per_s", "fp32_flops"):
        peaks = {name: getattr(gpu_models()[TYPES[name]], what) for name in names if name in TYPES}
        away = [
            math.log(rates[one] / rates[other] / peaks[one] * peaks[other])
            for rates in speeds.values()
            for one, other in combinations(sorted(peaks), 2)
            if one in rates and other in rates
        ]
        if away:
            found.append(Figure(f"ratio of {what} alone: median |ln error|", float(np.median(np.abs(away)))))
    return found


def figures_of(name: str, ours: Errors, alone: Errors, names: list[str], has_goal: bool) -> list[Figure]:
    found = []
    for one, other in [(a, b) for a, b in permutations(names, 2) if names.index(a) < names.index(b)]:
        pairs = ((one, other), (other, one))
        mine, theirs = ours.median(*pairs), alone.median(*pairs)
        found += [
            at_most(f"{name}: {one}/{other}: median |ln error|", mine, theirs if has_goal else None),
            Figure(f"{name}: {one}/{other}: the same, specifications alone", theirs),
            Figure(f"{name}: {one}/{other}: coverage of 80% intervals", ours.coverage(*pairs)),
        ]  # fmt: skip
    mine, theirs, held = ours.median(), alone.median(), ours.coverage()
    return [
        *found,
        at_most(f"{name}: all pairs: median |ln error|", mine, theirs),
        Figure(f"{name}: all pairs: the same, specifications alone", theirs),
        between(f"{name}: all pairs: coverage of 80% intervals", held, 0.75, 0.95),
        Figure(f"{name}: all pairs: coverage, specifications alone", alone.coverage()),
    ]


def training_time(speeds: Speeds, types: GpuTypes, names: list[str]) -> tuple[Figure, SpeedTable]:
    """Seconds to learn from 1,000 families."""
    many = {key._replace(user=f"{key.user}{copy}"): speed for copy in range(13) for key, speed in speeds.items()}
    runs = runs_of(many, list(many))
    begin_s = time.perf_counter()
    table = learn_speeds(runs, types, names)
    took_s = time.perf_counter() - begin_s
    return at_most(f"learn from {len(many):,} families, s", took_s, 5), table


def measure() -> list[Figure]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE, help="throughputs in Gavel's format")
    parser.add_argument("--types", nargs="+", default=list(TYPES), metavar="NAME", help="types of the table to use")
    options = parser.parse_args()
    models = {name: TYPES[name] for name in options.types if name in TYPES}
    types = GpuTypes(models=models)
    speeds = read_speeds(options.table, options.types)
    figures = figures_of("model left out", *leave_out(speeds, types, options.types, 0), options.types, True)
    figures += figures_of("family left out", *leave_out(speeds, types, options.types, None), options.types, False)
    figures += peaks_alone(speeds, options.types)
    return [*figures, training_time(speeds, types, options.types)[0]]


if __name__ == "__main__":
    main(measure)
