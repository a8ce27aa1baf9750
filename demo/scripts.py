"""The script that each job runs, as accounting's hash tells it: one a family, unless its user has a launcher."""

from __future__ import annotations

import hashlib

import numpy as np

from demo.hostile import hostile_profile
from demo.jobs import Jobs
from demo.population import Population


def job_scripts(seed: int, people: Population, jobs: Jobs) -> list[str | None]:
    """A script key for each job; None where it has none. Nothing else of the site depends on them.

    launcher_share of users run everything by one script; unscripted_share of families have no script (--wrap, srun);
    other_share of the jobs of a family come from another script of it (a copy, another work directory).
    """
    rng, tables = np.random.default_rng([seed, 29]), hostile_profile()["scripts"]
    is_launcher = rng.random(len(people.user_name)) < tables["launcher_share"]
    is_unscripted = rng.random(len(people.family_user)) < tables["unscripted_share"]
    is_other = rng.random(len(jobs)) < tables["other_share"]
    keys: list[str | None] = []
    for family, other in zip(jobs.family.tolist(), is_other.tolist(), strict=True):
        user = int(people.family_user[family])
        script = "launcher" if is_launcher[user] else f"{family} {other}"
        key = hashlib.sha256(f"{people.user_name[user]} {script}".encode()).hexdigest()[:16]
        keys.append(None if is_unscripted[family] else key)
    return keys
