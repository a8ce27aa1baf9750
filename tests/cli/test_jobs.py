"""`almanac jobs`: filters, sorting, columns and ways to print, on the generated site."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

CommandLine = Any
ALL = ("jobs", "-a", "-n", "0")


@pytest.fixture(scope="module")
def rows(site: CommandLine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = site.json(*ALL, "--json")
    return found


def test_rows_hold_imbalance_class_and_energy(rows: list[dict[str, Any]]) -> None:
    known = [row for row in rows if row["verdict"] == "ok"]
    assert all(0 <= row["spatial_imbalance"] <= 1 for row in known if row["spatial_imbalance"] is not None)
    assert all(row["energy_j"] > 0 for row in known)
    assert {row["job_class"] for row in known} >= {"memory", "compute"}
    assert max(row["idle_gpu_count"] for row in known) == 3


def test_a_preallocated_job_shows_no_peak_share(rows: list[dict[str, Any]]) -> None:
    kinds = {row["hbm_evidence"]: row["hbm_peak_frac"] is None for row in rows if row["verdict"] == "ok"}
    assert kinds == {"preallocated": True, "telemetry": False}
    some = next(row for row in rows if row["hbm_evidence"] == "telemetry")
    assert some["hbm_peak_frac"] == pytest.approx(some["hbm_peak_mib"] / some["hbm_capacity_mib"])


@pytest.mark.parametrize(
    ("argv", "column", "wanted"),
    [
        (("--account", "{account}"), "account", "{account}"),
        (("--where", "tier=hbm80g"), "tier", "hbm80g"),
        (("--state", "failed"), "state", "FAILED"),
        (("--where", "verdict=short"), "verdict", "short"),
        (("--where", "job_class=compute"), "job_class", "compute"),
        (("--partition", "gpu"), "partition", "gpu"),
    ],
)
def test_filters_by_word(
    site: CommandLine, rows: list[dict[str, Any]], argv: tuple[str, ...], column: str, wanted: str
) -> None:
    account = rows[0]["account"]
    wanted = wanted.format(account=account)
    found = site.json(*ALL, "--json", *(text.format(account=account) for text in argv))
    assert found == [row for row in rows if row[column] == wanted]
    assert found


def test_several_filters_and_a_sort(site: CommandLine, rows: list[dict[str, Any]]) -> None:
    argv = ("--min", "spatial_imbalance=0.5", "--max", "mean_gpu_util_pct=30", "--sort", "-spatial_imbalance")
    found = site.json(*ALL, "--json", *argv)
    expected = [r for r in rows if (r["spatial_imbalance"] or 0) >= 0.5 and r["mean_gpu_util_pct"] <= 30]
    assert sorted(row["job_id"] for row in found) == sorted(row["job_id"] for row in expected)
    values = [row["spatial_imbalance"] for row in found]
    assert values == sorted(values, reverse=True)
    assert len(values) > 5
    assert site.json("jobs", "-a", "-n", "3", "--json", *argv) == found[:3]


def test_jobs_whose_metric_is_not_known_are_said_to_be_left_out(site: CommandLine, rows: list[dict[str, Any]]) -> None:
    unknown = sum(row["job_class"] is None for row in rows)
    assert unknown > 0
    note = f"{unknown} jobs that may match are filtered out, because of unknown values: job_class ({unknown})"
    options = ("--config", str(site.folder / "almanac.toml"), "--store", str(site.folder / "store"))
    as_json = site.raw(*options, *ALL, "--json", "--where", "job_class=memory")
    assert note in as_json.stderr
    assert all(row["job_class"] == "memory" for row in json.loads(as_json.stdout))
    assert note in site(*ALL, "--where", "job_class=memory").splitlines()[-1]


def test_columns_can_be_chosen_in_every_way_to_print(site: CommandLine, rows: list[dict[str, Any]]) -> None:
    chosen = ("-o", "job_id,idle_gpus", "-o", "intensity_fp64")
    found = site.json(*ALL, "--json", *chosen)
    assert [list(row) for row in found[:1]] == [["job_id", "idle_gpus", "intensity_fp64"]]
    some = next(row for row in found if row["idle_gpus"])
    assert some["idle_gpus"][0].count(":") == 1
    lines = list(csv.DictReader(io.StringIO(site(*ALL, "--csv", *chosen))))
    assert [line["job_id"] for line in lines] == [str(row["job_id"]) for row in rows]
    of_job = {line["job_id"]: line["idle_gpus"] for line in lines}
    assert of_job[str(some["job_id"])] == ";".join(some["idle_gpus"])
    assert site(*ALL, "-P", *chosen).splitlines()[0] == "job_id|idle_gpus|intensity_fp64"
    table = site("jobs", "-a", "-n", "2", *chosen).splitlines()
    assert table[0].split() == ["job_id", "idle_gpus", "intensity_fp64"]
    assert len(table) == 4


def test_the_parsable_columns_of_before_keep_their_places(site: CommandLine) -> None:
    before = ("job_id|submit_s|start_s|end_s|user|account|partition|name|name_key|state|node_count|gpu_count|elapsed_s|"
              "tier|hbm_peak_mib|hbm_capacity_mib|hbm_evidence|mean_gpu_util_pct|coverage_frac|verdict|")  # fmt: skip
    assert site("jobs", "-a", "-P").startswith(before)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("-o", "job_id,nonsense"), "there is no column 'nonsense'"),
        (("-o", "spatial_imbalanse"), "did you mean spatial_imbalance"),
        (("-o", "nonsense"), "`almanac jobs --helpformat` lists the columns"),
        (("--sort", "-nonsense"), "there is no column 'nonsense'"),
        (("--sort", "idle_gpus"), "there is no column 'idle_gpus'"),
        (("--min", "user=1"), "there is no column of numbers 'user'"),
        (("--min", "energy_j=much"), "expected COLUMN=NUMBER"),
        (("--account", "nobody"), "choose one of: m"),
        (("--where", "job_class=both"), "no job has 'both'"),
        (("--json", "--csv"), "choose one"),
        (("-j", "9" * 30), "not a job id"),
        (("-j", "9" * 5000), "not a job id"),
        (("-j", "1_[2"), "not a job id"),
        (("-S", "@999999999999"), "not a time"),
        (("-S", "2026-11-05", "-E", "2026-11-01"), "-E 2026-11-01 00:00 is not after -S 2026-11-05 00:00"),
        (("-n", "-3"), "-3 is not in the range x>=0"),
        (("--state", "fail"), "did you mean FAILED"),
        (("--state", "canceled"), "did you mean CANCELLED"),
        (("--where", "tear=hbm80g"), "there is no column of texts 'tear'; did you mean tier"),
        (("--where", "tier="), "expected COLUMN=TEXT"),
        (("--where", "gpu_count=4"), "there is no column of texts 'gpu_count'"),
        (("--wide", "-o", "job"), "exclude each other"),
    ],
)
def test_what_does_not_exist_is_named_beside_what_does(site: CommandLine, argv: tuple[str, ...], said: str) -> None:
    options = ("--config", str(site.folder / "almanac.toml"), "--store", str(site.folder / "store"))
    done = site.raw(*options, "jobs", "-a", *argv)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_state_and_a_tier_that_no_job_has_are_no_errors(site: CommandLine) -> None:
    assert site.json(*ALL, "--json", "--state", "DEADLINE") == []
    assert "none of" in site(*ALL, "--state", "DEADLINE")


def test_texts_of_one_column_add_up_however_they_are_given(site: CommandLine) -> None:
    together = site.json(*ALL, "--json", "--where", "tier=hbm40g,hbm80g")
    assert together
    assert site.json(*ALL, "--json", "--where", "tier=hbm40g", "--where", "tier=hbm80g") == together


def test_hostile_names_are_inert_in_a_table_and_in_csv(site: CommandLine, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.csv"
    with jobs.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["job_id", "user", "account", "submit_s", "start_s", "end_s", "gpu_count", "state", "name"])
        for number, name in enumerate(['=cmd|" /C calc"!A0', "\x1b[31mred\nline", "@SUM(1+1)*2", "-1+1"], 1):
            writer.writerow([number, "ann", "+a", 1750000000, 1750000000, 1750001000, 1, "COMPLETED", name])
    store = ["--config", str(site.folder / "almanac.toml"), "--store", str(tmp_path / "s"), "-M", "c"]
    assert site.raw(*store, "ingest", "--jobs", str(jobs)).returncode == 0
    shown = ["jobs", "-a", "-S", "2025-01-01"]
    lines = list(csv.DictReader(io.StringIO(site.raw(*store, *shown, "--csv").stdout)))
    assert len(lines) == 4
    assert all(cell[:1] not in ("=", "+", "-", "@", "\t", "\r") for line in lines for cell in line.values())
    names = {line["name"] for line in lines}
    assert '\'=cmd|" /C calc"!A0' in names
    assert {line["account"] for line in lines} == {"'+a"}
    table = site.raw(*store, *shown, "-o", "job_id,name").stdout
    assert "\x1b" not in table
    assert len(table.splitlines()) == 5


def test_values_named_in_an_error_are_of_jobs_that_the_caller_may_see(site: CommandLine, rows: Any) -> None:
    """An error that lists accounts must not tell a user about the accounts of others."""
    options = ("--config", str(site.folder / "almanac.toml"), "--store", str(site.folder / "store"))
    user = rows[0]["user"]
    own = {row["account"] for row in rows if row["user"] == user}
    others = {row["account"] for row in rows} - own
    done = site.raw(*options, "jobs", "-u", user, "--account", "nobody")
    assert all(account in done.stderr for account in own)
    assert others
    assert not any(account in done.stderr for account in others)


def test_preallocated_memory_is_a_filter(site: CommandLine, rows: list[dict[str, Any]]) -> None:
    found = site.json(*ALL, "--json", "--where", "hbm_evidence=preallocated")
    assert found == [row for row in rows if row["hbm_evidence"] == "preallocated"]
    assert found


def test_short_states_stand_for_slurms_names(site: CommandLine, rows: list[dict[str, Any]]) -> None:
    found = site.json(*ALL, "--json", "--state", "f,ca")
    assert found == [row for row in rows if row["state"] in ("FAILED", "CANCELLED")]
    assert found


def test_the_default_table_fits_80_columns_in_a_pipe_and_the_wide_one_is_not_shortened(
    site: CommandLine, rows: list[dict[str, Any]]
) -> None:
    lines = site(*ALL, COLUMNS="80").splitlines()
    assert lines[0].split() == ["job", "user", "name", "state", "GPUs", "time", "util", "memory", "next", "time"]
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(rows) + 2
    wide = site("jobs", "-a", "-n", "3", "--wide", COLUMNS="80")
    assert all(row["name"] in wide for row in rows[-3:])


def test_chosen_columns_show_plain_digits(site: CommandLine) -> None:
    table = site(*ALL, "-o", "job,energy_j,temporal_imbalance,hbm_peak_ms")
    assert not re.search(r"\d[eE][+-]?\d", table)
    assert re.search(r" \d{1,3},\d{3} ", table)


def test_the_columns_are_listed_with_their_meaning(site: CommandLine) -> None:
    table = site("jobs", "--helpformat")
    assert "hbm_peak_mib" in table and "MiB" in table
