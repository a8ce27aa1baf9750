"""Text for terminals: ASCII in the locale C, no blanks at the ends of lines, and options in one piece."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.units import format_gib, span_text
from cli.app import folded
from cli.output import show_table
from reports.job.render import _hung, _with_whole_options

PROGRAM = """
from rich.panel import Panel
from cli import main, output
main._print_any_text()
output.show_rich(Panel("n1 · ▁▄█ … ü"), 30)
main._complain("n1 · …", "ü")
"""


@pytest.mark.parametrize(
    ("locale", "is_ascii"),
    [({"LC_ALL": "C"}, True), ({"LC_ALL": "POSIX"}, True), ({"LANG": "C"}, True), ({}, True),
     ({"LC_ALL": "C.UTF-8"}, False), ({"LANG": "C.UTF-8"}, False)],
)  # fmt: skip
def test_a_terminal_of_locale_c_gets_ascii(locale: dict[str, str], is_ascii: bool) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**kept, "PYTHONPATH": root, **locale}, capture_output=True, check=True
    )
    lines = done.stdout.decode("utf-8").splitlines()
    assert {len(line) for line in lines} == {30}, "each character has one in its place"
    assert done.stdout.isascii() is is_ascii
    assert done.stderr.decode() == ("error: n1 . ~\ntry: ?\n" if is_ascii else "error: n1 · …\ntry: ü\n")
    assert ("| n1 . _:# ~ ?" in lines[1]) is is_ascii and ("│ n1 · ▁▄█ … ü" in lines[1]) is not is_ascii


@pytest.mark.parametrize("columns", [60, 80])
def test_errors_and_findings_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "error: " + "no job has the number 4000000 yet, and --constraint=hbm40g is none " * 9
    screen = io.StringIO()
    assert folded(text, screen) == text, "scripts read one line"
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = folded(text, screen, "  ").splitlines()
    assert columns - 30 < max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()) == text.strip() and all("--constraint=" not in line or "=hbm40g" in line
                                                                     for line in lines)  # fmt: skip


def test_no_line_of_a_table_ends_with_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["name", "text"], [["a", "long enough"], ["b", ""], ["", ""]])
    assert capsys.readouterr().out == "name  text\na     long enough\nb\n\n"


@given(st.integers(20, 90), st.lists(st.sampled_from(["word", "40 GB", "a-b", "jobs"]), max_size=20))
def test_an_option_is_never_broken(columns: int, words: list[str]) -> None:
    text = " ".join([*words, 'Ask for -C "gpu&hbm40g" or --mem=48G, --gpu-memory-utilization', *words])
    lines = _hung(text, 2, columns).splitlines()
    for option in ('-C "gpu&hbm40g"', "--mem=48G,", "--gpu-memory-utilization"):
        assert sum(option in line for line in lines) == 1
    assert " ".join(" ".join(lines).split()) == text


def test_an_option_is_one_piece_of_a_page() -> None:
    page = str(_with_whole_options('Ask for -C "gpu&hbm40g" with --mem=48G & more'))
    assert '<span class="option">-C &#34;gpu&amp;hbm40g&#34;</span>' in page
    assert '<span class="option">--mem=48G</span> &amp; more' in page


def test_a_range_of_one_value_is_that_value_and_little_memory_is_not_none() -> None:
    assert (span_text("40 s", "40 s"), span_text("40 s", "2 min")) == ("40 s", "40 s to 2 min")
    assert [format_gib(mib) for mib in (0.0, 0.4, 13.0, 102.3, 102.5, 1024.0)] == [
        "0.0 GiB", "1 MiB", "13 MiB", "102 MiB", "0.1 GiB", "1.0 GiB",
    ]  # fmt: skip
