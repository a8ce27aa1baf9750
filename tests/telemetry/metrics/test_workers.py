"""Where workers come from: what is waited for, for how long, and what is said when none comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

from almanac.config import Dask
from almanac.errors import AlmanacError, ConfigError
from telemetry.metrics.workers import Local, Present, local_workers, scheduler_workers


class Workerless:
    """A client that sees the numbers of workers it was made with, one after another."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = iter(numbers)

    def nthreads(self) -> dict[str, int]:
        return {f"tcp://worker-{number}": 1 for number in range(next(self._numbers))}


def test_the_wait_for_workers_ends_and_starts_anew_when_one_was_there() -> None:
    times = iter([0.0, 599.0, 1198.0, 1797.0, 1799.0])
    present = Present(Workerless(0, 1, 0, 0), "tcp://h:1", clock=lambda: next(times))  # type: ignore[arg-type]
    assert [present.tend() for _ in range(3)] == [0, 1, 0]
    with pytest.raises(AlmanacError, match=r"no Dask worker came within 600 s at the scheduler tcp://h:1") as caught:
        present.tend()
    assert caught.value.hint == "start workers with `dask worker tcp://h:1`"


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    with local_workers(Dask(workers=1, memory_gib=0.5)) as running:
        running.want(3)
        yield running


def test_no_more_processes_than_configured_and_their_memory_is_bounded(local: Local) -> None:
    local.client.wait_for_workers(1, timeout=60)
    [found] = local.client.scheduler_info()["workers"].values()
    assert found["nthreads"] == 1
    assert found["memory_limit"] == 2**29


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.metrics.workers.WAIT_S", 1)


@pytest.mark.usefixtures("soon")
def test_a_stranger_cannot_talk_to_local_workers(local: Local) -> None:
    address = local.client.scheduler.address
    assert address.startswith("tls://127.0.0.1:")
    with pytest.raises(AlmanacError, match="no Dask scheduler answers at tcp://127"):
        with scheduler_workers(address.replace("tls", "tcp"), Dask()):
            raise AssertionError("let in")


def test_a_scheduler_that_is_already_there_is_used_with_the_configured_keys(local: Local, tmp_path: Path) -> None:
    security = local.client.security
    files = {"tls_ca_file": "tls_ca_file", "tls_cert_file": "tls_client_cert", "tls_key_file": "tls_client_key"}
    for key, attribute in files.items():
        (tmp_path / key).write_text(getattr(security, attribute))
    section = Dask(**{key: str(tmp_path / key) for key in files})
    with scheduler_workers(local.client.scheduler.address, section) as present:
        assert isinstance(present.client, Client)
        assert present.client.submit(sum, [1, 2]).result(timeout=60) == 3


def test_a_tls_scheduler_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs certificates, but dask.tls_ca_file is ''"):
        with scheduler_workers("tls://127.0.0.1:1", Dask()):
            raise AssertionError("let in")


@pytest.mark.usefixtures("soon")
def test_an_address_where_no_scheduler_is_is_said() -> None:
    with pytest.raises(AlmanacError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1:"):
        with scheduler_workers("tcp://127.0.0.1:1", Dask()):
            raise AssertionError("let in")


@pytest.mark.parametrize("address", ["nonsense", "ftp://x:1", "tcp://127.0.0.1", "tls://h:1 x"])
def test_what_is_no_address_of_a_scheduler_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"address is '{address}'"):
        with scheduler_workers(address, Dask()):
            raise AssertionError("let in")
