"""Slurm by its commands, on recorded answers of three releases: queue, priorities, reservations, and node power."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from backend_contract import check_reading
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import CommandError
from almanac.records import Counts
from slurm.backend import NODES_PER_COMMAND, CommandBackend, Reservation, SiteFactor
from slurm.commands import Done, SlurmCommands
from slurm.queued_job import QueuedJob, address
from slurm.sbatch import script_key

FIXTURES = Path(__file__).parent / "fixtures"
RELEASES = sorted(path.parent.name for path in FIXTURES.glob("*/queue_cases.tsv"))
CONFIG = (
    b"Configuration data as of now\nClusterName             = lab\nPriorityType            = priority/multifactor\n"
)


@dataclass
class Recorded:
    """Answers as a release did; raises on what was not recorded."""

    folder: Path
    queue: str = "squeue.json"
    answers: dict[str, bytes] = field(default_factory=dict)
    fed: list[bytes] = field(default_factory=list)
    done: Done = field(default_factory=lambda: Done(0, b"", b""))

    def __call__(self, argv: Sequence[str]) -> bytes:
        asked = " ".join(argv)
        if asked in self.answers:
            return self.answers[asked]
        if asked == "scontrol show config":
            return CONFIG
        if asked.startswith("squeue"):
            return (self.folder / self.queue).read_bytes()
        if asked.startswith("sprio"):
            path = self.folder / "sprio.txt"
            return path.read_bytes() if path.exists() else b""
        if asked == "sinfo --json":
            is_old = self.folder.name < "23"
            return (self.folder / "nodes.json").read_bytes() if is_old else b'{"sinfo": [{"nodes": {}}]}'
        if asked == "scontrol show nodes --json":
            return (self.folder / "nodes.json").read_bytes()
        raise AssertionError(f"not recorded: {asked}")

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        assert argv == ["scontrol"]
        self.fed.append(stdin)
        return self.done


@pytest.fixture(params=RELEASES)
def folder(request: pytest.FixtureRequest) -> Path:
    return FIXTURES / str(request.param)


@pytest.fixture
def cases(folder: Path) -> dict[str, int]:
    lines = (folder / "queue_cases.tsv").read_text().splitlines()
    return {case: int(job) for case, job in (line.split("\t") for line in lines)}


@pytest.fixture
def queue(folder: Path) -> CommandBackend:
    return CommandBackend(Recorded(folder, "queue.json"))


@pytest.mark.parametrize("release", RELEASES)
def test_the_contract_is_kept_on_recorded_outputs(release: str) -> None:
    jobs = check_reading(CommandBackend(Recorded(FIXTURES / release)))
    assert {job.name for job in jobs} >= {"too-big", "no-limit"}
    by_name = {job.name: job for job in jobs}
    big = by_name["too-big"]
    assert (big.gpu_count, big.node_count, big.time_limit_s, big.user) == (16, 4, 3600, "alice")
    assert by_name["no-limit"].time_limit_s is None
    rest = by_name["pending-array"]
    assert (rest.array_job_id, rest.array_task_id, rest.address) == (rest.job_id, None, str(rest.job_id))
    assert rest.request().is_array


def test_a_pending_job_has_the_script_key_of_its_record(folder: Path) -> None:
    """Needs a squeue that shows the submit line: 26.05 and later."""
    content = json.loads((folder / "queue.json").read_bytes())
    for job in content["jobs"]:
        job |= {"submit_line": "sbatch -J x\n$(reboot) run.sh --lr=1", "current_working_directory": "/home/alice"}
    answers = {"squeue -a --json": json.dumps(content).encode()}
    jobs = CommandBackend(Recorded(folder, answers=answers)).pending(Counts())
    keys = {job.het_job_id is None: job.request().script_key for job in jobs}
    assert keys == {True: script_key("alice", "sbatch -J x $(reboot) run.sh --lr=2", "/home/alice"), False: ""}
    pending = CommandBackend(Recorded(folder, "queue.json")).pending(Counts())
    assert not any(job.script_key for job in pending)  # all are `--wrap "sleep 600"`, which identifies no work


def test_an_array_is_named_whole_unless_tasks_of_it_have_records(queue: CommandBackend, cases: dict[str, int]) -> None:
    jobs = queue.pending(Counts())
    whole = [job.address for job in jobs if job.array_job_id == cases["array"]]
    assert whole == [str(cases["array"])]
    split = cases["split_array"]
    rest = [str(task) for task in range(0, 201, 2) if task not in (2, 4)]
    assert sorted(job.address for job in jobs if job.array_job_id == split) == sorted(
        [f"{split}_2", f"{split}_4", f"{split}_[{','.join(rest)}]"]
    )


def test_factors_of_what_slurm_ranks(queue: CommandBackend, cases: dict[str, int]) -> None:
    factors = queue.site_factors()
    assert factors[cases["plain"]] == SiteFactor(1111)
    assert factors[cases["forged"]] == SiteFactor(0)
    assert factors[cases["two_partitions"]] == SiteFactor(-5), "one line for each of its partitions"
    assert factors[cases["explicit"]] == SiteFactor(0, is_explicit=True), "it was told 55, and does not count it"
    assert factors[cases["het"] + 1] == SiteFactor(66)
    assert factors[cases["array"]] == SiteFactor(333)
    assert cases["held"] not in factors
    assert cases["dependent"] not in factors


def test_a_priority_with_parts_is_not_explicit() -> None:
    rows = b"  7|     12007|0|12007|0|0|0|0|0|0|\n8|500|0|0|0|0|0|0|500|0|\n"
    rows += b"9|1|0|0|0|0|0|0|0|0|\n10|3|0|0|0|0|0|0|0|0|cpu=3\n"
    recorded = Recorded(FIXTURES / "22.05.8")
    command = f"sprio -h -o {'|'.join(('%i', '%Y', '%S', '%A', '%B', '%F', '%J', '%P', '%Q', '%N', '%T'))}"
    factors = CommandBackend(Recorded(recorded.folder, answers={command: rows})).site_factors()
    assert factors == {number: SiteFactor(0) for number in (7, 8, 9, 10)}
    with pytest.raises(CommandError, match="sprio printed"):
        CommandBackend(Recorded(recorded.folder, answers={command: b"7 all 3\n"})).site_factors()


def test_factors_are_told_in_one_command_and_what_slurm_says_is_kept() -> None:
    recorded = Recorded(FIXTURES / "22.05.8")
    backend = CommandBackend(recorded)
    changes = [QueuedJob(12, "10_2", 1, "ann", "x", site_factor=40), QueuedJob(8, "8", 1, "bo", "", site_factor=-3)]
    assert backend.set_site_factors(changes) == []
    assert recorded.fed == [b"update jobid=10_2 sitefactor=40\nupdate jobid=8 sitefactor=-3\n"]
    recorded.done = Done(1, b"scontrol: \n", b"Invalid job id specified for job 8\n")
    assert backend.set_site_factors(changes) == ["Invalid job id specified for job 8"]
    recorded.done = Done(1, b"", b"")
    assert backend.set_site_factors(changes) == ["scontrol ended with 1"]
    recorded.fed.clear()
    assert backend.set_site_factors([]) == []
    assert recorded.fed == []


@pytest.mark.parametrize(
    ("job", "expected"),
    [((7, None, None, "", None, None), "7"), ((7, None, None, "", 7, 0), "7+0"), ((9, None, None, "", 7, 2), "7+2"),
     ((7, 7, None, "", None, None), "7"), ((7, 7, None, "1-3,8-12:2%4", None, None), "7_[1-3,8,10,12]"),
     ((7, 7, None, "0,2,4,...", None, None), "7"), ((7, 7, None, "5", None, None), "7_[5]"),
     ((12, 7, 0, "", None, None), "7_0")],
)  # fmt: skip
def test_addresses(job: tuple[int, int | None, int | None, str, int | None, int | None], expected: str) -> None:
    assert address(*job) == expected


@given(st.text(alphabet="0123456789-:,%.[] ", max_size=40))
def test_any_list_of_tasks_gives_an_address_of_that_array(tasks: str) -> None:
    name = address(7, 7, None, tasks, None, None)
    assert name == "7" or (name.startswith("7_[") and name.endswith("]") and ":" not in name and " " not in name)


def test_a_command_reads_what_it_is_fed_and_its_errors_are_kept(command: Callable[[str], SlurmCommands]) -> None:
    done = command('cat >&2\necho "$SLURM_BITSTR_LEN" >&2\nexit 1').feed(["scontrol"], b"update\n" * 20_000)
    assert done == Done(1, b"", b"update\n" * 20_000 + b"0\n")


LOST = [
    "Unexpected message received for job 1",  # scontrol of 22.05 and 26.05, slurmctld stopped or killed
    "Unable to contact slurm controller (connect failure) for job 1",
    "slurm_update error: Unable to contact slurm controller (connect failure)",
    "9_1-5: Socket timed out on send/recv operation",
    "Zero Bytes were transmitted or received for job 7+1",
]
CHANGES = [QueuedJob(number, str(number), 1, "ann", "x", site_factor=40) for number in (1, 2, 3)]


@pytest.mark.parametrize("line", LOST)
def test_a_lost_slurmctld_ends_scontrol_at_the_first_job(
    tmp_path: Path, command: Callable[[str], SlurmCommands], line: str
) -> None:
    """scontrol would wait 10 s for each further job; here it has a child, as behind a site's wrapper."""
    told = tmp_path / "told"
    told.touch()
    body = f"( while read -r line; do echo '{line}' >&2; echo \"$line\" >>{told}; /bin/sleep 2; done ) & wait"
    body = f"exec 3<&0; {body.replace('done )', 'done <&3 )')}"
    with pytest.raises(CommandError, match="lost the connection to slurmctld") as caught:
        CommandBackend(command(body)).set_site_factors(CHANGES)
    assert line in str(caught.value)
    assert len(told.read_text().splitlines()) <= 1


