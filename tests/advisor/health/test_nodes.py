"""Lemons by rate and days of record, and sites without any."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.health.nodes import NodeRecord, incidents, node_rates


def _site(seed: int, lemons: int, mean_lemon: float, nodes: int = 200, mean: float = 0.2) -> list[NodeRecord]:
    random = np.random.default_rng(seed)
    means = [mean_lemon] * lemons + [mean] * (nodes - lemons)
    return [NodeRecord(f"n{place}", 30, int(random.poisson(each))) for place, each in enumerate(means)]


def _lemons(records: list[NodeRecord]) -> list[str]:
    return sorted(rate.node for rate in node_rates(records) if rate.is_lemon)


def test_three_lemons_of_200_are_found_in_nearly_every_site() -> None:
    found = [_lemons(_site(seed, 3, 15)) for seed in range(100)]
    assert sum(set(names) >= {"n0", "n1", "n2"} for names in found) >= 97
    assert sum(len(set(names) - {"n0", "n1", "n2"}) for names in found) <= 2


@pytest.mark.parametrize("mean", [0.02, 0.2, 2.0, 20.0])
def test_an_even_site_has_no_lemon(mean: float) -> None:
    assert sum(len(_lemons(_site(seed, 0, 0, mean=mean))) for seed in range(100)) <= 1


def test_one_bad_node_of_four_does_not_hide_in_the_site() -> None:
    records = [NodeRecord("n0", 30, 15), *(NodeRecord(f"n{place}", 30, 0) for place in range(1, 4))]
    assert _lemons(records) == ["n0"]


def test_two_failures_are_no_lemon_and_a_node_without_days_has_no_rate() -> None:
    records = [NodeRecord("n0", 0.5, 2), NodeRecord("gone", 0, 9), *(NodeRecord(f"n{i}", 30, 0) for i in range(1, 50))]
    assert _lemons(records) == []
    assert "gone" not in [rate.node for rate in node_rates(records)]
    assert node_rates([]) == []
    assert [rate.is_lemon for rate in node_rates([NodeRecord("n0", 30, 15)])] == [False]


def test_the_rate_is_between_the_node_and_the_site() -> None:
    rate = node_rates([*_site(1, 0, 0), NodeRecord("x", 30, 2)])
    own = next(each for each in rate if each.node == "x")
    assert own.others_30d < own.rate_30d < 2


def test_a_burst_is_one_incident_and_a_node_that_never_stops_has_many() -> None:
    assert incidents(range(0, 3600, 6)) == [0]
    assert incidents([9000, 0, 100, 3700]) == [0, 3700, 9000]
    assert len(incidents(range(0, 86_400, 50 * 60))) == 15


def test_a_node_that_fails_every_50_minutes_is_found_after_a_day() -> None:
    counts = {"n0": len(incidents(range(0, 86_400, 50 * 60)))}
    assert _lemons([NodeRecord(f"n{place}", 1, counts.get(f"n{place}", 0)) for place in range(200)]) == ["n0"]
