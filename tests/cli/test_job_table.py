"""The table of `almanac jobs` fits 80 columns with the longest values that occur, and any hostile name."""

from __future__ import annotations

from typing import Any

import pytest
from rich.cells import cell_len

from almanac.units import format_number, format_short_duration
from cli.job_table import JOB_COLUMNS, show_columns, show_jobs

LONG = {
    "job": "123456789_1234", "job_id": 123_457_000, "user": "averylongusername", "name": "pretrain-" * 20 + "end",
    "state": "OUT_OF_MEMORY", "gpu_count": 512, "elapsed_s": 14 * 86_400.0 - 3600, "mean_gpu_util_pct": 100.0,
    "hbm_peak_mib": 141 * 1024.0, "hbm_capacity_mib": 141 * 1024.0, "hbm_evidence": "telemetry",
    "mig_profile": None, "gpu_share_count": None,
}  # fmt: skip
PLAIN = {
    "job": None, "job_id": 7, "user": "ann", "name": "x", "state": "COMPLETED", "gpu_count": 1, "elapsed_s": 46.0,
    "mean_gpu_util_pct": None, "hbm_peak_mib": None, "hbm_capacity_mib": None, "hbm_evidence": "none",
    "mig_profile": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("has_user", [True, False])
def test_the_longest_values_fit_and_only_texts_are_shortened(capsys: Any, has_user: bool) -> None:
    rows = [LONG, {**LONG, "job": "123+1", "state": "CANCELLED"}, PLAIN]
    assert set(JOB_COLUMNS) == set(LONG)
    show_jobs(rows, ["use tensor cores", "use 128 GPUs", ""], has_user=has_user)
    table = lines(capsys)
    assert len(table) == 4 and max(map(len, table)) <= 80
    for part in ("123456789_1234", "OOM", "512", "13d 23h", "100%", "141/141 GiB", "use "):
        assert part in table[1]
    assert table[2].split()[0] == "123+1" and "CANCELLED" in table[2]
    assert table[3].split() == ["7", *(["ann"] if has_user else []), "x", "COMPLETED", "1", "46s", "-", "-", "-"]


@pytest.mark.parametrize(
    "name", ["训练" * 60, "\x1b[31mred\nline\u202e", "a\u0301" * 90, "🚀" * 70, "", "\u200b" * 99, "…"]
)
def test_hostile_names_keep_a_line_and_the_width(capsys: Any, name: str) -> None:
    show_jobs([{**LONG, "name": name, "user": name, "state": name}], [""], has_user=True)
    table = lines(capsys)
    assert len(table) == 2 and max(map(cell_len, table)) <= 80
    assert "\x1b" not in table[1] and "\u202e" not in table[1]


def test_a_long_name_keeps_its_start_and_its_end(capsys: Any) -> None:
    show_jobs([{**PLAIN, "name": "vit-pretrain_" + "x" * 90 + "_bs128"}], [""], has_user=False)
    assert "vit-pretrain" in (row := lines(capsys)[1]) and "…" in row and "_bs128" in row


def test_unknown_memory_is_no_zero(capsys: Any) -> None:
    known = {"hbm_peak_mib": 26_624.0, "hbm_evidence": "jobstats"}
    rows = [
        {**PLAIN, **known},
        {**PLAIN, **known, "hbm_capacity_mib": 81_920.0},
        {**PLAIN, "hbm_evidence": "preallocated"},
    ]
    show_jobs(rows, ["", "", ""], has_user=False)
    assert [" ".join(line.split()[5:-1]) for line in lines(capsys)[1:]] == ["- 26 GiB", "- 26/80 GiB", "- reserved"]


def test_slices_show_their_profile_and_real_memory(capsys: Any) -> None:
    one = {
        **PLAIN, "mig_profile": "1g.10gb", "hbm_peak_mib": 4200.0, "hbm_capacity_mib": 9728.0,
        "hbm_evidence": "telemetry",
    }  # fmt: skip
    show_jobs([one, {**one, "gpu_count": 7}], ["", ""], has_user=False)
    found = [line.split() for line in lines(capsys)[1:]]
    assert [row[3] for row in found] == ["1g.10gb", "7x1g.10gb"]
    assert [" ".join(row[6:8]) for row in found] == ["4.1/9.5 GiB"] * 2


def test_long_values_of_a_slice_fit(capsys: Any) -> None:
    row = {**LONG, "gpu_count": 16, "mig_profile": "1g.10gb+me", "hbm_peak_mib": 9728.0, "hbm_capacity_mib": 9728.0}
    show_jobs([row], ["use tensor cores"], has_user=True)
    assert max(map(len, lines(capsys))) <= 80


def test_numbers_are_plain_digits(capsys: Any) -> None:
    numbers = (0.0, 1e-9, -1e-9, 0.041666, 48.421, 999.96, 404_612.3, 1.413e6, -2e5, 1e16)
    assert [format_number(number) for number in numbers] == [
        "0", "<0.000001", ">-0.000001", "0.04167", "48.42", "1,000", "404,612", "1,413,000", "-200,000",
        "10,000,000,000,000,000",
    ]  # fmt: skip
    assert [format_short_duration(s) for s in (46, 600, 11_400, 14 * 86_400)] == ["46s", "10m", "3h 10m", "14d"]
    show_columns(["job_id", "gpu_count", "energy_j"], [{"job_id": 1234567, "gpu_count": 1024, "energy_j": 20_250.4}])
    assert lines(capsys)[1].split() == ["1234567", "1,024", "20,250"]
