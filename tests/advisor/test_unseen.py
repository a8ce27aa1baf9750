"""A model is judged on what was really said of jobs before it had seen them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from advisor.artefacts import load, save
from advisor.duration import model as duration
from advisor.duration.model import MIN_UNSEEN, DurationModel, fit
from advisor.duration.rank_scale import PREDICTED_AS_IT_IS
from advisor.evaluation.replay import DurationReplay, replay_durations
from advisor.service import train
from almanac.config import Config

NOW_S = 1_750_000_000
DAY_S = 86_400
FIRST_S, SECOND_S = NOW_S - 20 * DAY_S, NOW_S - 8 * DAY_S


@pytest.fixture(scope="module")
def past(site_history: pd.DataFrame, config: Config) -> DurationReplay:
    return replay_durations(site_history)


def trained(past: DurationReplay, config: Config, now_s: int, previous: DurationModel | None = None) -> duration.Fitted:
    fitted = fit(past.select(past.end_s < now_s), config.training, now_s, previous)
    assert fitted is not None and fitted.parts is not None
    return fitted


def test_what_ended_since_is_judged_by_the_model_of_then(past: DurationReplay, config: Config) -> None:
    first = trained(past, config, FIRST_S).model
    second = trained(past, config, SECOND_S, first)
    since = past.select((past.end_s >= FIRST_S) & (past.end_s < SECOND_S))
    then = first.parts(since.features, since.rolling_s)
    said = {each.job_id: (each.mean_s, each.middle_s) for each in second.model.unseen}
    expected = zip(then.mean_s.tolist(), then.middle_s.tolist(), strict=True)
    assert {job_id: said[job_id] for job_id in since.job_id.tolist()} == {
        job_id: pytest.approx(pair, rel=1e-5) for job_id, pair in zip(since.job_id.tolist(), expected, strict=True)
    }
    before = {each.job_id: each for each in first.unseen}
    assert len(before) > 100 and before.items() <= {each.job_id: each for each in second.model.unseen}.items()


def test_only_the_first_training_tries_a_model_on_the_newest_jobs(
    past: DurationReplay, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fits = duration.fit_trees, []

    def counted(*given: Any) -> str:
        fits.append(len(given[0]))
        return real(*given)

    monkeypatch.setattr(duration, "fit_trees", counted)
    first = trained(past, config, FIRST_S).model
    assert len(fits) == 6
    trained(past, config, SECOND_S, first)
    assert len(fits) == 9


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


def test_a_version_remembers_and_an_older_ones_lack_is_no_fault(
    site_history: pd.DataFrame, config: Config, tmp_path: Path
) -> None:
    made = train(site_history, config, NOW_S)
    save(made, tmp_path)
    back = load(tmp_path)
    assert back is not None and back.model == made.model
    (meta,) = (tmp_path / "duration").glob("*/meta.json")
    content = json.loads(meta.read_text())
    del content["model"]["unseen"], content["model"]["trained_s"], content["model"]["rank_scale"]
    meta.write_text(json.dumps(content))
    older = load(tmp_path)
    assert older is not None and older.model is not None and older.model.unseen == ()
    assert older.model.rank_scale == PREDICTED_AS_IT_IS
