"""Users, their job families, who submits what when (with the rhythm of the day and the week), and under which names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from demo.quotas import rank_within
from demo.shape import Arrays, Bools, Floats, Ints, SiteShape

REGULAR, IDLE, STAFF = 0, 1, 2
SUFFIXES = ("-v2", "-final", "_rerun", "-new", "-v3_final")
_FIRST = (  # noqa: SIM905
    "ada ben carl dina emil fay gus hana ivan jo kai lena max nia otto pia quin rosa sam tara uma vik wei xena yan zoe"
).split()
_LAST = (  # noqa: SIM905
    "abel berg cho diaz engel fox gupta hahn ito jung kim lee mori nunez okoye park quist roy silva tan"
).split()
_CODES = (  # noqa: SIM905
    "vasp lammps gromacs cp2k qe namd openmm chroma milc warpx amrex pele nyx castro hacc gyro xgc bert resnet50 "
    "unet3d gpt-neo vit llama esm2 alphafold nerf diffusion gnn mace nequip cosmoflow deepcam fourcastnet orca pyscf"
).split()
_TASKS = (  # noqa: SIM905
    "relax md scf eq prod train finetune eval sweep infer sim ml test-set pretrain mesh restart ensemble scan bench"
).split()
_TEMPLATES: tuple[Callable[[str, int, int, str], str], ...] = (
    lambda stem, n, r, date: f"{stem}-seed{r % 1000}",
    lambda stem, n, r, date: f"{stem}_{n:04d}",
    lambda stem, n, r, date: f"{stem}_{date}",
    lambda stem, n, r, date: f"{stem}-{r:08x}",
    lambda stem, n, r, date: f"{stem}.{n}",
    lambda stem, n, r, date: stem,
    lambda stem, n, r, date: f"run{n}_{stem}",
    lambda stem, n, r, date: f"{stem}_lr1e-{1 + r % 5}_bs{16 << r % 4}",
    lambda stem, n, r, date: f"{stem}_{date}_{n:02d}",
)
"""Job names as people write them, with seeds, dates, numbers, and hashes."""


def make_users(shape: SiteShape, profile: Any, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Users, and one to six families of each; a share of the users joins in the course of the span. User 0 is staff.

    framework: index into the profile's memory.preallocate, -1 for none.
    """
    people, users = profile.people, shape.users
    is_new = (rng.random(users) < people.new_share) & (np.arange(users) > 0)
    joins = shape.start_s + np.where(is_new, rng.uniform(0.2, 0.9, users), 0.0) * (shape.end_s - shape.start_s)
    low, high = people.families_per_user
    per_user = rng.integers(low, high + 1, users)
    user = np.concatenate([np.repeat(np.arange(users), per_user), rng.integers(1, users, 2)])
    role = np.where(user == 0, STAFF, REGULAR)
    role[-2:] = IDLE
    everybody = Arrays(
        name=np.array([_user_name(number) for number in range(users)], dtype=object),
        account=np.array(["nstaff", *(f"m{rng.integers(1000, 4999)}" for _ in range(1, users))], dtype=object),
        first_s=joins.astype(np.int64),
        weight=np.minimum(rng.lognormal(0.0, 0.8, users), 4.0),
        framework=_frameworks(profile, rng, users),
    )
    weight = np.minimum(rng.lognormal(0.0, 0.8, len(user)), 4.0)
    array_share = np.where(rng.random(len(user)) < 2 * people.array_share, 0.5, 0.0)
    return everybody, Arrays(user=user, role=role, weight=weight, array_share=array_share)


def _user_name(number: int) -> str:
    """Names differ: a number is added from the second round on."""
    around, place = divmod(number, len(_FIRST) * len(_LAST))
    name = f"{_FIRST[place % len(_FIRST)]}{_LAST[place // len(_FIRST)]}"
    return f"{name}{around + 1}" if around else name


def _frameworks(profile: Any, rng: np.random.Generator, users: int) -> Ints:
    """At least one user for each framework that preallocates, where there are users enough."""
    framework = np.full(users, -1)
    free = iter(rng.permutation(np.arange(1, users)))
    for number, kind in enumerate(profile.memory.preallocate):
        for _ in range(max(1, round(kind.users * users))):
            framework[next(free, 0)] = number
    return framework


