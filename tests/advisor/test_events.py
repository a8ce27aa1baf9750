"""The event loop: order at one time, replaced events, and jobs whose speed changes, by hand and against exact sums."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.events import CALL, END, LAST, SUBMIT, EventLoop, JobLoop


class Recorded(EventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def say(self, what: object) -> None:
        self.seen.append((self.now_s, what))

    def settle(self) -> None:
        self.say("settled")


def test_events_of_one_time_run_by_order_and_number_and_settle_once() -> None:
    loop = Recorded()
    for order, number in ((LAST, 0), (SUBMIT, 0), (CALL, 2), (CALL, 1), (END, 9)):
        loop.at(5.0, partial(loop.say, (order, number)), order, number)
    loop.at(7.0, lambda: None)
    loop.run()
    assert loop.seen == [
        *((5.0, each) for each in ((END, 9), (CALL, 1), (CALL, 2), (SUBMIT, 0), (LAST, 0))),
        (5.0, "settled"),
        (7.0, "settled"),
    ]


def test_a_new_event_of_a_key_replaces_the_one_before_and_none_is_settled_for_the_old_time() -> None:
    loop = Recorded()
    for time_s in (3.0, 9.0, 6.0):
        loop.at(time_s, partial(loop.say, time_s), key="job")
    loop.run()
    assert loop.seen == [(6.0, 6.0), (6.0, "settled")]


def test_an_event_can_stop_the_loop() -> None:
    loop = Recorded()
    loop.at(1.0, loop.stop)
    loop.at(2.0, partial(loop.say, "never"))
    loop.run()
    assert loop.seen == [(1.0, "settled")]


class Paced(JobLoop):
    """One job of 100 units at 1 unit/s, whose speed changes at times after its start."""

    def __init__(self, changes: list[tuple[float, float, float]]) -> None:
        super().__init__([10.0])
        for time_s, speed, pause_s in changes:
            self.at(10.0 + time_s, partial(self.renew, speed, pause_s), LAST)

    def submitted(self, job: int) -> None:
        self.start(job, 100.0)

    def renew(self, speed: float, pause_s: float) -> None:
        if self.speeds:
            self.change_speed(0, speed, pause_s)


def test_a_job_by_hand() -> None:
    """40 s at 1, a pause of 30 s, in which the speed changes twice, and 60 units at 3."""
    loop = Paced([(40.0, 0.5, 30.0), (50.0, 2.0, 0.0), (60.0, 3.0, 0.0)])
    loop.run()
    assert (loop.start_s, loop.end_s) == ([10.0], [110.0 - 10.0])
    assert not loop.speeds


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(0.1, 5)), max_size=5))
def test_a_job_ends_when_its_work_is_done(changes: list[tuple[float, float]]) -> None:
    loop = Paced([(*change, 0.0) for change in changes])
    loop.run()
    edges = [(0.0, 1.0), *sorted(changes, key=lambda change: 10.0 + change[0])]
    ends = [time_s for time_s, _ in edges[1:]] + [float("inf")]
    left, now_s = 100.0, 0.0
    for (begin_s, speed), end_s in zip(edges, ends, strict=True):
        now_s = begin_s + min(left / speed, end_s - begin_s)
        left -= (now_s - begin_s) * speed
        if left <= 1e-9:
            break
    assert loop.end_s[0] == pytest.approx(10.0 + now_s, rel=1e-9)
