"""The summary on Dask: equal to the local one, whatever happens to the workers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster, WorkerPlugin

import telemetry.metrics.chunks
import telemetry.metrics.dask_engine
from almanac.config import Config, Filters
from almanac.errors import AlmanacError, DamageWarning, StoreError
from telemetry.attribution.allocations import JobRun
from telemetry.counters import COUNTER_COLUMNS
from telemetry.metrics.chunks import Mapper, map_partials
from telemetry.metrics.dask_engine import DaskMapper
from telemetry.metrics.engine import compute, prepare
from telemetry.metrics.finish import Results
from telemetry.metrics.summary import summarize
from telemetry.metrics.workers import QUIET, Workers, quiet_logs
from telemetry.store.schema import TELEMETRY
from telemetry.store.store import Store

# The workers cannot import this module: what it sends them goes by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPEN = Config(filters=Filters(min_elapsed_s=0, min_gpu_util_pct=-1.0, min_coverage=0.0))
START_S = 1_741_046_400 - 3600
HOURS = 4
JOBS = [
    JobRun(1, START_S, START_S, START_S + HOURS * 3600, 4, ("n1", "n2")),
    JobRun(2, START_S, START_S + 1800, START_S + 9000, 2, ("n3",)),
]


@contextlib.contextmanager
def started(number: int) -> Iterator[Workers]:
    """Worker processes on this machine."""
    limits = {"n_workers": number, "threads_per_worker": 1, "memory_limit": 2**29, "dashboard_address": "127.0.0.1:0"}
    with quiet_logs(), LocalCluster(**limits, silence_logs=QUIET, security=True) as cluster, Client(cluster) as client:
        yield Workers(client)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with started(2) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Four hours around midnight of three nodes with two GPUs; each hour is a chunk."""
    monkeypatch.setattr(telemetry.metrics.chunks, "ROWS_PER_CHUNK", 1)
    made = Store.create(tmp_path / "store", threads=1)
    made.of("c").write("telemetry", _samples())
    made.of("c").write("jobs", _jobs())
    return made


def _samples() -> pa.Table:
    rng = np.random.default_rng(7)
    number = HOURS * 360
    keys = [(f"n{node}", gpu) for node in (1, 2, 3) for gpu in (0, 1)]
    times = START_S * 1000 + 10_000 * np.arange(number)
    frame = pd.concat([pd.DataFrame({"host": host, "gpu": gpu, "mig": "", "time_ms": times}) for host, gpu in keys])
    frame = frame.assign(model="NVIDIA A100-SXM4-40GB", uuid=None, job_label=None, mig_profile=None)
    for name in COUNTER_COLUMNS:
        frame[name] = rng.beta(0.3, 1, len(frame))
    frame["energy_mj"] = np.tile(np.cumsum(np.round(1e6 * rng.random(number))), len(keys))
    return pa.table([pa.Array.from_pandas(frame[field.name], type=field.type) for field in TELEMETRY], schema=TELEMETRY)


def _jobs() -> pa.Table:
    names = ("job_id", "submit_s", "start_s", "end_s", "gpu_count")
    columns: dict[str, list[Any]] = {name: [getattr(job, name) for job in JOBS] for name in names}
    return pa.table({**columns, "node_list": ["n[1-2]", "n3"]})


def computed(store: Store, mapper: Mapper = map_partials) -> Results:
    with store.connect() as db:
        return compute(db, prepare(db, store.of("c").files("telemetry"), JOBS, [], OPEN), OPEN, mapper)[0]


def on(workers: Workers) -> DaskMapper:
    return DaskMapper(lambda: workers)


def test_results_are_bit_equal_to_those_of_one_process(
    workers: Workers, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.root.parent)  # the workers are elsewhere: paths must reach them whole
    relative = Store.open(Path("store"), threads=1)
    here, there = computed(store), computed(relative, on(workers))
    assert here.jobs.num_rows == 2
    assert there.jobs.equals(here.jobs)
    assert there.gpus.equals(here.gpus)


def test_every_chunk_is_reported_as_it_is_done(workers: Workers, store: Store) -> None:
    said: list[tuple[int, int, str]] = []
    with store.connect() as db:
        prepared = prepare(db, store.of("c").files("telemetry"), JOBS, [], OPEN)
        compute(db, prepared, OPEN, on(workers), lambda *seen: said.append(seen))
    assert said[0] == (0, HOURS, "waiting for workers")
    assert said[-1][:2] == (HOURS, HOURS)
    assert "GPU runs, 2 workers" in said[-1][2]
    assert [done for done, _, _ in said] == sorted(done for done, _, _ in said)


