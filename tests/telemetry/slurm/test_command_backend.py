"""Slurm by its commands, on what three releases said when they were asked (fixtures/slurm)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from backend_contract import check_reading
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import CommandError
from almanac.records import Counts
from telemetry.slurm.backend import FactorChange, PendingJob, SiteFactor
from telemetry.slurm.command_backend import CommandBackend
from telemetry.slurm.commands import Done, SlurmCommands
from telemetry.slurm.queue_json import address
from telemetry.slurm.script_key import script_key

FIXTURES = Path(__file__).parents[1] / "fixtures/slurm"
RELEASES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
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


@pytest.mark.parametrize("release", RELEASES)
def test_states_are_sets_of_flags(release: str) -> None:
    nodes = {node.name: node for node in CommandBackend(Recorded(FIXTURES / release)).nodes()}
    assert nodes["n4"].states == {"MIXED", "DRAIN", "POWER_DOWN"}
    assert nodes["n4"].features == ("gpu", "hbm80g")
    assert nodes["n4"].partitions == ("all", "hbm80")
    assert nodes["n4"].gres == "gpu:a100:4"


def test_a_queue_of_every_kind_of_job(queue: CommandBackend, cases: dict[str, int]) -> None:
    jobs = {job.job_id: job for job in check_reading(queue)}
    of = {case: jobs[job_id] for case, job_id in cases.items()}
    plain = of["plain"]
    assert plain.request().constraints == "gpu&hbm80g"
    assert (plain.gpu_count, plain.time_limit_s, plain.partition, plain.account) == (2, 1800, "all", "ml")
    assert of["forged"].name == "innocent\n7|99|5|0|0", "a name is whatever it is, and no record"
    assert of["cpu_only"].gpu_count == 0
    assert [case for case, job in of.items() if job.is_held] == ["held"]
    assert of["two_partitions"].partition == "all,hbm80"
    assert (of["two_nodes"].gpu_count, of["two_nodes"].gpu_type, of["two_nodes"].node_count) == (4, "a100", 2)
    parts = [job for job in jobs.values() if job.het_job_id == cases["het"]]
    assert [job.address for job in parts] == [f"{cases['het']}+0", f"{cases['het']}+1"]
    assert [job.gpu_count for job in parts] == [1, 2]


def test_how_often_a_job_was_requeued(folder: Path) -> None:
    content = json.loads((folder / "queue.json").read_bytes())
    (waiting, *rest) = CommandBackend(Recorded(folder, "queue.json")).pending(Counts())
    assert {job.restarts for job in (waiting, *rest)} == {0}
    for job in content["jobs"]:
        if job["job_id"] == waiting.job_id:
            job["restart_cnt"] = 2
    answers = {"squeue -a -t PENDING --json": json.dumps(content).encode()}
    (again, *_) = CommandBackend(Recorded(folder, answers=answers)).pending(Counts())
    assert (again.job_id, again.restarts) == (waiting.job_id, 2)


def test_a_pending_job_has_the_script_key_of_its_record(folder: Path) -> None:
    """Where squeue shows the submit line: from 26.05 on."""
    content = json.loads((folder / "queue.json").read_bytes())
    for job in content["jobs"]:
        job |= {"submit_line": "sbatch -J x\n$(reboot) run.sh --lr=1", "current_working_directory": "/home/alice"}
    answers = {"squeue -a -t PENDING --json": json.dumps(content).encode()}
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
    changes = [
        FactorChange(PendingJob(12, "10_2", 1, "ann", "x"), 40),
        FactorChange(PendingJob(8, "8", 1, "bo", ""), -3),
    ]
    assert backend.set_site_factors(changes) == []
    assert recorded.fed == [b"update jobid=10_2 sitefactor=40\nupdate jobid=8 sitefactor=-3\n"]
    recorded.done = Done(1, b"scontrol: \n", b"Invalid job id specified for job 8\n")
    assert backend.set_site_factors(changes) == ["Invalid job id specified for job 8"]
    recorded.done = Done(1, b"", b"")
    assert backend.set_site_factors(changes) == ["scontrol ended with 1"]
    recorded.fed.clear()
    assert backend.set_site_factors([]) == []
    assert recorded.fed == []


def _broken(job: dict[str, Any], **values: Any) -> bytes:
    return json.dumps({"jobs": [job, {**job, **values}]}).encode()


@pytest.mark.parametrize(
    "values",
    [
        {"job_id": None},
        {"job_id": "7"},
        {"submit_time": 0},
        {"submit_time": {"set": False, "number": 5}},
        {"name": ["a"]},
        {"tres_req_str": 5},
    ],
    ids=str,
)
def test_a_job_that_cannot_be_read_is_counted_and_the_others_kept(values: dict[str, Any]) -> None:
    jobs = json.loads((FIXTURES / "22.05.8/queue.json").read_bytes())["jobs"]
    job = next(each for each in jobs if each["job_state"] == "PENDING")
    recorded = Recorded(FIXTURES / "22.05.8", answers={"squeue -a -t PENDING --json": _broken(job, **values)})
    counts = Counts()
    assert [each.job_id for each in CommandBackend(recorded).pending(counts)] == [job["job_id"]]
    assert (counts.seen, counts.kept, counts.dropped.total()) == (2, 1, 1)


@pytest.mark.parametrize("answer", [b"", b"slurm_load_jobs error", b"[]", b'{"jobs": null}', b"[" * 100_000])
def test_no_list_of_jobs_is_no_empty_queue(answer: bytes) -> None:
    recorded = Recorded(FIXTURES / "22.05.8", answers={"squeue -a -t PENDING --json": answer})
    with pytest.raises(CommandError):
        CommandBackend(recorded).pending(Counts())


def test_jobs_of_another_cluster_are_not_ours() -> None:
    job = {"job_id": 5, "submit_time": 1_700_000_000, "job_state": ["PENDING"], "cluster": "other"}
    data = json.dumps({"jobs": [job, {**job, "job_id": 6, "cluster": "LAB"}, {**job, "job_id": 7, "cluster": ""}]})
    recorded = Recorded(FIXTURES / "22.05.8", answers={"squeue -a -t PENDING --json": data.encode()})
    assert [each.job_id for each in CommandBackend(recorded).pending(Counts())] == [6, 7]


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ((7, None, None, "", None, None), "7"),
        ((7, None, None, "", 7, 0), "7+0"),
        ((9, None, None, "", 7, 2), "7+2"),
        ((7, 7, None, "", None, None), "7"),
        ((7, 7, None, "1-3,8-12:2%4", None, None), "7_[1-3,8,10,12]"),
        ((7, 7, None, "0,2,4,...", None, None), "7"),
        ((7, 7, None, "5", None, None), "7_[5]"),
        ((12, 7, 0, "", None, None), "7_0"),
    ],
)
def test_addresses(job: tuple[int, int | None, int | None, str, int | None, int | None], expected: str) -> None:
    assert address(*job) == expected


@given(st.text(alphabet="0123456789-:,%.[] ", max_size=40))
def test_any_list_of_tasks_gives_an_address_of_that_array(tasks: str) -> None:
    name = address(7, 7, None, tasks, None, None)
    assert name == "7" or (name.startswith("7_[") and name.endswith("]") and ":" not in name and " " not in name)


def test_a_command_reads_what_it_is_fed_and_its_errors_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\ncat >&2\necho "$SLURM_BITSTR_LEN" >&2\nexit 1\n')
    script.chmod(0o755)
    done = SlurmCommands(bin_dir=f"{tmp_path}:/bin:/usr/bin").feed(["scontrol"], b"update\n" * 20_000)
    assert done == Done(1, b"", b"update\n" * 20_000 + b"0\n")


LOST = [
    "Unexpected message received for job 1",  # scontrol of 22.05 and 26.05, slurmctld stopped or killed
    "Unable to contact slurm controller (connect failure) for job 1",
    "slurm_update error: Unable to contact slurm controller (connect failure)",
    "9_1-5: Socket timed out on send/recv operation",
    "Zero Bytes were transmitted or received for job 7+1",
]
CHANGES = [FactorChange(PendingJob(number, str(number), 1, "ann", "x"), 40) for number in (1, 2, 3)]


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


def test_scontrol_that_says_nothing_is_ended_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "scontrol"
    script.write_text("#!/bin/sh\n/bin/sleep 600 &\nwait\n")
    script.chmod(0o755)
    with pytest.raises(CommandError, match=r"timed out after 0\.3 s"):
        SlurmCommands(bin_dir=str(tmp_path), timeout_s=0.3).feed(["scontrol"], b"update\n")


@pytest.mark.parametrize("name", ["sacct", "scontrol"])
def test_slurm_that_prints_for_ever_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("telemetry.slurm.commands.MOST_BYTES", {"sacct": 1 << 20})
    monkeypatch.setattr("telemetry.slurm.commands.MOST_OTHER_BYTES", 1 << 20)
    script = tmp_path / name
    script.write_text("#!/bin/sh\nexec yes\n")
    script.chmod(0o755)
    with pytest.raises(CommandError, match=f"{name} printed more than 1048576 bytes") as raised:
        SlurmCommands(bin_dir=str(tmp_path))([name])
    assert f"run {name} yourself" in raised.value.hint


def test_a_command_without_input_does_not_wait_for_ours(
    tmp_path: Path, command: Callable[[str], SlurmCommands]
) -> None:
    assert command("cat")(["scontrol"]) == b""


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], SlurmCommands]:
    def make(body: str) -> SlurmCommands:
        script = tmp_path / "scontrol"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        return SlurmCommands(bin_dir=str(tmp_path), timeout_s=10)

    return make
