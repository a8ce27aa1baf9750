"""Waves of work on streaming multiprocessors (SMs)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.mig.waves import least_sms, wave_count


@pytest.mark.parametrize(
    ("wanted", "full", "waves", "least"),
    [(120, 100, 2, 60), (100, 100, 1, 100), (101, 100, 2, 51), (1, 98, 1, 1), (98, 98, 1, 98), (197, 98, 3, 66)],
)
def test_the_papers_example_and_its_edges(wanted: int, full: int, waves: int, least: int) -> None:
    assert (wave_count(wanted, full), least_sms(wanted, full)) == (waves, least)


@given(st.integers(1, 10_000), st.integers(1, 200))
def test_no_fewer_sms_take_as_few_waves(wanted: int, full: int) -> None:
    """Against trying every number of SMs."""
    enough = [sms for sms in range(1, full + 1) if wave_count(wanted, sms) == wave_count(wanted, full)]
    assert least_sms(wanted, full) == min(enough)


@pytest.mark.parametrize(("wanted", "sms"), [(0, 98), (-1, 98), (98, 0), (98, -98)])
def test_nothing_wanted_or_present_is_an_error(wanted: int, sms: int) -> None:
    for rule in (wave_count, least_sms):
        with pytest.raises(ValueError, match="both must be at least 1"):
            rule(wanted, sms)
