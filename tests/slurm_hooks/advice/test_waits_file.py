"""The waits file, and its numbers from recorded output of squeue and sinfo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from advisor.decisions.gpu_type import GpuTypeRules, decide_type
from advisor.waits.view import TypeWait
from almanac.config import Config
from almanac.errors import ConfigError, FileFormatError
from almanac.records import Request
from almanac.submit_config import GpuType
from slurm_hooks.advice.times_file import PublishedTime
from slurm_hooks.advice.waits import gather, publish_waits
from slurm_hooks.advice.waits_file import WaitsFile, parse_waits, render_waits, usable_waits, waits_path
from slurm_hooks.distribute import distribute
from telemetry.slurm.backend import Node
from telemetry.slurm.queue_snapshot import LiveGpuJob, LiveQueue
from telemetry.store.outgoing import Outgoing

NOW_S = 1_795_256_100
TYPES = (GpuType(name="a100", gres="a100"), GpuType(name="h100", constraint="h100_80"))
WAITS = [(size, TypeWait("a100", 300.0, 0.0, 4200.0 * size, NOW_S)) for size in (1, 4)]
FILE = WaitsFile(NOW_S, TYPES, (*WAITS, (2, TypeWait("h100", 0.0, 0.0, 0.0, NOW_S))))


def live(name: str, gpus: int, start_s: int | None = None, **other: object) -> LiveGpuJob:
    request = Request("alice", name, partition="gpu", gpu_count=gpus, time_limit_s=3600, submit_s=NOW_S - 5000, **other)  # type: ignore[arg-type]
    return LiveGpuJob(request, start_s, ("n1",) if start_s else (), 100, True)


def test_the_file_comes_back_as_it_was_written() -> None:
    assert parse_waits(render_waits(FILE)) == FILE


def test_the_next_larger_size_counts_and_old_or_future_waits_are_none() -> None:
    assert [wait.high_s for wait in FILE.of_size(2, NOW_S)] == [16_800.0, 0.0]
    assert [wait.gpu_type for wait in FILE.of_size(3, NOW_S + 600)] == ["a100"]
    assert FILE.of_size(2, NOW_S + 601) == FILE.of_size(2, NOW_S - 1) == FILE.of_size(0, NOW_S) == ()
    assert FILE.of_size(5, NOW_S) == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"almanac-waits\t1", b"almanac-waits\t2"),
        (b"end\t5", b"end\t4"),
        (b"end\t5\n", b""),
        (b"W\ta100\t1\t300", b"W\tv100\t1\t300"),
        (b"\t300\t0\t", b"\t300\t400\t"),
        (b"W\ta100\t1\t", b"W\ta100\t-1\t"),
        (b"T\ta100\tgres\ta100", b"T\ta100\tgres\ta 100;reboot"),
        (b"T\ta100\tgres", b"T\ta100\tnodelist"),
        (b"0.150000", b"nan"),
    ],
)
def test_a_malformed_file_is_not_used(old: bytes, new: bytes) -> None:
    content = render_waits(FILE)
    assert old in content
    with pytest.raises(FileFormatError):
        parse_waits(content.replace(old, new, 1))


def test_a_published_file_is_everybodys_to_read_and_nobodys_to_write(tmp_path: Path) -> None:
    root = tmp_path / "advice"
    publish_waits(Outgoing(tmp_path / "outgoing"), FILE)
    publish_waits(Outgoing(tmp_path / "outgoing"), FILE)
    Outgoing(tmp_path / "outgoing").write([("_site", "advice", b"of the publish before\n")])
    distribute(tmp_path / "outgoing", root, None)
    path = waits_path(root)
    assert path.stat().st_mode & 0o7777 == 0o444
    assert path.parent.stat().st_mode & 0o7777 == 0o711
    assert usable_waits(root, NOW_S + 10) == FILE
    assert usable_waits(root, NOW_S + 700) is None
    assert sorted(each.name for each in root.iterdir()) == [".lock", "user"]
    path.unlink()
    os.mkfifo(path)
    assert usable_waits(root, NOW_S) is None


def test_a_snapshot_becomes_waits_by_type_and_names_no_user() -> None:
    nodes = [
        Node("n1", frozenset({"MIXED"}), gres="gpu:a100:4(S:0-1)", partitions=("gpu",)),
        Node("n2", frozenset({"IDLE"}), gres="gpu:h100:2", partitions=("gpu",)),
        Node("n3", frozenset({"IDLE", "DRAIN"}), gres="gpu:h100:8", partitions=("gpu",)),
        Node("n4", frozenset({"IDLE"}), gres="gpu:1g.10gb:7", partitions=("gpu",)),
    ]
    queue = LiveQueue((live("train", 4, NOW_S - 1000, gpu_type="a100"), live("secret", 4, gpu_type="a100")))
    found = gather(queue, nodes, lambda requests: [None] * len(requests), Config(), NOW_S)
    waits = {(wait.gpu_type, size): wait.wait_s for size, wait in found.file.waits}
    assert set(waits) == {("a100", 1), ("a100", 2), ("a100", 4), ("h100", 1), ("h100", 2)}
    assert waits["a100", 1] == 800 + 1800  # half of each time limit: nothing predicts
    assert waits["h100", 2] == 0
    assert (found.running, found.waiting, found.unpredicted) == (1, 1, 2)
    content = render_waits(found.file)
    assert b"alice" not in content
    assert b"secret" not in content


def test_a_site_of_features_names_its_types() -> None:
    nodes = [
        Node("n1", frozenset({"IDLE"}), features=("a100", "ib"), gres="gpu:4", partitions=("gpu",)),
        Node("n2", frozenset({"IDLE"}), features=("h100", "ib"), gres="gpu:4", partitions=("gpu",)),
        Node("n3", frozenset({"IDLE"}), features=("a100", "h100"), gres="gpu:4", partitions=("gpu",)),
    ]
    config = Config(gpu_types=(GpuType(name="a100", constraint="a100"), GpuType(name="h100", constraint="h100")))
    queue = LiveQueue((live("x", 4, constraints="ib&h100"), live("y", 4, constraints="!a100")))
    found = gather(queue, nodes, lambda requests: [None] * len(requests), config, NOW_S)
    waits = {(wait.gpu_type, size): wait.wait_s for size, wait in found.file.waits}
    assert waits["h100", 4] == 1800
    assert waits["a100", 4] == 1800  # "!a100" is not understood: it may start on any type
    with pytest.raises(ConfigError, match=r"\[\[gpu_types\]\]"):
        gather(queue, nodes, lambda requests: [None] * len(requests), Config(), NOW_S)


def times(a100_s: float, h100_s: float, spread: float = 1.05) -> list[PublishedTime]:
    return [
        PublishedTime("a100", a100_s, a100_s / spread, a100_s * spread, a100_s * 1.5, 9, "own runs"),
        PublishedTime("h100", h100_s, h100_s / spread, h100_s * spread, h100_s * 1.5, 2, "own rates"),
    ]


def waits(a100_s: float, h100_s: float, spread: float = 1.2, as_of_s: int = NOW_S) -> list[TypeWait]:
    return [
        TypeWait("a100", a100_s, a100_s / spread, a100_s * spread, as_of_s),
        TypeWait("h100", h100_s, h100_s / spread, h100_s * spread, as_of_s),
    ]


RULES = GpuTypeRules(NOW_S)


def test_the_type_that_ends_first_is_advised_with_both_times_and_waits() -> None:
    advice = decide_type(times(11_160, 6_120), waits(300, 15_600), ["h100"], RULES)
    assert advice is not None
    assert advice.text == (
        "Your runs take 3 h 6 min on a100 (9 runs), about 1 h 42 min on h100 (2 runs). "
        "Wait now: 5 min and 4 h 20 min. a100 ends 2 h 51 min earlier."
    )
    assert advice.types == ("a100",)


def test_no_advice_below_the_gain_with_overlap_or_with_old_waits() -> None:
    assert decide_type(times(11_160, 6_120), waits(300, 15_600), ["a100"], RULES) is None
    assert decide_type(times(10_000, 9_000, 1.0), waits(0, 2_000), ["h100"], RULES) is None  # 9%
    assert decide_type(times(11_160, 6_120, 3.0), waits(300, 15_600), ["h100"], RULES) is None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600, 5.0), ["h100"], RULES) is None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600, as_of_s=NOW_S - 601), ["h100"], RULES) is None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600, as_of_s=NOW_S + 1), ["h100"], RULES) is None
    assert decide_type(times(11_160, 6_120), waits(300, 15_600), ["v100"], RULES) is None
    assert decide_type([], waits(300, 15_600), [], RULES) is None


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
    more = [*times(3_000, 50_000), PublishedTime("v100", 3_200, 3_100, 3_300, 4_000, 5, "own runs")]
    wait = [*waits(0, 0), TypeWait("v100", 0, 0, 0, NOW_S)]
    advice = decide_type(more, wait, ["h100"], RULES)
    assert advice is not None
    assert advice.types == ("a100", "v100")