def make_submissions(
    shape: SiteShape, profile: Any, users: Arrays, families: Arrays, rng: np.random.Generator
) -> Arrays:
    """shape.job_count jobs in order of submission, in sessions of one family each; some sessions are one job array.

    array: -1, or the number of the array that the job is a task of.
    """
    mean, wanted = profile.people.session_jobs_mean, shape.job_count
    sessions = int(wanted / mean * 1.3) + 20
    family = rng.choice(len(families.user), sessions, p=_session_shares(profile, users, families))
    size = rng.geometric(1 / mean, sessions)
    begin_s = _session_times(shape, profile, users.first_s[families.user[family]], rng)
    keep = np.cumsum(size) - size < wanted
    family, size, begin_s = family[keep], size[keep], begin_s[keep]
    is_array = (rng.random(len(family)) < families.array_share[family]) & (size > 1)
    session = np.repeat(np.arange(len(size)), size)
    gaps = rng.exponential(profile.people.within_session_gap_s, len(session))
    rank, _ = rank_within(session)
    gaps[(rank == 0) | is_array[session]] = 0.0
    total = np.cumsum(gaps)
    since_begin = total - total[rank == 0][session]
    submit_s = np.minimum((begin_s[session] + since_begin).astype(np.int64), shape.end_s - 1)
    order = np.lexsort((rank, session, submit_s))[:wanted]
    array = np.where(is_array[session], session, -1)
    return Arrays(family=family[session], submit_s=submit_s, array=array, task=rank).take(order)


def _session_shares(profile: Any, users: Arrays, families: Arrays) -> Floats:
    weight = users.weight[families.user] * families.weight
    weight[families.role != REGULAR] = 0.0
    weight = np.minimum(weight / weight.sum(), 0.02)
    weight /= weight.sum()
    for role, share in ((IDLE, profile.people.idle_job_share), (STAFF, profile.people.staff_job_share)):
        members = families.role == role
        weight[members] = share / members.sum()
    shares: Floats = weight / weight.sum()
    return shares


def _session_times(shape: SiteShape, profile: Any, first_s: Ints, rng: np.random.Generator) -> Floats:
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


def job_names(families: Arrays, jobs: Arrays, rng: np.random.Generator) -> list[str]:
    """A name for each job: one stem per family, with parts and suffixes that vary."""
    stems = _family_stems(families.user, rng)
    template = rng.integers(0, len(_TEMPLATES), len(stems))[jobs.family].tolist()
    dates = np.char.replace(np.datetime_as_string(jobs.submit_s.astype("datetime64[s]"), unit="D"), "-", "")
    numbers = rng.integers(0, 2**32, len(jobs.family)).tolist()
    names = []
    for job, (rank, number) in enumerate(zip(jobs.rank.tolist(), numbers, strict=True)):
        name = _TEMPLATES[template[job]](stems[jobs.family[job]], rank, number, str(dates[job]))
        ending = "-debug" if jobs.is_debug[job] else SUFFIXES[jobs.suffix[job]] if jobs.suffix[job] >= 0 else ""
        names.append(name + ending)
    return names


def _family_stems(family_user: Ints, rng: np.random.Generator) -> list[str]:
    """A stem for each family; the families of one user differ."""
    taken: set[tuple[int, str]] = set()
    stems = []
    for user in family_user.tolist():
        stem = ""
        while not stem or (user, stem) in taken:
            code, task = _CODES[rng.integers(len(_CODES))], _TASKS[rng.integers(len(_TASKS))]
            stem = f"{code}{'-_'[rng.integers(2)]}{task}"
        taken.add((user, stem))
        stems.append(stem)
    return stems


def job_scripts(shape: SiteShape, profile: Any, users: Arrays, families: Arrays, family: Ints) -> list[str | None]:
    """A key of the script that each job runs, as accounting's hash tells it; None where it has none.

    Mostly one script a family, unless its user has a launcher. Nothing else of the site depends on them.
    """
    rng, shares = np.random.default_rng([shape.seed, 29]), profile.scripts
    is_launcher: Bools = rng.random(len(users.name)) < shares.launcher_share
    is_unscripted: Bools = rng.random(len(families.user)) < shares.unscripted_share
    is_other: Bools = rng.random(len(family)) < shares.other_share
    keys: list[str | None] = []
    for number, other in zip(family.tolist(), is_other.tolist(), strict=True):
        user = int(families.user[number])
        script = "launcher" if is_launcher[user] else f"{number} {other}"
        key = hashlib.sha256(f"{users.name[user]} {script}".encode()).hexdigest()[:16]
        keys.append(None if is_unscripted[number] else key)
    return keys
