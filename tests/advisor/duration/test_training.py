"""A training learns from a bounded number of jobs, and is judged on predictions made before it saw them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from advisor.artefacts import load, save
from advisor.duration import model
from advisor.duration import model as duration
from advisor.duration.backtest import evaluate
from advisor.duration.features import submissions
from advisor.duration.model import MIN_UNSEEN, OUTPUTS, DurationModel, fit, learned_rows
from advisor.duration.replay import DurationReplay, replay_durations
from advisor.service import train
from almanac.config import Config

NOW_S = 1_750_000_000


def rows_of(past: DurationReplay, previous: DurationModel | None = None) -> list[int]:
    return [int(row) for row in learned_rows(past.job_id, past.submit_s, past.end_s, previous)]


def test_some_rows_are_known_as_they_are_among_all(site_history: pd.DataFrame, config: Config) -> None:
    every = replay_durations(site_history)
    rows = np.arange(3, len(every), 7)
    some = replay_durations(site_history, rows)
    expected = every.select(rows)
    assert np.array_equal(some.features.numbers, expected.features.numbers, equal_nan=True)
    assert np.array_equal(some.features.categories, expected.features.categories)
    for name in ("rolling_s", "duration_s", "submit_s", "end_s", "job_id"):
        assert np.array_equal(getattr(some, name), getattr(expected, name), equal_nan=True), name


def test_equal_texts_are_one_object(site_history: pd.DataFrame) -> None:
    jobs = submissions(site_history)
    for name in ("user", "account", "partition", "qos", "name_key", "tier"):
        texts = [getattr(job, name) for job in jobs]
        assert len({id(text) for text in texts}) == len(set(texts)) < 100, name


def test_of_many_jobs_evenly_spaced_ones_are_learned_whatever_the_order_of_rows(
    site_history: pd.DataFrame, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = replay_durations(site_history)
    assert rows_of(past) == list(range(len(past))), "of few jobs all"
    monkeypatch.setattr(duration, "LEARNED", 90)
    learned = past.select(learned_rows(past.job_id, past.submit_s, past.end_s, None))
    assert len(learned) == 90
    places = np.searchsorted(np.sort(past.submit_s), np.sort(learned.submit_s))
    assert places[0] == 0 and places[-1] >= len(past) - 2 and np.diff(places).max() <= len(past) // 90 + 2
    mixed = past.select(np.random.default_rng(1).permutation(len(past)))
    assert set(mixed.job_id[rows_of(mixed)].tolist()) == set(learned.job_id.tolist())


def test_jobs_that_were_predicted_stay_to_judge(
    site_history: pd.DataFrame, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = replay_durations(site_history)
    fitted = fit(past, config.training, NOW_S)
    assert fitted is not None and len(fitted.model.unseen) > 100
    monkeypatch.setattr(duration, "LEARNED", 90)
    rows = rows_of(past, fitted.model)
    assert len(rows) < len(past)
    assert {each.job_id for each in fitted.model.unseen} <= set(past.job_id[rows].tolist())


def test_every_job_counts_for_the_site_though_few_are_learned(
    site_history: pd.DataFrame, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(site_history, config, NOW_S)
    monkeypatch.setattr(duration, "LEARNED", 400)
    few = train(site_history, config, NOW_S)
    assert few.model.texts != whole.model.texts
    assert (few.jobs, few.since_s, few.until_s) == (whole.jobs, whole.since_s, whole.until_s)
    assert few.site == whole.site and few.site.overall.number == len(site_history)
    assert few == train(site_history.sample(frac=1.0, random_state=3), config, NOW_S), "whatever the order of rows"


def test_a_back_test_learns_from_as_few(
    site_history: pd.DataFrame, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = model.fit_trees

    def counted(*given: Any) -> dict[str, str]:
        sizes.append(len(given[0]))
        return real(*given)

    monkeypatch.setattr(duration, "fit_trees", counted)
    monkeypatch.setattr(duration, "LEARNED", 300)
    monkeypatch.setattr(duration, "UNSEEN", 100)
    monthly = dataclasses.replace(config.training, retrain_hours=240)
    evaluate(site_history, dataclasses.replace(config, training=monthly))
    assert 0 < max(sizes) <= 400


DAY_S = 86_400
FIRST_S, SECOND_S = NOW_S - 20 * DAY_S, NOW_S - 8 * DAY_S


def trained(past: DurationReplay, config: Config, now_s: int, previous: DurationModel | None = None) -> duration.Fitted:
    fitted = fit(past.select(past.end_s < now_s), config.training, now_s, previous)
    assert fitted is not None and fitted.parts is not None
    return fitted


def test_what_ended_since_is_judged_by_the_model_of_then(past: DurationReplay, config: Config) -> None:
    first = trained(past, config, FIRST_S).model
    second = trained(past, config, SECOND_S, first)
    since = past.select((past.end_s >= FIRST_S) & (past.end_s < SECOND_S))
    then = first.parts(since.features, since.rolling_s)
    said = {each.job_id: each[2:] for each in second.model.unseen}
    expected = zip(*(getattr(then, name).tolist() for name in OUTPUTS), strict=True)
    assert {job_id: said[job_id] for job_id in since.job_id.tolist()} == {
        job_id: pytest.approx(pair, rel=1e-5) for job_id, pair in zip(since.job_id.tolist(), expected, strict=True)
    }
    before = {each.job_id: each for each in first.unseen}
    assert len(before) > 100 and before.items() <= {each.job_id: each for each in second.model.unseen}.items()


def test_only_the_first_training_tries_a_model_on_the_newest_jobs(
    past: DurationReplay, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fits = duration.fit_trees, []

    def counted(*given: Any) -> dict[str, str]:
        fits.append(len(given[0]))
        return real(*given)

    monkeypatch.setattr(duration, "fit_trees", counted)
    first = trained(past, config, FIRST_S).model
    assert len(fits) == 2
    trained(past, config, SECOND_S, first)
    assert len(fits) == 3


def test_the_newest_are_kept_and_a_busy_day_is_thinned(
    past: DurationReplay, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duration, "UNSEEN", 100)
    monkeypatch.setattr(duration, "NEW_UNSEEN", 40)
    first = trained(past, config, FIRST_S)
    second = trained(past, config, SECOND_S, first.model)
    assert len(first.newest) == len(second.newest) == 100
    assert list(first.newest.end_s) == sorted(first.newest.end_s)
    new_s = second.newest.end_s[second.newest.end_s >= FIRST_S]
    assert 20 <= len(new_s) <= 40
    assert np.ptp(new_s) > 0.8 * (SECOND_S - FIRST_S), "those of all the time since, not of its last night"


def test_a_user_who_was_forgotten_is_no_evidence(past: DurationReplay, config: Config) -> None:
    first = trained(past, config, FIRST_S).model
    is_kept = np.array(past.features.category("user")) != "u1"
    second = trained(past.select(is_kept), config, SECOND_S, first)
    assert {each.job_id for each in second.model.unseen} <= set(past.job_id[is_kept].tolist())


def test_too_few_unseen_jobs_are_no_judges(past: DurationReplay, config: Config) -> None:
    few = dataclasses.replace(
        trained(past, config, FIRST_S).model, unseen=trained(past, config, FIRST_S).model.unseen[: MIN_UNSEEN - 1]
    )
    assert trained(past, config, FIRST_S, few).model == trained(past, config, FIRST_S).model


def test_a_version_remembers(site_history: pd.DataFrame, config: Config, tmp_path: Path) -> None:
    made = train(site_history, config, NOW_S)
    save(made, tmp_path)
    back = load(tmp_path)
    assert back is not None and back.model == made.model and len(made.model.unseen) > 100
