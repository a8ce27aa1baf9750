"""cli_filter.lua and sbatch-almanac with a real Slurm, at a terminal and without one."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from typing import Any

import pexpect
import pytest
from advice_files import TEXT, family, shown_advice
from front_end import JOB, QUESTION, ROW, FrontEnd, ended
from native_site import NativeSite
from processes import wait_until
from sites import Site

from almanac.names import name_key

pytestmark = pytest.mark.cluster

HELD = ("-H", "-o", "/dev/null", *JOB)
WRAP = ("--wrap", "sleep 0")


@pytest.fixture
def front(site: Site) -> Iterator[FrontEnd]:
    made = FrontEnd(site)
    yield made
    made.forget()


@pytest.fixture(params=["filter", "wrapper", "both"])
def way(request: pytest.FixtureRequest, front: FrontEnd) -> str:
    """The call of sbatch with this piece, or both, installed."""
    if request.param != "wrapper":
        front.filter_on()
    return "sbatch" if request.param == "filter" else front.wrapper


@pytest.mark.every_release
@pytest.mark.parametrize(
    ("line", "features", "kept"),
    [
        ("y", "gpu&hbm40g", "asked"),
        ("", "gpu&hbm80g", "asked"),
        ("n", "gpu&hbm80g", "asked"),
        ("a", "gpu&hbm40g", "always"),
        ("v", "gpu&hbm80g", "never"),
    ],
)
def test_answers(front: FrontEnd, way: str, line: str, features: str, kept: str) -> None:
    shell = front.terminal(way, *HELD, *WRAP)
    shell.expect_exact("for this job: ")
    shown = str(shell.before + shell.after).replace("\r\n", "\n")
    assert shown == (
        f"almanac: hbm40g is enough: {TEXT.removesuffix(' 21.3 GiB per GPU')}\n         21.3 GiB per GPU.\n"
        "         With hbm40g, it starts about 40 min earlier (half of such jobs did) and\n"
        f"         frees 2 hbm80g for others.\n         {QUESTION}"
    )
    shell.sendline(line)
    after = ended(shell)
    assert re.fullmatch(rf"{line}\nSubmitted batch job \d+\n", after)
    assert front.constraint(after) == features
    fields = front.site.read("login", front.choices).decode().split("\t")
    assert fields[:4] == ["train-bert-#", "2", kept, "hbm40g"]
    assert front.run("stat", "-c", "%a %U", front.choices).stdout == b"600 alice\n"
    # Within the hour, and after a lasting answer, nothing is asked again.
    again = ended(front.terminal(way, *HELD, *WRAP))
    said = 'almanac: using -C "gpu&hbm40g": you answered "always" for train-bert-#.\n' if kept == "always" else ""
    assert re.fullmatch(re.escape(said) + r"Submitted batch job \d+\n", again)
    assert front.constraint(again) == ("gpu&hbm40g" if kept == "always" else "gpu&hbm80g")


def test_ctrl_c_cancels(front: FrontEnd, way: str) -> None:
    shell = front.terminal(way, *HELD, *WRAP)
    shell.expect_exact("for this job: ")
    shell.sendintr()
    shell.expect(pexpect.EOF)
    shell.close()
    assert shell.signalstatus == 2 or shell.exitstatus == 130  # as a container's engine says it
    wait_until("no job", lambda: not front.site.run("login", "alice", "squeue", "-h", "-u", "alice").stdout)


def test_a_partition_without_the_advised_tier(front: FrontEnd, way: str) -> None:
    """hbm80 has no hbm40g: such a job would be refused."""
    for mode in ("ask", "apply"):
        env = {"ALMANAC_ADVICE": mode, "SINFO_ALL": "1", "SINFO_PARTITION": "all"}
        shown = ended(front.terminal(way, *HELD, "-p", "hbm80", *WRAP, **env))
        assert "[y]es" not in shown
        assert ("found no nodes" in shown) == (mode == "ask")
        assert front.constraint(shown) == "gpu&hbm80g"
    front.forget()
    assert front.constraint(front.answered("y", way, *HELD, "-p", "all", *WRAP)) == "gpu&hbm40g"


def test_a_change_that_slurm_would_refuse_is_not_offered(front: FrontEnd, way: str) -> None:
    """No node with NVLink has the smaller tier: gpu&nvlink&hbm40g is refused, which gpu&nvlink is not."""
    features = ("scontrol", "update", "nodename=n[3-4]")
    front.site.run("ctl", "root", *features, "availablefeatures=gpu,hbm80g,nvlink", "activefeatures=gpu,hbm80g,nvlink")
    try:
        for constraint in ("gpu&nvlink", "gpu&nvlink&hbm80g"):
            argv = (*HELD[:-1], constraint, *WRAP)
            refused = front.run("sbatch", *HELD[1:-1], "gpu&nvlink&hbm40g", *WRAP, ALMANAC_ADVICE="off")
            assert refused.returncode != 0
            for mode in ("ask", "apply"):
                shown = ended(front.terminal(way, *argv, ALMANAC_ADVICE=mode))
                assert "[y]es" not in shown
                assert front.constraint(shown) == constraint
            done = front.run(way, *argv, ALMANAC_ADVICE="apply")
            assert front.constraint(done.stdout.decode()) == constraint
    finally:
        front.site.run("ctl", "root", *features, "availablefeatures=gpu,hbm80g", "activefeatures=gpu,hbm80g")


LINES = {
    "pipe in": "true | {0}",
    "file in": "{0} </dev/null",
    "closed input": "{0} <&-",
    "here-document": "{0} <<END\nx\nEND",
    "errors elsewhere": "{0} 2>/dev/null",
    "errors closed": "{0} 2>&-",
    "errors into a pipe": "{0} 2>&1 | cat",
    "another session": "setsid -w {0}; true",
    "nohup": "nohup {0}; true",
    "background": "set -m; {0} & wait $!",
    "a group of its own": "timeout 20 {0}; true",
    "cron": "env -i ${SLURM_CONF:+SLURM_CONF=$SLURM_CONF} PATH=$PATH HOME=$HOME setsid -w {0} </dev/null 2>&1; true",
    "--parsable": "{0} --parsable",
    "-Q": "{0} -Q",
    "inside a job": "SLURM_JOB_ID=1 {0}",
    "another name": "{0} -J something-else",
    "other GPUs": "{0} --gpus=1",
    "the advised tier": "{0} -C hbm40g",
    "a choice of tiers": "{0} -C 'hbm40g|hbm80g'",
}


def test_silent(front: FrontEnd, way: str) -> None:
    """From a shell on a terminal: each line takes something away that a question needs. Each submits one job."""
    command = shlex.join([way, *HELD, *WRAP])
    for number, (case, line) in enumerate(LINES.items(), 1):
        shown = ended(front.terminal("bash", "-c", line.replace("{0}", command)))
        assert "almanac:" not in shown, case
        jobs = front.site.run("login", "alice", "squeue", "-h", "-t", "PENDING", "-o", "%i").stdout.split()
        assert len(jobs) == number, (case, shown)


def test_without_a_terminal_the_output_is_sbatchs_own(front: FrontEnd) -> None:
    """Every way of submitting that programs use: same bytes, same status, with both pieces and with neither."""
    script = b"#!/bin/sh\n#SBATCH -J train-bert-1 --gpus=2\n#SBATCH -o /dev/null\nexit 3\n"
    cases: list[tuple[tuple[str, ...], bytes | None]] = [
        (("--parsable",), script),
        ((), script),
        (("-W",), script),
        (("--test-only",), script),
        (("--no-such-option",), script),
        (("-p", "nowhere"), script),
        ((), b"no script"),
        (("absent.sh",), None),
        (("-Q",), script),
        (("--version",), None),
        (("--help",), None),
    ]
    plain = [front.run("sbatch", *argv, stdin=stdin) for argv, stdin in cases]
    front.filter_on()
    ours = [front.run(front.wrapper, *argv, stdin=stdin) for argv, stdin in cases]
    for (argv, _), before, after in zip(cases, plain, ours, strict=True):
        assert after.returncode == before.returncode, argv
        for stream in ("stdout", "stderr"):
            assert numberless(getattr(after, stream)) == numberless(getattr(before, stream)), argv
    assert [done.returncode for done in plain[:3]] == [0, 0, 3]


def numberless(text: bytes) -> bytes:
    """Without what differs from one submission to the next: the job's number, a time, a node."""
    return re.sub(rb"\d{4}-\d\d-\d\dT[\d:]+|\bn[1-4]\b|\d+", b"N", text)


