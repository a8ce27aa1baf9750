"""`map_partials` on Dask: each chunk in some worker's process, merged here in the order of the chunks.

A chunk's partials depend on nothing but its files and the allocations, so a chunk whose worker dies is computed again
elsewhere and comes out the same. The workers belong to a scheduler that runs already, or are jobs (slurm_workers).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import dask
import duckdb
import pyarrow as pa
from distributed import Client, Future, Security, as_completed, get_worker
from distributed.scheduler import KilledWorker
from distributed.utils import silence_logging_cmgr

from almanac import __version__
from almanac.config import Dask
from almanac.errors import AlmanacError, ConfigError, StoreError
from almanac.units import format_count
from telemetry.metrics.arrays import Files
from telemetry.metrics.partials import MetricOptions, Partials, Progress, Work, compute_partials, merge_partials
from telemetry.store.database import connect

if TYPE_CHECKING:
    from distributed import Worker


WAIT_S = 600.0
"""Seconds without any worker after which a run fails. Slurm may need minutes to start jobs in a busy partition."""
_ANSWER_S = 30
# Errors reach the caller as exceptions; what distributed logs on the way would only garble the progress bar.
QUIET = logging.CRITICAL + 1


class Workers:
    """Workers of a scheduler that runs already. Raises AlmanacError if for WAIT_S there has been none."""

    def __init__(self, client: Client, address: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self._address = address
        self._clock = clock
        self._seen_s = clock()

    def want(self, tasks: int) -> None:
        """Start workers for so many tasks, without waiting for them. Somebody else starts these."""

    def tend(self) -> int:
        """The number of workers now. Called often while results are awaited."""
        present = len(self.client.nthreads())
        now_s = self._clock()
        if present:
            self._seen_s = now_s
        elif now_s - self._seen_s > WAIT_S:
            raise AlmanacError(*self.explain(f"no Dask worker came within {WAIT_S:g} s"))
        return present

    def explain(self, seen: str) -> tuple[str, str]:
        """Message and hint of the error that ends the wait."""
        where = self._address
        return f"{seen} at the scheduler {where}", f"start workers with `dask worker {where}`"


@contextlib.contextmanager
def scheduler_workers(address: str, section: Dask) -> Iterator[Workers]:
    """Workers of the scheduler at tcp://host:port or tls://host:port.

    Raises ConfigError for another address, AlmanacError if no scheduler answers.
    """
    if not re.fullmatch(r"(tcp|tls)://\S+:\d+", address):
        raise ConfigError(f"the scheduler's address is {address!r}", "write tcp://HOST:PORT or tls://HOST:PORT")
    security = _security(section) if address.startswith("tls://") else None
    with quiet_logs():
        try:
            client = Client(address, security=security, timeout=_ANSWER_S)
        except OSError as error:
            raise AlmanacError(
                f"no Dask scheduler answers at {address}: {error}",
                "start one with `dask scheduler`, or correct --engine",
            ) from error
        with client:
            yield Workers(client, address)


def _security(section: Dask) -> Security:
    """Keys from the files that [dask] names. Raises ConfigError if one of them cannot be read."""
    roles = {"tls_ca_file": "tls_ca_file", "tls_cert_file": "tls_client_cert", "tls_key_file": "tls_client_key"}
    for key in roles:
        if not os.access(getattr(section, key), os.R_OK):
            raise ConfigError(
                f"a tls:// scheduler needs certificates, but dask.{key} is {getattr(section, key)!r}",
                f"name readable files in: {', '.join(f'dask.{name}' for name in roles)}",
            )
    return Security(require_encryption=True, **{role: getattr(section, key) for key, role in roles.items()})


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Hide the logs of distributed meanwhile; its two loggers have handlers of their own."""
    with silence_logging_cmgr(QUIET), silence_logging_cmgr(QUIET, "distributed.client"):
        yield


_TICK_S = 0.2
_DECISIVE = ("duckdb", "numpy", "pyarrow")


@dataclass(frozen=True)
class _Call:
    """The arguments of every chunk's task, without the allocations."""

    options: MetricOptions
    counted_ms: tuple[int, int]
    software: tuple[tuple[str, str], ...]


class DaskMapper:
    """A `chunks.Mapper`. open_workers: called once, when there is first something to compute."""

    def __init__(self, open_workers: Callable[[], Workers]) -> None:
        self._workers = functools.cache(open_workers)

    def __call__(self, db: duckdb.DuckDBPyConnection, work: Work, progress: Progress) -> Partials:
        """Partials of all chunks, merged. Raises what a chunk raised, StoreError where a worker does not see the
        store, AlmanacError where workers do not come or keep dying.
        """
        if not work.chunks:
            return merge_partials(db, [])
        chunks = [replace(files, paths=tuple(path.absolute() for path in files.paths)) for files in work.chunks]
        progress(0, len(chunks), "waiting for workers")
        workers = self._workers()
        workers.want(len(chunks))
        with _scheduler_at_hand():
            _check_imports(workers.client)
            futures = _submit(
                workers.client, chunks, work.allocations, _Call(work.options, work.counted_ms, software())
            )
        return merge_partials(db, _gather(workers, chunks, futures, progress))


