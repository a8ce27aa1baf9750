"""Notes on packing for arrays: the file, the decision, and the words; packing.lua says the same of each case."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pexpect
import pytest
from advice_lines import shown

from almanac.records import JobRequest
from almanac.submit_config import Tier
from slurm_hooks.advice.kinds import PACKING, PackingFile, PackingRow
from slurm_hooks.submit.late_proposals import find_note, is_sweep, note, noted, was_noted
from tests.slurm_hooks.lua_runner import INTERPRETERS, LUA_DIR, literal, prompt_program

NOW_S = 1_795_256_100
ROOT = Path(__file__).resolve().parents[3]
TEXT = (
    "Pack two on one GPU: each likely 0.80 to 0.95 of its speed, 1.6 to 1.9 times the work per GPU-hour (9 runs). "
    "Use: --array=A-B:2 and almanac-pack -- CMD {}"
)
ROW = PackingRow("train-#", 1, 30_000, TEXT)
FILE = PackingFile(NOW_S, NOW_S + 10, (ROW,))
TIERS = (
    Tier("hbm24g", 24_576, constraint="hbm24g"),
    Tier("hbm80g", 81_920, constraint="hbm80g"),
    Tier("1g.10gb", 9728, gres="1g.10gb", compute_slices=1),
)


def request(**other: Any) -> JobRequest:
    """For one GPU of the large tier, unless `other` says otherwise."""
    fields: dict[str, Any] = {"gpu_count": 1, "is_array": True, "constraints": "hbm80g"} | other
    return JobRequest("alice", fields.pop("job_name", "train-7"), **fields)


def test_a_sweep_is_told_how_to_share_a_gpu_in_lines_of_80_columns() -> None:
    found = find_note(request(), "0-9", "python train.py $SLURM_ARRAY_TASK_ID", TIERS, FILE)
    assert found == ROW
    assert note(ROW) == (
        "almanac: Pack two on one GPU: each likely 0.80 to 0.95 of its speed, 1.6 to\n"
        "         1.9 times the work per GPU-hour (9 runs).\n"
        "         Use: --array=A-B:2 and almanac-pack -- CMD {}\n"
    )
    assert note(replace(ROW, text="Pack two.")) == "almanac: Pack two.\n"
    assert all(len(line) <= 80 for line in note(ROW).splitlines())


@pytest.mark.parametrize(
    ("array", "is_told"),
    [
        ("0-9", True), ("0-9%4", True), ("0-9:1", True), ("0-9:1%2", True), ("9-10", True), ("007-8", True),
        ("5", False), ("", False), ("5-5", False), ("0-0", False), ("9-1", False),  # one task, or none
        ("0-9%1", False), ("0-9%01", False), ("0-9%0", False), ("0-9:1%1", False),  # a chain
        ("1,5", False), ("0-9,20-29", False), ("1-9:2", False), ("0-9:", False),  # almanac-pack needs a step of its own
        ("0-9%", False), ("-9", False), ("a-b", False), ("0-9\n", False),
        pytest.param("0-" + "9" * 400, False, id="no number of Slurm's"),
    ],
)  # fmt: skip
def test_one_task_a_chain_and_what_cannot_have_a_step_are_no_sweep(array: str, is_told: bool) -> None:
    assert is_sweep(array) is is_told
    assert (find_note(request(), array, "", TIERS, FILE) is not None) is is_told


@pytest.mark.parametrize(
    "asked",
    [
        request(job_name="other"),
        request(gpu_count=2),
        request(node_count=2),
        request(may_use_more=True),
        request(constraints="hbm24g"),  # two of them need 30,000 MiB
        request(constraints="hbm24g|hbm80g"),  # Slurm may give it the smaller
        request(constraints=""),
        request(constraints="ib"),
        request(gpu_type="1g.10gb", gres="gpu:1g.10gb:1", constraints=""),
        request(gpu_type="2g.20gb", gres="gpu:2g.20gb:1"),  # no tier of this site
        request(gpu_type="nvidia_a100_1g.10gb", gres="gpu:nvidia_a100_1g.10gb:1"),
        request(gpu_type="a100_1g.5gb"),
    ],
)
def test_a_job_that_sharing_does_not_fit_is_told_nothing(asked: JobRequest) -> None:
    assert find_note(asked, "0-9", "", TIERS, FILE) is None


def test_a_job_that_names_no_tier_is_told_where_every_whole_gpu_holds_two() -> None:
    small = replace(ROW, need_mib=24_576)  # more than the slice, which no job gets without asking
    file = PackingFile(NOW_S, NOW_S + 10, (small,))
    for asked in (request(constraints=""), request(constraints="hbm24g|hbm80g"), request(constraints="hbm24g")):
        assert find_note(asked, "0-9", "", TIERS, file) == small
    assert find_note(request(constraints=""), "0-9", "", (), file) == small  # a site without tiers


def test_a_gpu_type_is_told_only_beside_a_tier() -> None:
    small = PackingFile(NOW_S, NOW_S + 10, (replace(ROW, need_mib=1),))
    for kind in ("k80", "1g.10gb", "a100_1g.5gb"):
        for tiers in (TIERS, ()):
            asked = request(gpu_type=kind, gres=f"gpu:{kind}:1", constraints="")
            assert find_note(asked, "0-9", "", tiers, small) is None
    assert find_note(request(gpu_type="a100", gres="gpu:a100:1"), "0-9", "", TIERS, FILE) == ROW
    named = (*TIERS, Tier("a100", 40_960, gres="a100"))
    assert find_note(request(gpu_type="a100", constraints=""), "0-9", "", named, FILE) == ROW


def test_a_job_that_packs_already_is_told_nothing() -> None:
    assert find_note(request(), "0-9", "#!/bin/sh\nsrun almanac-pack -n 2 -- ./a {}\n", TIERS, FILE) is None
    own = PackingFile(NOW_S, NOW_S + 10, (PackingRow("almanac-pack", 1, 1, TEXT),))
    assert find_note(request(job_name="almanac-pack"), "0-9", "", TIERS, own) is None


def test_a_note_is_not_repeated_for_a_day() -> None:
    kept = noted(ROW, NOW_S)
    assert was_noted(kept, NOW_S)
    assert was_noted(kept, NOW_S + 86_399)
    assert not was_noted(kept, NOW_S + 86_400)
    assert not was_noted(kept, NOW_S - 1)
    assert not was_noted(None, NOW_S)


def test_hostile_rows_are_left_out_and_many_families_are_cut() -> None:
    hostile = [PackingRow("a\nend\t0", 1, 1, "x"), PackingRow("b", 1, 1, "x\x1b[31m"), PackingRow("ü", 1, 1, "x")]
    many = [PackingRow(f"k{number}", 1, 1, TEXT) for number in range(5000)]
    file = PackingFile(NOW_S, NOW_S + 10, PACKING.fitting([*hostile, *many]))
    assert PACKING.parse(PACKING.render(file)).value == file
    assert 300 < len(file.rows) < 5000
    assert file.of_family("k0", 1) == many[0]
    assert file.of_family("k0", 2) is None


NOW_TEXT = "almanac: Pack two on one GPU: each likely 0.80 to 0.95 of its speed"
ADVICE = [
    "almanac-advice\t1", "version\tv", "mode\toff", "tell\tno", "prompt\task", "priority\t1000\t60\t8640000",
    "tier\thbm24g\t24576\tconstraint\thbm24g", "tier\thbm80g\t81920\tconstraint\thbm80g",
    "F\ttuned-#\t1\t60\t5\t9000\thbm24g\t-\tyour last 9 runs peaked at 8 GiB per GPU.", "end\t1", "",
]  # fmt: skip
PYTHON = """import sys
sys.path.insert(0, {root!r})
from slurm_hooks.submit.dialogue import Terminal, advise
terminal = Terminal(sys.stdout.write, sys.stdin.readline) if {is_terminal} else None
import os
argv, told = advise({argv!r}, os.environ, terminal, lambda: {advice!r})
print("told" if told else "silent", argv == {argv!r})
"""


class Submitter:
    """Submits at a terminal, by the wrapper's dialogue or by cli_filter.lua, and says what was shown."""

    def __init__(self, folder: Path, way: str) -> None:
        self.folder, self.way = folder, way
        self.own = folder / "advice/user" / str(os.getuid())
        self.own.mkdir(parents=True)
        now_s = int(time.time())
        lines = [*ADVICE[:2], f"written\t{now_s}", f"expires\t{now_s + 3600}", *ADVICE[2:]]
        (self.own / "advice.json").write_bytes(shown("\n".join(lines)))
        rows = (ROW, PackingRow("tuned-#", 1, 5, TEXT), PackingRow("almanac-pack", 1, 5, TEXT))
        (self.own / "packing").write_bytes(PACKING.render(PackingFile(now_s, now_s + 3600, rows)))
        self.script = folder / "train-7"
        self.script.write_text("#!/bin/sh\npython train.py\n")

    def say(self, *options: str, mode: str = "", pty: bool = True) -> str:
        environ = {"HOME": str(self.folder / "home"), "PATH": "/usr/bin:/bin", "TERM": "dumb"}
        environ |= {"ALMANAC_ADVICE": mode} if mode else {}
        argv = [*options, str(self.script)]
        command = self._python(argv, pty) if self.way == "python" else self._lua(argv)
        if not pty:
            return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
        shown, status = pexpect.run(
            shlex.join(command), env=environ, withexitstatus=True, timeout=300, encoding="utf-8", cwd=str(self.folder)
        )
        assert status == 0, shown
        return shown.replace("\r\n", "\n")

    def _python(self, argv: list[str], pty: bool) -> list[str]:
        code = PYTHON.format(root=str(ROOT), argv=argv, advice=str(self.folder / "advice"), is_terminal=pty)
        return [sys.executable, "-c", code]

    def _lua(self, argv: list[str]) -> list[str]:
        """As Slurm hands the options over: by their names, with the script and its arguments in argv."""
        named = [each.removeprefix("--").partition("=") for each in argv[:-1]]
        options: dict[str, Any] = {name: value for name, _, value in named} | {"type": "sbatch", "argv": [argv[-1]]}
        if "quiet" in options:
            options["quiet"] = "1"
        dirs = {"advice": str(self.folder / "advice"), "prompt": str(prompt_program(self.folder))}
        code = f"""
local options = {literal(options)}
dofile({literal(f"{LUA_DIR}/cli_filter.lua")}).pre_submit(options, 0, {literal(dirs)})
print(options["gpus"])"""
        path = self.folder / "submit.lua"
        path.write_bytes(code.encode())
        return [self.way, str(path)]