def test_a_script_on_the_terminals_input(front: FrontEnd, way: str) -> None:
    """A here-document is the script, and nobody reads from it before sbatch does."""
    line = f"{way} -H --parsable <<'END'\n#!/bin/sh\n#SBATCH -J from-here --gpus=2 -o /dev/null\nsleep 0\nEND"
    shown = ended(front.terminal("bash", "-c", line))
    assert front.site.job(shown.strip())["JobName"] == "from-here"


@pytest.mark.every_release
@pytest.mark.parametrize("hook", ["filter", "wrapper", "both"])
def test_the_jobs_environment_is_as_without_us(front: FrontEnd, hook: str) -> None:
    """Of a job whose question was answered yes, compared with the same job submitted with -C by hand."""
    out, script = f"{front.home}/env", f"{front.home}/env.sh"
    text = f"#!/bin/bash\nenv -0 | LC_ALL=C sort -z >{out}.$SLURM_JOB_NAME\n"
    front.site.write("login", script, text.encode(), owner="alice")
    exported = {"BASH_FUNC_module%%": "() {  echo module\n}", "EMPTY": "", "LANG": "C", "LC_ALL": "C"}
    asked = ("--gpus=2", "-o", "/dev/null")
    exports: list[tuple[str, ...]] = [()]
    if isinstance(front.site, NativeSite):
        # With these slurmd asks for the user's login environment, for which it waits two minutes in a container.
        exports += [("--export=ALL,FOO=1",), ("--export=NONE",)]
    for export in exports:
        front.site.hook("cli_filter", None)
        argv = ("sbatch", "-J", "train-bert-1", "-C", "gpu&hbm40g", *export, *asked, script)
        shown = [ended(front.terminal(*argv, **exported))]
        if hook != "wrapper":
            front.filter_on()
        program = "sbatch" if hook == "filter" else front.wrapper
        front.forget()
        argv = (program, "-J", "train-bert-2", "-C", "gpu&hbm80g", *export, *asked, script)
        shown.append(front.answered("y", *argv, **exported))
        for text in shown:
            front.site.wait_for(int(text.split("Submitted batch job ")[1]), "COMPLETED")
        before, after = (environment(front, f"{out}.train-bert-{number}") for number in (1, 2))
        assert after == before
        assert (b"BASH_FUNC_module%%" in after) == (export != ("--export=NONE",))


