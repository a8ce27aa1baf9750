"""sbatch-almanac as a process, around a program named sbatch that says what it got."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pexpect
import pytest
from advice_lines import shown

from slurm_hooks.submit.sbatch_almanac import configured

ROOT = Path(__file__).resolve().parents[3]
MODULE = ROOT / "slurm_hooks" / "submit" / "sbatch_almanac.py"
TEXT = 'your last 14 runs of "train-bert-#" peaked at 21.3 GiB per GPU.'
QUESTION = 'Submit with -C "gpu&hbm40g" instead?'
SBATCH = r"""#!{python} -I
import json, os, sys
try:
    stdin = b"" if os.isatty(0) else os.read(0, 10000)
except OSError as error:
    stdin = str(error).encode()
with open({out!r}, "w") as out:
    json.dump({{
        "argv": [os.fsencode(word).hex() for word in sys.argv],
        "environ": open("/proc/self/environ", "rb").read().hex(),
        "stdin": stdin.hex(),
        "pipe": open("/proc/self/status").read().split("SigIgn:")[1].split()[0],
    }}, out)
print("Submitted batch job 42")
sys.exit(7)
"""
GPU_JOB = ["-J", "train-BERT-7", "--gpus=2", "-C", "gpu&hbm80g", "--wrap", "sleep 1"]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def as_program(path: Path) -> Path:
    """sbatch-almanac as scripts/build-deb.sh makes it, finding the packages in this checkout."""
    head = f"#!{sys.executable} -I\n"
    text = MODULE.read_text().replace("import gc\n", f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport gc\n", 1)
    return program(path, head + text)


def nodes(partition: str, features: str) -> str:
    """A line of sinfo's listing: four nodes."""
    return f"{partition}|4|64|512000|{features}|gpu:a100:4|infinite|up|all"


NODES = "\n".join([nodes("p*", "gpu,hbm40g"), nodes("p*", "gpu,hbm80g")])


class Bench:
    """A folder with sbatch-almanac, a stand-in for sbatch, and a user's advice."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = root / "got.json"
        self.wrapper = as_program(root / "almanac-bin" / "sbatch-almanac")
        self.sbatch = program(root / "bin" / "sbatch", SBATCH.format(python=sys.executable, out=str(self.out)))
        self.choices = root / "home/.local/state/almanac/choices"
        (root / "home").mkdir()
        self.sinfo(f"echo '{NODES}'")
        config = root / "almanac.toml"
        config.write_text(f'[hooks]\nadvice_dir = "{root}/advice"\n')
        self.environ = {
            "PATH": f"{self.sbatch.parent}:/usr/bin:/bin",
            "HOME": str(root / "home"),
            "ALMANAC_CONFIG": str(config),
        }
        self.advise()

    def advise(self, prompt: str = "ask", now_s: int | None = None, text: str = TEXT) -> None:
        now_s = now_s or int(time.time())
        lines = [
            "almanac-advice\t1", "version\tv", f"written\t{now_s}", f"expires\t{now_s + 3600}", "mode\toff", "tell\tno",
            f"prompt\t{prompt}", "priority\t1000\t60\t8640000", "tier\thbm40g\t40960\tconstraint\thbm40g",
            "tier\thbm80g\t81920\tconstraint\thbm80g",
            f"F\ttrain-bert-#\t2\t60\t5\t25395\thbm40g\t-\t{text}", "end\t1", "",
        ]  # fmt: skip
        path = self.advice_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(shown("\n".join(lines), "hbm80g=40 min"))

    def sinfo(self, line: str) -> None:
        """Set what sinfo does instead of asking a slurmctld, and forget its earlier answer."""
        (self.choices.parent / "nodes").unlink(missing_ok=True)
        program(self.root / "bin/sinfo", f"#!/bin/sh\n{line}\n")

    @property
    def advice_path(self) -> Path:
        return self.root / "advice/user" / str(os.getuid()) / "advice.json"

    def run(self, *argv: str, program: Path | None = None, stdin: bytes = b"", **environ: str) -> Any:
        """Without a terminal."""
        self.out.unlink(missing_ok=True)
        command = [program or self.wrapper, *argv]
        whole = {**self.environ, **environ}
        return subprocess.run(command, input=stdin, env=whole, capture_output=True, check=False, cwd=self.root)

    def terminal(self, *argv: str, program: Path | None = None, **environ: str) -> Any:
        self.out.unlink(missing_ok=True)
        whole = {**self.environ, **environ}
        command = str(program or self.wrapper)
        return pexpect.spawn(
            command, list(argv), env=whole, cwd=str(self.root), timeout=300, encoding="utf-8", dimensions=(40, 120)
        )

    def answer(self, line: str, *argv: str, **environ: str) -> str:
        """Text shown before the question, once the line was typed and the end was reached."""
        shell = self.terminal(*(argv or GPU_JOB), **environ)
        shell.expect_exact("for this job: ")
        shown = str(shell.before)
        shell.sendline(line)
        ended(shell)
        return shown

    @property
    def got(self) -> list[str]:
        return [bytes.fromhex(word).decode() for word in self._got["argv"][1:]]

    @property
    def environment(self) -> bytes:
        return bytes.fromhex(self._got["environ"])

    @property
    def _got(self) -> Any:
        return json.loads(self.out.read_text())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def ended(shell: Any) -> str:
    """Text shown up to the end, which must be sbatch's own."""
    shell.expect(pexpect.EOF)
    shown = str(shell.before).replace("\r\n", "\n")
    shell.close()
    assert shell.exitstatus == 7
    return shown


