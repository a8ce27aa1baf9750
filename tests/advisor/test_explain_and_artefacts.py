"""What a person reads, what a program reads, and what is kept on disk."""

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

from advisor.artefacts import current_version, load, save
from advisor.explain import explain, to_json
from advisor.lifecycle import MAX_AGE_DAYS, drift_of, faults_of, trusted
from advisor.memory.calibration import Calibration, Margins
from advisor.service import advise, train
from advisor.versions import prune, roll_back, use, versions
from almanac.config import Config
from almanac.errors import DamageWarning, SchemaVersionError, StoreError
from almanac.records import Advice, ExpectedWait, PriorityAdvice, Request, TierAdvice

NOW_S = 1_750_000_000
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


def one_line(text: str) -> str:
    """The text as before it was wrapped."""
    return " ".join(text.split())


@pytest.fixture
def advice(history_of: History, config: Config) -> Advice:
    history = history_of([{"name": f"train-bert-{n}", "hbm_peak_mib": 21000.0 + 100 * n} for n in range(14)])
    request = Request(user="ann", job_name="train-bert-99", gpu_count=4, constraints="gpu&hbm80g")
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
    advice: Advice, site_history: pd.DataFrame, config: Config
) -> None:
    assert "why" not in explain(advice)
    assert "no trained model is used" in one_line(explain(advice, why=True))
    request = Request(user="u1", job_name="fama-run9", gpu_count=1, constraints="gpu&hbm80g")
    text = explain(advise(request, site_history, train(site_history, config, NOW_S), config, NOW_S), why=True)
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
    assert advice.bound is not None
    assert advice.evidence is not None
    above = 39936 * advice.bound.highest_mib / advice.bound.bound_mib
    assert advice.evidence.changes_above_mib == pytest.approx(above)
    assert f"; a peak above {above / 1024:.1f} GiB would change the advice" in one_line(explain(advice))


def test_waits_are_shown_where_another_tier_is_advised(advice: Advice) -> None:
    waits = (ExpectedWait("hbm40g", 40, 60.0, 30.0, 600.0), ExpectedWait("hbm80g", 12, 7200.0, 3600.0, 14400.0))
    said = one_line(explain(dataclasses.replace(advice, waits=waits)))
    assert "recent waits: hbm40g 1 min (half of 40 jobs waited 30 s to 10 min), hbm80g 2 h (half of 12" in said
    assert "recent waits" not in explain(dataclasses.replace(advice, waits=()))
    assert "recent waits" not in explain(dataclasses.replace(advice, waits=waits[:1])), "nothing to compare with"


@pytest.mark.parametrize(
    ("first_s", "second_s", "differs"),
    [(13, 16, False), (13, 73, False), (13, 74, True), (3600, 4500, False), (3600, 4501, True), (7200, 60, True)],
)
def test_waits_differ_by_more_than_a_minute_and_a_fifth(
    advice: Advice, first_s: float, second_s: float, differs: bool
) -> None:
    waits = tuple(
        ExpectedWait(tier, 40, wait_s, wait_s, wait_s) for tier, wait_s in (("hbm40g", first_s), ("hbm80g", second_s))
    )
    assert ("recent waits" in explain(dataclasses.replace(advice, waits=waits))) is differs


@pytest.mark.parametrize(
    ("worth_wait_s", "said"),
    [
        (44_400.0, "; ranks about 12 h 20 min ahead of a typical job; 40% of recent jobs rank behind it"),
        (-44_400.0, "; ranks about 12 h 20 min behind a typical job; 40% of recent jobs rank behind it"),
        (59.0, "site factor 7,286; 40% of recent jobs rank behind it"),
        (None, "site factor 7,286; 40% of recent jobs rank behind it"),
    ],
)
def test_the_rank_is_said_against_a_typical_job(advice: Advice, worth_wait_s: float | None, said: str) -> None:
    priority = PriorityAdvice(7286, 2400.0, 0.4, worth_wait_s)
    assert said in one_line(explain(dataclasses.replace(advice, priority=priority)))