def environment(front: FrontEnd, path: str) -> dict[bytes, bytes]:
    """Without what is of one job alone."""
    pairs = (entry.partition(b"=") for entry in front.site.read("login", path).split(b"\0") if entry)
    of_a_job = rb"SLURM_.*(ID|NAME|NODE|NODELIST|ADDR|TIME|GTIDS|PID|GPUS_ON_NODE)|SLURM_JOB_.*"
    own = re.compile(rb"%s|SLURMD_NODENAME|HOSTNAME|TMPDIR|ZE_AFFINITY_MASK|ROCR_.*|GPU_.*|CUDA_.*|_" % of_a_job)
    return {name: value for name, _, value in pairs if not own.fullmatch(name)}


@pytest.mark.every_release
@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_srun_and_salloc(front: FrontEnd, command: str) -> None:
    front.filter_on()
    options = (*JOB, "-n1", "-t1", "sh", "-c", "scontrol -o show job $SLURM_JOB_ID | grep -o 'Features=[^ ]*'")
    assert "Features=gpu&hbm40g" in front.answered("y", command, *options)
    assert "Features=gpu&hbm80g" in ended(front.terminal(command, *options))
    front.forget()
    assert "Features=gpu&hbm80g" in front.answered("n", command, *options)


def test_a_step_of_a_job_is_not_asked_about(front: FrontEnd) -> None:
    """srun --jobid from a login shell."""
    job_id = front.run("sbatch", "--parsable", "-t9", "-o", "/dev/null", *JOB, "--wrap", "sleep 500").stdout.decode()
    front.site.wait_for(int(job_id), "RUNNING")
    front.filter_on()
    try:
        shown = ended(front.terminal("srun", f"--jobid={int(job_id)}", "-n1", *JOB[:3], "echo", "a step has run"))
    finally:
        front.run("scancel", job_id.strip())
    assert shown == "a step has run\n"


