"""The chart of `almanac simulate`: one line for each policy, in every panel, whatever its name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from reports.backtest_plot import UNDATED
from reports.simulation_plot import PolicyCurves, render_simulation_plot


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


def test_a_name_is_no_formula_and_no_markup() -> None:
    names = ["$x^2$", "\x1b[31mred\nline", "<b>&amp;</b>", "_hidden", "\u202eevil \u6f22", "a" * 500]
    drawn = text_of("".join(names), *map(curves, names), curves("sjf"))
    assert drawn.isascii()
    assert "\x1b" not in drawn
    assert "<b>" not in drawn
    assert ">sjf<" in drawn
