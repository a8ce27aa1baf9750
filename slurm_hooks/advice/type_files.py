"""Publish run times by GPU type (`almanac publish`) and the waits of the queue (`almanac waits`), for showing only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pandas as pd

from advisor.artefacts import load_speeds
from advisor.duration.blend import COVERAGE
from advisor.duration.service import durations_of
from advisor.from_store import load_usable
from advisor.types.decide import TypeWait
from advisor.types.learning import SpeedTable
from advisor.types.queue_forward import estimate_waits
from advisor.types.queue_view import build_view, types_on
from advisor.types.runs import FamilyKey, FamilyRuns, load_speed_runs
from advisor.types.times import MemoryFit, TypeTime, family_times, user_families
from advisor.waits.record import ALL_SIZES, HISTORY_DAYS, recent_cells
from almanac.atomic import TEMPORARY, locked, make_folders, write_atomically
from almanac.config import Config
from almanac.errors import ConfigError, FileFormatError
from almanac.published.outgoing import FOLDER_MODE, Outgoing, Uids, explained, owners_of, uid_of
from almanac.records import Duration, JobRequest
from almanac.submit_config import SITE, GpuType
from almanac.tiers import asked_types
from almanac.units import DAY_S, size_class
from slurm.commands import Runner
from slurm.nodes import SlurmNode
from slurm.queue import Queue, read_queue
from slurm_hooks.advice.file import ADVICE
from slurm_hooks.advice.kinds import TIMES, WAITS, Family, WaitsFile, in_steps, times_file
from slurm_hooks.advice.publish import PublishRun
from telemetry.history import load_history, load_history_table
from telemetry.site import Site

CHUNK = 200
"""Users whose runs are held in memory together."""
MIN_TYPES = 2
"""Least GPU types between which there is a choice."""


@dataclass
class PublishedTimes:
    """Counts of what was published: files, and job families in them."""

    written: int = 0
    families: int = 0


def publish_times(job: PublishRun, uids: Uids = uid_of) -> PublishedTimes:
    """Write the files of all users with completed runs, under the publisher's lock. Nothing while one type is known.

    Raises ConfigError, StoreError, BusyError.
    """
    site, now_s = job.site, job.site.now_s()
    table = load_speeds(site.store.models_dir) or SpeedTable()
    outcome = PublishedTimes()
    if len(table.names) < MIN_TYPES:
        return outcome
    since_s = now_s - site.config.advice.history_days * DAY_S
    found = load_history_table(site.store, ("user",), since_s=since_s)["user"].to_pylist()
    users = sorted({str(user) for user in found if user})
    owners = owners_of(users, uids).uids
    known = [user for user in users if user in owners]
    if job.is_dry:
        return outcome
    with job.folder.locked():
        job.folder.prepare()
        for first in range(0, len(known), CHUNK):
            some = known[first : first + CHUNK]
            families = user_families(load_speed_runs(site.store, some, since_s), table, site.config, now_s)
            files = [(str(owners[user]), _own_times(job, user, owners[user], families, table)) for user in some]
            made = ((uid, times_file(now_s, now_s + job.lifetime_s, own)) for uid, own in files if own)
            job.folder.write((uid, TIMES.name, TIMES.render(file)) for uid, file in made)
            outcome.written += sum(bool(own) for _, own in files)
            outcome.families += sum(len(own) for _, own in files)
    return outcome


def _own_times(
    job: PublishRun, user: str, uid: int, families: Mapping[FamilyKey, FamilyRuns], table: SpeedTable
) -> dict[Family, Sequence[TypeTime]]:
    own = {key: runs for key, runs in families.items() if key.user == user}
    return dict(_times(own, table, _bounds(job.folder, uid), job.site.config))


def _bounds(folder: Outgoing, uid: int) -> Mapping[Family, int]:
    """The memory bounds of the user's families, MiB, as their advice file has them."""
    try:
        file = ADVICE.parse(folder.read(str(uid), ADVICE.name) or b"").value
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


Durations = Callable[[Sequence[JobRequest]], Sequence[Duration | None]]
"""Predicted run times of many jobs, as advisor.duration.service.durations_of gives them."""


@dataclass(frozen=True)
class GatheredWaits:
    """The waits to publish, and what they rest on.

    running, waiting: numbers of GPU jobs. unreadable: number of records left out. silent: types and sizes of recent
    jobs whose waits cannot be predicted now.
    """

    file: WaitsFile
    running: int
    waiting: int
    unreadable: int
    silent: tuple[tuple[str, int], ...]


