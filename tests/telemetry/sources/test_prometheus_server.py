"""Against a real Prometheus: the history that record.py writes, read by the real server's own rules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from almanac.config import Prometheus
from telemetry.sources.base import RowBatch
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_probe import probe

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("prometheus_binaries")]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


RECORD = load(Path(__file__).parents[1] / "fixtures" / "prometheus" / "record.py")
HOUR_S, SINCE_S, UNTIL_S = RECORD.HOUR_S, RECORD.SINCE_S, RECORD.UNTIL_S
LIMIT = "--query.max-samples=60"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("prometheus")
    RECORD.write_openmetrics(root / "history.om", RECORD.history())
    RECORD.LocalPrometheus(root / "server").load(root / "history.om")
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with RECORD.LocalPrometheus(root / "server") as server:
        yield server.url


def read(url: str, since_s: int = SINCE_S, until_s: int = UNTIL_S, **options: Any) -> list[RowBatch]:
    source = PrometheusSource(Prometheus(url=url, **options), clock=lambda: UNTIL_S + 3600, sleep=lambda _: None)
    return list(source.read(since_s, until_s))


def rows(batches: list[RowBatch]) -> list[dict[str, Any]]:
    found = [row for batch in batches for row in batch.rows.to_pylist()]
    return sorted(found, key=lambda row: (row["host"], row["gpu"], row["mig"], row["time_ms"]))


def test_any_cut_gives_the_same_rows_once(url: str) -> None:
    whole = rows(read(url))
    assert len(whole) == 18 * 5
    for minutes in (1, 2, 45, 120):
        assert rows(read(url, chunk_minutes=minutes)) == whole
    pieces = [
        batch for start_s in range(SINCE_S, UNTIL_S, 7) for batch in read(url, start_s, min(start_s + 7, UNTIL_S))
    ]
    assert rows(pieces) == whole


def test_a_bound_on_memory_gives_the_same_rows(url: str) -> None:
    assert rows(read(url, max_samples=1000)) == rows(read(url))


def test_a_server_that_refuses_many_samples_gives_the_same_rows(root: Path, url: str, tmp_path: Path) -> None:
    RECORD.LocalPrometheus(tmp_path).load(root / "history.om")
    with RECORD.LocalPrometheus(tmp_path, LIMIT) as strict:
        batches = read(strict.url)
    assert len(batches) > 2
    assert rows(batches) == rows(read(url))


def test_the_selector_of_a_site(url: str) -> None:
    assert {row["host"] for row in rows(read(url, selector='hostname="n2"'))} == {"n2"}


def test_probe(url: str) -> None:
    status = probe(Prometheus(url=url), clock=lambda: UNTIL_S)
    assert status.version.startswith(("2.", "3."))
    assert (status.hosts, status.gpus, status.instances, status.scrape_interval_s) == (2, 4, 1, 10.0)
    assert status.unusable == {"no host label": 1}
    held = {counter.counter.column: (counter.present, counter.expected) for counter in status.counters}
    assert held.pop("hbm_used_mib") == (5, 5)
    assert held.pop("hbm_total_mib") == (2, 5)
    assert held.pop("gpu_util_pct") == (1, 4)
    assert {present for present, _ in held.values()} == {0}


def test_a_wrong_selector_is_said(url: str) -> None:
    with pytest.raises(Exception, match="parse error") as caught:
        read(url, selector="job=dcgm")
    assert "prometheus.selector" in caught.value.hint  # type: ignore[attr-defined]