def _check_imports(client: Client) -> None:
    """Raises AlmanacError where the scheduler or a worker lacks almanac: Dask ends such a worker without a word."""

    def failure(module: str) -> str:  # nested, so that it travels as code, not by name
        import importlib

        try:
            importlib.import_module(module)
        except ImportError as error:
            return str(error)
        return ""

    said = {
        "the scheduler": client.run_on_scheduler(failure, __name__),
        **client.run(failure, __name__, on_error="ignore"),
    }
    for where, error in said.items():
        if error:
            raise AlmanacError(
                f"{where} cannot import almanac's modules: {error}",
                "install the same requirements.lock and almanac there",
            )


def _submit(client: Client, chunks: Sequence[Files], allocations: pa.Table, call: _Call) -> list[Future[Partials]]:
    """One future per chunk. The allocations travel once, as a task, because scattered data dies with its holder."""
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}):
        shared = client.submit(pa.table, allocations, pure=False)
    futures: list[Future[Partials]] = client.map(_chunk_partials, chunks, allocations=shared, call=call, pure=False)
    return futures


def _gather(
    workers: Workers, chunks: Sequence[Files], futures: list[Future[Partials]], progress: Progress
) -> list[Partials]:
    """Results in the order of the chunks; the workers forget each when it is here."""
    place = {future.key: number for number, future in enumerate(futures)}
    done = as_completed(futures, with_results=True, raise_errors=False)
    futures.clear()
    found: dict[int, Partials] = {}
    while len(found) < len(chunks):
        batch = done.next_batch(block=False)
        with _scheduler_at_hand():
            for future, part in batch:
                if future.status == "error":
                    raise _said(part[1], chunks[place[future.key]])
                if future.status != "finished":
                    raise CancelledError(future.status)
                found[place[future.key]] = part
            present = workers.tend()
        note = f"{format_count(sum(part.runs for part in found.values()))} GPU runs"
        progress(len(found), len(chunks), f"{note}, {format_count(present)} workers" if present else "no worker yet")
        if not batch:
            time.sleep(_TICK_S)
    return [found[number] for number in range(len(chunks))]


@contextlib.contextmanager
def _scheduler_at_hand() -> Iterator[None]:
    try:
        yield
    except (CancelledError, OSError) as error:
        raise AlmanacError(
            f"lost the connection to the Dask scheduler: {error or type(error).__name__}",
            "check that it runs and is reachable, then run this again; the store is intact",
        ) from error


def _said(error: BaseException, files: Files) -> BaseException:
    """A task's error as it is, or in words if it is Dask's or the worker's own."""
    named = f"{files.paths[0]}" + (f" and {len(files.paths) - 1} more" if len(files.paths) > 1 else "")
    if isinstance(error, KilledWorker):
        return AlmanacError(
            f"{error.allowed_failures + 1} workers died while they computed {named}",
            "they probably ran out of memory: raise dask.memory_gib, or read the workers' output",
        )
    if isinstance(error, duckdb.OutOfMemoryException):
        return AlmanacError(f"{named}: a worker ran out of memory: {error}", "raise dask.memory_gib")
    return error


@functools.cache
def software() -> tuple[tuple[str, str], ...]:
    """Versions that a result depends on."""
    return (("almanac", __version__), *((name, metadata.version(name)) for name in _DECISIVE))


def _chunk_partials(files: Files, allocations: pa.Table, call: _Call) -> Partials:
    """Runs in a worker, on a DuckDB connection of its own."""
    _check_software(call.software)
    _check_files(files.paths)
    worker = get_worker()
    with connect([Path(worker.local_directory)], memory_limit_mib=_memory_limit_mib(worker), threads=1) as db:
        return compute_partials(db, files, allocations, call.options, call.counted_ms)


def _check_software(expected: Sequence[tuple[str, str]]) -> None:
    for (name, wanted), (_, here) in zip(expected, software(), strict=True):
        if here != wanted:
            raise AlmanacError(
                f"the worker on {socket.gethostname()} has {name} {here}, this almanac {wanted}",
                "install the same requirements.lock there, or set dask.worker_python",
            )


def _check_files(paths: Sequence[Path]) -> None:
    for path in paths:
        if not os.access(path, os.R_OK):
            raise StoreError(
                f"{path}: the worker on {socket.gethostname()} cannot read it",
                "put the store on a file system that the workers' nodes mount at the same path",
            )


def _memory_limit_mib(worker: Worker) -> int | None:
    """DuckDB's share of a worker: half of a task's memory; arrays need the rest. None: the worker has no limit."""
    memory = worker.memory_manager.memory_limit
    return memory // (2 * worker.state.nthreads * 2**20) if memory else None
