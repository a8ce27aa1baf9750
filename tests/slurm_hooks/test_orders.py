"""The files of what almanac told Slurm: a year is kept, and nothing of others is touched."""

from __future__ import annotations

from pathlib import Path

from almanac.units import DAY_S
from slurm_hooks.orders import KEEP_DAYS, JsonLines

NOW_S = 1_795_003_200  # 2026-11-18


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_older_than_a_year_go_with_the_first_line_of_a_day(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "power", "actions-")
    for days in (KEEP_DAYS + 2, KEEP_DAYS + 1, 1):
        lines.append([{"days": days}], NOW_S - days * DAY_S)
    others = ("actions-2001-01-01.jsonl.gz", "other-2001-01-01.jsonl", "state.json")
    for name in others:
        (tmp_path / "power" / name).touch()
    assert len(names(tmp_path / "power")) == 6
    lines.append([{"days": 0}], NOW_S)
    assert names(tmp_path / "power") == {
        *others, "actions-2025-10-13.jsonl", "actions-2026-11-17.jsonl", "actions-2026-11-18.jsonl",
    }  # fmt: skip
    assert [row["days"] for row in lines.read(0, NOW_S)] == [KEEP_DAYS + 1, 1, 0]


def test_what_cannot_be_removed_stays_and_the_line_is_written(tmp_path: Path) -> None:
    """A folder of that name; and a link, of which only the link goes."""
    (tmp_path / "precious").write_text("x")
    (tmp_path / "power" / "actions-2001-01-01.jsonl").mkdir(parents=True)
    (tmp_path / "power" / "actions-2001-01-02.jsonl").symlink_to(tmp_path / "precious")
    for days in (1, 0):
        JsonLines(tmp_path / "power", "actions-").append([{"a": 1}], NOW_S - days * DAY_S)
    kept = {"actions-2001-01-01.jsonl", "actions-2026-11-17.jsonl", "actions-2026-11-18.jsonl"}
    assert names(tmp_path / "power") == kept
    assert (tmp_path / "precious").read_text() == "x"


def test_a_clock_that_was_far_ahead_removes_nothing(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path, "actions-")
    lines.append([{"n": 1}], NOW_S)
    lines.append([{"n": 2}], NOW_S + 1000 * DAY_S)
    lines.append([{"n": 3}], NOW_S + DAY_S)
    assert [row["n"] for row in lines.read(NOW_S, NOW_S + DAY_S)] == [2, 1, 3]
    (tmp_path / "actions-0000-99-99.jsonl").touch()
    (tmp_path / "actions-2026-11-1x.jsonl").touch()
    lines.append([{"n": 4}], NOW_S + 2 * DAY_S)
    assert len(names(tmp_path)) == 6
