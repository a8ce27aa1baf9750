"""The replay and delayed jobs by hand and by count, the oracle by brute force, and the whole back-test."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.power.backtest import (
    LEAKY,
    ORACLE,
    OURS,
    OWN_START,
    PAPER,
    TEXT,
    JobDelays,
    PowerBacktest,
    Rates,
    backtest_power,
    delays_in,
    delays_of,
    oracle_asleep,
    spans_of,
    starts_of,
)
from advisor.power.decide import (
    Budget,
    Controller,
    DemandView,
    ForecastController,
    ForecastSettings,
    Views,
    views_of,
)
from advisor.power.forecast import steps_of
from advisor.power.replay import Plant, PowerReplay, replay
from almanac.actions_config import Power
from almanac.errors import NoModelError, RequestError
from telemetry.power.series import NodeRuns, NodeSeries


def made(active: list[float] | np.ndarray, total: float = 10.0) -> NodeSeries:
    values = np.asarray(active, dtype=float)
    return NodeSeries(
        np.datetime64("2026-01-05", "m"), values, np.full(len(values), total), values * np.nan, ~np.isnan(values)
    )


@dataclass(frozen=True)
class Fixed:
    """Keeps `keep`, and wakes `extra` above demand."""

    keep: int | None
    extra: int = 0
    margin: int = 0
    name: str = "fixed"

    def target(self, view: DemandView) -> int | None:
        return self.keep

    def raised(self, view: DemandView, active: float) -> int:
        return int(active) + self.extra


AT_ONCE = Plant(5, cooldown_steps=0)


def run(active: list[float], controller: Controller, plant: Plant = AT_ONCE) -> PowerReplay:
    """Each step sees the minute before it, and the highest of each of the 7 steps before."""
    views = []
    for step in range(len(active) // 10):
        last, highs = active[max(0, step * 10 - 1)], [max(active[at * 10 : at * 10 + 10]) for at in range(step)][-7:]
        view = DemandView(step, 0, 0, None if np.isnan(last) else last, None, highs=tuple(highs))
        views.append(view._replace(is_stale=view.active is None))
    return replay(made(active), Views(0, views), controller, plant=plant)


def test_a_rise_is_seen_a_minute_later_and_met_when_the_nodes_have_booted() -> None:
    done = run([3.0] * 12 + [7.0] * 8, Fixed(keep=4, extra=1))
    assert done.wakes == [4]
    assert done.powered.tolist() == [4] * 13 + [8] * 7
    assert done.short.tolist() == [0] * 12 + [3] * 6 + [0, 0]


def test_nodes_in_use_stay_on_and_a_hold_changes_nothing() -> None:
    assert run([6.0] * 20, Fixed(keep=2)).powered.tolist() == [6] * 20
    assert run([6.0] * 20, Fixed(keep=None)).powered.tolist() == [10] * 20


def test_a_margin_wakes_before_there_is_a_shortage() -> None:
    done = run([3.0] * 12 + [4.0] * 18, Fixed(keep=None, extra=3, margin=1))
    assert not done.wakes  # all nodes are on
    done = run([3.0] * 12 + [4.0] * 18, Fixed(keep=4, extra=3, margin=1), Plant())
    assert done.wakes[0] == 3 and not done.short.any()


def test_what_is_not_usable_is_neither_short_nor_seen() -> None:
    done = run([3.0] * 10 + [np.nan] * 10 + [3.0] * 10, Fixed(keep=4, extra=1), Plant())
    assert done.powered.tolist() == [4] * 30
    assert not done.wakes and not done.short.any()


def test_a_replay_begins_with_all_nodes_or_so_many_above_those_in_use() -> None:
    views = Views(0, [DemandView(0, 0, 0, None, None, is_stale=True)])
    assert replay(made([3.0] * 10), views, Fixed(None)).powered.tolist() == [10] * 10
    assert replay(made([3.0] * 10), views, Fixed(None), spare=2).powered.tolist() == [5] * 10
    assert replay(made([3.0] * 10), views, Fixed(None), spare=20).powered.tolist() == [10] * 10


@pytest.mark.parametrize("boots", [0, 1, 2, 5])
def test_the_oracle_is_the_best_of_all_plans_of_so_many_boots(boots: int) -> None:
    rng = np.random.default_rng(boots)
    for _ in range(10):
        demand, total = rng.integers(0, 4, 5), 3
        most = 0
        for plan in itertools.product(range(total + 1), repeat=5):
            booted = sum(max(0, after - before) for before, after in itertools.pairwise((total, *plan)))
            if booted <= boots and all(up >= need for up, need in zip(plan, demand, strict=True)):
                most = max(most, sum(total - up for up in plan))
        found = oracle_asleep(demand.astype(float), np.full(5, float(total)), np.ones(5, dtype=bool), boots)
        assert found == pytest.approx(most / 5)


def test_the_oracle_leaves_out_what_is_not_usable() -> None:
    demand = np.array([2.0] * 10 + [9.0] * 10 + [2.0] * 10)
    usable = np.array([True] * 10 + [False] * 10 + [True] * 10)
    assert oracle_asleep(demand, np.full(30, 10.0), usable, 0) == 8.0


def daily(days: int) -> NodeSeries:
    minutes = np.arange(days * 1440)
    noise = np.random.default_rng(0).normal(0, 1, len(minutes))
    return made(np.clip(np.round(50 + 30 * np.sin(minutes * 2 * np.pi / 1440) + noise), 0, 100), 100)


@pytest.fixture(scope="module")
def outcome() -> PowerBacktest:
    series = daily(14)
    return backtest_power(series, spans_of(series), Budget(60, 10), rates=Rates(1000, 1.0, 0.1, 0.5))


def test_all_controllers_stand_side_by_side_and_none_beats_the_oracle_at_its_boots(outcome: PowerBacktest) -> None:
    names = [score.controller for score in outcome.scores]
    ces = [name + start for name in (PAPER, TEXT, LEAKY) for start in ("", OWN_START)]
    control = ["shuffled"] if outcome.used != "persistence" else []
    assert names == ["vanilla", "keep warm", *ces, "persistence", "hour of day", "model", *control, OURS, ORACLE]
    assert outcome.score_of(OURS).asleep == outcome.score_of(outcome.used).asleep
    assert outcome.reason.startswith(outcome.used)
    ours, oracle = outcome.score_of(OURS), outcome.score_of(ORACLE)
    assert outcome.score_of("vanilla").asleep == 0
    assert 0 < ours.asleep < oracle.asleep
    assert ours.boots == oracle.boots
    assert ours.boots_per_day <= 90


def test_what_is_saved_follows_from_the_nodes_asleep(outcome: PowerBacktest) -> None:
    ours = outcome.score_of(OURS)
    assert ours.kwh == pytest.approx(ours.asleep * outcome.days * 24)
    assert (ours.money, ours.co2_kg) == pytest.approx((ours.kwh * 0.1, ours.kwh * 0.5))
    assert outcome.score_of("vanilla").utilization == pytest.approx(outcome.utilization_before)


def test_the_scored_span_decides_nothing() -> None:
    series = daily(14)
    spans = spans_of(series)
    other = daily(14)
    other.active[spans.score + 10 :] = 3.0
    one, two = (backtest_power(s, spans, Budget(60, 10)) for s in (series, other))
    assert one.settings == two.settings
    assert one.trials == two.trials


def test_a_budget_that_nothing_keeps_is_said() -> None:
    series = daily(14)
    notes = backtest_power(series, spans_of(series), Budget(0, 0)).notes
    assert any("no setting kept the budget" in note for note in notes)


def test_spans_in_the_wrong_order_or_too_short_are_refused() -> None:
    series = daily(14)
    at = np.datetime64
    with pytest.raises(RequestError, match="before the tuning span ends"):
        spans_of(series, at("2026-01-10"), at("2026-01-15"), at("2026-01-14"))
    with pytest.raises(RequestError, match="tuning span has 1"):
        spans_of(series, at("2026-01-13"), at("2026-01-14"))
    with pytest.raises(RequestError, match="scored span has 0"):
        spans_of(series, at("2026-01-10"), at("2026-01-18T12:00"), None, at("2026-01-19"))


def test_too_little_to_train_on_is_no_model() -> None:
    series = daily(14)
    series.is_usable[: 6 * 1440] = False
    with pytest.raises(NoModelError, match="nothing can be trained"):
        backtest_power(series, spans_of(series), Budget())


def test_a_run_powers_down_so_many_nodes_and_none_soon_after_a_wake_up() -> None:
    plant = Plant(0, nodes_per_run=2, cooldown_steps=3)
    done = run([3.0] * 60 + [9.0] * 5 + [3.0] * 95, Fixed(keep=4), plant)
    assert done.powered[:60:10].tolist() == [8, 6, 4, 4, 4, 4]
    assert done.powered[60:62].tolist() == [4, 9]
    assert done.powered[70::10].tolist() == [9, 9, 9, 7, 5, 4, 4, 4, 4]


@pytest.mark.parametrize(("steps", "powered"), [(3, [8] * 5 + [4] * 3), (0, [8] * 3 + [4] * 5)])
def test_what_is_in_use_and_was_within_the_cool_down_stays_on(steps: int, powered: list[int]) -> None:
    done = run([8.0] * 20 + [3.0] * 60, Fixed(keep=4), Plant(5, cooldown_steps=steps))
    assert done.powered[::10].tolist() == powered


def test_the_limits_are_those_of_the_configuration() -> None:
    assert Plant.configured(Power()) == Plant()
    assert Plant.configured(Power(boot_min=7, nodes_per_run=3, cooldown_s=1801)) == Plant(7, 3, 4)
    assert Plant.configured(Power(cooldown_s=0)).cooldown_steps == 0
    assert Plant.configured(Power(cooldown_s=90_000)).cooldown_steps == 36, "6 hours are replayed"


def test_a_cool_down_of_hours_is_replayed() -> None:
    series = made([8.0] * 300 + [3.0] * 600)
    done = replay(
        series, views_of(steps_of(series), np.zeros(90), 0, 90), Fixed(keep=4), plant=Plant(5, cooldown_steps=36)
    )
    assert done.powered[[300, 650, 659, 660]].tolist() == [8, 8, 8, 4]


def test_an_overspent_budget_ends_the_power_downs() -> None:
    """Settings that suit no budget: what is spent stays near twice the budget of each week."""
    rng = np.random.default_rng(5)
    days = 21
    active = np.clip(np.round(200 + rng.normal(0, 30, days * 24).repeat(60)), 0, 400)
    series = made(active, 400)
    steps = steps_of(series)
    views = views_of(steps, 0 * steps.recent, 144, len(steps))
    bold = ForecastController(ForecastSettings(6, 0, 0))
    free, done = (replay(series, views, bold, Budget(boots, 1000)) for boots in (10_000, 20))
    assert sum(free.wakes) / (days - 1) > 100
    assert sum(done.wakes) / (days - 1) < 60
    assert done.powered.mean() < 400


def runs_of(spans: list[tuple[int, int, tuple[int, ...]]]) -> NodeRuns:
    spans = sorted(spans)
    return NodeRuns(
        np.array([one[0] for one in spans], dtype=np.int64), np.array([one[1] for one in spans], dtype=np.int64),
        np.arange(len(spans)), tuple(np.array(one[2], dtype=np.int32) for one in spans),
    )  # fmt: skip


def taken(runs: NodeRuns, end_s: int) -> list[tuple[int, int]]:
    minute, level = starts_of(runs, 0, end_s)
    return list(zip(minute.tolist(), level.tolist(), strict=True))


def test_only_a_run_that_takes_a_node_can_be_delayed() -> None:
    runs = runs_of(
        [(0, 200, (0,)), (30, 90, (0,)), (65, 300, (0, 1)), (90, 95, (2,)), (200, 210, (0,)), (299, 320, (0,))]
    )
    assert taken(runs, 300) == [(0, 1), (1, 2), (1, 3)]
    assert taken(runs_of([]), 86400 * 2) == []


def test_a_job_waits_until_enough_nodes_are_up_or_nobody_waits() -> None:
    demand, short = np.array([1, 4, 4, 4, 2, 2]), np.array([0, 3, 2, 0, 0, 1])
    starts = np.array([0, 1, 1, 1, 5]), np.array([1, 1, 2, 4, 2])
    assert delays_of(9, starts, demand, short) == JobDelays(9, 3, 4 / 3, 2), "the last one until the end of the span"
    assert delays_of(9, starts, demand, np.zeros(6, dtype=np.int64)) == JobDelays(9, 0, None, None)


def test_starts_in_unusable_minutes_do_not_count() -> None:
    active = np.array([np.nan, 1.0])
    series = NodeSeries(np.datetime64(0, "m"), active, np.ones(2), active, ~np.isnan(active))
    runs = runs_of([(0, 50, (0,)), (61, 90, (0,))])
    found = delays_in(runs, series, slice(0, 2), {"ours": np.ones(2, dtype=np.int64)})
    assert found == {"ours": JobDelays(1, 1, 1.0, 1), ORACLE: JobDelays(1, 0, None, None)}


def test_a_day_has_no_seam() -> None:
    day = 86400
    runs = runs_of(
        [(day - 50, day, (0,)), (day, day + 50, (0,)), (day - 10, day + 90, (1,)), (day + 95, day + 99, (1,))]
    )
    found = [minute for minute, _ in taken(runs, 2 * day)]
    assert found == [1439, 1439, 1441], "a node that passes from run to run stays up"


_SPANS = st.lists(
    st.tuples(
        st.integers(-100, 500), st.integers(1, 300), st.lists(st.integers(0, 4), max_size=3, unique=True).map(tuple)
    ).map(lambda one: (one[0], one[0] + one[1], one[2])),
    max_size=10, unique_by=lambda one: one[0],
)  # fmt: skip


@given(_SPANS)
def test_starts_against_a_count_by_second(spans: list[tuple[int, int, tuple[int, ...]]]) -> None:
    expected = []
    for begin, _, nodes in sorted(spans):
        if 0 <= begin < 480:
            used_before = {n for b, u, ns in spans for n in ns if b < begin <= u}
            used_after = {n for b, u, ns in spans for n in ns if b <= begin < u}
            if set(nodes) - used_before:
                expected.append((begin // 60, len(used_after)))
    assert taken(runs_of(spans), 480) == expected


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=9),
)
def test_delays_against_a_walk_by_minute(minutes: list[tuple[int, int]], jobs: list[tuple[int, int]]) -> None:
    demand = np.array([max(one) for one in minutes])
    short = np.array([min(one[1], max(one)) for one in minutes])
    jobs = sorted((minute % len(minutes), level) for minute, level in jobs)
    waits = []
    for minute, level in jobs:
        waited = 0
        while minute + waited < len(minutes):
            now = minute + waited
            if short[now] == 0 or demand[now] - short[now] >= level:
                break
            waited += 1
        waits.append(waited)
    late = [one for one in waits if one]
    starts = np.array([m for m, _ in jobs], dtype=np.int64), np.array([n for _, n in jobs], dtype=np.int64)
    found = delays_of(9, starts, demand, short)
    assert (found.delayed, found.longest_min) == (len(late), max(late, default=None))
    assert found.mean_min is None or abs(found.mean_min - sum(late) / len(late)) < 1e-9
