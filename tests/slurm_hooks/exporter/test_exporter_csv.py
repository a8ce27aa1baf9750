"""The CSVs for dcgm-exporter: what the code gives, in the form that dcgm-exporter accepts."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from telemetry.counters import COUNTERS
from telemetry.sources.exporters import FILES, csv_line, csv_text, presets

DCGM = presets()["dcgm"]
FOLDER = Path(__file__).parents[3] / "slurm_hooks" / "exporter"


def records(name: str) -> list[list[str]]:
    """Records as dcgm-exporter reads them: comments and empty lines left out, spaces trimmed around fields."""
    lines = (FOLDER / name).read_text(encoding="ascii").splitlines()
    kept = [line for line in lines if line and not line.startswith("#")]
    return [[field.strip(" ") for field in record] for record in csv.reader(kept, strict=True)]


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_what_the_code_gives(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == csv_text(is_basic=FILES[name]), "run `make docs`"


@pytest.mark.parametrize("name", FILES)
def test_every_record_is_one_that_dcgm_exporter_accepts(name: str) -> None:
    for field, kind, about in records(name):
        assert re.fullmatch(r"DCGM_FI_(DEV|PROF)_[A-Z0-9_]+", field)
        assert kind in ("gauge", "counter")
        assert about and '"' not in about


def test_the_full_file_has_the_counters_that_are_read_and_the_defaults_of_the_exporter() -> None:
    fields = {field for field, _, _ in records("almanac-counters.csv")}
    kept = {line.partition(",")[0] for line in DCGM.kept}
    assert fields == {DCGM.main(counter.column).name for counter in COUNTERS} | kept
    assert {"DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_MEM_CLOCK"} <= fields
    assert len(records("almanac-counters.csv")) == len(fields) and not DCGM.unknown(fields)


def test_the_basic_file_has_no_profiling_field() -> None:
    fields = [field for field, _, _ in records("almanac-counters-basic.csv")]
    assert fields == [name for name, _, _ in records("almanac-counters.csv") if name.startswith("DCGM_FI_DEV_")]
    assert {"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"} <= set(fields)


def test_types_and_help_are_those_of_the_field() -> None:
    lines = {counter.column: csv_line(DCGM.main(counter.column)) for counter in COUNTERS}
    assert lines["energy_mj"].startswith("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION, counter, ")
    assert lines["hbm_total_mib"] == "DCGM_FI_DEV_FB_FREE, gauge, Device memory not in use (MiB)."
    assert sum(", counter, " in line for line in lines.values()) == 1
