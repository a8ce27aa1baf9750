"""The paper's mixes: the figures of the issue, by the arithmetic that gives them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from mig_paper import MixRow, gain_a, gain_b, mix_row, paper_mixes, shuffled

MIXES = {mix.name: mix for mix in paper_mixes()}


def row(name: str, orders: int = 300) -> MixRow:
    return mix_row(MIXES[name], orders)


def test_ht1_under_scheme_a() -> None:
    """Two rounds of the small, one of the medium, one after the other of the large: 3 / (2/11 + 1/2 + 1) = 66/37."""
    found = row("Ht1", 1).ours_a
    assert found == pytest.approx(66 / 37)
    assert math.floor(found * 1000) / 1000 == 1.783


def test_hm3_by_table_3() -> None:
    """100 runs of 3.616 s, and 15 rounds of 4.488 s."""
    whole_s, slice_s = 0.24 + 0.0122 + 0.003555 + 3.36 + 0.00058, 0.98 + 0.0102 + 0.002647 + 3.47 + 0.02469
    found = row("Hm3")
    assert found.ours_a == pytest.approx(100 * whole_s / (15 * slice_s))
    assert round(found.ours_a, 2) == round(found.ours_b, 2) == 5.37


def test_ht1_under_scheme_b_in_300_orders() -> None:
    found = row("Ht1")
    assert round(found.ours_b, 2) == 1.53
    assert (found.low_b, found.high_b) == (pytest.approx(1.375), pytest.approx(22 / 13))
    # The range of the issue, 1.37 to 1.69, is that of nine orders in ten. The extremes lie outside of it.
    assert (found.least_b, found.greatest_b) == (pytest.approx(1.32), pytest.approx(66 / 37))


@pytest.mark.parametrize(("name", "scheme_a", "scheme_b"), [("Ht2", 1.14, 1.09), ("Ht3", 1.29, 1.23)])
def test_ht2_and_ht3(name: str, scheme_a: float, scheme_b: float) -> None:
    found = row(name)
    assert round(found.ours_a, 2) == scheme_a
    assert round(found.ours_b, 2) == scheme_b


def test_ml2_and_ml3() -> None:
    ml2, ml3 = row("Ml2"), row("Ml3")
    assert ml2.ours_a == ml2.ours_b == pytest.approx(21 / (3 * 4.65))
    assert [round(each, 2) for each in (ml2.ours_a, ml2.ours_b)] == [1.51, 1.51]
    # Nine jobs on three compute slices; with one queue only eight.
    assert ml3.ours_a == pytest.approx(18 / (9 * 4.65 / 3))
    assert ml3.ours_a_one_queue == ml3.ours_b == pytest.approx(18 / (8 * 4.65 / 3))
    assert [round(each, 2) for each in (ml3.ours_a, ml3.ours_a_one_queue, ml3.ours_b)] == [1.29, 1.45, 1.45]


def test_mixes_without_contention_exceed_the_paper() -> None:
    assert round(row("NW").ours_a, 2) == 3.13
    assert row("Hm4").ours_a == row("Hm4").ours_b == 2
    assert row("Hm2").ours_a == 6.25


def test_all_agree_with_the_trial() -> None:
    for mix in MIXES.values():
        found = mix_row(mix)
        assert mix.trial_a is None or found.ours_a == pytest.approx(mix.trial_a, abs=0.0051)
        assert mix.trial_b is None or found.ours_b == pytest.approx(mix.trial_b, abs=0.0051)


def test_orders_are_the_same_at_each_call() -> None:
    jobs = MIXES["Ht3"].jobs
    assert shuffled(jobs, 4) == shuffled(jobs, 4) != shuffled(jobs, 5)
    assert row("Ht1", 20) == row("Ht1", 20)
    assert sorted(shuffled(jobs, 1), key=lambda job: job.size_gb) == sorted(jobs, key=lambda job: job.size_gb)


def test_one_order_is_its_own_mean_and_range() -> None:
    found = row("Ht1", 1)
    assert found.ours_b == found.low_b == found.high_b == gain_b(shuffled(MIXES["Ht1"].jobs, 0))


def test_scheme_a_does_not_depend_on_the_order_of_sizes() -> None:
    jobs = MIXES["Ht1"].jobs
    assert {round(gain_a(shuffled(jobs, seed)), 9) for seed in range(20)} == {round(66 / 37, 9)}


def test_the_documentation_shows_these_figures() -> None:
    page = (Path(__file__).parents[3] / "docs/mig-tables.md").read_text(encoding="utf-8")
    shown = {}
    for line in page[page.index("| batch |") :].split("\n\n")[0].splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        shown["NW" if cells[0].startswith("Needleman") else cells[0].split(",")[0]] = cells[1:]
    assert set(shown) == set(MIXES)
    for found in map(mix_row, MIXES.values()):
        paper_a, trial_a, ours_a, paper_b, trial_b, ours_b, spread = shown[found.mix.name]
        assert round(found.ours_a, len(ours_a) - 2) == float(ours_a)
        assert round(found.ours_b, 2) == float(ours_b)
        given = (found.mix.paper_a, found.mix.trial_a, found.mix.paper_b, found.mix.trial_b)
        said = [float(cell.removeprefix("up to ")) if cell else None for cell in (paper_a, trial_a, paper_b, trial_b)]
        assert said == list(given)
        assert spread == (f"{found.low_b:.2f} to {found.high_b:.2f}" if found.least_b < found.greatest_b else "")


def test_batches_have_the_papers_sizes() -> None:
    sizes = {name: len(mix.jobs) for name, mix in MIXES.items()}
    assert sizes == {
        "Hm1": 50, "Hm2": 50, "Hm3": 100, "Hm4": 50, "NW": 21, "Ht1": 15, "Ht2": 18, "Ht3": 36, "Ml2": 21, "Ml3": 18
    }  # fmt: skip
    assert all(mix.note for mix in MIXES.values())