@pytest.mark.parametrize(
    "line", ["Invalid job id specified for job 1", "lua: my job Broken pipe is", "9_1-2: No error", "Invalid user id"]
)
def test_what_slurm_says_of_a_job_ends_nothing(command: Callable[[str], SlurmCommands], line: str) -> None:
    body = f"while read -r word; do echo '{line}' >&2; done; exit 1"
    assert CommandBackend(command(body)).set_site_factors(CHANGES) == [line] * 3


def test_scontrol_that_says_nothing_is_ended_with_its_children(command: Callable[..., SlurmCommands]) -> None:
    with pytest.raises(CommandError, match=r"timed out after 0\.3 s"):
        command("/bin/sleep 600 &\nwait", timeout_s=0.3).feed(["scontrol"], b"update\n")


@pytest.mark.parametrize("name", ["sacct", "scontrol"])
def test_slurm_that_prints_for_ever_is_an_error_that_says_what_to_do(
    command: Callable[..., SlurmCommands], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("slurm.commands.MOST_BYTES", {"sacct": 1 << 20})
    monkeypatch.setattr("slurm.commands.MOST_OTHER_BYTES", 1 << 20)
    with pytest.raises(CommandError, match=f"{name} printed more than 1048576 bytes") as raised:
        command("exec yes", name)([name])
    assert f"run {name} yourself" in raised.value.hint


def test_a_command_without_input_does_not_wait_for_ours(command: Callable[[str], SlurmCommands]) -> None:
    assert command("cat")(["scontrol"]) == b""


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], SlurmCommands]:
    def make(body: str, name: str = "scontrol", timeout_s: float = 10) -> SlurmCommands:
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        return SlurmCommands(bin_dir=f"{tmp_path}:/bin:/usr/bin", timeout_s=timeout_s)

    return make


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
    assert CommandBackend(Answers(ONE)).reservations() == [Reservation(("n1", "n2"), 1795358859, 1795359459, "r1")]
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
