"""The site factor: jobs predicted to need little GPU-time start earlier (Hu et al., SC'21, 4.2.2).

site_factor = C - K ln(GPU-time). GPU-time is the one that ranks jobs (advisor.duration.blend), held between a
least and a greatest value. C gives the greatest 0. Slurm adds its age factor, PriorityWeightAge * age / PriorityMaxAge,
and starts the greatest sum first. Where

    PriorityWeightAge = K * PriorityMaxAge / tau

that is the order of ln(GPU-time) + submission / tau. A job with e times the GPU-time waits tau longer. No job is
overtaken by jobs that are submitted more than tau ln(greatest / least) after it. This needs an age that still grows by
then: PriorityMaxAge >= tau ln(greatest / least).

Users whose newest runs took far longer than predicted gain less (`overrun_of`). The prediction itself follows a change
of habits within a few runs. To compare runs with the habit as well would make users with runs of very different lengths
wait: on Helios a third of all jobs, for a mean JCT 1.5 times as long.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from almanac.errors import ConfigError
from almanac.records import PriorityAdvice
from almanac.submit_config import Priority
from almanac.units import DAY_S, parse_time_limit

TIMES = 2.0
MIN_RUNS = 4
_MOST_LOG = 25.0


class Overrun(NamedTuple):
    """A user's newest runs compared with their expected times.

    share: those that took more than TIMES as long, as a share of the newest runs. times: the geometric mean of actual
    over expected time, at least 1.
    """

    share: float = 0.0
    times: float = 1.0


NO_OVERRUN = Overrun()


def overrun_of(log_ratios: Sequence[float]) -> Overrun:
    """Compare a user's newest runs with what was expected; NO_OVERRUN for fewer than MIN_RUNS.

    log_ratios: logarithms of actual over expected time.
    """
    if len(log_ratios) < MIN_RUNS:
        return NO_OVERRUN
    share = sum(ratio > math.log(TIMES) for ratio in log_ratios) / len(log_ratios)
    mean = sum(log_ratios) / len(log_ratios)
    return Overrun(share, math.exp(min(max(mean, 0.0), _MOST_LOG)))


OVERRUN_SHARE = 0.5
"""Share of a user's newest runs that take over twice their recorded time; from then on a longer time ranks the jobs."""
DEFAULTS = {"PriorityType": "priority/multifactor", "PriorityMaxAge": "7-0", "PriorityWeightAge": "0"}
"""Defaults of slurm.conf(5); PriorityType has been multifactor since 23.11."""


def site_factor(gpu_time_s: float, priority: Priority) -> int:
    """Return the site factor for a predicted GPU-time: at least 0, at most that of priority.min_gpu_time_s.

    It never rises with the GPU-time.
    """
    # In this order NaN, a GPU-time that is not known, is the greatest.
    held_s = max(priority.min_gpu_time_s, min(priority.max_gpu_time_s, gpu_time_s))
    return round(priority.points_per_e * math.log(priority.max_gpu_time_s / held_s))


