"""Output of `almanac ingest` for a telemetry file that it need not read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from almanac.errors import SourceError
from almanac.records import Counts
from cli.ingest import run, show
from telemetry.ingest import IngestResult, SourceSpan
from telemetry.sources.files import FileSource
from telemetry.store.store import Store


@pytest.mark.parametrize("as_json", [False, True])
def test_a_skipped_file_has_the_counts_of_its_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    path, store = tmp_path / "t.csv", Store.create(tmp_path / "store").of("c")
    path.write_text("host,gpu,time_ms,power_w,temp_c\nn1,0,1000,5,40\nn1,1,1000,9999,41\n")
    for _ in range(2):
        results = run(store, [SourceSpan(FileSource(path, "telemetry"), 0, 2**40)])
    show(results, None, as_json)
    said = capsys.readouterr().out
    if as_json:
        outcome = json.loads(said)["sources"]["file:t.csv"]
        assert outcome["skipped"] is True
        assert (outcome["seen"], outcome["kept"], outcome["dropped"]) == (4, 3, {"unit mismatch: power_w": 1})
        assert outcome["written"] == {"telemetry": {"added": 0, "unchanged": 2, "replaced": 0, "left_out": 0}}
    else:
        assert said.splitlines()[:2] == [
            "file:t.csv: unchanged, 3 values were imported before",
            "  telemetry: 0 added, 0 changed, 2 known, in 0 s",
        ]


@pytest.mark.parametrize(
    ("source", "length_s", "is_worth_a_word"),
    [("prometheus", 600, True), ("prometheus", 599, False), ("sacct", 86_400, True), ("prolog", 86_399, False),
     ("squeue", 10**7, False), ("file:t.csv", 2**41, True)],
)  # fmt: skip
@pytest.mark.parametrize(
    "change", [{}, {"counts": Counts(seen=1, kept=1)}, {"error": SourceError("x")}, {"is_skipped": True}]
)
def test_a_source_that_gave_nothing_is_warned_of(
    source: str, length_s: int, is_worth_a_word: bool, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = IngestResult(source, 1000, 1000 + length_s, **change)
    show({source: result}, None, False)
    said = capsys.readouterr().err
    assert ("warning: " in said) == (is_worth_a_word and not change) == bool(result.as_dict()["warning"])


def test_a_file_of_which_nothing_can_be_kept_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, store = tmp_path / "t.csv", Store.create(tmp_path / "store").of("c")
    path.write_text("timestamp,host,gpu,metric,value\n1,n1,0,DCGM_FI_DEV_GPU_UTIX,95\n")
    show(run(store, [SourceSpan(FileSource(path, "telemetry"), 0, 2**40)]), None, False)
    said = capsys.readouterr()
    assert "1 metric not known: DCGM_FI_DEV_GPU_UTIX" in said.out
    assert "warning: file:t.csv: 0 of 1 records could be kept" in said.err