def test_without_a_terminal_nothing_differs(bench: Bench) -> None:
    for argv in (GPU_JOB, ["--parsable", *GPU_JOB], ["-W", "job.sh", "a b", "", "é\udcff$(id)"], []):
        plain = bench.run(*argv, program=bench.sbatch, stdin=b"#!/bin/sh\n#SBATCH --gpus=2\n\x00\xff")
        before = bench._got
        done = bench.run(*argv, stdin=b"#!/bin/sh\n#SBATCH --gpus=2\n\x00\xff")
        after = bench._got
        assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)
        assert after["argv"][1:] == before["argv"][1:]
        assert (after["environ"], after["stdin"]) == (before["environ"], before["stdin"])
        # The stand-in is Python, which ignores SIGPIPE itself: what else is ignored is as it was.
        assert after["pipe"] == before["pipe"]


def test_the_environment_stays_as_it_came(bench: Bench) -> None:
    exported = {"BASH_FUNC_module%%": "() {  echo; }", "with.dot": "1", "EMPTY": "", "BAD": "\udcff\n", "LC_ALL": "C"}
    bench.run(program=bench.sbatch, **exported)
    before = bench.environment
    bench.run(**exported)
    assert bench.environment == before
    shell = bench.terminal(*GPU_JOB, **exported)
    shell.expect_exact("for this job: ")
    shell.sendline("y")
    ended(shell)
    assert bench.environment == before


def test_signals_are_as_sbatch_would_have_them(bench: Bench) -> None:
    program(bench.sbatch, f"#!/bin/sh\ngrep SigIgn /proc/self/status >{bench.out}\n")
    bench.run(program=bench.sbatch)
    plain = bench.out.read_text()
    bench.run()
    assert bench.out.read_text() == plain


@pytest.mark.parametrize(
    ("typed_line", "is_changed", "kept"),
    [("y", True, "asked"), ("v", False, "never")],
)
def test_answers(bench: Bench, typed_line: str, is_changed: bool, kept: str) -> None:
    shown = bench.answer(typed_line)
    assert f"almanac: hbm40g is enough: {TEXT}" in " ".join(shown.split())
    assert "With hbm40g, it starts about 40 min earlier" in shown
    assert QUESTION in shown
    extra = ["--constraint=gpu&hbm40g"] if is_changed else []
    assert bench.got == [*GPU_JOB, *extra]
    key, gpus, word, tier, _ = bench.choices.read_text().split("\t")
    assert (key, gpus, word, tier) == ("train-bert-#", "2", kept, "hbm40g")
    assert bench.choices.stat().st_mode & 0o777 == 0o600


def test_always_says_so_and_only_at_a_terminal(bench: Bench) -> None:
    bench.answer("a")
    shown = ended(bench.terminal(*GPU_JOB))
    assert shown == 'almanac: using -C "gpu&hbm40g": you answered "always" for train-bert-#.\nSubmitted batch job 42\n'
    assert bench.got == [*GPU_JOB, "--constraint=gpu&hbm40g"]
    assert bench.run(*GPU_JOB).stderr == b""
    assert bench.got == GPU_JOB


def test_ctrl_c_cancels(bench: Bench) -> None:
    shell = bench.terminal(*GPU_JOB)
    shell.expect_exact("for this job: ")
    shell.sendintr()
    shell.expect(pexpect.EOF)
    shell.close()
    assert shell.signalstatus == 2
    assert not bench.out.exists()
    assert not bench.choices.exists()