def test_runs_that_do_not_count_are_named(advice: Advice) -> None:
    excluded = {"short": 3, "low coverage": 1, "odd\x1b[2J": 1200}
    said = one_line(explain(dataclasses.replace(advice, excluded=excluded)))
    assert " not counted: 1 run with low coverage, 1,200 runs (odd?[2J), 3 short runs predicted time: " in said
    assert "not counted" not in explain(dataclasses.replace(advice, excluded={}))


def test_lines_fit_80_columns_and_keep_numbers_with_their_units(advice: Advice) -> None:
    waits = (ExpectedWait("hbm40g", 40, 60.0, 30.0, 600.0), ExpectedWait("hbm80g", 12, 7200.0, 3600.0, 14400.0))
    lines = explain(dataclasses.replace(advice, waits=waits), why=True).split("\n")
    assert len(lines) > 8
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[:-1] if line[-1].isdigit()]


def test_one_familys_runs_alone_support_no_small_risk(history_of: History, config: Config) -> None:
    history = history_of([{"name": f"train-bert-{n}"} for n in range(14)])
    request = Request(user="ann", job_name="train-bert-99", gpu_count=4, constraints="gpu&hbm80g")
    silent = advise(request, history, train(history, config, NOW_S), config, NOW_S)
    assert silent.bound is None
    said = 'no advice yet for "train-bert-#" on 4 GPUs: the site\'s history is too short to judge 14 measured runs.'
    assert said in one_line(explain(silent))


def test_a_death_of_memory_after_a_move_down_is_shown_and_pauses_advice(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{"hbm_peak_mib": 30000.0}] * 8
    rows += [{"hbm_peak_mib": 40200.0, "hbm_capacity_mib": 40960.0, "tier": "hbm40g", "state": "FAILED"}]
    request = Request(user="ann", job_name="train-1", gpu_count=4, constraints="gpu&hbm80g")
    paused = advise(request, history_of(rows), None, config, NOW_S)
    assert paused.tier.tier is None
    assert paused.evidence is not None
    assert paused.evidence.ran_out_mib == 40960
    assert one_line(explain(paused)).startswith(
        'almanac: check the last runs of "train-#": one on a smaller tier than before seems to have run out of GPU '
        "memory. Its memory advice is paused until 2025-07-15."
    )


def test_a_family_that_ran_out_of_memory_is_told_to_ask_for_more(history_of: History, config: Config) -> None:
    rows = [{"hbm_peak_mib": 40200.0, "hbm_capacity_mib": 40960.0, "tier": "hbm40g", "state": "FAILED"}] * 2
    request = Request(user="ann", job_name="train-1", gpu_count=4, constraints="gpu&hbm40g")
    advice = advise(request, history_of(rows), None, config, NOW_S)
    assert (advice.tier.reason, advice.tier.tier) == ("ran out", "hbm80g")
    assert one_line(explain(advice)).startswith(
        'almanac: ask for hbm80g (-C "gpu&hbm80g"), the next larger tier: a run of "train-#" seems to have run out of '
        "memory on 40.0 GiB GPUs."
    )


def test_without_evidence_nothing_is_advised(history_of: History, config: Config) -> None:
    silent = advise(Request(user="eve", job_name="x", gpu_count=4), history_of([{}]), None, config, NOW_S)
    assert not silent.has_evidence
    said = one_line(explain(silent))
    assert said.startswith('almanac: no advice yet for "x" on 4 GPUs: 0 of the 5 measured runs needed.')
    assert silent.tier.tier is None


@examples(0.6)
@given(st.text(max_size=60), st.text(max_size=30))
def test_hostile_text_is_inert(name: str, constraint: str) -> None:
    request = Request(user="eve", job_name=name, constraints=constraint, gpu_count=1)
    said = explain(Advice(request, TierAdvice(None, "no evidence", requested_tier=constraint, note=name)))
    assert all(line.isprintable() for line in said.split("\n"))
    assert len(one_line(said)) < 400