def test_ctrl_c_at_sruns_question_cancels(front: FrontEnd) -> None:
    """At the latest with the next line: srun blocks the signal until it has submitted, at least on 22.05 and 24.11."""
    front.filter_on()
    shell = front.terminal("srun", *JOB, "-t1", "echo", "has", "run")
    shell.expect_exact("for this job: ")
    shell.sendintr()
    shell.sendline("")
    shell.expect(pexpect.EOF)
    assert "has run" not in str(shell.before)
    shell.close()
    assert shell.exitstatus != 0
    wait_until("no job", lambda: not front.site.run("login", "alice", "squeue", "-h", "-u", "alice").stdout)


@pytest.mark.every_release
def test_each_component_of_a_het_job_is_asked_for_once(front: FrontEnd) -> None:
    front.publish(
        shown_advice(ROW, family("eval-#", 2, 500, bound_mib=1000, tier="hbm40g", text=f"{TEXT}."), prompt="ask")
    )
    front.filter_on()
    other = ("-J", "eval-1", *JOB[2:])
    argv = ("-H", "-o", "/dev/null", *JOB, ":", *other, ":", *JOB)
    script = f"{front.home}/job.sh"
    front.site.write("login", script, b"#!/bin/sh\nsleep 0\n", owner="alice")
    shell = front.terminal("sbatch", *argv, script)
    for line in ("y", "n"):
        shell.expect_exact("for this job: ")
        shell.sendline(line)
    shown = ended(shell)
    first = int(shown.split("Submitted batch job ")[1].split()[0])
    found = [front.site.job(f"{first}+{n}")["Features"] for n in range(3)]
    assert found == ["gpu&hbm40g", "gpu&hbm80g", "gpu&hbm80g"]
    front.forget()
    front.site.hook("cli_filter", None)
    assert "almanac" not in ended(front.terminal(front.wrapper, *argv, script))


def test_filter_and_wrapper_never_both_ask(front: FrontEnd) -> None:
    """Not even where the first cannot remember that it has asked."""
    front.filter_on()
    for home in ("/nonexistent", ""):
        after = front.answered("n", front.wrapper, *HELD, *WRAP, HOME=home)
        assert re.fullmatch(r"n\nSubmitted batch job \d+\n", after)
    shown = ended(front.terminal(front.wrapper, *HELD, *WRAP, HOME="/nonexistent", ALMANAC_ADVICE="show"))
    assert shown.count("almanac:") == 1


def test_a_missing_or_broken_hook_changes_nothing(front: FrontEnd) -> None:
    front.filter_on()
    for path, texts in {
        f"{front.site.lua_dir}/cli_filter.lua": (b"", b"syntax error here", b"error('x')", b"return nil", b"return {}"),
        str(front.prompt): (
            b"",
            b"#!/nowhere\n",
            b"#!/bin/sh\nexit 3\n",
            b"#!/bin/sh\necho no answer >&4\nkill -9 $$\n",
        ),
    }.items():
        saved = front.site.read("login", path)
        try:
            for text in (None, *texts):
                front.site.remove("login", path)
                if text is not None:
                    front.site.write("login", path, text, mode=0o755)
                shown = ended(front.terminal("sbatch", *HELD, *WRAP)).replace("no answer\n", "")
                assert re.fullmatch(r"Submitted batch job \d+\n", shown), (path, text)
        finally:
            front.site.write("login", path, saved, mode=0o755)


def test_a_prompt_that_hangs_is_ended_and_one_that_asks_is_waited_for(front: FrontEnd) -> None:
    front.filter_on(wait_s=15)
    shell = front.terminal("sbatch", *HELD, *WRAP)
    shell.expect_exact("for this job: ")
    time.sleep(16)
    shell.sendline("y")
    assert front.constraint(ended(shell)) == "gpu&hbm40g"
    front.filter_on(wait_s=5)
    saved = front.site.read("login", str(front.prompt))
    front.site.write("login", str(front.prompt), b"#!/bin/sh\nexec sleep 600\n", mode=0o755)
    try:
        assert front.constraint(ended(front.terminal("sbatch", *HELD, *WRAP))) == "gpu&hbm80g"
    finally:
        front.site.write("login", str(front.prompt), saved, mode=0o755)