@pytest.mark.parametrize(
    ("mode", "is_told", "is_changed"),
    [("off", False, False), ("show", True, False), ("apply", False, True), ("nonsense", None, False)],
)
def test_the_users_own_mode(bench: Bench, mode: str, is_told: bool | None, is_changed: bool) -> None:
    shell = bench.terminal(*GPU_JOB, ALMANAC_ADVICE=mode)
    if is_told is None:
        shell.expect_exact("for this job: ")
        shell.sendline("n")
    shown = ended(shell)
    assert (TEXT in shown.replace("\n         ", " ")) == bool(is_told)
    assert "[y]es" not in shown
    assert bench.got == [*GPU_JOB, *(["--constraint=gpu&hbm40g"] if is_changed else [])]


@pytest.mark.parametrize("prompt", ["off", "show"])
def test_the_sites_mode(bench: Bench, prompt: str) -> None:
    bench.advise(prompt)
    assert ("almanac:" in ended(bench.terminal(*GPU_JOB))) == (prompt == "show")
    bench.choices.unlink(missing_ok=True)
    bench.answer("y", ALMANAC_ADVICE="ask")


def test_apply_needs_no_terminal_but_never_acts_inside_a_job(bench: Bench) -> None:
    done = bench.run(*GPU_JOB, ALMANAC_ADVICE="apply")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"Submitted batch job 42\n", b"")
    assert bench.got == [*GPU_JOB, "--constraint=gpu&hbm40g"]
    bench.run(*GPU_JOB, ALMANAC_ADVICE="apply", SLURM_JOB_ID="1")
    assert bench.got == GPU_JOB


@pytest.mark.parametrize(
    "argv",
    [
        ["--parsable", *GPU_JOB],
        ["-Q", *GPU_JOB],
        ["--quiet", *GPU_JOB],
        ["--test-only", *GPU_JOB],
        ["-M", "other", *GPU_JOB],
        ["--het-thing", *GPU_JOB],
        [*GPU_JOB, "-C", "gpu&hbm40g"],
        [*GPU_JOB, ":", *GPU_JOB],
        [word.replace("--gpus=2", "--gpus=1") for word in GPU_JOB],
        ["-J", "train-bert-1", "absent.sh"],
    ],
    ids=" ".join,
)
def test_silent_at_a_terminal(bench: Bench, argv: list[str]) -> None:
    assert ended(bench.terminal(*argv)) == "Submitted batch job 42\n"
    assert bench.got == argv


def test_silent_inside_a_job(bench: Bench) -> None:
    assert ended(bench.terminal(*GPU_JOB, SLURM_JOB_ID="5")) == "Submitted batch job 42\n"


@pytest.mark.parametrize("redirection", ["<&-", "</dev/null", "2>/dev/null", "2>&-", "<<X\nX", "| cat >&2; true"])
def test_silent_where_one_end_is_no_terminal(bench: Bench, redirection: str) -> None:
    line = f"{bench.wrapper} -J train-bert-1 --gpus=2 --wrap x {redirection}"
    if redirection.startswith("|"):
        line = f"true | {bench.wrapper} -J train-bert-1 --gpus=2 --wrap x"
    shell = bench.terminal("-c", line, program=Path("/bin/bash"))
    shell.expect(pexpect.EOF)
    assert "almanac" not in str(shell.before)
    shell.close()
    assert bench.got == ["-J", "train-bert-1", "--gpus=2", "--wrap", "x"]


@pytest.mark.parametrize("prefix", ["setsid -w", "nohup", "timeout 10"])
def test_silent_without_the_terminal_of_ones_own(bench: Bench, prefix: str) -> None:
    """setsid has none; nohup sends the words into a file; timeout is a background group."""
    line = f"{prefix} {bench.wrapper} -J train-bert-1 --gpus=2 --wrap x; true"
    shell = bench.terminal("-c", line, program=Path("/bin/bash"))
    shell.expect(pexpect.EOF)
    assert "almanac:" not in str(shell.before)
    shell.close()
    assert bench.got == ["-J", "train-bert-1", "--gpus=2", "--wrap", "x"]


def test_a_question_never_stops_a_background_job(bench: Bench) -> None:
    line = f"set -m; {bench.wrapper} -J train-bert-1 --gpus=2 --wrap x & wait $!; echo rc=$?"
    shell = bench.terminal("-c", line, program=Path("/bin/bash"))
    shell.expect("rc=7")