def test_a_model_is_kept_and_read_back(site_history: pd.DataFrame, config: Config, tmp_path: Path) -> None:
    assert load(tmp_path) is None
    calibration = Calibration(
        config.advice.risk, {"family/0/0/0/5": Margins(None, 0.5), "family/0/0/0/4": Margins(1.0, None)}
    )
    trained = dataclasses.replace(train(site_history, config, NOW_S), calibration=calibration)
    save(trained, tmp_path)
    back = load(tmp_path)
    assert back is not None and back.calibration == calibration
    request = Request(user="u1", job_name="fama-run9", gpu_count=1, constraints="gpu&hbm80g")
    assert advise(request, site_history, back, config, NOW_S) == advise(request, site_history, trained, config, NOW_S)


def test_the_newest_version_is_current_and_older_ones_stay(history_of: History, config: Config, tmp_path: Path) -> None:
    first = save(train(history_of([{}] * 6), config, NOW_S), tmp_path)
    second = save(train(history_of([{}] * 7), config, NOW_S + 5), tmp_path)
    assert first != second
    current = load(tmp_path)
    assert current is not None
    assert current.jobs == 7
    assert (tmp_path / "duration" / first).is_dir()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda meta: {**meta, "schema": 99}, SchemaVersionError),
        (lambda meta: {key: value for key, value in meta.items() if key != "site"}, StoreError),
    ],
)
def test_a_damaged_or_foreign_model_is_refused(
    history_of: History, config: Config, tmp_path: Path, change: Callable[[dict], dict], error: type[Exception]
) -> None:
    version = save(train(history_of([{}] * 6), config, NOW_S), tmp_path)
    path = tmp_path / "duration" / version / "meta.json"
    path.chmod(0o600)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(error):
        load(tmp_path)


def test_a_model_file_that_was_altered_is_refused(site_history: pd.DataFrame, config: Config, tmp_path: Path) -> None:
    version = save(train(site_history, config, NOW_S), tmp_path)
    path = next((tmp_path / "duration" / version).glob("*.txt"))
    path.chmod(0o600)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(StoreError):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "../../etc", "20260101T000000Z/../x", "20990101T000000Z"])
def test_a_pointer_to_no_version_is_not_followed(
    history_of: History, config: Config, tmp_path: Path, text: str
) -> None:
    version = save(train(history_of([{}] * 6), config, NOW_S), tmp_path)
    (tmp_path / "duration" / "current").write_text(text)
    with pytest.warns(DamageWarning, match=f"version {version} is used"):
        assert load(tmp_path)


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


def test_one_goes_back_version_by_version(three: list[str], tmp_path: Path) -> None:
    assert [version.name for version in versions(tmp_path)] == three
    assert [version.is_current for version in versions(tmp_path)] == [False, False, True]
    assert roll_back(tmp_path) == three[1]
    current = load(tmp_path)
    assert current is not None
    assert current.jobs == 7
    assert roll_back(tmp_path) == three[0]
    with pytest.raises(StoreError, match="no version to go back to"):
        roll_back(tmp_path)
    use(tmp_path, three[2])
    assert current_version(tmp_path) == three[2]


def test_going_back_passes_over_what_is_damaged(three: list[str], tmp_path: Path) -> None:
    (tmp_path / "hbm" / three[1] / "meta.json").write_text("{")
    assert [bool(version.fault) for version in versions(tmp_path)] == [False, True, False]
    with pytest.raises(StoreError):
        use(tmp_path, three[1])
    assert roll_back(tmp_path) == three[0]


@pytest.mark.parametrize("name", ["20990101T000000Z", "../..", ""])
def test_a_version_that_is_not_there_is_not_used(three: list[str], tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="not a trained version"):
        use(tmp_path, name)
    assert current_version(tmp_path) == three[2]


