"""Publishes each user's run times by GPU type, beside their advice file: for showing only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor.duration.intervals import COVERAGE
from advisor.speed.learning import SpeedTable
from advisor.speed.runs import FamilyKey, FamilyRuns, load_speed_runs
from advisor.speed.site import user_families
from advisor.speed.times import MemoryFit, TypeTime, family_times
from almanac.config import Config
from almanac.errors import FileFormatError
from almanac.units import DAY_S
from slurm_hooks.advice.file import AdviceFile, parse
from slurm_hooks.advice.folder import SHOWN
from slurm_hooks.advice.publish import PublishRun
from slurm_hooks.advice.times_file import NAME, Family, render_times
from telemetry.history import load_history_table
from telemetry.store.outgoing import Outgoing
from telemetry.store.user_files import Uids, owners_of, uid_of

CHUNK = 200
"""Users whose runs are held in memory together."""
MIN_TYPES = 2
"""With fewer types there is nothing to choose."""


@dataclass
class PublishedTimes:
    """written: files. families: in them."""

    written: int = 0
    families: int = 0


def publish_times(job: PublishRun, uids: Uids = uid_of) -> PublishedTimes:
    """Write the files of all users with completed runs, under the publisher's lock. Nothing while one type is known.

    Raises ConfigError, StoreError, BusyError.
    """
    table = job.trained.speeds if job.trained else SpeedTable()
    outcome = PublishedTimes()
    if len(table.names) < MIN_TYPES:
        return outcome
    since_s = job.now_s - job.config.advice.history_days * DAY_S
    found = load_history_table(job.store, ("user",), since_s=since_s)["user"].to_pylist()
    users = sorted({str(user) for user in found if user})
    owners = owners_of(users, uids).uids
    known = [user for user in users if user in owners]
    if job.is_dry:
        return outcome
    with job.folder.locked():
        job.folder.prepare()
        for first in range(0, len(known), CHUNK):
            some = known[first : first + CHUNK]
            families = user_families(load_speed_runs(job.store, some, since_s), table, job.config, job.now_s)
            files = [(str(owners[user]), _own_times(job, user, owners[user], families, table)) for user in some]
            job.folder.write((uid, NAME, render_times(job.now_s + job.lifetime_s, own)) for uid, own in files if own)
            outcome.written += sum(bool(own) for _, own in files)
            outcome.families += sum(len(own) for _, own in files)
    return outcome


def _own_times(
    job: PublishRun, user: str, uid: int, families: Mapping[FamilyKey, FamilyRuns], table: SpeedTable
) -> dict[Family, Sequence[TypeTime]]:
    own = {key: runs for key, runs in families.items() if key.user == user}
    return dict(_times(own, table, _bounds(job.folder, uid), job.config))


def _bounds(folder: Outgoing, uid: int) -> Mapping[Family, int]:
    """The memory bounds of the user's families, MiB, as their advice file has them."""
    try:
        file: AdviceFile = parse(folder.read(str(uid), SHOWN) or b"", None)
    except FileFormatError:
        return {}
    return {(row.key, row.gpus): row.bound_mib for row in file.rows if row.gpus and row.bound_mib is not None}


def _times(
    families: Mapping[FamilyKey, FamilyRuns], table: SpeedTable, bounds: Mapping[Family, int], config: Config
) -> Iterator[tuple[Family, Sequence[TypeTime]]]:
    """Times of each family on the types that hold it, the newest family first; of those with more than one type."""
    for key in reversed(list(families)):
        family = key.name_key, key.gpu_count
        fit = MemoryFit(bounds.get(family), float(config.advice.headroom_mib))
        times = family_times(key, families, table, fit, COVERAGE)
        if len(times) >= MIN_TYPES:
            yield family, times