def test_the_options_of_a_script_count(bench: Bench) -> None:
    script = bench.root / "sub" / "job.sh"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n#SBATCH -J train-bert-1 -G2\n#SBATCH -C gpu&hbm80g\nsleep 1\n")
    bench.answer("y", "sub/job.sh", "-C", "x")
    assert bench.got == ["--constraint=gpu&hbm40g", "sub/job.sh", "-C", "x"]
    bench.choices.unlink()
    bench.answer("y", "-D", "sub", "--", "job.sh")
    assert bench.got == ["-D", "sub", "--constraint=gpu&hbm40g", "--", "job.sh"]
    bench.choices.unlink()
    script.write_text("#!/bin/sh\n#SBATCH -J train-bert-1 -G2\n#SBATCH --parsable\n")
    assert "almanac" not in ended(bench.terminal("sub/job.sh"))
    script.write_text("#!/bin/sh\n#SBATCH -J train-bert-1 -G2\n#SBATCH hetjob\n#SBATCH -G2\n")
    assert "almanac" not in ended(bench.terminal("sub/job.sh"))


@pytest.mark.parametrize(
    "option", [["--tasks-per-node", "4"], ["--context", "s0"], ["--resources", "power:1"], ["--external"]]
)
def test_options_of_every_release_are_known(bench: Bench, option: list[str]) -> None:
    """An option that is not known hides what follows it, and nothing is said."""
    assert QUESTION in bench.answer("n", *option, *GPU_JOB)


def test_the_environments_options_count(bench: Bench) -> None:
    bench.answer("y", "-Jtrain-bert-1", "--wrap=x", SBATCH_GPUS="2", SBATCH_CONSTRAINT="gpu&hbm80g")
    assert bench.got == ["-Jtrain-bert-1", "--wrap=x", "--constraint=gpu&hbm40g"]


def test_a_default_partition_without_the_advised_tier(bench: Bench) -> None:
    bench.sinfo(f'[ -z "$SINFO_PARTITION" ] && echo "{nodes("a", "gpu,hbm40g")}\n{nodes("b*", "gpu,hbm80g")}"')
    bench.run(*GPU_JOB, ALMANAC_ADVICE="apply", SINFO_PARTITION="a")
    assert bench.got == GPU_JOB
    bench.sinfo(f'echo "{nodes("a*", "gpu,hbm40g")}\n{nodes("b", "gpu,hbm80g")}"')
    bench.run(*GPU_JOB, ALMANAC_ADVICE="apply")
    assert bench.got[-1] == "--constraint=gpu&hbm40g"


def test_sinfo_is_asked_once_in_a_loop_of_submissions(bench: Bench) -> None:
    bench.sinfo(f"echo x >>{bench.root}/asked; echo '{NODES}'")
    for _ in range(3):
        bench.run(*GPU_JOB, ALMANAC_ADVICE="apply")
        assert bench.got[-1] == "--constraint=gpu&hbm40g"
    assert (bench.root / "asked").read_text() == "x\n"
    bench.run(*GPU_JOB, ALMANAC_ADVICE="apply", SLURM_CONF="/of/another/cluster")
    assert (bench.root / "asked").read_text() == "x\nx\n"


@pytest.mark.parametrize("sinfo", ["sleep 3; echo '{}'", "exit 1", "echo nonsense; echo 'a|b'"])
def test_what_sinfo_does_not_say_is_not_offered(bench: Bench, sinfo: str) -> None:
    """An answer that comes after three seconds does not count."""
    bench.sinfo(sinfo.format(NODES))
    bench.run(*GPU_JOB, ALMANAC_ADVICE="apply")
    assert bench.got == GPU_JOB


PLACED = [["-w", "n3"], ["--nodelist=n3"], ["-F", "nodes"], ["-xn1"], ["--exclude", "n1"], ["--reservation=r"]]


@pytest.mark.parametrize("option", PLACED, ids=" ".join)
def test_nothing_is_changed_where_the_nodes_are_said(bench: Bench, option: list[str]) -> None:
    argv = [*option, *GPU_JOB]
    bench.run(*argv, ALMANAC_ADVICE="apply")
    assert bench.got == argv


