"""The trained demand model: decides live as in the back-test, survives its files, and refuses damaged ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from advisor.power.decide import Budget, DemandView, ForecastController, views_of
from advisor.power.forecast import STEP_MIN, steps_of
from advisor.power.model import MODEL_FILE, TAIL_MIN, DemandModel, Spent, train_demand
from advisor.power.replay import replay
from telemetry.power.series import NodeSeries

NOTHING = Spent()


def made(days: int) -> NodeSeries:
    """Work by day on 100 nodes, with noise and a week's worth of drift."""
    rng = np.random.default_rng(0)
    minutes = np.arange(days * 1440)
    drift = np.repeat(np.cumsum(rng.normal(0, 0.6, days * 24)), 60)
    active = np.clip(
        np.round(50 + 25 * np.sin(minutes * 2 * np.pi / 1440) + drift + rng.normal(0, 1, len(minutes))), 0, 100
    )
    full = np.full(len(minutes), 100.0)
    return NodeSeries(
        np.datetime64("2026-01-05", "m"), active, full, active * np.nan, np.ones(len(minutes), dtype=bool)
    )


def cut(series: NodeSeries, first: int, end: int) -> NodeSeries:
    part = slice(first, end)
    return NodeSeries(
        series.start + np.timedelta64(first, "m"), series.active[part], series.total[part], series.wanted[part],
        series.is_usable[part],
    )  # fmt: skip


@pytest.fixture(scope="module")
def series() -> NodeSeries:
    return made(20)


@pytest.fixture(scope="module")
def model(series: NodeSeries) -> DemandModel:
    return train_demand(cut(series, 0, 15 * 1440), Budget(60, 20), seed=1)


@pytest.mark.parametrize("powered", [55, 80, 100])
def test_a_live_decision_from_the_newest_minutes_is_that_of_the_whole_record(
    series: NodeSeries, model: DemandModel, powered: int
) -> None:
    first, end = 15 * 144, 20 * 144
    steps = steps_of(series)
    changes = model.forecaster.changes(steps)
    views = views_of(steps, changes - model.forecaster.usual, first, end).views
    controller = ForecastController(model.settings)
    compared = 0
    for step in range(first, end, 37):
        minute = step * STEP_MIN
        live = model.decide(cut(series, minute - TAIL_MIN, minute), powered, NOTHING)
        view = views[step - first]._replace(powered=powered, total=100)
        assert view.active is not None
        assert live.forecast == {(180, 0.6): float((steps.recent + changes)[step])}
        if view.active + controller.margin <= powered:
            assert live.target == controller.target(view)
            compared += 1
    assert compared


def test_more_of_the_past_than_the_tail_changes_nothing(series: NodeSeries, model: DemandModel) -> None:
    end = 18 * 1440 + 7  # not at a border of the series' own steps
    long, short = (cut(series, first, end) for first in (0, end - TAIL_MIN))
    assert model.decide(long, 90, NOTHING) == model.decide(short, 90, NOTHING)


def test_nothing_but_the_past_of_one_step_enters(series: NodeSeries, model: DemandModel) -> None:
    end = 18 * 1440
    later = cut(series, 0, len(series))
    later.active[end:] = 3.0
    assert model.decide(cut(later, 0, end), 90, NOTHING) == model.decide(cut(series, 0, end), 90, NOTHING)


def test_missing_or_unusable_minutes_of_the_last_hour_hold(series: NodeSeries, model: DemandModel) -> None:
    for spoiled in (1, 30, 60):
        recent = cut(series, 0, 18 * 1440)
        usable = recent.is_usable.copy()
        usable[-spoiled] = False
        broken = NodeSeries(recent.start, recent.active, recent.total, recent.wanted, usable)
        assert model.decide(broken, 90, NOTHING).target is None
    assert model.decide(cut(series, 0, 0), 90, NOTHING).target is None


def test_demand_near_the_powered_nodes_asks_for_more(series: NodeSeries, model: DemandModel) -> None:
    recent = cut(series, 0, 18 * 1440)
    active = int(recent.active[-1])
    target = model.decide(recent, active - 1, NOTHING).target
    assert target is not None and target > active


