"""Values that the unit of a metric forbids are dropped and counted by its name; percent is not taken for a ratio."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from almanac.records import Counts
from telemetry.sources.exporters import Metric, presets
from telemetry.sources.unit_limits import within_unit

NAMED = {name: metric for exporter in presets().values() for name, metric in exporter.named.items()}


def kept(name: str, *series: Sequence[float]) -> tuple[list[list[float]], Counts]:
    """The values that are kept of each series, as the metric gives them."""
    metric, counts = NAMED[name], Counts()
    raw = np.concatenate([np.array(values, dtype=np.float64) for values in series])
    number = np.repeat(np.arange(len(series)), [len(values) for values in series])
    flags = within_unit(metric, raw * metric.scale, number, np.ones(len(raw), dtype=bool), counts)
    assert sum(counts.dropped.values()) == int((~flags).sum())
    return [raw[flags & (number == at)].tolist() for at in range(len(series))], counts


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", 95, "0 to 1"),
        ("DCGM_FI_PROF_SM_UTIL_RATIO", 88, "0 to 1"),
        ("DCGM_FI_PROF_SM_ACTIVE", 88, "0 to 1"),
        ("DCGM_FI_DEV_GPU_UTIL", 0.95, "1 to 100"),
        ("DCGM_FI_DEV_GPU_UTIL", 101, "1 to 100"),
        ("DCGM_FI_DEV_FB_USED_BYTES", 2**44, "1048576 to 1.099512e+12"),  # 16 TiB
        ("DCGM_FI_DEV_FB_USED_BYTES", 30_000, "1048576 to 1.099512e+12"),
        ("DCGM_FI_DEV_FB_CAPACITY_BYTES", 81_920, "1048576 to 1.099512e+12"),
        ("DCGM_FI_DEV_FB_USED", 3e10, "1 to 1048576"),
        ("DCGM_FI_DEV_BOARD_POWER_WATTS", -1, "1 to 2000"),
        ("DCGM_FI_DEV_POWER_USAGE", 301_500, "1 to 2000"),
        ("nvidia_gpu_power_usage_milliwatts", 301, "1000 to 2000000"),
        ("nvidia_gpu_duty_cycle", 0.5, "1 to 100"),
    ],
)
def test_a_value_that_the_unit_forbids_is_named_with_its_metric(name: str, value: float, limits: str) -> None:
    found, counts = kept(name, [value, value])
    assert found == [[]]
    assert counts.dropped == {f"unit mismatch: {name}": 2}
    assert counts.examples[f"unit mismatch: {name}"] == f"{float(value):.7g} (expected: {limits})"


@pytest.mark.parametrize(("name", "full"), [("DCGM_FI_PROF_SM_ACTIVE", 1.0), ("DCGM_FI_DEV_GPU_UTIL", 100.0)])
def test_a_share_that_rounding_took_above_its_limit_is_kept(name: str, full: float) -> None:
    found, counts = kept(name, [1.0002 * full] * 3, [1.02 * full, full])
    assert (found, counts.dropped) == ([[1.0002 * full] * 3, [full]], {f"unit mismatch: {name}": 1})


def test_percent_under_the_name_of_a_ratio_leaves_nothing_of_the_series() -> None:
    """Else 1% would be 100%, and the zeros alone an idle GPU; a series of 0 and 1 may mean either."""
    found, _ = kept("DCGM_FI_DEV_GPU_UTIL_RATIO", [0, 1, 95, 97, 0], [0.5, 0.93, 1.0], [0, 1, 1.002], [0, 0])
    assert found == [[], [0.5, 0.93, 1.0], [], [0, 0]]


def test_a_ratio_under_the_name_of_percent_leaves_nothing_of_the_series() -> None:
    found, _ = kept("DCGM_FI_DEV_GPU_UTIL", [0, 0.95, 1, 0.97], [0, 1, 50], [100, 100])
    assert found == [[], [0, 1, 50], [100, 100]]


@pytest.mark.parametrize("wrong", [95, 1e17, -3])
def test_one_impossible_value_costs_no_other(wrong: float) -> None:
    found, counts = kept("DCGM_FI_PROF_SM_ACTIVE", [0, 0.5, wrong, 1, 0.25], [1, 1])
    assert found == [[0, 0.5, 1, 0.25], [1, 1]]
    assert counts.dropped == {"unit mismatch: DCGM_FI_PROF_SM_ACTIVE": 1}


def test_a_value_that_no_unit_explains_costs_no_other_even_alone() -> None:
    found, _ = kept("DCGM_FI_DEV_GPU_UTIL", [1e17], [1], [0, 1e17, 1])
    assert found == [[], [1], [0, 1]]


def test_what_is_not_a_number_is_counted_apart() -> None:
    _, counts = kept("DCGM_FI_DEV_GPU_TEMP_CELSIUS", [np.nan, 40, 9999])
    assert counts.dropped == {
        "not a number: DCGM_FI_DEV_GPU_TEMP_CELSIUS": 1, "unit mismatch: DCGM_FI_DEV_GPU_TEMP_CELSIUS": 1,
    }  # fmt: skip


@pytest.mark.parametrize("metric", NAMED.values(), ids=lambda metric: metric.name)
def test_every_name_reads_the_range_of_its_counter_in_its_own_unit(metric: Metric) -> None:
    low, high = metric.limits
    found, counts = kept(metric.name, [low, (low + high) / 2, high])
    assert len(found[0]) == 3 and not counts.dropped
