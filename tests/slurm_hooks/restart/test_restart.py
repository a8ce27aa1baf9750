"""almanac-restart without Slurm: decisions, the recipe, output that passes through, and faults that change nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from advisor.memory.restart import Destination, RestartJob, next_type, why_never
from slurm.releases import release_of
from slurm_hooks.restart.job import ShownJob, move, read_site, running_job
from slurm_hooks.restart.watch import GpuMemory, IterationFile, names_out_of_memory, read_memory
from slurm_hooks.restart.wrapper import parse_options

ROOT = Path(__file__).parents[3]
JOB = RestartJob(1, "1g.10gb", "gres", 0, can_requeue=True, is_own=True, appends_output=True)
SHOWN = (
    "JobId=7 JobName=x UserId=alice(1000) GroupId=alice(1000) Priority=1 Requeue=1 Restarts=2 NumNodes=1 "
    "Nodes=n1 CPU_IDs=0 Mem=100 GRES=gpu:1g.10gb:1(IDX:0) TresPerNode=gres/gpu:1g.10gb:1,gres/nvme:2"
)
MAIN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from slurm_hooks.restart.wrapper import main; main()"


@dataclass(frozen=True)
class Said:
    code: int = 0
    stdout: bytes = b""
    said: str = ""


class FakeSlurm:
    """Answers in order per first words of a command; everything else succeeds."""

    def __init__(self, answers: Mapping[str, Sequence[Said]]) -> None:
        self.answers = {words: list(each) for words, each in answers.items()}
        self.ran: list[str] = []

    def __call__(self, argv: Sequence[str]) -> Said:
        line = " ".join(argv)
        self.ran.append(line)
        for words, answers in self.answers.items():
            if line.startswith(words) and answers:
                return answers.pop(0)
        return Said()


@dataclass
class OwnJob:
    """slurmctld with the job of SHOWN. change: fields that somebody else sets right before the look number at_look."""

    refusals: int = 0
    refused: str = "update jobid=7 gres"
    fields: dict[str, str] = field(default_factory=lambda: {"JobState": "RUNNING", "Reason": "None"})
    orders: list[str] = field(default_factory=list)
    at_look: int = 0
    change: dict[str, str] = field(default_factory=dict)
    looks: int = 0
    orders_before: int = 0

    @property
    def shown(self) -> ShownJob:
        named = {name: value for name, _, value in (word.partition("=") for word in SHOWN.split())} | self.fields
        return ShownJob(" ".join(f"{name}={value}" for name, value in named.items()))

    def __call__(self, argv: Sequence[str]) -> Said:
        line = " ".join(argv)
        if line == "scontrol -d -o show job 7":
            self.looks += 1
            if self.looks == self.at_look:
                self.fields |= self.change
                self.orders_before = len(self.orders)
            return Said(stdout=self.shown.text.encode())
        self.orders.append(line)
        if self.refused in line and self.refusals:
            self.refusals -= 1
            return Said(1, said="Requested operation is presently disabled")
        if "requeuehold" in line:
            self.fields |= {"JobState": "COMPLETING", "Reason": "JobHeldUser"}
        elif "gres=" in line:
            self.fields["TresPerNode"] = "gres/gpu:2g.20gb:1"
        return Said()


# --- which type comes next


@pytest.mark.parametrize(
    ("here", "existing", "wanted", "expected"),
    [
        ("1g.10gb", {"1g.10gb", "2g.20gb", "3g.40gb"}, (), "2g.20gb"),
        ("1g.10gb", {"1g.10gb", "3g.40gb"}, (), "3g.40gb"),
        ("2g.20gb", {"1g.20gb", "3g.40gb", "4g.40gb"}, (), "3g.40gb"),
        ("4g.40gb", {"4g.40gb", "3g.40gb"}, (), ""),
        ("3g.40gb", {"1g.80gb", "4g.80gb", "a100"}, (), "a100"),
        ("1g.10gb", {"7g.80gb", "a100"}, (), "a100"),
        ("1g.10gb", {"2g.20gb", "3g.40gb"}, ("3g.40gb",), "3g.40gb"),
        ("3g.40gb", {"2g.20gb", "3g.40gb"}, ("2g.20gb", "3g.40gb"), ""),
        ("x", {"y", "z"}, ("x", "y", "z"), "y"),
        ("y", {"x", "y"}, ("x", "y", "x"), ""),
        ("x", {"y", "2g.20gb"}, (), ""),
        ("1g.10gb", set(), ("2g.20gb",), ""),
        ("1g.10gb", {"2g.20gb"}, ("5g.80gb",), ""),
    ],
)
def test_the_next_type(here: str, existing: set[str], wanted: tuple[str, ...], expected: str) -> None:
    found = next_type(replace(JOB, gpu_type=here), {"a100": 81920 - 1024}, existing, wanted)
    assert found.gpu_type == expected
    assert bool(found.why_not) == (not expected)


def test_restarts_by_themselves_always_end() -> None:
    here, steps = JOB, 0
    while (found := next_type(here, {}, {"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "7g.80gb"})) != Destination():
        if found.why_not:
            break
        here, steps = replace(here, gpu_type=found.gpu_type), steps + 1
    assert (here.gpu_type, steps) == ("7g.80gb", 3)


@pytest.mark.parametrize(
    ("change", "release", "words"),
    [
        ({}, "22.05.8", "restarts need Slurm 24.11 or later, this is Slurm 22.05"),
        ({}, "", "an unknown release"),
        ({"can_requeue": False}, "24.11.5", "--no-requeue"),
        ({"is_own": False}, "24.11.5", "another user"),
        ({"gpus": 2}, "24.11.5", "2 GPUs"),
        ({"gpus": 0}, "24.11.5", "0 GPUs"),
        ({"request": ""}, "24.11.5", "not requested by"),
        ({"appends_output": False}, "26.05.5", "--open-mode=append"),
        ({"restarts": 3}, "26.05.5", "restarted 3 times"),
        ({"is_het": True}, "26.05.5", "heterogeneous"),
        ({}, "24.11.5", ""),
    ],
)
def test_why_a_job_is_never_moved(change: dict[str, object], release: str, words: str) -> None:
    why = why_never(replace(JOB, **change), release_of(release), 3)  # type: ignore[arg-type]
    assert (words in why) if words else why == ""


# --- Slurm's words


def test_the_job_as_slurm_shows_it() -> None:
    job = running_job(ShownJob(SHOWN), 1000, True)
    assert job == replace(JOB, restarts=2)
    assert ShownJob(SHOWN).changed("2g.20gb") == "gres=gpu:2g.20gb:1,nvme:2"
    by_job = SHOWN.replace("TresPerNode=gres/gpu:1g.10gb:1,gres/nvme:2", "TresPerJob=gres/gpu:1")
    assert ShownJob(by_job).changed("2g.20gb") == "TresPerJob=gres/gpu:2g.20gb:1"
    assert not running_job(ShownJob(SHOWN), 1001, True).is_own
    assert running_job(ShownJob(f"{SHOWN} TresPerTask=gres/gpu=1"), 1000, True).request == ""
    assert running_job(ShownJob(SHOWN.replace("NumNodes=1", "NumNodes=2")), 1000, True).gpus == 2
    assert running_job(ShownJob(""), 1000, True) == RestartJob(0, "", "", 0, False, False, True)


def test_the_recipe_in_order_and_tried_while_the_job_ends() -> None:
    slurm = OwnJob(refusals=1)
    pauses: list[float] = []
    done = move(slurm.shown, "gres=gpu:2g.20gb:1", slurm, pauses.append)
    assert (done.is_requeued, done.is_changed, len(pauses)) == (True, True, 1)
    assert slurm.orders == [
        "scontrol requeuehold 7", *["scontrol update jobid=7 gres=gpu:2g.20gb:1"] * 2, "scontrol release 7",
    ]  # fmt: skip


def test_a_refused_requeue_changes_nothing_and_a_refused_change_still_releases() -> None:
    slurm = OwnJob(refusals=99, refused="requeuehold")
    assert move(slurm.shown, "gres=x", slurm).why.startswith("Requested operation")
    assert len(slurm.orders) == 1
    slurm = OwnJob(refusals=99)
    done = move(slurm.shown, "gres=x", slurm, lambda _: None)
    assert done.is_requeued and not done.is_changed and slurm.orders[-1] == "scontrol release 7"


@pytest.mark.parametrize("look", range(1, 4))
@pytest.mark.parametrize(
    ("change", "is_held"),
    [
        ({"Comment": "leave_me"}, False),
        ({"TresPerNode": "gres/gpu:3g.40gb:1"}, False),
        ({"Requeue": "0"}, False),
        ({"TimeLimit": "01:00:00"}, False),
        ({"Reason": "JobHeldAdmin"}, True),
        ({"JobState": "CANCELLED"}, True),
    ],
)
def test_what_is_changed_before_any_look_of_a_move_stays(look: int, change: dict[str, str], is_held: bool) -> None:
    slurm = OwnJob()
    slurm.at_look, slurm.change = look, change
    done = move(slurm.shown, "gres=gpu:2g.20gb:1", slurm, lambda _: None)
    later = slurm.orders[slurm.orders_before :]
    assert not any("requeuehold" in order or "gres=" in order for order in later), "not over the change"
    assert done.is_requeued is (look > 1)
    assert bool(done.why) is (look < 3 or is_held)
    assert ("scontrol release 7" in later) is (look > 1 and not is_held), "it runs again, unless somebody holds it"


# --- memory


SMI = """<nvidia_smi_log><gpu><uuid>GPU-a</uuid><fb_memory_usage><used>3 MiB</used><free>N/A</free></fb_memory_usage>
<mig_devices><mig_device><index>0</index><fb_memory_usage><used>20 MiB</used><free>9708 MiB</free></fb_memory_usage>
</mig_device><mig_device><index>1</index><fb_memory_usage><used>[N/A]</used><free>9 MiB</free></fb_memory_usage>
</mig_device></mig_devices></gpu></nvidia_smi_log>"""
LIST = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-a)
  MIG 1g.10gb     Device  0: (UUID: MIG-1-2)
  MIG 1g.10gb     Device  1: (UUID: MIG-3-4)
"""