def test_a_reservation_of_the_environment_counts(bench: Bench) -> None:
    bench.run(*GPU_JOB, ALMANAC_ADVICE="apply", SBATCH_RESERVATION="r")
    assert bench.got == GPU_JOB


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 100, None],
    ids=["garbage", "absent"],
)
def test_an_advice_file_that_is_not_to_be_used(bench: Bench, content: bytes | None) -> None:
    bench.advice_path.unlink()
    if content is not None:
        bench.advice_path.write_bytes(content)
    assert ended(bench.terminal(*GPU_JOB)) == "Submitted batch job 42\n"
    assert bench.got == GPU_JOB


def test_no_file_makes_it_wait(bench: Bench) -> None:
    bench.advice_path.unlink()
    os.mkfifo(bench.advice_path)
    assert ended(bench.terminal(*GPU_JOB)) == "Submitted batch job 42\n"
    os.mkfifo(bench.root / "job.sh")
    assert ended(bench.terminal("--gpus=2", "job.sh")) == "Submitted batch job 42\n"


@pytest.mark.parametrize("broken", ["no home", "file in the way", "garbage"])
def test_answers_that_cannot_be_kept(bench: Bench, broken: str) -> None:
    environ = {"HOME": ""} if broken == "no home" else {}
    if broken == "file in the way":
        (bench.root / "home/.local").write_text("")
    if broken == "garbage":
        bench.choices.parent.mkdir(parents=True)
        bench.choices.write_bytes(b"\xff\x00")
    for _ in range(1 if broken == "garbage" else 2):
        bench.answer("y", **environ)
        assert bench.got == [*GPU_JOB, "--constraint=gpu&hbm40g"]
    if broken != "garbage":
        shell = bench.terminal(*GPU_JOB, **environ)
        shell.expect_exact("for this job: ")
        shell.sendline("a")
        assert "almanac: could not save your answer" in ended(shell)


def test_hostile_names_are_inert(bench: Bench) -> None:
    name = "train-\x1b[31m\n%s$(touch x)`id`'\"-7"
    key = "train-_[#m_%s$(touch_x)`id`'`-#"
    lines = bench.advice_path.read_text().replace('"train-bert-#","gpus"', f'{json.dumps(key)},"gpus"')
    bench.advice_path.write_text(lines)
    shell = bench.terminal("-J", name, "--gpus=2", "--wrap=x", "--gres=none:$(id)\x1b[1m")
    shell.expect_exact("for this job: ")
    assert "\x1b" not in str(shell.before)
    shell.sendline("a")
    ended(shell)
    again = ended(bench.terminal("-J", name, "--gpus=2", "--wrap=x"))
    assert "\x1b" not in again
    assert key in again
    assert not (bench.root / "x").exists()


