"""A script's runs as evidence for a job whose name tells little."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from advisor.duration.features import submission_of, submissions
from advisor.duration.replay import recorded_requests
from advisor.explain import short_text
from advisor.memory.calibration import Calibration, Margins, class_of, pools_of
from advisor.memory.decide import decide_memory
from advisor.memory.evidence import Evidence
from advisor.memory.peak_store import MAX_FAMILIES, remember_peaks
from almanac.config import Config
from almanac.records import Advice, JobRequest

NOW_S = 1_750_000_000
RUN = "a1b2c3d4e5f60718"
History = Callable[[list[dict[str, Any]]], pd.DataFrame]
WORDS = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath")


def named(*names: str, script: str | None = RUN, **row: Any) -> list[dict[str, Any]]:
    """A run of the script under each of these names."""
    return [{"name": name, "script_key": script, **row} for name in names]


def evidence_of(history: pd.DataFrame, config: Config, name: str = "zebra", script: str = RUN) -> Evidence:
    request = JobRequest(user="ann", job_name=name, gpu_count=4, submit_s=NOW_S, script_key=script)
    store = remember_peaks([request.user], history, NOW_S, config.advice, config.tiers)
    return store.evidence(submission_of(request, config.tiers), NOW_S)


@pytest.mark.parametrize("name", ["zebra", "", "amber"])
def test_runs_of_the_script_stand_for_a_name_that_is_new_each_time(
    history_of: History, config: Config, name: str
) -> None:
    evidence = evidence_of(history_of(named(*WORDS)), config, name)
    assert (evidence.runs, evidence.highest_mib) == (8, 20000.0)


def test_people_are_told_that_it_is_the_script(history_of: History, config: Config) -> None:
    """The bounds are calibrated with those of similar names."""
    evidence = evidence_of(history_of(named(*WORDS)), config)
    assert (evidence.scope, evidence.told_scope) == ("similar", "script")
    margins = {pool: Margins(1.0, 1.0) for pool in pools_of(class_of(evidence))}
    request = JobRequest(user="ann", job_name="zebra", gpu_count=4, constraints="gpu&hbm80g")
    memory = decide_memory(request, evidence, Calibration(config.advice.risk, margins), config)
    assert (memory.bound.scope, memory.evidence.scope) == ("script", "script")
    advice = Advice(request, memory.tier, bound=memory.bound, evidence=memory.evidence)
    assert short_text(advice).startswith("your last 8 runs of this script peaked at ")


@pytest.mark.parametrize("script", ["", "0" * 16])
def test_another_script_or_none_has_no_part_in_it(history_of: History, config: Config, script: str) -> None:
    assert evidence_of(history_of(named(*WORDS)), config, script=script).runs == 0
    assert evidence_of(history_of(named(*WORDS, script=script or None)), config).runs == 0


@pytest.mark.parametrize(
    ("rows", "runs"),
    [
        (named(*WORDS[:2]), 0), (named(*WORDS[:3]), 3), (named(*WORDS, user="bob"), 0), (named(*WORDS, gpu_count=8), 0),
        # a launcher: its runs are those of programs with names of their own
        ([row for word in WORDS for row in named(word, word)], 0),
    ],
)  # fmt: skip
def test_runs_of_a_few_names_of_others_and_of_a_launcher_say_too_little(
    history_of: History, config: Config, rows: list[dict[str, Any]], runs: int
) -> None:
    assert evidence_of(history_of(rows), config).runs == runs


def test_a_name_with_enough_runs_speaks_for_itself(history_of: History, config: Config) -> None:
    rows = named(*WORDS, hbm_peak_mib=70000.0) + named(*["zebra"] * 5, hbm_peak_mib=9000.0)
    evidence = evidence_of(history_of(rows), config)
    assert (evidence.scope, evidence.runs, evidence.highest_mib) == ("family", 5, 9000.0)


def test_a_reserving_family_learns_nothing_from_its_script(history_of: History, config: Config) -> None:
    reserved = {"hbm_peak_mib": float("nan"), "hbm_evidence": "preallocated"}
    rows = named(*WORDS) + named("zebra", **reserved)
    assert evidence_of(history_of(rows), config).runs == 0


def test_an_array_is_one_submission(history_of: History, config: Config) -> None:
    tasks = named(*["amber"] * 20, is_array=True, submit_s=NOW_S - 90_000)
    assert evidence_of(history_of(tasks), config).runs == 0
    assert evidence_of(history_of([*tasks, *named(*WORDS[1:])]), config).runs == 27


def test_what_the_script_has_open_counts(history_of: History, config: Config) -> None:
    waiting = {"end_s": NOW_S + 50, "submit_s": NOW_S - 50, "start_s": NOW_S - 40}
    rows = named(*WORDS) + named(*(f"{word}-new" for word in ("quail", "raven", "tiger")), **waiting)
    assert evidence_of(history_of(rows), config).open_jobs == 3


def test_a_death_of_memory_under_one_name_counts_for_the_next(history_of: History, config: Config) -> None:
    small = {"hbm_capacity_mib": 40960.0, "tier": "hbm40g", "state": "FAILED", "hbm_peak_mib": 40900.0}
    evidence = evidence_of(history_of(named(*WORDS) + named("yak", **small)), config)
    assert evidence.oom is not None and evidence.oom.capacity_mib == 40960.0


def test_a_record_and_a_request_name_the_same_script(history_of: History, config: Config) -> None:
    history = history_of(named("amber") + named("birch", script=None))
    requests = recorded_requests(history, config.tiers)
    assert [request.script_key for request in requests] == [RUN, ""]
    live = [submission_of(request, config.tiers) for request in requests]
    assert [job.script_key for job in live] == [job.script_key for job in submissions(history)]
    assert [job.script_key for job in submissions(history_of([{}]))] == [""], "a history without scripts"


def test_neither_names_nor_scripts_of_one_user_grow_without_end(history_of: History, config: Config) -> None:
    """Names that are forgotten as families and come again are no new ones."""
    letters = "bdfhjlnprtvxz"
    many = [f"{a * 3}{b * 3}{c * 3}" for a in letters for b in letters for c in "aei"]
    assert len(many) > MAX_FAMILIES + len(WORDS)
    rare = dataclasses.replace(config, advice=dataclasses.replace(config.advice, risk=0.001))
    assert evidence_of(history_of(named(*many)), rare, "zebra").runs == MAX_FAMILIES
    assert evidence_of(history_of(named(*many, *many[-200:])), rare, "zebra").runs == MAX_FAMILIES - 200
    others = [row for number, word in enumerate(many) for row in named(word, script=f"{number:016x}")]
    assert evidence_of(history_of(named(*WORDS) + others), config).runs == 0
