"""Advice as text and as JSON, trained versions on disk, and the trust in them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.artefacts import load, prune, roll_back, save, use, versions
from advisor.explain import explain, to_json
from advisor.from_store import MAX_AGE_DAYS, drift_of, faults_of, trusted
from advisor.memory.calibration import Calibration, Margins
from advisor.service import Trained, advise, train
from almanac.config import Config
from almanac.errors import DamageWarning, SchemaVersionError, StoreError
from almanac.records import Advice, JobRequest, PriorityAdvice, TierAdvice, WaitGain

NOW_S = 1_750_000_000
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


def one_line(text: str) -> str:
    """The text as before it was wrapped."""
    return " ".join(text.split())


@pytest.fixture
def advice(history_of: History, config: Config) -> Advice:
    history = history_of([{"name": f"train-bert-{n}", "hbm_peak_mib": 21000.0 + 100 * n} for n in range(14)])
    request = JobRequest(user="ann", job_name="train-bert-99", gpu_count=4, constraints="gpu&hbm80g")
    # a site whose record has calibrated growing families of 13 to 24 runs
    calibration = Calibration(config.advice.risk, {"family/0/2/0/2": Margins(2.0, 2.0)})
    trained = dataclasses.replace(train(history, config, NOW_S), calibration=calibration)
    return advise(request, history, trained, config, NOW_S)


def test_the_text_names_evidence_bound_risk_and_option(advice: Advice) -> None:
    text = one_line(explain(advice))
    assert text.startswith('almanac: ask for hbm40g (-C "gpu&hbm40g") instead of hbm80g: your last 14 runs of ')
    assert '"train-bert-#" peaked at 21.8 GiB per GPU; about 1 in 100 such jobs needs more than ' in text
    assert "predicted time: 10 min, 40 min of GPU-time" in text


def test_why_tells_what_time_and_priority_are_made_of(
    advice: Advice, site_history: pd.DataFrame, config: Config, trained: Trained
) -> None:
    assert "why" not in explain(advice)
    assert "no trained model is used" in one_line(explain(advice, why=True))
    request = JobRequest(user="u1", job_name="fama-run9", gpu_count=1, constraints="gpu&hbm80g")
    text = explain(advise(request, site_history, trained, config, NOW_S), why=True)
    assert "the site's model predicts" in one_line(text)
    assert "why this priority" in text
    assert "usually" in text, "the interval"


def test_the_json_holds_the_reasons(advice: Advice) -> None:
    data = json.loads(json.dumps(to_json(advice)))
    assert data["tier"]["tier"] == "hbm40g"
    assert data["bound"]["runs"] == 14
    assert data["bound"]["risk"] == 0.01
    assert data["has_evidence"] is True
    assert data["evidence"]["newest_peaks_mib"][-1] == pytest.approx(22300)
    assert data["evidence"]["paused_until_s"] is None


def test_the_text_says_since_when_and_what_would_change_it(advice: Advice) -> None:
    # of 39 GiB usable, as far below as the highest peak is below the bound
    above = 39936 * advice.bound.highest_mib / advice.bound.bound_mib
    assert advice.evidence.changes_above_mib == pytest.approx(above)
    assert f"; a peak above {above / 1024:.1f} GiB would change the advice" in one_line(explain(advice))


def test_the_gain_of_a_change_is_said(advice: Advice) -> None:
    gains = (WaitGain("hbm80g", 40, 2400.0), WaitGain("hbm141g", 40, 9000.0))
    said = one_line(explain(dataclasses.replace(advice, gains=gains)))
    gpus = advice.request.gpu_count
    assert f" gain: it starts about 40 min earlier (half of such jobs did) and frees {gpus} hbm80g for others " in said
    assert f" gain: it frees {gpus} hbm80g for others " in one_line(explain(advice))
    kept = dataclasses.replace(advice, tier=TierAdvice("hbm40g", "fits"), gains=gains)
    assert "gain" not in explain(kept)


@pytest.mark.parametrize(
    ("priority", "said"),
    [(PriorityAdvice(7286, 2400.0, 0.4, 4.0), " priority: by its predicted time, this job goes before 40% of recent"),
     (PriorityAdvice(7286, 2400.0, None, None), "")],
)  # fmt: skip
def test_the_priority_is_said_against_recent_jobs(advice: Advice, priority: PriorityAdvice, said: str) -> None:
    shown = explain(dataclasses.replace(advice, priority=priority))
    assert said in one_line(shown)
    assert ("priority" in shown) is bool(said)


def test_runs_that_do_not_count_are_named(advice: Advice) -> None:
    excluded = {"short": 3, "low coverage": 1, "odd\x1b[2J": 1200}
    said = one_line(explain(dataclasses.replace(advice, excluded=excluded)))
    assert " not counted: 1 run with low coverage, 1,200 runs (odd?[2J), 3 short runs predicted time: " in said
    assert "not counted" not in explain(dataclasses.replace(advice, excluded={}))


def test_lines_fit_80_columns_and_keep_numbers_with_their_units(advice: Advice) -> None:
    lines = explain(dataclasses.replace(advice, gains=(WaitGain("hbm80g", 40, 2400.0),)), why=True).split("\n")
    assert len(lines) > 8
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[:-1] if line[-1].isdigit()]


def test_one_familys_runs_alone_support_no_small_risk(history_of: History, config: Config) -> None:
    history = history_of([{"name": f"train-bert-{n}"} for n in range(14)])
    request = JobRequest(user="ann", job_name="train-bert-99", gpu_count=4, constraints="gpu&hbm80g")
    silent = advise(request, history, train(history, config, NOW_S), config, NOW_S)
    assert silent.bound is None
    said = 'no advice yet for "train-bert-#" on 4 GPUs: the site\'s history is too short to judge 14 measured runs.'
    assert said in one_line(explain(silent))


def test_a_death_of_memory_after_a_move_down_is_shown_and_pauses_advice(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{"hbm_peak_mib": 30000.0}] * 8
    rows += [{"hbm_peak_mib": 40200.0, "hbm_capacity_mib": 40960.0, "tier": "hbm40g", "state": "FAILED"}]
    request = JobRequest(user="ann", job_name="train-1", gpu_count=4, constraints="gpu&hbm80g")
    paused = advise(request, history_of(rows), None, config, NOW_S)
    assert paused.tier.tier is None
    assert paused.evidence.ran_out_mib == 40960
    assert one_line(explain(paused)).startswith(
        'almanac: check the last runs of "train-#": one on a smaller tier than before seems to have run out of GPU '
        "memory. Its memory advice is paused until 2025-07-15."
    )


def test_a_family_that_ran_out_of_memory_is_told_to_ask_for_more(history_of: History, config: Config) -> None:
    rows = [{"hbm_peak_mib": 40200.0, "hbm_capacity_mib": 40960.0, "tier": "hbm40g", "state": "FAILED"}] * 2
    request = JobRequest(user="ann", job_name="train-1", gpu_count=4, constraints="gpu&hbm40g")
    advice = advise(request, history_of(rows), None, config, NOW_S)
    assert (advice.tier.reason, advice.tier.tier) == ("ran out", "hbm80g")
    assert one_line(explain(advice)).startswith(
        'almanac: ask for hbm80g (-C "gpu&hbm80g"), the next larger tier: a run of "train-#" seems to have run out of '
        "memory on 40.0 GiB GPUs."
    )


def test_without_evidence_nothing_is_advised(history_of: History, config: Config) -> None:
    silent = advise(JobRequest(user="eve", job_name="x", gpu_count=4), history_of([{}]), None, config, NOW_S)
    assert not silent.has_evidence
    said = one_line(explain(silent))
    assert said.startswith('almanac: no advice yet for "x" on 4 GPUs: 0 of the 3 measured runs needed.')
    assert silent.tier.tier is None


@examples(0.6)
@given(st.text(max_size=60), st.text(max_size=30))
def test_hostile_text_is_inert(name: str, constraint: str) -> None:
    request = JobRequest(user="eve", job_name=name, constraints=constraint, gpu_count=1)
    said = explain(Advice(request, TierAdvice(None, "no evidence", requested_tier=constraint, note=name)))
    assert all(line.isprintable() for line in said.split("\n"))
    assert len(one_line(said)) < 400


def test_a_model_is_kept_and_read_back(
    site_history: pd.DataFrame, config: Config, tmp_path: Path, trained: Trained
) -> None:
    assert load(tmp_path) is None
    calibration = Calibration(
        config.advice.risk, {"family/0/0/0/5": Margins(None, 0.5), "family/0/0/0/4": Margins(1.0, None)}
    )
    trained = dataclasses.replace(trained, calibration=calibration)
    save(trained, tmp_path)
    back = load(tmp_path)
    assert back is not None and back.calibration == calibration
    request = JobRequest(user="u1", job_name="fama-run9", gpu_count=1, constraints="gpu&hbm80g")
    assert advise(request, site_history, back, config, NOW_S) == advise(request, site_history, trained, config, NOW_S)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [("meta.json", lambda text: json.dumps({**json.loads(text), "schema": 99}), SchemaVersionError),
     ("meta.json", lambda text: json.dumps({**json.loads(text), "site": None}), StoreError),
     ("*.txt", lambda text: text + "\n", StoreError)],
)  # fmt: skip
def test_a_damaged_or_foreign_model_is_refused(
    trained: Trained, tmp_path: Path, name: str, change: Callable[[str], str], error: type[Exception]
) -> None:
    version = save(trained, tmp_path)
    path = next((tmp_path / "duration" / version).glob(name))
    path.chmod(0o600)
    path.write_text(change(path.read_text()))
    with pytest.raises(error):
        load(tmp_path)


def test_a_damaged_current_version_falls_back_to_the_newest_whole_one(three: list[str], tmp_path: Path) -> None:
    (tmp_path / "duration" / three[2] / "meta.json").write_text("[" * 100_000)
    (tmp_path / "hbm" / three[1] / "meta.json").write_text("{")
    with pytest.warns(DamageWarning, match=f"version {three[0]} is used"):
        assert load(tmp_path).jobs == 6  # type: ignore[union-attr]
    (tmp_path / "duration" / three[0] / "meta.json").unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        load(tmp_path)


@pytest.fixture
def three(history_of: History, config: Config, tmp_path: Path) -> list[str]:
    """Three versions, the newest of which is used."""
    return [save(train(history_of([{}] * (6 + number)), config, NOW_S + number), tmp_path) for number in range(3)]


def test_going_back_passes_over_what_is_damaged(three: list[str], tmp_path: Path) -> None:
    (tmp_path / "hbm" / three[1] / "meta.json").write_text("{")
    assert [bool(version.fault) for version in versions(tmp_path)] == [False, True, False]
    with pytest.raises(StoreError):
        use(tmp_path, three[1])
    assert roll_back(tmp_path) == three[0]


def test_old_versions_are_removed_but_not_the_one_in_use(three: list[str], tmp_path: Path) -> None:
    use(tmp_path, three[0])
    assert prune(tmp_path, keep=1) == [three[1]]
    assert [version.name for version in versions(tmp_path)] == [three[0], three[2]]
    assert versions(tmp_path / "nothing") == []


def test_a_model_of_a_clock_that_was_ahead_is_not_used(trained: Trained) -> None:
    """Its age would stay below the limit for as long."""
    assert "trained 365 days in the future" in faults_of(trained, NOW_S - 365 * 86_400)[0]
    assert faults_of(trained, NOW_S - 3600) == []


def test_a_model_too_old_or_worse_than_the_simplest_is_not_used(trained: Trained) -> None:
    limit_s = MAX_AGE_DAYS * 86400
    assert trusted(trained, NOW_S + limit_s) is trained
    old = trusted(trained, NOW_S + limit_s + 60)
    assert old.model is None
    assert old.calibration == trained.calibration, "the memory bound is not the duration model's fault"
    assert "trained 14 days ago" in faults_of(trained, NOW_S + limit_s + 60)[0]
    poor = dataclasses.replace(trained.scores["almanac"], median_abs_log_error=9.0)
    worse = dataclasses.replace(trained, scores={**trained.scores, "almanac": poor})
    assert "9.00" in faults_of(worse, NOW_S)[0]
    assert trusted(None, NOW_S) is None


def test_a_world_that_changed_raises_an_alarm(site_history: pd.DataFrame, config: Config) -> None:
    moment_s = int(site_history["submit_s"].quantile(0.6))
    trained = train(site_history, config, moment_s)
    assert drift_of(trained, site_history, NOW_S).alarms == ()  # type: ignore[union-attr]
    later = site_history["submit_s"] >= moment_s
    factor = np.where(later, np.random.default_rng(1).choice([0.02, 1.0, 50.0], len(site_history)), 1.0)
    elapsed_s = site_history["elapsed_s"] * factor
    wild = site_history.assign(elapsed_s=elapsed_s, end_s=(site_history["start_s"] + elapsed_s).astype("int64"))
    assert len(drift_of(trained, wild, int(wild["end_s"].max()) + 1).alarms) == 2  # type: ignore[union-attr]
    assert drift_of(trained, site_history, moment_s + 3600) is None, "too few jobs have ended since"
