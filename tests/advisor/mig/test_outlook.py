"""The coming days: drawn futures, replays from a state, and the search over layouts, with known answers."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from advisor.mig.outlook import MigClusterState, Outlook, PoolJob, RunningSlice, futures, total_wait_s
from advisor.mig.search import Layouts, LayoutSearch
from advisor.mig.states import sizes_of
from almanac.hardware import mig_models

SIZES = sizes_of(mig_models()["A100-40"])
FULL, SMALL = ((0, 0, 0, 0, 1),), ((7, 0, 0, 0, 0),)
DAY_S, NOW_S = 86400, 10 * 86400


def job(submit_s: float, run_s: float, size: int = 0) -> PoolJob:
    return PoolJob(submit_s, size, (run_s,) * len(SIZES.shapes))


def site(
    layouts: Layouts, running: tuple[RunningSlice, ...] = (), waiting: int = 0, drained: bool = False
) -> MigClusterState:
    """Nodes without arrivals to come, at NOW_S; `waiting` jobs of 100 s."""
    return MigClusterState(
        now_s=NOW_S, layouts=layouts, is_drained=tuple(drained for _ in layouts), running=running,
        waiting=((job(0, 100),),) * waiting, past=(), window_s=7 * DAY_S, change_s=120, raises=True,
        needed=frozenset(),
    )  # fmt: skip


def test_busy_instances_come_back_later() -> None:
    assert total_wait_s((0, 0, 0, 0, 1), [job(10, 5)], raises=True, busy=[(30, 4)]) == 20
    assert total_wait_s((1, 0, 0, 0, 1), [job(10, 5)], raises=True, busy=[(30, 4)]) == 0


def test_futures_keep_the_hour_and_the_number_of_arrivals() -> None:
    past = [job(NOW_S - day * DAY_S + 6 * 3600 + number, 60) for day in (3, 2, 1) for number in range(100)]
    found = futures(past, NOW_S, 7 * DAY_S, 2, 10, random.Random(3))
    assert found == futures(past, NOW_S, 7 * DAY_S, 2, 10, random.Random(3))
    assert len(found) == 10 and 1800 < sum(map(len, found)) < 2200, "100 a day, 20 days"
    hours = [(each.submit_s - NOW_S) % DAY_S / 3600 for jobs in found for each in jobs]
    assert min(hours) > 4.9 and max(hours) < 7.2
    assert all(jobs == sorted(jobs) and jobs[-1].submit_s < NOW_S + 2 * DAY_S for jobs in found)


def test_before_a_day_is_known_the_last_hours_stand_for_any_hour() -> None:
    found = futures([job(NOW_S - 3600, 60)] * 10, NOW_S, 7 * DAY_S, 1, 20, random.Random(3))
    assert 4000 < sum(map(len, found)) < 5600, "10 in an hour, 20 days"
    assert {int((each.submit_s - NOW_S) // 3600) for jobs in found for each in jobs} == set(range(24))

    assert futures([], NOW_S, DAY_S, 4, 3, random.Random(3)) == [[], [], []]


def test_the_queue_and_the_running_jobs_count() -> None:
    busy = Outlook(site((FULL,), (RunningSlice(0, 4, (1000.0,)),), waiting=2), 1, 3, 1)
    assert busy.wait_s((FULL,)) == pytest.approx((1000 + 1100) / 2)
    assert busy.wait_s((SMALL,)) == pytest.approx(1000 + 120), "it changes when its job has ended"
    assert busy.wait_s((FULL,), 1000.0) == math.inf

    drained = Outlook(site((SMALL,), (RunningSlice(0, 4, (1000.0,)),), waiting=1, drained=True), 1, 2, 1)
    assert drained.wait_s((SMALL,)) == 1120, "it takes no job before it has changed"


def test_a_needed_size_never_vanishes() -> None:
    outlook = Outlook(replace(site((FULL, FULL), waiting=9), needed=frozenset([4])), 1, 2, 1)
    assert outlook.wait_s((SMALL, SMALL)) == math.inf and outlook.wait_s((SMALL, FULL)) < math.inf


def search(outlook: Outlook, is_free: tuple[bool, ...], most_nodes: int = 9, most_busy: int = 9) -> LayoutSearch:
    present = outlook.site.layouts
    return LayoutSearch(SIZES, present, is_free, outlook.wait_s, lambda wait_s: 1.0, most_nodes, most_busy)


def test_the_search_finds_the_better_layout_and_keeps_its_bounds() -> None:
    running = tuple(RunningSlice(place, 4, (4000.0,)) for place in range(3))
    outlook = Outlook(site((FULL,) * 3, running, waiting=40), 1, 2, 1)
    now_s, then_s, found = search(outlook, (False,) * 3).run()
    assert then_s < now_s and found != outlook.site.layouts
    for most_nodes, most_busy in ((0, 9), (9, 0)):
        assert search(outlook, (False,) * 3, most_nodes, most_busy).run([[SMALL] * 3])[2] == outlook.site.layouts


def test_a_start_that_does_not_pay_is_reverted() -> None:
    outlook = Outlook(site((FULL,) * 3, waiting=2), 1, 2, 1)
    assert search(outlook, (True,) * 3).run([[SMALL] * 3])[2] == (FULL,) * 3