def decide_priority(
    gpu_time_s: float,
    cautious_s: float,
    overran: Overrun,
    quantiles_s: Sequence[float],
    priority: Priority,
    ranked: Callable[[float], float] = float,
) -> PriorityAdvice:
    """Return the site factor and what it rests on. gpu_time_s: predicted; cautious_s: the upper end of its interval.

    overran: the user's newest runs. If at least the share OVERRUN_SHARE of them overran, and on the whole they did too,
    as many times the predicted GPU-time counts, at most cautious_s. ranked: gives the GPU-time that ranks the job for
    the one that counts. quantiles_s: ascending, such GPU-times of the site's recent jobs at evenly spaced quantiles,
    for the words of the advice.
    """
    is_cautious = overran.share >= OVERRUN_SHARE and overran.times >= TIMES
    counted_s = max(gpu_time_s, min(cautious_s, gpu_time_s * overran.times)) if is_cautious else gpu_time_s
    rank_s = ranked(counted_s)
    extra = 0
    if gpu_time_s <= priority.short_gpu_time_s and not is_cautious:
        extra += priority.short_points
    middle_s = quantiles_s[len(quantiles_s) // 2] if quantiles_s else None
    wait_s = None
    if middle_s:
        steps = (site_factor(rank_s, priority) + extra - site_factor(middle_s, priority)) / priority.points_per_e
        wait_s = steps * priority.tau_hours * 3600
    return PriorityAdvice(
        site_factor=site_factor(rank_s, priority) + extra,
        gpu_time_s=counted_s,
        share_longer=share_longer(rank_s, quantiles_s) if len(quantiles_s) > 1 else None,
        worth_wait_s=wait_s,
        is_cautious=is_cautious,
        extra=extra,
        rank_gpu_time_s=rank_s,
    )


RELIEF_SHARE, RELIEF_S = 0.05, 3600
"""Share of the users with waiting jobs that get relief, and how often they are chosen, s."""


def relieved_users(waiting: Iterable[tuple[str, int]], now_s: int, share: float = RELIEF_SHARE) -> frozenset[str]:
    """Return the users whose waiting jobs have waited longest in sum (Hu et al., SC'21, implication 7).

    waiting: user, and since when, of each waiting job. share: of all users with such jobs, at least one user. The
    choice holds within an hour, but for jobs that start: a job counts from the next full hour on.
    """
    hour_s = now_s // RELIEF_S * RELIEF_S
    waited_s: Counter[str] = Counter()
    for user, since_s in waiting:
        waited_s[user] += max(hour_s - since_s, 0)
    longest = sorted((user for user, total_s in waited_s.items() if total_s), key=lambda user: (-waited_s[user], user))
    return frozenset(longest[: math.ceil(len(waited_s) * share)])


def share_longer(gpu_time_s: float, quantiles_s: Sequence[float]) -> float:
    """Return the share of jobs with more GPU-time, in [0, 1]; half of the jobs with equal GPU-time count as longer.

    quantiles_s: at least two evenly spaced quantiles of the jobs' GPU-time, ascending; interpolated linearly.
    """
    last, below = len(quantiles_s) - 1, bisect_left(quantiles_s, gpu_time_s)
    equal = bisect_right(quantiles_s, gpu_time_s) - below
    if equal:
        rank = below + (equal - 1) / 2
    elif below in (0, last + 1):
        rank = 0.0 if below == 0 else float(last)
    else:
        low, high = quantiles_s[below - 1], quantiles_s[below]
        rank = below - 1 + (gpu_time_s - low) / (high - low)
    return 1.0 - rank / last


@dataclass(frozen=True)
class AgeingCheck:
    """The weight that a site's slurm.conf gives age, compared with the site factor. tau_s: None if age does not count.

    lines: the lines that slurm.conf needs; () where its weights fit. faults: why, for people.
    """

    tau_s: float | None
    lines: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.lines


def check_ageing(settings: Mapping[str, str], priority: Priority, tolerance: float = 0.1) -> AgeingCheck:
    """Compare slurmctld's weight of age with the site factor.

    tolerance: how far the implied tau may be from the goal. Raises ConfigError for a value that cannot be read.
    """
    said = {name: (settings.get(name, "").split() or [value])[0] for name, value in DEFAULTS.items()}
    max_age_s = _seconds(said["PriorityMaxAge"])
    weight = _whole(said["PriorityWeightAge"])
    goal_s = priority.tau_hours * 3600
    tau_s = priority.points_per_e * max_age_s / weight if weight and max_age_s else None
    options = (priority.relief_points + priority.short_points) / priority.points_per_e
    needed_s = goal_s * (math.log(priority.max_gpu_time_s / priority.min_gpu_time_s) + options)
    lines, faults = [], []
    if said["PriorityType"] != DEFAULTS["PriorityType"]:
        lines.append(f"PriorityType={DEFAULTS['PriorityType']}")
        faults.append(f"PriorityType is {said['PriorityType']}: only priority/multifactor adds the site factor")
    if max_age_s < needed_s:
        max_age_s = math.ceil(needed_s / DAY_S) * DAY_S
        lines.append(f"PriorityMaxAge={max_age_s // DAY_S}-0")
        faults.append("PriorityMaxAge is too short: long jobs could starve")
    wanted = max(round(priority.points_per_e * max_age_s / goal_s), 1)
    if not weight or abs(math.log(wanted / weight)) > math.log1p(tolerance):
        lines.append(f"PriorityWeightAge={wanted}")
        now = "age does not count" if tau_s is None else f"a job e times as long waits {tau_s / 3600:.1f} h longer"
        faults.append(f"PriorityWeightAge is {weight}: {now}, but priority.tau_hours is {priority.tau_hours:g}")
    return AgeingCheck(tau_s, tuple(lines), tuple(faults))


def require_ageing(settings: Mapping[str, str], priority: Priority) -> None:
    """Raise ConfigError unless site factors may be set: the mode is apply, and slurmctld's weights fit."""
    if priority.mode != "apply":
        raise ConfigError(f"priority.mode is {priority.mode}: no site factor is set", 'set priority.mode = "apply"')
    check = check_ageing(settings, priority)
    if not check.fits:
        raise ConfigError(
            f"no site factor is set: {'; '.join(check.faults)}", f"in slurm.conf: {', '.join(check.lines)}"
        )


def _seconds(text: str) -> int:
    try:
        seconds = parse_time_limit(text)
    except ValueError:
        seconds = None
    if seconds is None:
        raise ConfigError(f"slurm.conf: PriorityMaxAge is {text!r}, expected a time", "write days-hours, such as 7-0")
    return seconds


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"slurm.conf: PriorityWeightAge is {text!r}, expected a whole number", "write 0 or more")
    return int(text)
