"""Reservations that a user sets, told from own use by the shares of the GPU that runs held."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from advisor.memory.reservations import EARLY, OWN, RESERVED, UNCLEAR, HeldShares
from advisor.memory.runs import runs_of
from almanac.config import Config

SMALL_MIB, LARGE_MIB = 40960.0, 81920.0
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


def read(*runs: tuple[float, float], is_flat: bool | None = True, is_completed: bool = True) -> list[str]:
    """Return what each peak is. runs: share of the capacity, and the capacity in MiB."""
    held = HeldShares()
    return [held.observe(share * size, size, is_flat, is_completed) for share, size in runs]


@pytest.mark.parametrize("share", [0.8, 0.83, 0.86])
@pytest.mark.parametrize("is_flat", [True, None])
def test_equal_flat_peaks_of_most_of_a_gpu_are_no_use(share: float, is_flat: bool | None) -> None:
    assert read(*[(share, LARGE_MIB)] * 4, is_flat=is_flat) == [UNCLEAR, UNCLEAR, RESERVED, RESERVED]


def test_a_share_that_gpus_of_two_sizes_hold_is_reserved_however_small() -> None:
    """The context comes on top: it is a larger share of the smaller GPU."""
    assert read((0.406, LARGE_MIB), (0.412, SMALL_MIB), (0.406, LARGE_MIB)) == [OWN, RESERVED, RESERVED]
    assert read((0.4, LARGE_MIB), (0.8, SMALL_MIB), (0.4, LARGE_MIB), (0.8, SMALL_MIB)) == [OWN] * 4


@pytest.mark.parametrize(
    ("runs", "is_flat"),
    [([(0.83, LARGE_MIB)] * 6, False), ([(0.3, LARGE_MIB)] * 6, True), ([(0.3, LARGE_MIB)] * 6, None)],
)
def test_peaks_that_rise_and_those_below_half_of_one_gpu_are_own_use(
    runs: list[tuple[float, float]], is_flat: bool | None
) -> None:
    assert read(*runs, is_flat=is_flat) == [OWN] * 6


def test_completed_runs_that_differ_show_use_and_five_equal_ones_take_it_back() -> None:
    varied = [(0.83, LARGE_MIB), (0.81, LARGE_MIB), (0.84, LARGE_MIB), (0.835, LARGE_MIB)]
    assert read(*varied) == [UNCLEAR, OWN, OWN, OWN]
    assert read(*varied, *[(0.8, LARGE_MIB)] * 5)[-2:] == [OWN, RESERVED]


def test_a_run_that_was_cancelled_before_the_reservation_shows_no_use() -> None:
    held = HeldShares()
    assert held.observe(0.83 * LARGE_MIB, LARGE_MIB, True, True) == UNCLEAR
    assert held.observe(9000.0, LARGE_MIB, False, False) == EARLY
    assert held.observe(0.83 * LARGE_MIB, LARGE_MIB, True, True) == UNCLEAR
    assert held.holds(0.83 * LARGE_MIB, LARGE_MIB) and not held.holds(0.9 * LARGE_MIB, LARGE_MIB)
    assert held.observe(9000.0, LARGE_MIB, False, True) == OWN


@pytest.mark.parametrize("flat", [{"is_flat": True}, {"is_flat": None}, {"is_flat": math.nan}, {}])
def test_no_run_of_a_family_that_holds_0_83_of_a_gpu_is_evidence_of_its_need(
    history_of: History, config: Config, flat: dict[str, Any]
) -> None:
    held = {"hbm_peak_mib": 0.83 * LARGE_MIB, "hbm_max_mib": 0.83 * LARGE_MIB, **flat}
    runs = runs_of(history_of([*[held] * 9, {**held, "state": "FAILED"}]), config.advice, config.tiers)
    assert not any(run.is_known for run in runs if run)
    assert [run.why_not for run in runs[2:] if run] == ["preallocated memory"] * 8
    assert all(math.isnan(run.need_mib) for run in runs[2:] if run)


def test_runs_whose_use_rises_are_evidence(history_of: History, config: Config) -> None:
    risen = {"hbm_peak_mib": 0.83 * LARGE_MIB, "hbm_max_mib": 0.83 * LARGE_MIB, "is_flat": False}
    assert all(run and run.is_known for run in runs_of(history_of([risen] * 9), config.advice, config.tiers))
