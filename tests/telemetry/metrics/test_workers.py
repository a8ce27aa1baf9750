"""Where workers come from: what is waited for, for how long, and what is said when none comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import LocalCluster

from almanac.config import Dask
from almanac.errors import AlmanacError, ConfigError
from telemetry.metrics.workers import Workers, scheduler_workers


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
        assert present.client.submit(sum, [1, 2]).result(timeout=60) == 3


def test_a_tls_scheduler_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs certificates, but dask.tls_ca_file is ''"):
        with scheduler_workers("tls://127.0.0.1:1", Dask()):
            raise AssertionError("let in")


def test_an_address_where_no_scheduler_is_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.metrics.workers._ANSWER_S", 1)
    with pytest.raises(AlmanacError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1:"):
        with scheduler_workers("tcp://127.0.0.1:1", Dask()):
            raise AssertionError("let in")


@pytest.mark.parametrize("address", ["nonsense", "ftp://x:1", "tcp://127.0.0.1", "tls://h:1 x"])
def test_what_is_no_address_of_a_scheduler_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"address is '{address}'"):
        with scheduler_workers(address, Dask()):
            raise AssertionError("let in")