def _smi(xml: str, listing: str) -> Callable[[Sequence[str]], Said]:
    return FakeSlurm({"nvidia-smi -q": [Said(0, xml.encode())], "nvidia-smi -L": [Said(0, listing.encode())]})


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("MIG-1-2", GpuMemory(20, 9728)), ("MIG-3-4", None), ("0", None), ("", None), ("MIG-1-2,MIG-3-4", None)],
)
def test_the_memory_of_the_jobs_own_instance(visible: str, expected: GpuMemory | None) -> None:
    assert read_memory(_smi(SMI, LIST), {"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.parametrize("xml", ["", "<a>", "<nvidia_smi_log/>", "no devices were found"])
def test_unreadable_memory_is_unknown(xml: str) -> None:
    assert read_memory(_smi(xml, LIST), {}) is None


def test_iterations_as_they_come_and_torn_or_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "iterations"
    file = IterationFile(str(path))
    assert file.new() == []
    path.write_text("1 50 100 20\n2 - 10")
    assert [(each.requested_mib, last) for each, last in file.new()] == [(100.0, 50.0)]
    with path.open("a") as more:
        more.write("0 30\nx\n3 4 nan 5\n4 4 0 1\n")
    assert [(each.held_mib, last) for each, last in file.new()] == [(30.0, None)]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert IterationFile(str(fifo)).new() == []


def test_the_site_from_the_configuration_and_without_one(tmp_path: Path) -> None:
    config = tmp_path / "almanac.toml"
    config.write_text(
        f'[hooks]\nadvice_dir = "{tmp_path}"\n[[tiers]]\nname = "s"\ngres = "1g.10gb"\ncapacity_mib = 9728\n'
        '[[tiers]]\nname = "t"\ngres = 3\n'
    )
    assert read_site({"ALMANAC_CONFIG": str(config)}, 1, 0).capacities_mib == {"1g.10gb": 9728}
    config.write_text("[[[")
    assert read_site({"ALMANAC_CONFIG": str(config)}, 1, 0).capacities_mib == {}


# --- messages and options


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB", True),
        ("RuntimeError: CUDA error: out of memory", True),
        ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
        ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate", True),
        ("slurmstepd: error: Detected 1 oom_kill event", False),
        ("MemoryError", False),
        ("RESOURCE_EXHAUSTED: quota of requests", False),
    ],
)
def test_messages(text: str, is_one: bool) -> None:
    assert names_out_of_memory(text.encode()) == is_one


