"""The charts of backtests and of `almanac simulate`: deterministic, complete, and safe with any name."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from advisor.backtest import Rate
from advisor.memory.backtest import TierScores
from reports.replay_plots import UNDATED, PolicyCurves, render_simulation_plot, render_tier_plot

NONE = Rate(0, math.nan, math.nan, math.nan)
ALL = TierScores("all", 12_000, 9_000, 4_000, 30, Rate(8_000, 0.004, 0.002, 0.006), Rate(8_000, 0, 0, 0.001), 51_234.4)
UNJUDGED = TierScores("evidence: user", 10, 2, 0, 1, NONE, NONE, 0.0)
MAGIC = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "pdf": b"%PDF-"}
SVG_TEXT = "{http://www.w3.org/2000/svg}text"


def words(content: bytes) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(content).iter(SVG_TEXT)]


@pytest.mark.parametrize("kind", UNDATED)
def test_the_same_scores_are_the_same_file_of_its_kind(kind: str) -> None:
    content = render_tier_plot("perlmutter", 0.01, [ALL, UNJUDGED], kind)
    assert content.startswith(MAGIC[kind])
    assert content == render_tier_plot("perlmutter", 0.01, [ALL, UNJUDGED], kind)


def test_every_group_has_its_row_of_words() -> None:
    said = words(render_tier_plot("perlmutter", 0.01, [ALL, UNJUDGED], "svg"))
    assert "perlmutter: memory advice replayed on 12,000 jobs, 9,000 advised" in said
    assert {"all", "51,234 GPU-h, 4,000 jobs", "evidence: user", "0 GPU-h, 0 jobs", "accepted risk 1.00%"} < set(said)
    assert said.count("too few") == 1  # no job of the second group could be judged: that is no rate of 0


def test_without_advice_there_is_nothing_to_judge() -> None:
    silent = replace(UNJUDGED, group="all", advised=0, moved_up=0)
    said = words(render_tier_plot("perlmutter", 0.01, [silent], "svg"))
    assert said == [
        "perlmutter: memory advice replayed on 10 jobs, 0 advised",
        "no scores: no job would have been advised",
    ]


def test_numbers_however_long_stay_apart_and_inside_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: object, **options: object) -> None:
        drawn.append(figure)
        save(figure, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    huge = replace(ALL, freed_gpu_hours=123_456_789.0, moved_down=9_999_999)
    render_tier_plot("perlmutter", 0.01, [huge, ALL], "png")
    drawn[0].draw_without_rendering()
    right = drawn[0].axes[1]
    assert max(text.get_window_extent().x1 for text in right.texts) <= drawn[0].bbox.x1
    labels = [label.get_window_extent() for label in right.get_xticklabels() if label.get_text()]
    assert len(labels) >= 3
    assert all(first.x1 < second.x0 for first, second in pairwise(labels))


@pytest.mark.parametrize("name", ["$\\frac{", "a$b_c$d", "\\textbf{x}", "<script>&", "{0}%s"])
def test_a_name_is_no_formula_and_no_markup(name: str) -> None:
    said = words(render_tier_plot(name, 0.01, [ALL, replace(UNJUDGED, group=name)], "svg"))
    assert name in said
    assert any(text.startswith(f"{name}: memory") for text in said)


def test_what_a_font_or_a_terminal_lacks_is_a_question_mark() -> None:
    said = words(render_tier_plot("c\n\x00\x1b[31m", 0.01, [ALL, replace(UNJUDGED, group="ü\u202e漢")], "svg"))
    assert "???" in said
    assert any(text.startswith("c???[31m: memory") for text in said)


def test_no_matplotlibrc_has_a_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    wanted = render_tier_plot("c", 0.01, [ALL], "svg")
    monkeypatch.setitem(mpl.rcParams, "font.size", 31.0)
    monkeypatch.setitem(mpl.rcParams, "text.usetex", True)
    assert render_tier_plot("c", 0.01, [ALL], "svg") == wanted


def test_the_current_folder_cannot_stop_a_picture(tmp_path: Path) -> None:
    """A FIFO named matplotlibrc, in a folder of another user's in which root calls almanac."""
    os.mkfifo(tmp_path / "matplotlibrc")
    os.mkfifo(tmp_path / "named")
    code = "import os; at = os.getcwd(); import reports.job.plots; assert os.getcwd() == at"
    environment = {**os.environ, "MATPLOTLIBRC": str(tmp_path / "named")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=300)


def test_every_module_that_draws_loads_matplotlib_so() -> None:
    draws = {}
    for path in (Path(__file__).parents[2] / "reports").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next((at for at, line in enumerate(lines) if re.match(r"(import|from) matplotlib", line)), None)
        if first is not None:
            draws[path] = any("matplotlib_start" in line for line in lines[:first])
    assert len(draws) > 3 and all(draws.values()), draws


def curves(policy: str, jobs: int = 50, scale: float = 100.0) -> PolicyCurves:
    rng = np.random.default_rng(1)
    delay_s = np.maximum(rng.normal(0, scale, jobs), 0)
    bins = rng.random(24)
    return PolicyCurves(policy, delay_s + 60, delay_s, np.linspace(5e8, 5e8 + 86_400, 25), bins, bins / 9, bins * 80)


@pytest.mark.parametrize("kind", list(UNDATED))
def test_the_same_curves_are_the_same_file_of_its_kind(kind: str) -> None:
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    one, again = (render_simulation_plot("x", [curves("fifo"), curves("sjf")], kind) for _ in range(2))
    assert one.startswith(start)
    assert one == again


def text_of(title: str, *policies: PolicyCurves) -> str:
    return render_simulation_plot(title, policies, "svg").decode()


def test_every_policy_is_named_once_and_times_have_units() -> None:
    drawn = text_of("a trace on 8 GPUs", *(curves(f"policy-{number}", scale=1e5) for number in range(12)))
    assert re.findall(r">(policy-\d+)<", drawn) == [f"policy-{number}" for number in range(12)]
    for text in ("a trace on 8 GPUs", "1 min", "1 h", "job completion time", "waiting jobs"):
        assert f">{text}<" in drawn


def test_a_policy_that_started_no_job_has_an_empty_line() -> None:
    assert ">fifo<" in text_of("x", curves("fifo", jobs=0))
    assert ">fifo<" in text_of("x", curves("fifo", jobs=1, scale=0.0))


def test_the_name_of_a_policy_is_no_formula_and_no_markup() -> None:
    names = ["$x^2$", "\x1b[31mred\nline", "<b>&amp;</b>", "_hidden", "\u202eevil \u6f22", "a" * 500]
    drawn = text_of("".join(names), *map(curves, names), curves("sjf"))
    assert drawn.isascii()
    assert "\x1b" not in drawn
    assert "<b>" not in drawn
    assert ">sjf<" in drawn