def damaged(files: dict[str, str], **change: object) -> dict[str, str]:
    return {**files, MODEL_FILE: json.dumps({**json.loads(files[MODEL_FILE]), **change})}


def test_damaged_files_are_refused(model: DemandModel) -> None:
    files = model.to_files()
    texts = [name for name in files if name != MODEL_FILE]
    first = files[texts[0]]
    bad: list[dict[str, str]] = [
        {}, {**files, MODEL_FILE: ""}, {**files, MODEL_FILE: "[]"}, {**files, MODEL_FILE: '"x"'},
        {**files, MODEL_FILE: files[MODEL_FILE][:-40]}, {**files, texts[0]: ""}, {**files, texts[0]: first[:3000]},
        {name: text for name, text in files.items() if name != texts[0]}, damaged(files, format=1),
        damaged(files, settings={}), damaged(files, budget=[]), damaged(files, holidays=["x"]),
        damaged(files, fits=[]), damaged(files, settings={"tail": 2.0, "margin": 1, "extra": 1}),
        damaged(files, settings={"tail": "0.1", "margin": 1, "extra": 1}),
        damaged(files, settings={"tail": 0.1, "margin": -1, "extra": 1}),
    ]  # fmt: skip
    for content in bad:
        with pytest.raises(ValueError):
            DemandModel.from_files(content)


def test_too_short_a_record_is_refused(series: NodeSeries) -> None:
    with pytest.raises(ValueError, match=r"has 5\.0 days of demand, at least 8"):
        train_demand(cut(series, 0, 5 * 1440), Budget())


def test_the_replay_decides_as_the_model_does_live_with_what_it_has_spent(
    series: NodeSeries, model: DemandModel
) -> None:
    """Each decision of a replay again, from truncated series and the wake-ups and short minutes before it."""
    steps, first = steps_of(series), 15 * 144
    views = views_of(steps, model.forecaster.changes(steps) - model.forecaster.usual, first, 20 * 144)
    seen: list[tuple[DemandView, int | None]] = []

    class Watched(ForecastController):
        def target(self, view: DemandView) -> int | None:
            seen.append((view, super().target(view)))
            return seen[-1][1]

    done = replay(series, views, Watched(model.settings), model.budget)
    assert done.powered.mean() < 95 and len(done.wakes) > 1
    begin_s = int(series.start.astype("datetime64[s]").astype(int)) + first * STEP_MIN * 60
    compared = 0
    for view, target in seen[::11]:
        now_s = (view.step - first) * STEP_MIN * 60
        spent = Spent(
            begin_s, tuple(begin_s + s for s in done.spent.wake_times_s if s < now_s),
            tuple(begin_s + s for s in done.spent.short_times_s if s < now_s),
        )  # fmt: skip
        minute = view.step * STEP_MIN
        live = model.decide(cut(series, minute - TAIL_MIN, minute), view.powered, spent)
        assert view.active is not None
        if view.active + model.settings.margin <= view.powered:
            assert live.target == target
            compared += target is not None
    assert compared > 5


def test_who_spent_more_keeps_more_nodes(series: NodeSeries, model: DemandModel) -> None:
    recent = cut(series, 0, 18 * 1440)
    now_s = int(series.start.astype("datetime64[s]").astype(int)) + 18 * 86400
    rich, poor = Spent(now_s - 10 * 86400), Spent(now_s - 86400, tuple(now_s - 60 * n for n in range(9, 0, -1)))
    bold, careful = (model.decide(recent, 100, spent).target for spent in (rich, poor))
    assert bold is not None and (careful is None or bold < careful)


def test_an_outage_that_nobody_knows_of_yet_holds(series: NodeSeries, model: DemandModel) -> None:
    recent = cut(series, 0, 18 * 1440)
    fallen = recent.active.copy()
    fallen[-20:] = 0.0
    out = NodeSeries(recent.start, fallen, recent.total, recent.wanted, recent.is_usable)
    assert model.decide(out, 100, NOTHING).target is None