def test_options() -> None:
    options = parse_options(
        ["--signal", "SIGUSR1", "--next=gpu:2g.20gb,gpu:3g.40gb:1", "--grace", "5", "--", "-x", "y"]
    )
    assert (options.signal, options.wanted, options.command) == (signal.SIGUSR1, ("2g.20gb", "3g.40gb"), ("-x", "y"))
    for wrong in (["--signal", "NO", "x"], ["--grace", "nan", "x"], [], ["--"], ["--no", "x"], ["--poll"]):
        with pytest.raises(ValueError):
            parse_options(wrong)


# --- the program itself


def _run(tmp_path: Path, *argv: str, stderr: int | Path = subprocess.PIPE, **env: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-c", MAIN, str(ROOT), *argv]
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path), **env}
    if isinstance(stderr, Path):
        with stderr.open("ab") as file:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, env=environ)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environ)


@pytest.mark.parametrize("to_file", [True, False])
def test_output_passes_byte_for_byte_and_the_exit_code_stays(tmp_path: Path, to_file: bool) -> None:
    noise = bytes(range(256)) * 3000 + b"CUDA out of memory"
    (tmp_path / "noise").write_bytes(noise)
    errors = tmp_path / "errors"
    done = _run(tmp_path, "--", "sh", "-c", "cat noise; cat noise >&2; exit 7".replace("noise", f"{tmp_path}/noise"),
                stderr=errors if to_file else subprocess.PIPE)  # fmt: skip
    out, err = done.communicate(timeout=300)
    err = errors.read_bytes() if to_file else err
    ours = b"almanac-restart: no restarts: not in a Slurm job\n"
    assert (done.returncode, out) == (7, noise)
    assert err.replace(ours, b"") == noise


