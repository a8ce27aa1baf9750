"""A training learns from a bounded number of jobs, and what it says of them is what it would say without the bound."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from advisor.duration import model as duration
from advisor.duration import trees
from advisor.duration.features import submissions
from advisor.duration.model import DurationModel, fit, learned_rows
from advisor.evaluation.durations import evaluate
from advisor.evaluation.replay import DurationReplay, replay_durations
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
    assert few.model is not None and whole.model is not None
    assert few.model.texts != whole.model.texts
    assert (few.jobs, few.since_s, few.until_s) == (whole.jobs, whole.since_s, whole.until_s)
    assert few.site == whole.site and few.site.overall.number == len(site_history)
    assert few == train(site_history.sample(frac=1.0, random_state=3), config, NOW_S), "whatever the order of rows"


def test_a_back_test_learns_from_as_few(
    site_history: pd.DataFrame, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = trees.fit_trees

    def counted(past: DurationReplay, *rest: object) -> str:
        sizes.append(len(past))
        return real(past, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(duration, "fit_trees", counted)
    monkeypatch.setattr(duration, "LEARNED", 300)
    monkeypatch.setattr(duration, "UNSEEN", 100)
    monthly = dataclasses.replace(config.training, retrain_hours=240)
    evaluate(site_history, dataclasses.replace(config, training=monthly))
    assert 0 < max(sizes) <= 400
