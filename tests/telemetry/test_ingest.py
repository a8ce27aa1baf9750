"""Reading sources into the store from Python, without the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from almanac.config import Config
from almanac.config_file import parse_config
from almanac.errors import ConfigError, DamageWarning, SourceError
from almanac.records import Counts
from telemetry.ingest import Advance, SourceSpan, configured_sources, configured_spans, ingest_all
from telemetry.site import Site
from telemetry.sources.source import RowBatch
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

NOW_S, DAY_S = 1_780_000_000, 86_400


@dataclass(frozen=True)
class Jobs:
    """A source of one job, or of a fault after it."""

    name: str
    fault: str = ""

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        rows = [{"job_id": 1, "submit_s": since_s, "end_s": since_s + 5, "user": "ann", "gpu_count": 1}]
        yield RowBatch("jobs", pa.Table.from_pylist(rows, schema=JOBS), Counts(seen=1, kept=1), since_s + 5)
        if self.fault:
            raise SourceError(self.fault, "mend it")


def test_a_source_that_fails_ends_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.create(tmp_path / "store")
    spans = [SourceSpan(Jobs("a", "no answer"), 0, 10), SourceSpan(Jobs("b"), 20, 30), SourceSpan(Jobs("b"), 40, 50)]
    shown: list[tuple[Any, ...]] = []

    @contextmanager
    def show(name: str) -> Iterator[Advance]:
        yield lambda done, total, note: shown.append((name, done, total, note))

    results = ingest_all(store.of("c"), spans, show)
    assert {name: str(result.error or "") for name, result in results.items()} == {"a": "no answer", "b": "", "b 3": ""}
    assert results["a"].as_dict()["written"]["jobs"]["added"] == 1
    assert shown == [("a", 5, 10, "1 rows"), ("b", 5, 10, "1 rows"), ("b 3", 5, 10, "1 rows")]
    assert sorted(store.of("c").read("jobs", ["submit_s"])["submit_s"].to_pylist()) == [0, 20, 40]
    assert capsys.readouterr() == ("", "")


def test_a_damaged_file_keeps_its_rows_out_and_the_watermark_where_it_is(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store").of("c")
    ingest_all(store, [SourceSpan(Jobs("a"), 0, 10)])
    [path] = store.files("jobs")
    path.write_bytes(b"damaged")
    again = Store.open(tmp_path / "store").of("c")
    with pytest.warns(DamageWarning, match="left out"):
        results = ingest_all(again, [SourceSpan(Jobs("a"), 5, 10), SourceSpan(Jobs("b"), DAY_S, DAY_S + 10)])
    assert [result.left_out for result in results.values()] == [1, 0]
    assert (again.watermark("a"), again.watermark("b")) == (5, DAY_S + 5)
    assert again.read("jobs", ["submit_s"])["submit_s"].to_pylist() == [DAY_S]
    path.unlink()
    ingest_all(again, [SourceSpan(Jobs("a"), 5, 10)])
    assert again.watermark("a") == 10


def site(store: Store, settings: dict[str, Any]) -> Site:
    return Site.of(store.of("c"), parse_config(settings), NOW_S)


def test_a_source_goes_on_from_its_watermark(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    store.of("c").set_watermark("sacct", NOW_S - 60)
    settings = {"bindings": {"prolog_dir": "/p"}, "slurm": {"lookback_days": 3}}
    found = {each.source.name: each for each in configured_spans(site(store, settings))}
    assert (found["sacct"].since_s, found["sacct"].until_s) == (NOW_S - 60, NOW_S)
    assert found["prolog"].since_s == NOW_S - 3 * DAY_S
    named = list(configured_spans(site(store, settings), ("sacct",), since_s=7, until_s=9))
    assert [(each.since_s, each.until_s) for each in named] == [(7, 9)]


def test_a_watermark_in_the_future_is_told_to_the_caller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.create(tmp_path / "store")
    store.of("c").set_watermark("sacct", NOW_S + DAY_S)
    said: list[str] = []
    (found,) = configured_spans(site(store, {"slurm": {"lookback_days": 3}}), ("sacct",), warn=said.append)
    assert found.since_s == NOW_S - 3 * DAY_S
    assert said == ["the watermark of sacct was 1 d in the future: a clock was ahead; the last 3 days are read again"]
    assert capsys.readouterr() == ("", "")


def test_what_is_not_configured_is_not_read(tmp_path: Path) -> None:
    assert configured_sources(Config()) == ("squeue", "sacct")
    for name in ("prometheus", "prolog"):
        with pytest.raises(ConfigError, match="configured"):
            list(configured_spans(site(Store.create(tmp_path / name), {}), (name,)))
