"""Notes on packing for arrays: the file, the decision, and the words; packing.lua says the same of each case."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pexpect
import pytest

from almanac.records import Request
from almanac.submit_config import Tier
from slurm_hooks.advice.packing_file import MAX_BYTES, PackingFile, PackingRow, render_packing, usable_packing
from slurm_hooks.submit.packing_note import find_note, is_sweep, note, noted, was_noted
from tests.slurm_hooks.lua_runner import INTERPRETERS, LUA_DIR, Lua, literal

NOW_S = 1_795_256_100
ROOT = Path(__file__).resolve().parents[3]
TEXT = (
    "Pack two on one GPU: each likely 0.80 to 0.95 of its speed, 1.6 to 1.9 times the work per GPU-hour (9 runs). "
    "Use: --array=A-B:2 and almanac-pack -- CMD {}"
)
ROW = PackingRow("train-#", 1, 30_000, TEXT)
FILE = PackingFile(NOW_S + 10, {("train-#", 1): ROW})
TIERS = (
    Tier("hbm24g", 24_576, constraint="hbm24g"),
    Tier("hbm80g", 81_920, constraint="hbm80g"),
    Tier("1g.10gb", 9728, gres="1g.10gb", compute_slices=1),
)


def request(**other: Any) -> Request:
    """For one GPU of the large tier, unless `other` says otherwise."""
    fields: dict[str, Any] = {"gpu_count": 1, "is_array": True, "constraints": "hbm80g"} | other
    return Request("alice", fields.pop("job_name", "train-7"), **fields)


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
def test_a_job_that_sharing_does_not_fit_is_told_nothing(asked: Request) -> None:
    assert find_note(asked, "0-9", "", TIERS, FILE) is None


def test_a_job_that_names_no_tier_is_told_where_every_whole_gpu_holds_two() -> None:
    small = replace(ROW, need_mib=24_576)  # more than the slice, which no job gets without asking
    file = PackingFile(NOW_S + 10, {("train-#", 1): small})
    for asked in (request(constraints=""), request(constraints="hbm24g|hbm80g"), request(constraints="hbm24g")):
        assert find_note(asked, "0-9", "", TIERS, file) == small
    assert find_note(request(constraints=""), "0-9", "", (), file) == small  # a site without tiers


def test_a_gpu_type_is_told_only_beside_a_tier() -> None:
    small = PackingFile(NOW_S + 10, {("train-#", 1): replace(ROW, need_mib=1)})
    for kind in ("k80", "1g.10gb", "a100_1g.5gb"):
        for tiers in (TIERS, ()):
            asked = request(gpu_type=kind, gres=f"gpu:{kind}:1", constraints="")
            assert find_note(asked, "0-9", "", tiers, small) is None
    assert find_note(request(gpu_type="a100", gres="gpu:a100:1"), "0-9", "", TIERS, FILE) == ROW
    named = (*TIERS, Tier("a100", 40_960, gres="a100"))
    assert find_note(request(gpu_type="a100", constraints=""), "0-9", "", named, FILE) == ROW


def test_a_job_that_packs_already_is_told_nothing() -> None:
    assert find_note(request(), "0-9", "#!/bin/sh\nsrun almanac-pack -n 2 -- ./a {}\n", TIERS, FILE) is None
    own = PackingFile(NOW_S + 10, {("almanac-pack", 1): PackingRow("almanac-pack", 1, 1, TEXT)})
    assert find_note(request(job_name="almanac-pack"), "0-9", "", TIERS, own) is None


def test_a_note_is_not_repeated_for_a_day() -> None:
    kept = noted(ROW, NOW_S)
    assert was_noted(kept, NOW_S)
    assert was_noted(kept, NOW_S + 86_399)
    assert not was_noted(kept, NOW_S + 86_400)
    assert not was_noted(kept, NOW_S - 1)
    assert not was_noted(None, NOW_S)


def good_and_bad() -> tuple[bytes, list[bytes]]:
    good = render_packing(NOW_S + 10, [ROW, PackingRow("eval", 1, 5, "x")])
    bad = [
        good[:-1], good + b"P\n", good.replace(b"packing\t1", b"packing\t2"), good.replace(b"end\t2", b"end\t3"),
        good.replace(b"\t30000\t", b"\t-1\t"), good.replace(b"train-#", b"train #"), b"", b"\xff\n", b"end\t0\n",
        good.replace(b"Pack two", b"Pack\x1b[2Jtwo"), good.replace(b"Pack two", b"Pack\ttwo"),
        good.replace(b"\t1\t30000", b"\t0\t30000"), good.replace(b"(9 runs)", b"(" + b"9" * 400), good + good,
        good + b" " * MAX_BYTES + b"\n",
    ]  # fmt: skip
    assert all(each != good for each in bad)
    return good, bad


def test_a_file_comes_back_and_breaks_on_anything_else(tmp_path: Any) -> None:
    path = tmp_path / "packing"
    good, bad = good_and_bad()
    path.write_bytes(good)
    file = usable_packing(str(path), NOW_S)
    assert file is not None
    assert file.rows["train-#", 1] == ROW
    assert usable_packing(str(path), NOW_S + 10) is None
    for each in bad:
        path.write_bytes(each)
        assert usable_packing(str(path), NOW_S) is None, each
    path.unlink()
    assert usable_packing(str(path), NOW_S) is None


def test_hostile_rows_are_left_out_and_many_families_are_cut(tmp_path: Any) -> None:
    hostile = [
        PackingRow("a\nend\t0", 1, 1, "x"), PackingRow("b", 1, 1, "x\n\x1b[31m"), PackingRow("ü", 1, 1, "x"),
        PackingRow("x" * 65, 1, 1, "x"), PackingRow("n", 1, -5, "x"), PackingRow("t", 1, 1, ""),
    ]  # fmt: skip
    assert render_packing(NOW_S, hostile).endswith(b"\nend\t0\n")
    many = render_packing(NOW_S + 10, [PackingRow(f"k{number}", 1, 1, TEXT) for number in range(5000)])
    assert len(many) <= MAX_BYTES
    path = tmp_path / "packing"
    path.write_bytes(many)
    file = usable_packing(str(path), NOW_S)
    assert file is not None
    assert 300 < len(file.rows) < 5000
    assert ("k0", 1) in file.rows


GPU_TYPES = (
    "1g.10gb", "2g.20gb", "a100", "k80", "nvidia_a100_1g.10gb", "a100_1g.5gb", "1C.3G.20GB", "8g.5gb", "1gx10gb", "%d",
    "h1g.gb",
)  # fmt: skip
ARRAYS = (
    "0-9", "1,2", "3", "0-4%1", "0-4%11", "5-5", "0-0", "9-1", "10-9", "0-9%01", "0-9%0", "0-9:1", "0-9:2", "0-9:1%2",
    "0-9:1%1", "0-4%", "0-9%2%2", "0-9,3", "-", "%1", "", "0-9\n", " 0-9", "0-" + "9" * 9, "0-" + "9" * 10,
    "0-9%" + "9" * 400,
)  # fmt: skip


def random_case(rng: random.Random) -> tuple[Request, str, PackingFile]:
    gpu_type = rng.choice(("", "", rng.choice(GPU_TYPES)))
    asked = request(
        gpu_count=rng.choice((1, 1, 1, 2)), may_use_more=rng.random() < 0.1, gpu_type=gpu_type,
        gres=f"gpu:{gpu_type}:1" if gpu_type else "",
        constraints=rng.choice(("", "hbm24g", "hbm80g", "ib&hbm80g", "x", "hbm24g|hbm80g")),
    )  # fmt: skip
    need_mib = rng.choice((1, 24_576, 24_577, 81_920, 81_921, 90_000))
    key = rng.choice(("train-#", "train-#", "train", "other"))
    return (
        asked,
        rng.choice(("0-9", rng.choice(ARRAYS))),
        PackingFile(NOW_S + rng.choice((0, 1, 9)), {(key, 1): PackingRow(key, 1, need_mib, TEXT)}),
    )


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_lua_says_the_same(interpreter: str) -> None:
    rng = random.Random(22)
    cases = [random_case(rng) for _ in range(3000)]
    code = [
        'local packing, proposal = dofile(dir .. "packing.lua"), dofile(dir .. "proposal.lua")',
        f"local tiers_of = {literal([_lua_tier(each) for each in TIERS])}",
        "local function say(request, array, text)",
        f"  local row = packing.parse(text, {NOW_S}, 'train-#', 1)",
        "  local is_told = row and packing.is_sweep(array) and packing.fits(tiers, request, tiers_of, row)",
        "  all(is_told and row.need or nil, is_told and proposal.note(row.text) or nil)",
        "end",
    ]
    expected = []
    for asked, array, file in cases:
        content = render_packing(file.expires_s, file.rows.values())
        told = {
            "constraints": asked.constraints, "gres": asked.gres, "partition": "", "gpu_count": asked.gpu_count,
            "gpu_type": asked.gpu_type, "may_use_more": asked.may_use_more, "gpu_options": [],
        }  # fmt: skip
        code.append(f"say({literal(told)}, {literal(array)}, {literal(content)})")
        row = find_note(asked, array, "", TIERS, file) if file.expires_s > NOW_S else None
        expected.append([row.need_mib, note(row)] if row else [None, None])
    actual = Lua(interpreter).run("\n".join(code))
    for case, one, other in zip(cases, actual, expected, strict=True):
        assert one == other, case
    assert 100 < sum(row[0] is not None for row in expected) < 2000


def _lua_tier(tier: Tier) -> dict[str, Any]:
    slices = {"compute_slices": tier.compute_slices} if tier.is_slice else {}
    plain = {"name": tier.name, "capacity_mib": tier.capacity_mib, "kind": tier.kind}
    return {**plain, tier.kind: getattr(tier, tier.kind), **slices}


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_lua_refuses_the_same_files(interpreter: str) -> None:
    good, bad = good_and_bad()
    code = ['local packing = dofile(dir .. "packing.lua")']
    code += [f"all(packing.parse({literal(each)}, {NOW_S}, 'train-#', 1) ~= nil)" for each in (good, *bad)]
    code.append(f"all(packing.parse({literal(good)}, {NOW_S + 10}, 'train-#', 1) ~= nil)")
    code.append(f"all(packing.parse({literal(good)}, {NOW_S}, 'train-#', 2) ~= nil)")
    found = [row[0] for row in Lua(interpreter).run("\n".join(code))]
    assert found == [True, *[False] * (len(bad) + 2)]


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
        (self.own / "advice").write_text("\n".join(lines))
        (self.own / "packing").write_bytes(
            render_packing(
                now_s + 3600, [ROW, PackingRow("tuned-#", 1, 5, TEXT), PackingRow("almanac-pack", 1, 5, TEXT)]
            )
        )
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
            shlex.join(command), env=environ, withexitstatus=True, timeout=30, encoding="utf-8", cwd=str(self.folder)
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
        dirs = {"advice": str(self.folder / "advice")}
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