def test_nothing_to_compute_opens_no_workers(store: Store) -> None:
    def refuse() -> Workers:
        raise AssertionError("opened")

    with store.connect() as db:
        results, _ = compute(db, prepare(db, [], [], [], OPEN), OPEN, DaskMapper(refuse))
    assert results.jobs.num_rows == 0


class Deadly(WorkerPlugin):
    """The worker's process ends in the middle of a chunk: the first `deaths` chunks in all that are begun."""

    name = "deadly"

    def __init__(self, folder: Path, deaths: int) -> None:
        self._folder = folder
        self._deaths = deaths

    def setup(self, worker: Any) -> None:
        engine = telemetry.metrics.dask_engine
        self._real = real = engine.compute_partials

        def dying(*arguments: Any) -> Any:
            found = real(*arguments)
            for number in range(self._deaths):
                try:
                    (self._folder / f"death-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os._exit(1)
            return found

        engine.compute_partials = dying

    def teardown(self, worker: Any) -> None:
        telemetry.metrics.dask_engine.compute_partials = self._real


@pytest.fixture
def deadly(workers: Workers, tmp_path: Path) -> Iterator[Any]:
    """Call it with a number of deaths; they have happened when the returned folder holds as many files."""

    def register(deaths: int) -> Path:
        workers.client.register_plugin(Deadly(tmp_path, deaths))
        return tmp_path

    yield register
    workers.client.unregister_worker_plugin("deadly")


def test_workers_killed_in_the_middle_change_nothing(workers: Workers, store: Store, deadly: Any) -> None:
    folder = deadly(2)
    there = computed(store, on(workers))
    assert len(list(folder.glob("death-*"))) == 2
    here = computed(store)
    assert there.jobs.equals(here.jobs)
    assert there.gpus.equals(here.gpus)


def test_a_chunk_that_kills_every_worker_is_named(
    workers: Workers, store: Store, deadly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.client.cluster.scheduler, "allowed_failures", 1)
    deadly(100)
    with pytest.raises(
        AlmanacError, match=r"2 workers died while they computed .*date=2025-03-0\d/\d\d00\.parquet"
    ) as e:
        computed(store, on(workers))
    assert "dask.memory_gib" in e.value.hint


def spoil(path: Path, column: str) -> None:
    """Overwrite the pages of one column; the footer still reads."""
    place = pq.read_schema(path).names.index(column)
    found = pq.read_metadata(path).row_group(0).column(place)
    start = found.dictionary_page_offset or found.data_page_offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * found.total_compressed_size)


def test_a_file_that_cannot_be_read_is_said_as_it_is_locally(workers: Workers, store: Store) -> None:
    spoil(store.of("c").files("telemetry")[2], "gpu_util_pct")
    said = []
    for mapper in (map_partials, on(workers)):
        again = Store.open(store.root).of("c")
        with pytest.warns(DamageWarning, match="is left out: damaged: its checksum differs") as caught:
            counts = summarize(again, OPEN, START_S, START_S + HOURS * 3600, mapper=mapper)
        said.append(([str(one.message) for one in caught], counts.damaged_jobs))
    assert said[0] == said[1]
    assert said[0][1] > 0


def test_a_worker_that_does_not_see_the_store_is_an_error(workers: Workers, store: Store) -> None:
    class Hiding(DaskMapper):
        def __call__(self, *arguments: Any) -> Any:
            store.of("c").files("telemetry")[2].rename(store.root / "hidden")
            return super().__call__(*arguments)

    with pytest.raises(StoreError, match=r"the worker on .* cannot read it") as caught:
        computed(store, Hiding(lambda: workers))
    assert "mount at the same path" in caught.value.hint


def test_a_worker_of_another_version_is_an_error(
    workers: Workers, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = (("almanac", "99"), *telemetry.metrics.dask_engine.software()[1:])
    monkeypatch.setattr(telemetry.metrics.dask_engine, "software", lambda: ours)
    with pytest.raises(AlmanacError, match=r"has almanac \S+, this almanac 99"):
        computed(store, on(workers))


def test_a_worker_without_almanac_is_an_error_before_anything_is_computed(store: Store) -> None:
    name = "telemetry.metrics.dask_engine"

    def hide() -> None:
        sys.modules[name] = None  # type: ignore[assignment]

    # Workers of its own: a task that an earlier test left behind would end one that cannot import its function.
    with started(1) as fresh:
        fresh.client.run(hide)
        with pytest.raises(AlmanacError, match=r"tls://127\.0\.0\.1:\d+ cannot import almanac's modules"):
            computed(store, on(fresh))