def waits_now(site: Site) -> GatheredWaits:
    """The waits file of this moment, by Slurm's queue, the site's models, and the recorded waits. Raises CommandError,
    StoreError, and what `types_of` raises.
    """
    store, now_s, nodes = site.store, site.now_s(), site.backend.nodes()
    queue, types = read_gpu_queue(site.commands, store.cluster), types_of(site.config, nodes)
    trained = load_usable(store.models_dir, now_s)
    users, since_s = {job.request().user for job in queue.jobs}, now_s - HISTORY_DAYS * DAY_S
    history = load_history(store, since_s, running=True, also=users)

    def durations(requests: Sequence[JobRequest]) -> Sequence[Duration | None]:
        own = history[history["user"].isin({request.user for request in requests})].reset_index(drop=True)
        return durations_of(requests, own, trained, site.config, now_s)

    told, silent = told_waits(queue, history[history["submit_s"] >= since_s], types, now_s)
    waits = queue_waits(queue, nodes, durations, types, now_s)
    counts = [job.task_count for job in queue.jobs if job.is_waiting]
    running = len(queue.jobs) - len(counts)
    return GatheredWaits(WaitsFile(now_s, types, waits, told), running, sum(counts), queue.unreadable, silent)


def read_gpu_queue(commands: Runner, cluster: str) -> Queue:
    """The jobs of a cluster that hold GPUs, or wait for some or for whole nodes, now. Raises CommandError."""
    queue = read_queue(commands, cluster)
    jobs = (job for job in queue.jobs if job.gpu_count or (job.is_waiting and job.is_exclusive))
    return replace(queue, jobs=tuple(job for job in jobs if job.holds_nodes or job.is_waiting))


def types_of(config: Config, nodes: Sequence[SlurmNode]) -> tuple[GpuType, ...]:
    """The site's GPU types. Raises ConfigError without any."""
    types: tuple[GpuType, ...] = config.gpu_types or types_on(nodes)
    if not types:
        raise ConfigError(
            "no node has GPUs with a GRES type, and [[gpu_types]] is empty", "name the site's types under [[gpu_types]]"
        )
    return types


def queue_waits(
    queue: Queue, nodes: Sequence[SlurmNode], durations: Durations, types: Sequence[GpuType], now_s: int
) -> tuple[tuple[int, TypeWait], ...]:
    """Number of GPUs and the wait by the queue played forward, without held jobs, to choose a type by."""
    jobs = [job for job in queue.jobs if not (job.is_waiting and job.is_held)]
    predicted = durations([job.request() for job in jobs]) if jobs else []
    found = estimate_waits(build_view(nodes, jobs, predicted, types, now_s))
    return tuple((size, wait) for (_, size), wait in sorted(found.items()))


def told_waits(
    queue: Queue, history: pd.DataFrame, types: tuple[GpuType, ...], now_s: int
) -> tuple[tuple[tuple[int, TypeWait], ...], tuple[tuple[str, int], ...]]:
    """Return the waits to show users, by recent waits, and the types and sizes without a prediction."""
    names = pd.Series(
        [_type_of(*row, types) for row in zip(*(history[name] for name in _TYPED), strict=True)], dtype=object
    )
    cells, waiting = recent_cells(history, now_s, names.set_axis(history.index)), _waiting(queue, types)
    told, silent = list[tuple[int, TypeWait]](), list[tuple[str, int]]()
    for name, size in sorted((name, int(size)) for name, size in cells if size != ALL_SIZES):
        found = cells[name, str(size)].predicted_now(now_s, (name, size) in waiting)
        if found is None:
            silent.append((name, size))
        else:
            low_s, wait_s, high_s = found
            told.append((size, TypeWait(name, wait_s, low_s, high_s, now_s)))
    return tuple(told), tuple(silent)


_TYPED = ("gpu_type", "constraints", "partition")


@cache
def _type_of(gpu_type: str, constraints: str, partition: str, types: tuple[GpuType, ...]) -> str | None:
    """The one type that such a job used; None if it is not sure."""
    request = JobRequest("", gpu_type=gpu_type, constraints=constraints, partition=partition)
    found = asked_types(request, types)
    return next(iter(found)) if len(found) == 1 else None


def _waiting(queue: Queue, types: tuple[GpuType, ...]) -> set[tuple[str, int]]:
    """Types and sizes that jobs wait for. As in the record, an array no longer waits once a task of it has started."""
    started = {job.array_job_id for job in queue.jobs if job.holds_nodes} - {None}
    found = set[tuple[str, int]]()
    for job in queue.jobs:
        if job.gpu_count and job.is_waiting and job.array_job_id not in started:
            any_type = () if job.gpu_type else (kind.name for kind in types)
            found |= {(name, size_class(job.gpu_count)) for name in asked_types(job.request(), types) or any_type}
    return found


def publish_waits(folder: Outgoing, file: WaitsFile) -> None:
    """Replace the waits file, whole or not at all. Raises StoreError.

    It has a lock of its own: `almanac publish` may take longer than waits are used.
    """
    path = folder.path(SITE, WAITS.name)
    with explained(path, folder.root):
        make_folders(path.parent, FOLDER_MODE)
    with locked(folder.root / ".waits.lock", "publishes waits"), explained(path, folder.root):
        for stale in path.parent.glob(f"{TEMPORARY}*"):
            stale.unlink()
        write_atomically(path, WAITS.render(in_steps(file)))
