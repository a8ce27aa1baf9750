"""The waits file, and its numbers from recorded output of squeue and sinfo."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from advisor.types.decide import GpuTypeRules, TypeRunTime, TypeWait, decide_type
from advisor.types.queue_view import types_on
from almanac.config import Config
from almanac.errors import ConfigError, FileFormatError
from almanac.published.files import to_plain, usable
from almanac.published.outgoing import Outgoing
from almanac.submit_config import SITE, GpuType
from slurm.nodes import SlurmNode
from slurm.queue import Queue
from slurm.queued_job import QueuedJob
from slurm_hooks.advice.kinds import WAITS as WAITS_KIND
from slurm_hooks.advice.kinds import WaitsFile
from slurm_hooks.advice.type_files import publish_waits, queue_waits, read_gpu_queue, told_waits, types_of
from slurm_hooks.distribute import distribute

NOW_S = 1_795_256_100
FIXTURES = Path(__file__).parents[2] / "slurm/fixtures"
TYPES = (GpuType(name="a100", gres="a100"), GpuType(name="h100", constraint="h100_80"))
WAITS = [(size, TypeWait("a100", 300.0, 0.0, 4200.0 * size, NOW_S)) for size in (1, 4)]
FILE = WaitsFile(NOW_S, TYPES, (*WAITS, (2, TypeWait("h100", 0.0, 0.0, 0.0, NOW_S))), told=(WAITS[1],))


def history(**columns: Any) -> pd.DataFrame:
    """Jobs of 4 GPUs on a100, one every 10 minutes, that started at once."""
    number = len(next(iter(columns.values()), range(200)))
    start_s = NOW_S - 600 * np.arange(number, 0, -1)
    texts = {
        "user": "bob",
        "name_key": "k",
        "state": "COMPLETED",
        "gpu_type": "a100",
        "constraints": "",
        "partition": "gpu",
    }
    frame = {"job_id": range(number), "submit_s": start_s, "start_s": start_s, "end_s": start_s + 60.0, "gpu_count": 4}
    return pd.DataFrame({**frame, **texts, "gpu_type": "a100", "is_array": False, **columns})


def live(name: str, gpus: int, start_s: int | None = None, **other: Any) -> QueuedJob:
    state, node = ("RUNNING", "n1") if start_s else ("PENDING", "")
    return QueuedJob(
        7, "7", NOW_S - 5000, "alice", name, partition="gpu", gpu_count=gpus, time_limit_s=3600, start_s=start_s,
        states=frozenset({state}), node_list=node, priority=100, reason="Resources", **other,
    )  # fmt: skip


def test_the_next_larger_size_counts_and_old_or_future_waits_are_none() -> None:
    assert [wait.high_s for wait in FILE.of_size(2, NOW_S)] == [16_800.0, 0.0]
    assert [wait.gpu_type for wait in FILE.of_size(3, NOW_S + 600)] == ["a100"]
    assert FILE.of_size(2, NOW_S + 601) == FILE.of_size(2, NOW_S - 1) == FILE.of_size(0, NOW_S) == ()
    assert FILE.of_size(5, NOW_S) == ()


def test_a_wait_is_told_for_its_own_class_of_sizes() -> None:
    assert [wait.high_s for wait in FILE.told_of(3, NOW_S + 600)] == [16_800.0], "of 3 to 4 GPUs"
    assert FILE.told_of(2, NOW_S) == FILE.told_of(0, NOW_S) == FILE.told_of(4, NOW_S + 601) == ()


def test_files_of_the_release_before_and_after_are_read() -> None:
    """The release before had no waits to tell; its reader ignores them."""
    own = json.loads(WAITS_KIND.render(FILE))
    of_before = {name: value for name, value in own.items() if name != "told"}
    assert own.keys() - of_before.keys() == {"told"} and own["format"] == 1
    found = WAITS_KIND.parse(json.dumps(of_before).encode()).value
    assert found.waits == FILE.waits and found.told == ()
    later = WAITS_KIND.parse(json.dumps({**own, "of_later": [[1, WAITS[0][1].gpu_type]]}).encode())
    assert later.value == FILE and later.unknown == ("of_later",)


@pytest.mark.parametrize(
    "change",
    [
        {"types": TYPES[:1]},
        {"types": (*TYPES, TYPES[0])},
        {"waits": ((1, TypeWait("a100", 300.0, 400.0, 500.0, NOW_S)),)},
        {"waits": ((1, TypeWait("a100", 300.0, 0.0, 200.0, NOW_S)),)},
        {"told": ((1, TypeWait("v100", 300.0, 0.0, 400.0, NOW_S)),)},
    ],
)
def test_waits_that_contradict_each_other_are_not_used(change: dict[str, Any]) -> None:
    document = {**json.loads(WAITS_KIND.render(FILE)), **to_plain(change)}
    with pytest.raises(FileFormatError):
        WAITS_KIND.parse(json.dumps(document).encode())


def test_a_published_file_is_everybodys_to_read_and_nobodys_to_write(tmp_path: Path) -> None:
    root = tmp_path / "advice"
    publish_waits(Outgoing(tmp_path / "outgoing"), FILE)
    publish_waits(Outgoing(tmp_path / "outgoing"), FILE)
    Outgoing(tmp_path / "outgoing").write([("_site", "advice", b"of the publish before\n")])
    distribute(tmp_path / "outgoing", root, None)
    path = root / "user/_site/waits"
    assert path.stat().st_mode & 0o7777 == 0o444
    assert path.parent.stat().st_mode & 0o7777 == 0o711
    assert usable(WAITS_KIND, root, SITE, NOW_S + 10) == FILE
    assert usable(WAITS_KIND, root, SITE, NOW_S + 700) is None
    assert sorted(each.name for each in root.iterdir()) == [".lock", "user"]
    path.unlink()
    os.mkfifo(path)
    assert usable(WAITS_KIND, root, SITE, NOW_S) is None


def no_durations(requests: Any) -> list[None]:
    return [None] * len(requests)


BY_GRES = (GpuType(name="a100", gres="a100"), GpuType(name="h100", gres="h100"))


def test_a_snapshot_becomes_waits_by_type() -> None:
    nodes = [
        SlurmNode("n1", frozenset({"MIXED"}), gres="gpu:a100:4(S:0-1)", partitions=("gpu",)),
        SlurmNode("n2", frozenset({"IDLE"}), gres="gpu:h100:2", partitions=("gpu",)),
        SlurmNode("n3", frozenset({"IDLE", "DRAIN"}), gres="gpu:h100:8", partitions=("gpu",)),
        SlurmNode("n4", frozenset({"IDLE"}), gres="gpu:1g.10gb:7", partitions=("gpu",)),
    ]
    queue = Queue((live("train", 4, NOW_S - 1000, gpu_type="a100"), live("secret", 4, gpu_type="a100")))
    found = queue_waits(queue, nodes, no_durations, types_of(Config(), nodes), NOW_S)
    waits = {(wait.gpu_type, size): wait.wait_s for size, wait in found}
    assert set(waits) == {("a100", 1), ("a100", 2), ("a100", 4), ("h100", 1), ("h100", 2)}
    assert waits["a100", 1] == 800 + 1800  # half of each time limit: nothing predicts
    assert waits["h100", 2] == 0
    held = replace(queue.jobs[1], reason="JobHeldUser", priority=0)
    found = queue_waits(Queue((queue.jobs[0], held)), nodes, no_durations, BY_GRES, NOW_S)
    assert {(wait.gpu_type, size): wait.wait_s for size, wait in found}["a100", 1] == 800


def test_a_job_that_waits_for_whole_nodes_gets_all_their_gpus() -> None:
    """`-N2 --exclusive` of 25.11.7, recorded: it asks for no GPU. And a job that asks for one GPU of a whole node."""
    data = (FIXTURES / "25.11.7/odd_queue.json").read_bytes()
    queue = read_gpu_queue(lambda argv: data, "lab")
    waits = [job for job in queue.jobs if job.is_waiting]
    assert {job.job_id for job in waits if not job.is_held} == {8, 17, 18, 21, 28, 44, 46, 47}
    assert {job.job_id: job.gpu_count for job in queue.jobs if job.holds_nodes}[3] == 8
    nodes = [SlurmNode(f"n{n}", frozenset({"IDLE"}), gres="gpu:a100:4", partitions=("all",)) for n in (1, 2, 3)]
    [whole] = [replace(job, submit_s=NOW_S - 5000, reason="Resources") for job in waits if job.job_id == 44]
    one = replace(live("one", 1, is_exclusive=True, node_count=2), partition="all")
    found = []
    for jobs in ([whole], [whole, one], [replace(whole, partition="other")]):
        rows = queue_waits(Queue(tuple(jobs)), nodes, no_durations, BY_GRES[:1], NOW_S)
        found.append({size: wait.wait_s for size, wait in rows}[12])
    # Half of a limit of an hour for each job ahead; the last job can run on none of these nodes.
    assert found == [1800, 3600, 0]


def test_recent_waits_in_the_state_of_the_queue_and_no_user() -> None:
    """Every third job waits while another one does, and then for an hour."""
    turn = np.arange(600) % 3
    jobs = history(submit_s=NOW_S - 7200 * np.arange(600, 0, -1) + 60 * turn)
    jobs["start_s"] = jobs["submit_s"] + np.choose(turn, [0, 600, 3600])
    jobs["submit_s"] -= 7200 * turn
    jobs["start_s"] -= 7200 * turn
    jobs["end_s"] = jobs["start_s"] + 60.0
    idle, silent = told_waits(Queue(()), jobs, TYPES, NOW_S)
    assert [(size, wait.gpu_type) for size, wait in idle] == [(4, "a100")]
    assert idle[0][1].high_s == 600 and not silent
    queue = Queue((live("secret", 4, gpu_type="a100"), live("x", 4, NOW_S - 60, gpu_type="a100")))
    busy = told_waits(queue, jobs, TYPES, NOW_S)[0]
    assert [(wait.low_s, wait.wait_s) for _, wait in busy] == [(3600, 3600)]
    others = live("x", 1, gpu_type="a100"), live("y", 4, gpu_type="h100"), live("z", 0, is_exclusive=True)
    assert told_waits(Queue(others), jobs, TYPES, NOW_S)[0] == idle, "nobody waits for 4 GPUs of a100"
    everywhere = told_waits(Queue((live("any", 4),)), jobs, TYPES, NOW_S)[0]
    assert everywhere == busy, "a job that accepts any type waits for each"
    content = WAITS_KIND.render(WaitsFile(NOW_S, TYPES, (), busy))
    assert b"alice" not in content and b"secret" not in content and b"bob" not in content


def test_an_array_no_longer_waits_once_a_task_has_started() -> None:
    tasks = (live("a", 4, NOW_S - 60, gpu_type="a100", array_job_id=7), live("a", 4, gpu_type="a100", array_job_id=7))
    idle = told_waits(Queue(()), history(), TYPES, NOW_S)
    assert told_waits(Queue(tasks), history(), TYPES, NOW_S) == idle and idle[0]


def test_where_predictions_do_not_hold_nothing_is_said() -> None:
    growing = history()
    growing["submit_s"] -= 2 ** np.linspace(0, 20, len(growing))
    assert told_waits(Queue(()), growing, TYPES, NOW_S) == ((), (("a100", 4),))
    assert told_waits(Queue(()), history().head(60), TYPES, NOW_S) == ((), (("a100", 4),))


def test_a_site_of_features_names_its_types() -> None:
    features = (GpuType(name="a100", constraint="a100"), GpuType(name="h100", constraint="h100"))
    both = ["ib&h100", "!a100", "a100|h100"] * 100
    told, _ = told_waits(Queue(()), history(constraints=both, gpu_type=[""] * 300), features, NOW_S)
    assert [wait.gpu_type for _, wait in told] == ["h100"], "for the others, the type is not sure"
    nodes = [
        SlurmNode("n1", frozenset({"IDLE"}), features=("a100", "ib"), gres="gpu:4", partitions=("gpu",)),
        SlurmNode("n2", frozenset({"IDLE"}), features=("h100", "ib"), gres="gpu:4", partitions=("gpu",)),
        SlurmNode("n3", frozenset({"IDLE"}), features=("a100", "h100"), gres="gpu:4", partitions=("gpu",)),
    ]
    queue = Queue((live("x", 4, constraints="ib&h100"), live("y", 4, constraints="!a100")))
    found = queue_waits(queue, nodes, no_durations, types_of(Config(gpu_types=features), nodes), NOW_S)
    waits = {(wait.gpu_type, size): wait.wait_s for size, wait in found}
    assert waits["h100", 4] == waits["a100", 4] == 1800, "!a100 is not understood: it may start on any type"
    with pytest.raises(ConfigError, match=r"\[\[gpu_types\]\]"):
        types_of(Config(), nodes)


def test_types_are_those_of_whole_gpus_on_the_nodes() -> None:
    nodes = [SlurmNode(f"n{n}", frozenset({"IDLE"}), gres=gres) for n, gres in enumerate(GRES)]
    assert [(kind.name, kind.gres) for kind in types_on(nodes)] == [("a100", "a100"), ("h100", "h100")]


GRES = ("gpu:a100:4(S:0-1)", "gpu:h100:2", "gpu:1g.10gb:7", "gpu:4", "gpu:a100:8")


def times(a100_s: float, h100_s: float, spread: float = 1.05) -> list[TypeRunTime]:
    return [
        TypeRunTime("a100", a100_s, a100_s / spread, a100_s * spread, a100_s * 1.5, 9, "own runs"),
        TypeRunTime("h100", h100_s, h100_s / spread, h100_s * spread, h100_s * 1.5, 2, "own rates"),
    ]


def waits(a100_s: float, h100_s: float, spread: float = 1.2, as_of_s: int = NOW_S) -> list[TypeWait]:
    return [
        TypeWait("a100", a100_s, a100_s / spread, a100_s * spread, as_of_s),
        TypeWait("h100", h100_s, h100_s / spread, h100_s * spread, as_of_s),
    ]


RULES = GpuTypeRules(NOW_S)


def test_the_type_that_ends_first_is_advised_with_waits_that_may_be_told() -> None:
    advice = decide_type(times(11_160, 6_120), waits(300, 15_600), ["h100"], RULES)
    assert advice is not None
    runs = "Your runs take 3 h 6 min on a100 (9 runs), about 1 h 42 min on h100 (2 runs). "
    assert advice.text(waits(300, 15_600)) == runs + "Wait now: 5 min and 4 h 20 min. a100 ends 2 h 51 min earlier."
    silent = runs + "By the queue now, a100 should end first."
    assert advice.text() == advice.text(waits(300, 15_600)[:1]) == silent
    assert advice.text(waits(15_600, 300)) == silent, "recent waits say otherwise"
    assert (advice.types, advice.best.low_s, advice.asked.high_s) == (("a100",), 300 / 1.2 + 11_160 / 1.05, 25_146.0)


def test_no_advice_below_the_gain_with_overlap_or_with_old_waits() -> None:
    assert decide_type(times(11_160, 6_120), waits(300, 15_600), ["a100"], RULES) is None
    assert decide_type(times(10_000, 9_000, 1.0), waits(0, 2_000), ["h100"], RULES) is None  # 9%
    assert decide_type(times(11_160, 6_120, 3.0), waits(300, 15_600), ["h100"], RULES) is None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600, 5.0), ["h100"], RULES) is None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600, as_of_s=NOW_S - 601), ["h100"], RULES) is None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600, as_of_s=NOW_S + 1), ["h100"], RULES) is None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600), ["v100"], RULES) is None
    assert decide_type([], waits(300, 15_600), [], RULES) is None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600), ["h100", "v100"], RULES) is None
    assert decide_type(times(8_500, 10_000), waits(0, 0), ["h100"], RULES) is not None  # 15%
    assert decide_type(times(8_500, 10_000, 1.09), waits(0, 0), ["h100"], RULES) is None


def test_a_type_on_which_the_job_could_reach_its_time_limit_is_not_advised() -> None:
    longest_s = 11_160 * 1.5
    assert decide_type(times(11_160, 6_120), waits(300, 15_600), ["h100"], RULES, longest_s) is not None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600), ["h100"], RULES, longest_s - 1) is None
    # The usual time fits, and so does its interval; one run in ten would not.
    assert decide_type(times(11_160, 6_120), waits(300, 15_600), ["h100"], RULES, 12_000) is None


def test_a_request_of_any_type_is_compared_with_the_type_that_is_free_first() -> None:
    slow_first = decide_type(times(90_000, 6_120), waits(0, 3_000), [], RULES)
    assert slow_first is not None
    assert slow_first.best.gpu_type == "h100"
    assert decide_type(times(6_000, 6_120), waits(0, 3_000), [], RULES) is None
    assert decide_type(times(90_000, 6_120)[:1], waits(0, 3_000), [], RULES) is None


def test_types_that_end_about_as_soon_are_advised_together() -> None:
    more = [*times(3_000, 50_000), TypeRunTime("v100", 3_200, 3_100, 3_300, 4_000, 5, "own runs")]
    wait = [*waits(0, 0), TypeWait("v100", 0, 0, 0, NOW_S)]
    advice = decide_type(more, wait, ["h100"], RULES)
    assert advice is not None
    assert advice.types == ("a100", "v100")
