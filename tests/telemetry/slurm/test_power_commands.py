"""Node power by Slurm's commands: what is asked and told, and what is not believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from almanac.errors import CommandError
from telemetry.slurm.backend import Node, Reservation
from telemetry.slurm.command_backend import NODES_PER_COMMAND, CommandBackend
from telemetry.slurm.commands import Done
from telemetry.slurm.queue_json import nodes_of, records

FIXTURES = Path(__file__).parents[1] / "fixtures/slurm"
ONE = (
    b"ReservationName=r1 StartTime=1795358859 EndTime=1795359459 Duration=00:10:00 Nodes=n[1-2] NodeCnt=2 CoreCnt=64 "
    b"Features=(null) PartitionName=(null) Flags=MAINT,SPEC_NODES TRES=cpu=64 Users=root Groups=(null) Accounts=(null) "
    b"Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
)
"""As 22.05.8 printed it with SLURM_TIME_FORMAT=%s."""


@dataclass
class Answers:
    """Says one thing to every question, and keeps what it is told."""

    said: bytes = b""
    done: Done = field(default_factory=lambda: Done(0, b"", b""))
    told: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> bytes:
        return self.said

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        self.told.append(list(argv))
        return self.done


def test_reservations_are_read_with_their_nodes() -> None:
    assert CommandBackend(Answers(ONE)).reservations() == [Reservation(("n1", "n2"), 1795358859, 1795359459)]
    assert CommandBackend(Answers(b"No reservations in the system\n")).reservations() == []
    assert CommandBackend(Answers(ONE.replace(b"n[1-2]", b"(null)"))).reservations() == []


@pytest.mark.parametrize(
    "text", [b"ReservationName=r1 StartTime=soon\n", b"garbage\n", ONE.replace(b"n[1-2]", b"n[1-999999999]")]
)
def test_a_reservation_that_cannot_be_read_is_an_error_not_none(text: bytes) -> None:
    with pytest.raises(CommandError):
        CommandBackend(Answers(text)).reservations()


def test_nodes_are_told_in_batches_as_host_lists() -> None:
    answers = Answers()
    names = [f"n{number:04}" for number in range(NODES_PER_COMMAND + 2)]
    assert CommandBackend(answers).set_node_state(names, "power_down_asap", "almanac: power saving") == []
    first, second = answers.told
    assert first[:2] == ["scontrol", "update"]
    assert second[2:] == ["nodename=n[0500-0501]", "state=power_down_asap", "reason=almanac: power saving"]
    assert CommandBackend(answers).set_node_state([], "drain", "x") == []
    assert len(answers.told) == 2


def test_a_name_that_is_no_node_is_refused_before_slurm_hears_it() -> None:
    answers = Answers()
    for name in ("n1 state=down", "n[1-3]", "n1,n2", "@all", "$(reboot)"):
        with pytest.raises(ValueError, match="host"):
            CommandBackend(answers).set_node_state([name], "power_up")
    assert answers.told == []


def test_what_slurm_says_against_an_order_comes_back() -> None:
    refused = Answers(done=Done(1, b"", b"slurm_update error: Invalid user id\n"))
    assert CommandBackend(refused).set_node_state(["n1"], "power_up") == ["slurm_update error: Invalid user id"]
    assert CommandBackend(Answers(done=Done(1, b"", b""))).set_suspend_exceptions("n1:2") == ["scontrol ended with 1"]


def test_suspend_exceptions_are_read_from_the_configuration() -> None:
    def read(text: bytes) -> str:
        return CommandBackend(Answers(text)).suspend_exceptions()

    assert read(b"SuspendExcNodes         = n1,n[2-4]:2\nSuspendExcParts = (null)\n") == "n1,n[2-4]:2"
    assert read(b"SuspendExcNodes         = (null)\n") == ""
    assert read(b"SuspendExcNodes         = \n") == ""
    with pytest.raises(CommandError):
        read(b"ClusterName = lab\n")


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5", "26.05.5"])
def test_when_a_node_was_busy_and_booted_is_read_of_every_release(release: str) -> None:
    found = records((FIXTURES / release / "nodes.json").read_bytes(), "nodes")
    assert found is not None
    [node] = [node for node in nodes_of(found) if node.name == "n4"]
    assert node.last_busy_s is not None
    assert node.boot_s is not None
    assert 1_795_230_000 < node.boot_s <= node.last_busy_s < 1_795_231_000
    assert node.states == {"MIXED", "DRAIN", "POWER_DOWN"}


def test_times_that_are_missing_are_unknown_not_1970() -> None:
    unset = {"set": False, "infinite": False, "number": 5}
    [node] = nodes_of([{"name": "n1", "state": ["IDLE"], "last_busy": 0, "boot_time": unset, "reservation": "r"}])
    assert node == Node("n1", frozenset({"IDLE"}), reservation="r")