@pytest.fixture(params=["python", *INTERPRETERS])
def submitter(request: pytest.FixtureRequest, tmp_path: Path) -> Submitter:
    return Submitter(tmp_path, request.param)


SWEEP = ("--gpus=1", "--array=0-9", "--constraint=hbm80g")


def test_a_note_is_shown_once_a_day_and_changes_nothing(submitter: Submitter) -> None:
    shown = submitter.say(*SWEEP)
    assert NOW_TEXT in shown
    assert "\n         Use: --array=A-B:2 and almanac-pack -- CMD {}\n" in shown
    assert "?" not in shown  # nothing is asked
    assert shown.endswith(("told True\n", "\n1\n"))
    assert NOW_TEXT not in submitter.say(*SWEEP)
    kept = submitter.folder / "home/.local/state/almanac/packing"
    key, gpus, word, _, time_s = kept.read_text().rstrip("\n").split("\t")
    assert (key, gpus, word) == ("train-#", "1", "asked")
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.write_text(kept.read_text().replace(time_s, str(int(time_s) - 90_000)))
    assert NOW_TEXT in submitter.say(*SWEEP)


@pytest.mark.parametrize("submitter", ["python", INTERPRETERS[0]], indirect=True)
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        (("--gpus=1", "--constraint=hbm80g"), ""),
        (("--gpus=1", "--constraint=hbm80g", "--array=0-9%01"), ""),
        (("--gpus=1", "--constraint=hbm80g", "--array=5-5"), ""),
        (("--gpus=1", "--constraint=hbm80g", "--array=0-9:2"), ""),
        (("--gpus=2", "--constraint=hbm80g", "--array=0-9"), ""),
        (("--gpus=1", "--array=0-9", "--constraint=hbm24g"), ""),
        (("--gpus=1", "--array=0-9", "--constraint=hbm24g|hbm80g"), ""),
        (("--gpus=1", "--array=0-9"), ""),
        (("--gpus=k80:1", "--array=0-9"), ""),
        (("--gres=gpu:nvidia_a100_1g.10gb:1", "--array=0-9", "--constraint=hbm80g"), ""),
        (SWEEP, "off"),
        (SWEEP, "apply"),
        ((*SWEEP, "--quiet"), ""),
        ((*SWEEP, "--job-name=other"), ""),
        ((*SWEEP, "--job-name=almanac-pack"), ""),
        # A smaller tier is enough: one advice on a GPU is enough, too, and this one is shown or not as it was before.
        ((*SWEEP, "--job-name=tuned-3"), "show"),
    ],
)
def test_other_submissions_are_not_told(submitter: Submitter, options: tuple[str, ...], mode: str) -> None:
    assert NOW_TEXT not in submitter.say(*options, mode=mode)


def test_nothing_is_said_without_a_terminal_or_of_a_script_that_packs(submitter: Submitter) -> None:
    assert NOW_TEXT not in submitter.say(*SWEEP, pty=False)
    submitter.script.write_text("#!/bin/sh\nexec almanac-pack -n 2 -- ./train {}\n")
    assert NOW_TEXT not in submitter.say(*SWEEP)


def test_a_broken_file_a_pipe_and_a_home_that_cannot_be_written_never_stop_a_submission(submitter: Submitter) -> None:
    path = submitter.own / "packing"
    good = path.read_bytes()
    for bad in (b"", good[:-9], b"\xff" * 70_000, good.replace(b"Pack", b"\x1b[2J")):
        path.write_bytes(bad)
        assert NOW_TEXT not in submitter.say(*SWEEP)
    path.unlink()
    os.mkfifo(path)
    assert NOW_TEXT not in submitter.say(*SWEEP)
    path.unlink()
    path.write_bytes(good)
    (submitter.folder / "home").write_text("no folder")
    for _ in range(2):  # what cannot be kept is told again
        assert NOW_TEXT in submitter.say(*SWEEP)
