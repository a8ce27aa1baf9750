"""The trained demand model: decides live as in the back-test, survives its files, and refuses damaged ones."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from advisor.power.decide import Budget, DemandView, ForecastController, views_of
from advisor.power.forecast import KINDS, MODEL, STEP_MIN, fit_forecaster, steps_of
from advisor.power.model import MODEL_FILE, TAIL_MIN, DemandModel, Spent, train_demand
from advisor.power.replay import replay
from telemetry.power.series import NodeSeries

NOTHING = Spent()
OVERSPENT = Spent(tuple(range(1767571200, 1767571200 + 30 * 86400, 3600)), (1000,) * 720)


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


def of_kind(model: DemandModel, series: NodeSeries, kind: str) -> DemandModel:
    trial = dataclasses.replace(model.trials[0], kind=kind)
    fitted = fit_forecaster(steps_of(series), 10 * 144, 1, kind)
    return dataclasses.replace(model, forecaster=fitted, trials=(trial,))


@pytest.mark.parametrize("kind", KINDS)
def test_files_give_the_model_back_and_hold_lightgbm_only_where_it_is_used(
    series: NodeSeries, model: DemandModel, kind: str
) -> None:
    own = of_kind(model, series, kind)
    files = own.to_files()
    assert DemandModel.from_files(files) == own
    assert sorted(files) == [MODEL_FILE, *(["seed0.txt", "seed1.txt", "seed2.txt"] if kind == MODEL else [])]


def test_damaged_files_are_refused(series: NodeSeries, model: DemandModel) -> None:
    files = of_kind(model, series, MODEL).to_files()
    texts = [name for name in files if name != MODEL_FILE]
    first = files[texts[0]]
    trial = json.loads(files[MODEL_FILE])["trials"][0]
    bad: list[dict[str, str]] = [
        {}, {**files, MODEL_FILE: ""}, {**files, MODEL_FILE: "[]"}, {**files, MODEL_FILE: '"x"'},
        {**files, MODEL_FILE: files[MODEL_FILE][:-40]}, {**files, texts[0]: ""}, {**files, texts[0]: first[:3000]},
        {name: text for name, text in files.items() if name != texts[0]}, damaged(files, format=1),
        damaged(files, settings={"tail": 2.0}), damaged(files, budget=[]), damaged(files, holidays=["x"]),
        damaged(files, trials=[]), damaged(files, trials=[{**trial, "kind": "persistence"}]),
        damaged(files, kind="oracle"), damaged(files, kind="hour of day"), damaged(files, texts=0),
        damaged(files, usual=None), damaged(files, model_tried_s="x"),
        damaged(files, settings={"hold": 7, "margin": 1, "extra": 1}),
        damaged(files, settings={"hold": 24, "margin": "1", "extra": 1}),
        damaged(files, settings={"hold": 24, "margin": 1, "extra": -1}),
    ]  # fmt: skip
    for content in bad:
        with pytest.raises(ValueError):
            DemandModel.from_files(content)


@pytest.mark.parametrize(("kind", "days", "is_tried"), [
    ("persistence", 29, False), ("persistence", 30, True), ("persistence", -1, True), (MODEL, 1, True),
])  # fmt: skip
def test_a_model_that_did_not_pay_is_not_trained_again_for_30_days(
    series: NodeSeries, model: DemandModel, kind: str, days: int, is_tried: bool
) -> None:
    part = cut(series, 0, 9 * 1440)
    end_s = int(series.start.astype("datetime64[s]").astype(int)) + 9 * 86400
    tried_s = end_s - days * 86400
    before = dataclasses.replace(of_kind(model, series, kind), model_tried_s=tried_s)
    found = train_demand(part, Budget(60, 20), before=before)
    assert [each.kind for each in found.trials] == list(KINDS if is_tried else KINDS[:-1])
    assert found.model_tried_s == (end_s if is_tried else tried_s)


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
    compared = 0
    for view, target in seen[::11]:
        minute = view.step * STEP_MIN
        spent = NOTHING if not view.is_overspent else OVERSPENT
        live = model.decide(cut(series, minute - TAIL_MIN, minute), view.powered, spent)
        assert view.active is not None
        if view.active + model.settings.margin <= view.powered:
            assert live.target == target
            compared += target is not None
    assert compared > 5


def test_who_spent_too_much_powers_nothing_down(series: NodeSeries, model: DemandModel) -> None:
    recent = cut(series, 0, 18 * 1440)
    target = model.decide(recent, 100, NOTHING).target
    assert target is not None and target < 100
    held = model.decide(recent, 100, OVERSPENT)
    assert held.target is None and "twice the budget" in held.reason
    active = int(recent.active[-1])
    assert (model.decide(recent, active - 1, OVERSPENT).target or 0) > active, "jobs come first"


def test_an_outage_that_nobody_knows_of_yet_holds(series: NodeSeries, model: DemandModel) -> None:
    recent = cut(series, 0, 18 * 1440)
    fallen = recent.active.copy()
    fallen[-20:] = 0.0
    out = NodeSeries(recent.start, fallen, recent.total, recent.wanted, recent.is_usable)
    assert model.decide(out, 100, NOTHING).target is None