class TestFindingSbatch:
    def test_placed_earlier_in_path_under_its_name(self, bench: Bench) -> None:
        for link in (os.symlink, os.link):
            folder = bench.root / "early" / link.__name__
            folder.mkdir(parents=True)
            link(bench.wrapper, folder / "sbatch")
            done = bench.run("a", program=folder / "sbatch", PATH=f"{folder}:{bench.environ['PATH']}")
            assert (done.returncode, bench.got) == (7, ["a"])

    def test_several_copies_do_not_call_each_other_for_ever(self, bench: Bench) -> None:
        folders = [bench.root / name for name in ("one", "two", "three")]
        for folder in folders:
            shutil.copy(bench.wrapper, program(folder / "sbatch", ""))
        path = ":".join(map(str, [*folders, bench.environ["PATH"]]))
        for folder in folders:
            done = bench.run("a", program=folder / "sbatch", PATH=path)
            assert (done.returncode, done.stderr, bench.got) == (7, b"", ["a"])

    def test_a_script_named_sbatch_that_calls_it(self, bench: Bench) -> None:
        script = program(bench.root / "early/sbatch", f'#!/bin/sh\n{bench.wrapper} --from-script "$@"\n')
        path = f"{script.parent}:{bench.environ['PATH']}"
        bench.environ["PATH"] = path
        assert bench.run("a", program=script).returncode == 7
        assert bench.got == ["--from-script", "--from-script", "a"]
        shell = bench.terminal(*GPU_JOB)
        shell.expect_exact("for this job: ")
        shell.sendline("y")
        ended(shell)  # the second one does not ask again
        assert bench.got == ["--from-script", *GPU_JOB, "--constraint=gpu&hbm40g"]

    def test_named_by_the_user(self, bench: Bench) -> None:
        other = program(bench.root / "other/my-sbatch", "#!/bin/sh\necho other; exit 3\n")
        done = bench.run(ALMANAC_SBATCH=str(other))
        assert (done.returncode, done.stdout) == (3, b"other\n")

    def test_named_by_the_site(self, bench: Bench) -> None:
        config = Path(bench.environ["ALMANAC_CONFIG"])
        config.write_text(f'[slurm]\nbin_dir = "{bench.sbatch.parent}"\n')
        assert bench.run("a", PATH="/nonexistent").returncode == 7

    def test_named_by_another_user(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Root by a sudo that keeps HOME: the program that is named there would run as root."""
        config = tmp_path / "almanac/config.toml"
        config.parent.mkdir()
        config.write_text('[slurm]\nbin_dir = "/home/alice/bin"\n')
        environ = {"XDG_CONFIG_HOME": str(tmp_path)}
        assert configured(environ, "slurm", "bin_dir") == "/home/alice/bin"
        if os.geteuid() == 0:
            os.chown(config, 54321, 54321)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 54321)
        assert configured(environ, "slurm", "bin_dir") == ""
        expected = "" if os.geteuid() == 0 else "/home/alice/bin"
        assert configured({"ALMANAC_CONFIG": str(config)}, "slurm", "bin_dir") == expected

    def test_none_at_all(self, bench: Bench) -> None:
        config = Path(bench.environ["ALMANAC_CONFIG"])
        config.write_text('[slurm]\nbin_dir = "/nonexistent"\n')
        done = bench.run(PATH="/nonexistent")
        assert done.returncode == 1
        assert b"cannot run sbatch" in done.stderr
        helped = bench.run("--help", PATH="/nonexistent")
        assert (helped.returncode, helped.stderr) == (0, b"") and b"Usage: sbatch-almanac" in helped.stdout

    def test_without_a_path_the_systems_own_is_searched(self, bench: Bench) -> None:
        """Never the current folder."""
        program(bench.root / "sbatch", "#!/bin/sh\necho wrong\n")
        config = Path(bench.environ["ALMANAC_CONFIG"])
        config.write_text(f'[slurm]\nbin_dir = "{bench.sbatch.parent}"\n')
        del bench.environ["PATH"]
        assert b"wrong" not in bench.run("--version").stdout

    def test_a_sbatch_that_cannot_be_run_is_passed_over(self, bench: Bench) -> None:
        bad = program(bench.root / "early/sbatch", "#!/nonexistent\n")
        assert bench.run("a", PATH=f"{bad.parent}:{bench.environ['PATH']}").returncode == 7


@pytest.mark.parametrize("text", ["= broken", "[hooks]\nadvice_dir = 5\n"])
def test_a_broken_configuration_changes_nothing(bench: Bench, text: str) -> None:
    Path(bench.environ["ALMANAC_CONFIG"]).write_text(text, encoding="latin-1")
    assert ended(bench.terminal(*GPU_JOB)) == "Submitted batch job 42\n"


def test_almanac_missing_or_broken_changes_nothing(bench: Bench) -> None:
    alone = program(bench.root / "alone/sbatch-almanac", f"#!{sys.executable} -IS\n{MODULE.read_text()}")
    assert ended(bench.terminal(*GPU_JOB, program=alone)) == "Submitted batch job 42\n"
    broken = bench.root / "broken"
    program(broken / "slurm_hooks/__init__.py", "syntax error here")
    text = bench.wrapper.read_text().replace(repr(str(ROOT)), repr(str(broken)))
    assert ended(bench.terminal(*GPU_JOB, program=program(bench.root / "b/w", text))) == "Submitted batch job 42\n"


def loaded(code: str, *argv: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(sorted(sys.modules))", *argv],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return set(ast.literal_eval(done.stdout))


def test_nothing_heavy_is_imported() -> None:
    before = loaded("")
    quick = loaded("import slurm_hooks.submit.sbatch_almanac") - before
    assert not quick & {"re", "dataclasses", "pathlib", "typing", "subprocess", "almanac.config"}
    whole = loaded("import slurm_hooks.submit.dialogue, tomllib") - before
    heavy = {"click", "pandas", "numpy", "pyarrow", "duckdb", "lightgbm", "scipy", "requests", "rich", "jinja2", "dask",
             "ClusterShell", "matplotlib", "rapidfuzz", "subprocess", "pathlib", "logging", "almanac.config",
             "almanac.config_file", "advisor.explain", "argparse"}  # fmt: skip
    assert not whole & heavy
    assert len(whole) < 100