def test_a_signal_reaches_the_command_and_its_end_by_a_signal_is_told(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    done = _run(tmp_path, "sh", "-c", f"trap 'echo got; exit 9' USR1; : >{ready}; while :; do sleep 0.1; done")
    until = time.monotonic() + 300
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.05)
    done.send_signal(signal.SIGUSR1)
    assert (done.communicate(timeout=300)[0], done.returncode) == (b"got\n", 9)
    killed = _run(tmp_path, "sh", "-c", "kill -TERM $$")
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGTERM


SCONTROL = """#!/bin/sh
echo "$*" >>"$HOME/ran"
case "$*" in
*config*) echo "SLURM_VERSION           = 24.11.5" ;;
*show*) echo "{shown}" ;;
esac
{more}
"""


def _slurm(tmp_path: Path, more: str = "") -> None:
    (tmp_path / "bin").mkdir()
    shown = SHOWN.replace("alice(1000)", f"me({os.getuid()})").replace("Restarts=2", "Restarts=0")
    programs = {
        "scontrol": SCONTROL.format(shown=shown, more=more),
        "sinfo": "#!/bin/sh\necho gpu:2g.20gb:1,gpu:1g.10gb:1\n",
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)


FAILING = ("sh", "-c", "sleep 1; echo CUDA out of memory >&2; exit 3")


def test_an_out_of_memory_end_moves_the_job(tmp_path: Path) -> None:
    _slurm(tmp_path)
    done = _run(tmp_path, *FAILING, SLURM_JOB_ID="7", SLURM_OPEN_MODE="a")
    err = done.communicate(timeout=300)[1].decode()
    assert done.returncode == 3
    assert err.count("almanac-restart:") == 1 and "moving job 7 from gpu:1g.10gb to gpu:2g.20gb" in err
    ran = (tmp_path / "ran").read_text().splitlines()
    ran = [line for line in ran if not line.startswith("-d -o show")]
    assert ran[-3:] == ["requeuehold 7", "update jobid=7 gres=gpu:2g.20gb:1,nvme:2", "release 7"]


@pytest.mark.parametrize(
    ("more", "env", "words"),
    [
        ("", {"SLURM_OPEN_MODE": "t"}, "--open-mode=append"),
        ("", {}, "--open-mode=append"),
        ("exit 1", {"SLURM_OPEN_MODE": "a"}, "no restarts"),
        ("kill -9 $$", {"SLURM_OPEN_MODE": "a"}, "no restarts"),
    ],
)
def test_faults_leave_the_job_alone(tmp_path: Path, more: str, env: dict[str, str], words: str) -> None:
    _slurm(tmp_path, more)
    done = _run(tmp_path, *FAILING, SLURM_JOB_ID="7", **env)
    err = done.communicate(timeout=300)[1].decode()
    assert done.returncode == 3 and words in err
    assert "requeuehold" not in (tmp_path / "ran").read_text()


def test_a_failure_of_another_kind_and_a_dry_run_move_nothing(tmp_path: Path) -> None:
    _slurm(tmp_path)
    for argv in (("sh", "-c", "sleep 1; exit 3"), ("--dry-run", *FAILING), ("sh", "-c", "echo CUDA out of memory >&2")):
        _run(tmp_path, *argv, SLURM_JOB_ID="7", SLURM_OPEN_MODE="a").communicate(timeout=300)
    assert "requeuehold" not in (tmp_path / "ran").read_text()
