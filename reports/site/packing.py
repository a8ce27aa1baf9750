"""The job families that could share a GPU, and the GPU-hours that this would save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import duckdb

from advisor.from_store import load_usable
from advisor.memory.calibration import Calibration
from advisor.packing.decide import FamilyKey, PackingAdvice, packing_pairs
from advisor.packing.evidence import packing_families, rules_of
from telemetry.history import UserHistories
from telemetry.site import Site

MOST_USERS = 500
"""Users with the most GPU-hours on one GPU whose families are looked at."""
CHUNK = 100
"""Users whose history is held in memory together."""
OFF, UNTRAINED, NO_JOBS = "packing.advise is off", "nothing is trained (almanac train)", "no job ran on one GPU"
_SQL = """
SELECT "user", regexp_replace(name_key, '[_?]+', '_', 'g'), sum(gpu_hours) FROM runs
WHERE gpus = 1 AND mig_profile IS NULL AND name_key IS NOT NULL AND "user" <> ''
GROUP BY 1, 2
"""


@dataclass(frozen=True)
class SharingFamilies:
    """Families of one user that could share. hours: GPU-hours of the span that could run together; saved_hours: those
    that sharing would save at the low end of its gain.
    """

    user: str
    advice: PackingAdvice
    hours: float
    saved_hours: float


@dataclass(frozen=True)
class SitePacking:
    """Job families that could share GPUs, and the GPU-hours that this would save.

    rows: most saved GPU-hours first; each family is in one of them. hours: GPU-hours of all jobs on one GPU. users:
    number of users looked at. left_out: number of users with fewer GPU-hours, who were not. why_none: why there are no
    rows; else "".
    """

    rows: tuple[SharingFamilies, ...] = ()
    hours: float = 0.0
    users: int = 0
    left_out: int = 0
    why_none: str = ""

    @property
    def saved_hours(self) -> float:
        return sum(row.saved_hours for row in self.rows)


def load_packing(db: duckdb.DuckDBPyConnection, site: Site) -> SitePacking:
    """The families that could share, of the runs of `site_runs`, by the evidence of today. Raises StoreError."""
    if not site.config.packing.advise:
        return SitePacking(why_none=OFF)
    spent: dict[FamilyKey, float] = {(user, key, 1): each for user, key, each in db.execute(_SQL).fetchall() if each}
    by_user: dict[str, float] = {}
    for (user, _, _), each in spent.items():
        by_user[user] = by_user.get(user, 0.0) + each
    users = sorted(by_user, key=lambda user: (-round(by_user[user], 6), user))[:MOST_USERS]
    found = SitePacking(hours=sum(spent.values()), users=len(users), left_out=len(by_user) - len(users))
    trained = load_usable(site.store.models_dir, site.now_s()) if users else None
    if not users or trained is None:
        return SitePacking(hours=found.hours, why_none=UNTRAINED if users else NO_JOBS)
    advices = list(_advices(site, users, trained.calibration))
    return SitePacking(tuple(_rows(advices, spent)), found.hours, found.users, found.left_out)


def _advices(site: Site, users: Sequence[str], calibration: Calibration) -> Iterator[PackingAdvice]:
    rules, histories, now_s = rules_of(site.config), UserHistories(site.store), site.now_s()
    try:
        for first in range(0, len(users), CHUNK):
            history = histories.of(users[first : first + CHUNK])
            small = history[history["gpu_count"] == 1]
            yield from packing_pairs(packing_families(small, calibration, site.config, now_s), rules)
    finally:
        histories.close()


def _rows(advices: Sequence[PackingAdvice], spent: dict[FamilyKey, float]) -> list[SharingFamilies]:
    """Each family once, in the row that saves most."""
    found = [_row(advice, spent) for advice in advices]
    rows, used = list[SharingFamilies](), set[FamilyKey]()
    for row in sorted(found, key=lambda row: (-round(row.saved_hours, 6), _keys(row.advice))):
        keys = _keys(row.advice)
        if row.saved_hours > 0 and used.isdisjoint(keys):
            used.update(keys)
            rows.append(row)
    return rows


def _row(advice: PackingAdvice, spent: dict[FamilyKey, float]) -> SharingFamilies:
    """Two families can share as long as both run: twice the hours of the shorter one."""
    keys = _keys(advice)
    own = [spent.get(key, 0.0) for key in keys]
    together = own[0] if advice.is_with_itself else 2 * min(own)
    saved = together * (1 - 1 / advice.gain.low) if advice.gain else 0.0
    return SharingFamilies(keys[0][0], advice, together, saved)


def _keys(advice: PackingAdvice) -> list[FamilyKey]:
    return [member.key for member in advice.members]