def test_old_versions_are_removed_but_not_the_one_in_use(three: list[str], tmp_path: Path) -> None:
    use(tmp_path, three[0])
    assert prune(tmp_path, keep=1) == [three[1]]
    assert [version.name for version in versions(tmp_path)] == [three[0], three[2]]
    assert versions(tmp_path / "nothing") == []


def test_versions_of_a_clock_that_was_ahead_are_removed_first(three: list[str], tmp_path: Path) -> None:
    for kind in ("duration", "hbm"):
        for name in ("20990101T000000Z", "20990102T000000Z"):
            (tmp_path / kind / name).mkdir()
    assert prune(tmp_path, 2, three[2]) == ["20990101T000000Z", "20990102T000000Z", three[0]]


def test_a_model_of_a_clock_that_was_ahead_is_not_used(site_history: pd.DataFrame, config: Config) -> None:
    """Its age would stay below the limit for as long."""
    trained = train(site_history, config, NOW_S)
    assert "trained 365 days in the future" in faults_of(trained, config, NOW_S - 365 * 86_400)[0]
    assert faults_of(trained, config, NOW_S - 3600) == []


def test_versions_of_one_second_are_in_order(history_of: History, config: Config, tmp_path: Path) -> None:
    names = [save(train(history_of([{}] * 6), config, NOW_S), tmp_path) for _ in range(11)]
    assert [version.name for version in versions(tmp_path)] == names
    assert roll_back(tmp_path) == names[-2]


def test_a_model_too_old_or_worse_than_the_simplest_is_not_used(site_history: pd.DataFrame, config: Config) -> None:
    trained = train(site_history, config, NOW_S)
    limit_s = MAX_AGE_DAYS * 86400
    assert trusted(trained, config, NOW_S + limit_s) is trained
    old = trusted(trained, config, NOW_S + limit_s + 60)
    assert old is not None
    assert old.model is None
    assert old.calibration == trained.calibration, "the memory bound is not the duration model's fault"
    assert "trained 14 days ago" in faults_of(trained, config, NOW_S + limit_s + 60)[0]
    poor = dataclasses.replace(trained.scores["almanac"], median_abs_log_error=9.0)
    worse = dataclasses.replace(trained, scores={**trained.scores, "almanac": poor})
    assert "9.00" in faults_of(worse, config, NOW_S)[0]
    assert trusted(None, config, NOW_S) is None


def test_a_world_that_changed_raises_an_alarm(site_history: pd.DataFrame, config: Config) -> None:
    moment_s = int(site_history["submit_s"].quantile(0.6))
    trained = train(site_history, config, moment_s)
    calm = drift_of(trained, site_history, config, NOW_S)
    assert calm is not None
    assert calm.alarms == ()
    later = site_history["submit_s"] >= moment_s
    factor = np.where(later, np.random.default_rng(1).choice([0.02, 1.0, 50.0], len(site_history)), 1.0)
    elapsed_s = site_history["elapsed_s"] * factor
    wild = site_history.assign(elapsed_s=elapsed_s, end_s=(site_history["start_s"] + elapsed_s).astype("int64"))
    alarm = drift_of(trained, wild, config, int(wild["end_s"].max()) + 1)
    assert alarm is not None
    assert len(alarm.alarms) == 2
    assert drift_of(trained, site_history, config, moment_s + 3600) is None, "too few jobs have ended since"


def test_what_a_killed_training_left_behind_is_passed_over(history_of: History, config: Config, tmp_path: Path) -> None:
    save(train(history_of([{}] * 6), config, NOW_S), tmp_path)
    (tmp_path / "duration" / ".new-killed").mkdir()
    (tmp_path / "duration" / ".new-killed" / "meta.json").write_text("{")
    kept = load(tmp_path)
    assert kept is not None
    assert kept.jobs == 6
