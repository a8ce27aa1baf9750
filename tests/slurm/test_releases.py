"""The tables of releases and states, and the forms of values that they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm.nodes import SlurmNode, nodes_of
from slurm.queue import states_of
from slurm.releases import RELEASES, first_with, number, records, release_of, words
from slurm.states import HOLDS_NODES, JOB_ENDED, JOB_STATES, JOB_WAITS, NODE_STATES, is_in_service
from slurm_hooks.mig import planning

FIXTURES = Path(__file__).parent / "fixtures"


def test_the_table_names_each_recorded_release_once_and_in_order() -> None:
    assert sorted(each.recorded for each in RELEASES if each.recorded) == sorted(
        path.name for path in FIXTURES.iterdir() if path.is_dir()
    )
    assert [each.number for each in RELEASES] == sorted({each.number for each in RELEASES})
    assert all(str(release_of(each.recorded)) == str(each) for each in RELEASES if each.recorded)


def test_a_release_has_what_the_last_one_before_it_has() -> None:
    for text, short, changes, counts in [
        ("22.05.8", "22.05", False, False), ("slurm-wlm 22.05.8", "22.05", False, False),
        ("20.11", "20.11", False, False), ("23.02.1", "23.02", False, False), ("24.05.0", "24.05", False, True),
        ("24.11.5", "24.11", True, True), ("25.05.3", "25.05", True, True), ("26.5.0", "26.05", True, True),
        ("31.11.0", "31.11", True, True),
    ]:  # fmt: skip
        found = release_of(text)
        assert (str(found), found.changes_gpu_type, found.has_suspend_counts) == (short, changes, counts)


@pytest.mark.parametrize("text", ["", "no", "124.11", "24", "24.111", "v1.24.11"])
def test_text_that_names_no_release(text: str) -> None:
    assert release_of(text) is None


@pytest.mark.parametrize("release", [each for each in RELEASES if each.recorded], ids=str)
def test_only_some_releases_show_the_submit_line(release: Any) -> None:
    name = "odd_queue.json" if release.recorded == "25.11.7" else "squeue.json"
    jobs = json.loads((FIXTURES / release.recorded / name).read_bytes())["jobs"]
    assert any("submit_line" in job for job in jobs) is release.shows_submit_line
    assert str(first_with("shows_submit_line")) == "25.11"


def test_numbers_of_either_form() -> None:
    for value, expected in [
        (5, 5), (0, 0), (True, None), ("5", None), (None, None), (5.0, None), ({}, None), (2**53, None),
        ({"set": True, "infinite": False, "number": 5}, 5), ({"set": False, "infinite": False, "number": 5}, None),
        ({"set": True, "infinite": True, "number": 5}, None), ({"set": True, "number": "5"}, None),
    ]:  # fmt: skip
        assert number(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ()), ("", ()), ("IDLE", ("IDLE",)), (["IDLE", "DRAIN"], ("IDLE", "DRAIN")), (["IDLE", 3], None), (3, None)],
)
def test_words_of_either_form(value: Any, expected: tuple[str, ...] | None) -> None:
    assert words(value) == expected


def test_bytes_that_are_not_utf8_are_read() -> None:
    assert records(b'{"jobs": [{"name": "bad\xff\xfe"}, 3]}', "jobs") == [{"name": "bad\ufffd\ufffd"}]
    assert [records(data, "jobs") for data in (b"[" * 9999, b"", b"[]", b'{"jobs": {}}')] == [None] * 4


def test_every_recorded_state_has_a_meaning() -> None:
    jobs, nodes = set[str](), set[str]()
    for path in FIXTURES.glob("*/*.json"):
        data = path.read_bytes()
        if path.name.endswith(("queue.json", "expediting.json")):
            jobs.update(*map(states_of, records(data, "jobs") or ()))
        nodes.update(*(node.states for node in nodes_of(records(data, "nodes") or ())))
    assert jobs >= {"PENDING", "RUNNING", "SUSPENDED", "EXPEDITING", "REQUEUE_HOLD", "TIMEOUT"}
    assert nodes >= {"IDLE", "MIXED", "DRAIN", "POWER_DOWN"}
    assert jobs <= JOB_STATES.keys() and nodes <= NODE_STATES.keys()


def test_no_job_state_means_two_of_waiting_holding_and_ended() -> None:
    assert not JOB_WAITS & HOLDS_NODES and not JOB_ENDED & (JOB_WAITS | HOLDS_NODES)


def test_one_list_of_states() -> None:
    for states, is_in in [
        ({"IDLE"}, True), ({"MIXED", "COMPLETING", "PLANNED"}, True), ({"IDLE", "CLOUD", "DYNAMIC_NORM"}, True),
        ({"ALLOCATED", "DYNAMIC_FUTURE"}, True), ({"IDLE", "DRAIN"}, False), ({"IDLE", "POWERED_DOWN"}, False),
        ({"IDLE", "RESERVED"}, False), ({"DOWN"}, False), ({"PLANNED"}, False),
        ({"UNKNOWN_OF_A_LATER_RELEASE", "IDLE"}, False), (set(), False),
    ]:  # fmt: skip
        node = SlurmNode("n1", frozenset(states), (), "gpu:a100:4", ())
        assert is_in_service(states) is planning.is_in_service(node) is node.takes_jobs is is_in
