"""`almanac site-report --study` on the generated site, from the store to the files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from telemetry.characterize.study import TABLES

CommandLine = Any


@pytest.fixture(scope="module")
def told(site: CommandLine) -> dict[str, Any]:
    found: dict[str, Any] = site.json("site-report", "--study", "--json")
    return found


def test_every_table_has_rows_on_a_site_with_every_counter(told: dict[str, Any]) -> None:
    assert set(told["tables"]) == {*(table.name for table in TABLES), "headline"}
    for name, table in told["tables"].items():
        assert table["rows"], name
        assert table["why_empty"] is None
        assert table["jobs"] + sum(table["left_out"].values()) == told["jobs"]


def test_the_generated_site_is_near_the_published_figures_it_is_made_after(told: dict[str, Any]) -> None:
    found = {row["finding"]: row for row in told["tables"]["headline"]["rows"]}
    for words, within in (
        ("jobs memory-bound by FP64 intensity", 0.08),
        ("jobs that use only FP64", 0.1),
        ("4-GPU jobs that never used three GPUs", 0.08),
        ("jobs of 3 or 4 GPUs", 0.1),
    ):
        assert found[words]["site_value"] == pytest.approx(found[words]["published_value"], abs=within), words


def test_tables_agree_with_the_list_of_jobs(site: CommandLine, told: dict[str, Any]) -> None:
    jobs = [row for row in site.json("jobs", "-a", "-n", "0", "--json") if row["verdict"] == "ok"]
    sizes = told["tables"]["fig01_job_size"]["rows"]
    assert {row["gpus_from"]: row["jobs"] for row in sizes}[3] == sum(3 <= row["gpu_count"] < 5 for row in jobs)
    shares = told["tables"]["fig06_spatial_shares"]["rows"]
    high = [row for row in jobs if row["mean_gpu_util_pct"] >= 70 and row["spatial_imbalance"] is not None]
    assert shares[-1]["jobs"] == len(high)
    assert shares[-1]["share_below_30pct"] == pytest.approx(
        sum(row["spatial_imbalance"] < 0.3 for row in high) / len(high)
    )
    by_class = {
        (row["class_by"], row["class"]): row["jobs"] for row in told["tables"]["fig09_temporal_by_class"]["rows"]
    }
    left_out = told["tables"]["fig09_temporal_by_class"]["left_out"]
    faulty = sum(number for why, number in left_out.items() if why.startswith("profiling"))
    assert by_class["main pipe", "memory"] == pytest.approx(
        sum(row["job_class"] == "memory" for row in jobs), abs=faulty
    )


def test_files_and_summary(site: CommandLine, told: dict[str, Any], tmp_path: Path) -> None:
    said = site("site-report", "--study", "--csv", str(tmp_path / "tables"))
    assert "published" in said
    assert "with usable data" in said.splitlines()[0]
    files = sorted(path.name for path in (tmp_path / "tables").iterdir())
    assert len(files) == 2 * (len(TABLES) + 2)
    assert f"{len(files)} files written to" in said
    for name, table in told["tables"].items():
        stored = pq.read_table(tmp_path / "tables" / f"{name}.parquet")
        assert stored.num_rows == len(table["rows"])
        with (tmp_path / "tables" / f"{name}.csv").open(newline="") as lines:
            read = list(csv.reader(lines))
        assert read[0] == stored.column_names
        assert len(read) == stored.num_rows + 1


def test_a_span_without_jobs_is_no_error(site: CommandLine, tmp_path: Path) -> None:
    said = site("site-report", "--study", "-S", "2001-01-01", "-E", "2001-02-01", "--csv", str(tmp_path))
    assert said.startswith("no GPU jobs")
    assert pq.read_table(tmp_path / "fig05_energy.parquet").num_rows == 0


def test_a_folder_that_cannot_be_made_ends_in_words(site: CommandLine) -> None:
    options = ("--config", str(site.folder / "almanac.toml"), "--store", str(site.folder / "store"))
    done = site.raw(*options, "site-report", "--study", "--csv", "/proc/self/nothing")
    assert done.returncode == 4
    assert "cannot be written" in done.stderr
