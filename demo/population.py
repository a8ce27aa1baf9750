"""Users, their job families, and who submits what when: sessions with the rhythm of the day and the week."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demo.profile import Bools, Floats, Ints, People, Profile
from demo.quotas import rank_within
from demo.shape import SiteShape

REGULAR, IDLE, STAFF = 0, 1, 2


@dataclass(frozen=True)
class Population:
    """Users and families as parallel arrays; a family belongs to the user `family_user`."""

    user_name: list[str]
    user_account: list[str]
    user_first_s: Ints
    user_weight: Floats
    user_framework: Ints  # index into Memory.preallocate, -1 for none
    family_user: Ints
    family_role: Ints
    family_weight: Floats
    family_array_share: Floats


@dataclass(frozen=True)
class Submissions:
    """One entry per job in order of submission. array is -1, or the number of the array that the job is a task of."""

    family: Ints
    submit_s: Ints
    array: Ints
    task: Ints


_FIRST = (  # noqa: SIM905
    "ada ben carl dina emil fay gus hana ivan jo kai lena max nia otto pia quin rosa sam tara uma vik wei xena yan zoe"
).split()
_LAST = (  # noqa: SIM905
    "abel berg cho diaz engel fox gupta hahn ito jung kim lee mori nunez okoye park quist roy silva tan"
).split()


def make_population(shape: SiteShape, profile: Profile, rng: np.random.Generator) -> Population:
    """Users with one to six families each; a share of them joins in the course of the span. User 0 is staff."""
    people, users = profile.people, shape.users
    newcomers = (rng.random(users) < people.new_share) & (np.arange(users) > 0)
    joins = shape.start_s + np.where(newcomers, rng.uniform(0.2, 0.9, users), 0.0) * (shape.end_s - shape.start_s)
    low, high = people.families_per_user
    per_user = rng.integers(low, high + 1, users)
    family_user = np.concatenate([np.repeat(np.arange(users), per_user), rng.integers(1, users, 2)])
    families = len(family_user)
    role = np.where(family_user == 0, STAFF, REGULAR)
    role[-2:] = IDLE
    return Population(
        user_name=_user_names(users),
        user_account=["nstaff" if n == 0 else f"m{rng.integers(1000, 4999)}" for n in range(users)],
        user_first_s=joins.astype(np.int64),
        user_weight=np.minimum(rng.lognormal(0.0, 0.8, users), 4.0),
        user_framework=_frameworks(profile, rng, users),
        family_user=family_user,
        family_role=role,
        family_weight=np.minimum(rng.lognormal(0.0, 0.8, families), 4.0),
        family_array_share=np.where(rng.random(families) < 2 * people.array_share, 0.5, 0.0),
    )


def _user_names(users: int) -> list[str]:
    """Names that differ: a number is added from the second round on."""
    rounds = len(_FIRST) * len(_LAST)
    names = [f"{_FIRST[n % len(_FIRST)]}{_LAST[n // len(_FIRST) % len(_LAST)]}" for n in range(users)]
    return [name if n < rounds else f"{name}{n // rounds + 1}" for n, name in enumerate(names)]


def _frameworks(profile: Profile, rng: np.random.Generator, users: int) -> Ints:
    """Which framework each user preallocates with; at least one user each where there are users enough."""
    framework = np.full(users, -1)
    free = iter(rng.permutation(np.arange(1, users)))
    for number, kind in enumerate(profile.memory.preallocate):
        for _ in range(max(1, round(kind.users * users))):
            framework[next(free, 0)] = number
    return framework


def make_submissions(shape: SiteShape, profile: Profile, people: Population, rng: np.random.Generator) -> Submissions:
    """shape.job_count jobs, in sessions of one family each; some sessions are one job array."""
    mean = profile.people.session_jobs_mean
    wanted = shape.job_count
    sessions = int(wanted / mean * 1.3) + 20
    family = rng.choice(len(people.family_user), sessions, p=_session_shares(profile, people))
    size = rng.geometric(1 / mean, sessions)
    begin_s = _session_times(shape, profile, people.user_first_s[people.family_user[family]], rng)
    keep = np.cumsum(size) - size < wanted
    family, size, begin_s = family[keep], size[keep], begin_s[keep]
    is_array = (rng.random(len(family)) < people.family_array_share[family]) & (size > 1)
    return _expand(shape, profile.people, family, size, begin_s, is_array, rng)


def _session_shares(profile: Profile, people: Population) -> Floats:
    weight = people.user_weight[people.family_user] * people.family_weight
    regular = people.family_role == REGULAR
    weight[~regular] = 0.0
    weight = np.minimum(weight / weight.sum(), 0.02)
    weight /= weight.sum()
    for role, share in ((IDLE, profile.people.idle_job_share), (STAFF, profile.people.staff_job_share)):
        members = people.family_role == role
        weight[members] = share / members.sum()
    shares: Floats = weight / weight.sum()
    return shares


def _session_times(shape: SiteShape, profile: Profile, first_s: Ints, rng: np.random.Generator) -> Floats:
    """Begin of each session, not before first_s, by the inverse of the cumulated weight of the hours."""
    hours = np.arange(max(1, int(np.ceil((shape.end_s - shape.start_s) / 3600))))
    at_s = shape.start_s + hours * 3600
    weekday = hours // 24 % 7  # the first day counts as a Monday: equal shapes give equal jobs, whatever the date
    of_day, of_week = np.array(profile.people.hours), np.array(profile.people.weekdays)
    passed = np.concatenate([[0.0], np.cumsum(of_day[at_s // 3600 % 24] * of_week[weekday])])
    edges = np.concatenate([at_s, [shape.end_s]]).astype(float)
    least = np.interp(first_s, edges, passed) / passed[-1]
    begin_s: Floats = np.interp((least + rng.random(len(first_s)) * (1 - least)) * passed[-1], passed, edges)
    return begin_s


def _expand(
    shape: SiteShape,
    habits: People,
    family: Ints,
    size: Ints,
    begin_s: Floats,
    is_array: Bools,
    rng: np.random.Generator,
) -> Submissions:
    """Sessions as single jobs, sorted by time, cut to shape.job_count."""
    session = np.repeat(np.arange(len(size)), size)
    gaps = rng.exponential(habits.within_session_gap_s, len(session))
    rank, _ = rank_within(session)
    gaps[(rank == 0) | is_array[session]] = 0.0
    total = np.cumsum(gaps)
    since_begin = total - total[rank == 0][session]
    submit_s = (begin_s[session] + since_begin).astype(np.int64)
    submit_s = np.minimum(submit_s, shape.end_s - 1)
    order = np.lexsort((rank, session, submit_s))[: shape.job_count]
    array = np.where(is_array[session], session, -1)
    return Submissions(family[session][order], submit_s[order], array[order], rank[order])
