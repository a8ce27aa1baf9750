"""The summary on Dask: its workers, and results equal to the local ones, whatever happens to them."""

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

import telemetry.metrics.dask_engine
import telemetry.metrics.partials
from almanac.config import Config, Dask, Filters
from almanac.errors import AlmanacError, ConfigError, DamageWarning, StoreError
from telemetry.attribution.allocations import JobRun
from telemetry.counters import COUNTER_COLUMNS
from telemetry.metrics.dask_engine import QUIET, DaskMapper, Workers, quiet_logs, scheduler_workers
from telemetry.metrics.engine import Results, compute, prepare
from telemetry.metrics.partials import Mapper, map_partials
from telemetry.metrics.summary import summarize
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
    monkeypatch.setattr(telemetry.metrics.partials, "ROWS_PER_CHUNK", 1)
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
        return compute(db, prepare(db, store.of("c").files("telemetry"), JOBS, [], OPEN), OPEN, mapper)


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


def test_nothing_to_compute_opens_no_workers(store: Store) -> None:
    def refuse() -> Workers:
        raise AssertionError("opened")

    with store.connect() as db:
        results = compute(db, prepare(db, [], [], [], OPEN), OPEN, DaskMapper(refuse))
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
def mortals() -> Iterator[Workers]:
    """Workers of one test: of those that died, not all always come back."""
    with started(2) as running:
        yield running


@pytest.fixture
def deadly(mortals: Workers, tmp_path: Path) -> Any:
    """Call it with a number of deaths; they have happened when the returned folder holds as many files."""

    def register(deaths: int) -> Path:
        mortals.client.register_plugin(Deadly(tmp_path, deaths))
        return tmp_path

    return register


def test_workers_killed_in_the_middle_change_nothing(mortals: Workers, store: Store, deadly: Any) -> None:
    folder = deadly(2)
    there = computed(store, on(mortals))
    assert len(list(folder.glob("death-*"))) == 2
    here = computed(store)
    assert there.jobs.equals(here.jobs)
    assert there.gpus.equals(here.gpus)


def test_a_chunk_that_kills_every_worker_is_named(
    mortals: Workers, store: Store, deadly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mortals.client.cluster.scheduler, "allowed_failures", 1)
    deadly(100)
    with pytest.raises(
        AlmanacError, match=r"2 workers died while they computed .*date=2025-03-0\d/\d\d00\.parquet"
    ) as e:
        computed(store, on(mortals))
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


class Workerless:
    """A client that sees the numbers of workers it was made with, one after another."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = iter(numbers)

    def nthreads(self) -> dict[str, int]:
        return {f"tcp://worker-{number}": 1 for number in range(next(self._numbers))}


def test_the_wait_for_workers_ends_and_starts_anew_when_one_was_there() -> None:
    times = iter([0.0, 599.0, 1198.0, 1797.0, 1799.0])
    present = Workers(Workerless(0, 1, 0, 0), "tcp://h:1", clock=lambda: next(times))  # type: ignore[arg-type]
    assert [present.tend() for _ in range(3)] == [0, 1, 0]
    with pytest.raises(AlmanacError, match=r"no Dask worker came within 600 s at the scheduler tcp://h:1") as caught:
        present.tend()
    assert caught.value.hint == "start workers with `dask worker tcp://h:1`"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0", security=True) as running:
        yield running


def test_a_scheduler_that_is_already_there_is_used_with_the_configured_keys(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    security = cluster.security
    files = {"tls_ca_file": "tls_ca_file", "tls_cert_file": "tls_client_cert", "tls_key_file": "tls_client_key"}
    for key, attribute in files.items():
        (tmp_path / key).write_text(getattr(security, attribute))
    section = Dask(**{key: str(tmp_path / key) for key in files})
    with scheduler_workers(cluster.scheduler_address, section) as present:
        assert present.client.submit(sum, [1, 2]).result(timeout=300) == 3


def test_a_tls_scheduler_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs certificates, but dask.tls_ca_file is ''"):
        with scheduler_workers("tls://127.0.0.1:1", Dask()):
            raise AssertionError("let in")


def test_an_address_where_no_scheduler_is_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.metrics.dask_engine._ANSWER_S", 1)
    with pytest.raises(AlmanacError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1:"):
        with scheduler_workers("tcp://127.0.0.1:1", Dask()):
            raise AssertionError("let in")


@pytest.mark.parametrize("address", ["nonsense", "ftp://x:1", "tcp://127.0.0.1", "tls://h:1 x"])
def test_what_is_no_address_of_a_scheduler_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"address is '{address}'"):
        with scheduler_workers(address, Dask()):
            raise AssertionError("let in")