def test_the_prompt_is_asked_whatever_the_users_environment_is(front: FrontEnd) -> None:
    front.filter_on()
    hostile = {
        "PYTHONHOME": "/nonexistent",
        "PYTHONPATH": front.home,
        "LD_LIBRARY_PATH": front.home,
    }
    front.site.write("login", f"{front.home}/json.py", b"raise SystemExit('not mine')\n", owner="alice")
    assert front.constraint(front.answered("y", "sbatch", *HELD, *WRAP, **hostile)) == "gpu&hbm40g"


HOSTILE = "train-\x1b[31;5m%s%n`touch x`$(touch x)'\"\\;\n\tmore-7"


def test_hostile_names_are_inert(front: FrontEnd, way: str) -> None:
    key = name_key(HOSTILE.replace('"', "`"))
    text = f'your last 14 runs of "{key}" peaked at 21.3 GiB per GPU.'
    front.publish(shown_advice(family(key, 2, 500, bound_mib=25396, tier="hbm40g", text=text), prompt="ask"))
    argv = ("-H", "-o", "/dev/null", "-J", HOSTILE, "--gpus=2", "--comment", HOSTILE)
    shell = front.terminal(way, *argv, "-C", "gpu&hbm80g", *WRAP)
    shell.expect_exact("for this job: ")
    assert "\x1b" not in str(shell.before)
    shell.sendline("a")
    assert "\x1b" not in ended(shell)
    again = ended(front.terminal(way, *argv, "-C", "gpu&hbm80g", *WRAP))
    assert key in again.replace("\n", "")
    assert "\x1b" not in again
    for constraint in ("$(touch x)", "gpu&hbm80g|`touch x`", "\x1b[31m"):
        shell = front.terminal(way, *argv, "-C", constraint, *WRAP)
        shell.expect(pexpect.EOF)
        shell.close()
    assert front.run("ls", f"{front.home}/x").returncode != 0


def test_workflow_managers_find_the_job_id(front: FrontEnd) -> None:
    """sbatch-almanac earlier in PATH as sbatch; Snakemake takes --parsable's first word, Nextflow has a pattern."""
    front.filter_on()
    folder = f"{front.home}/bin"
    front.run("sh", "-c", f"mkdir -p {folder} && ln -sf {front.wrapper} {folder}/sbatch")
    path = front.run("sh", "-c", 'printf %s "$PATH"').stdout.decode()
    env = {"PATH": f"{folder}:{path}"}
    script = b"#!/bin/bash\n#SBATCH -J train-bert-1 --gpus=2 -o /dev/null\nexit 0\n"
    for stdin in (script, None):
        argv: tuple[str, ...] = () if stdin else ("--gpus=2", "-o", "/dev/null", "--wrap", "exit 0")
        snakemake = front.run("sbatch", "--parsable", *argv, stdin=stdin, **env)
        assert re.fullmatch(rb"\d+(;\S+)?\n", snakemake.stdout)
        assert snakemake.stderr == b""
        nextflow = front.run("sh", "-c", 'sbatch "$@" 2>&1', "sh", *argv, stdin=stdin, **env)
        assert re.fullmatch(rb"Submitted batch job (\d+)\n", nextflow.stdout)
    # Their users sit at a terminal, and the manager's child has it as input and a pipe for the rest.
    shown = ended(front.terminal("sh", "-c", f"sbatch {shlex.join(HELD)} --wrap x 2>&1 | cat", **env))
    assert re.fullmatch(r"Submitted batch job (\d+)\n", shown)


def test_the_status_of_a_job_that_was_waited_for(front: FrontEnd, way: str) -> None:
    argv = (*JOB, "-o", "/dev/null", "-W", "--wrap", "exit 5")
    shell: Any = front.terminal(way, *argv)
    shell.expect_exact("for this job: ")
    shell.sendline("y")
    ended(shell, rc=5)
