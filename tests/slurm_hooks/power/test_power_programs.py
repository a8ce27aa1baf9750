"""almanac-power-off and -on: the BMC file, commands, many nodes, being killed. Slurm is a stand-in."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from bmc_lab import POWERING_DOWN, PowerLab
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import ConfigError
from slurm.nodes import parse_states
from slurm_hooks.power.bmc_file import BmcError, IpmiTable, node_names, open_bmc_file, read_bmc_file
from slurm_hooks.power.bmc_switch import Ipmi, why_not_off, why_not_on

TOUCH = """
[[bmc]]
nodes = "{nodes}"
method = "command"
on_command = ["{folder}/do", "on", "{{node}}"]
off_command = ["{folder}/do", "off", "{{node}}"]
"""
DO = """#!/bin/sh
echo "$1 $2" >>{folder}/done
"""


@pytest.fixture
def lab(tmp_path: Path) -> PowerLab:
    lab = PowerLab(tmp_path)
    lab.program("do", DO.format(folder=tmp_path))
    lab.bmc(TOUCH.format(nodes="n[1-2]", folder=tmp_path))
    return lab


def done(lab: PowerLab) -> list[str]:
    path = lab.folder / "done"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_a_sites_own_command_gets_the_nodes_name_and_the_log_a_line_for_each(lab: PowerLab) -> None:
    assert {line["result"] for line in lab.run("off", "n[1-2]").values()} == {"done"}
    assert done(lab) == ["off n1", "off n2"]
    first, *nodes, last = lab.lines()
    assert first["nodes"] == "n[1-2]" and first["count"] == 2 and last["ended"] == {"done": 2}
    assert all(list(line)[2:] == ["node", "result", "message", "tries", "took_s"] for line in nodes)


def test_a_password_reaches_ipmitool_and_nobody_else(lab: PowerLab) -> None:
    """A stand-in for ipmitool that keeps what it was started with."""
    keep = 'tr "\\0" " " </proc/$$/cmdline >>"${0%/*}/argv"; echo "$IPMI_PASSWORD"; exit 3'
    spy = lab.program("ipmitool", f"#!/bin/sh\n{keep}\n")
    table = IpmiTable(nodes="n1", address="bmc-{node}", user="u", password="s3cret")
    method = Ipmi(table, "n1", 5)
    method._argv[0] = str(spy)
    with pytest.raises(BmcError, match=r"ipmitool failed with exit code 3: \*\*\*") as caught:
        method.status()
    argv = (lab.folder / "argv").read_text()
    assert "-H bmc-n1 -p 623 -U u -E chassis power status" in argv and "s3cret" not in argv + str(caught.value)
    assert "s3cret" not in repr(table)


def test_it_tries_again_after_a_fault_that_passes(lab: PowerLab) -> None:
    once = f"[ -e {lab.folder}/once ] || {{ touch {lab.folder}/once; exit 1; }}\n"
    lab.program("do", f"#!/bin/sh\n{once}" + DO.format(folder=lab.folder).split("\n", 1)[1])
    lab.bmc(TOUCH.format(nodes="n1", folder=lab.folder), retries=1)
    line = lab.run("off", "n1")["n1"]
    assert (line["result"], line["tries"], done(lab)) == ("done", 2, ["off n1"])


def test_2000_nodes_at_once(lab: PowerLab) -> None:
    """It returns at once, runs few at a time, and asks Slurm about all in one call."""
    counting = "#!/bin/sh\necho x >>{0}/running\nsleep 0.05\nwc -l <{0}/running >>{0}/most\n"
    lab.program("do", counting.format(lab.folder) + DO.format(folder=lab.folder).split("\n", 1)[1])
    lab.bmc(TOUCH.format(nodes="n[0001-2000]", folder=lab.folder), parallel=16)
    lab.states({f"n{number:04}": POWERING_DOWN for number in range(1, 2001)})
    assert lab.start("off", "n[0001-2000]").returncode == 0
    assert not any("ended" in line for line in lab.lines())
    lines = lab.wait()
    assert len(lines) == 2000 and {line["result"] for line in lines.values()} == {"done"}
    assert len(done(lab)) == 2000 and len(set(done(lab))) == 2000
    asked = (lab.folder / "asked").read_text().splitlines()
    assert set(asked) == {"-o show node n[0001-2000]"} and len(asked) < 100


def test_2000_nodes_while_slurm_hangs(lab: PowerLab) -> None:
    """One question at a time, and its failure counts for all: not 2,000 timeouts one after another."""
    lab.program("scontrol", f"#!/bin/sh\necho x >>{lab.folder}/asked\nsleep 300\n")
    lab.bmc(TOUCH.format(nodes="n[0001-2000]", folder=lab.folder), timeout_s=1)
    lines = lab.run("off", "n[0001-2000]")
    assert {line["result"] for line in lines.values()} == {"failed"} and done(lab) == []
    assert len((lab.folder / "asked").read_text().splitlines()) < 10


def test_the_background_survives_slurms_kill_of_the_process_group(lab: PowerLab) -> None:
    """slurmscriptd kills the program's process group as soon as the program has ended."""
    lab.program("do", "#!/bin/sh\nsleep 1\n" + DO.format(folder=lab.folder).split("\n", 1)[1])
    for _ in range(5):
        lab.log.unlink(missing_ok=True)
        code = "import sys; sys.path.insert(0, sys.argv.pop()); from cli.power_programs import main; main('off')"
        root = str(Path(__file__).parents[3])
        program = subprocess.Popen(
            [shutil.which("python3", path=str(Path(os.sys.executable).parent)) or "", "-I", "-c", code, "n1", root],  # type: ignore[attr-defined]
            env={"ALMANAC_CONFIG": str(lab.config)},
            process_group=0,
        )
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)  # still a zombie: its group is there to be killed
        os.killpg(program.pid, signal.SIGKILL)
        assert program.wait() == 0
        assert lab.wait()["n1"]["result"] == "done"


def test_sigterm_stops_before_the_next_node(lab: PowerLab) -> None:
    lab.program("do", f'#!/bin/sh\necho "$PPID" >{lab.folder}/pid\nsleep 1\n')
    lab.bmc(TOUCH.format(nodes="n[1-9]", folder=lab.folder), parallel=1)
    lab.states({f"n{number}": POWERING_DOWN for number in range(1, 10)})
    assert lab.start("off", "n[1-9]").returncode == 0
    until_s = time.monotonic() + 300
    while not (lab.folder / "pid").exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    time.sleep(0.1)
    os.kill(int((lab.folder / "pid").read_text()), signal.SIGTERM)
    results = [line["result"] for line in lab.wait().values()]
    assert results.count("done") <= 2 and results.count("stopped") >= 7


def test_a_later_call_waits_for_an_earlier_one_on_the_same_node(lab: PowerLab) -> None:
    lab.program("do", DO.format(folder=lab.folder) + f"sleep 0.7\necho end $1 >>{lab.folder}/done\n")
    assert lab.start("off", "n1").returncode == 0
    until_s = time.monotonic() + 300
    while not done(lab) and time.monotonic() < until_s:
        time.sleep(0.02)
    lab.states({"n1": "IDLE+POWERING_UP"})
    assert lab.start("on", "n1").returncode == 0
    while len((lab.folder / "done").read_text().splitlines()) < 4 and time.monotonic() < until_s:
        time.sleep(0.05)
    assert (lab.folder / "done").read_text().split("\n")[:-1] == ["off n1", "end off", "on n1", "end on"]


@pytest.mark.parametrize(
    "hosts", ["", "n1;reboot", "$(reboot)", "-n1", "n1 n2", "@all", "n[1-999999999]", "n1\nn2", "../n1", ".n1", "n[1"]
)
def test_a_hostile_host_list_is_refused(lab: PowerLab, hosts: str) -> None:
    result = lab.start("off", hosts)
    assert result.returncode in (2, 3) and "almanac-power-off" in result.stderr and done(lab) == []


def test_a_node_that_the_file_does_not_name_is_said_and_left(lab: PowerLab) -> None:
    lab.states({"n1": POWERING_DOWN, "n7": POWERING_DOWN})
    lines = lab.run("off", "n[1,7]")
    assert (lines["n1"]["result"], lines["n7"]["result"]) == ("done", "failed")
    assert "no [[bmc]] table" in str(lines["n7"]["message"])


def test_what_a_command_prints_cannot_forge_a_line_of_the_log(lab: PowerLab) -> None:
    forged = '{"node": "n2", "result": "done"}'
    lab.program("do", f"#!/bin/sh\nprintf '\\033[2Jx\\n%s\\n' '{forged}'; exit 1\n")
    lines = lab.run("off", "n1")
    assert set(lines) == {"n1"} and lines["n1"]["result"] == "failed"
    assert "\x1b" not in lab.log.read_text() and "\\u001b" not in lab.log.read_text()


def test_a_command_that_hangs_is_ended_with_its_children(lab: PowerLab) -> None:
    lab.program("do", f"#!/bin/sh\nsleep 300 & echo $! >{lab.folder}/child; wait\n")
    lab.bmc(TOUCH.format(nodes="n1", folder=lab.folder), timeout_s=1)
    assert "timed out after 1 s" in str(lab.run("off", "n1")["n1"]["message"])
    child = Path(f"/proc/{(lab.folder / 'child').read_text().strip()}/stat")
    assert not child.exists() or child.read_text().split(")")[1].split()[0] in "ZX"


def test_a_planted_log_file_is_not_followed(lab: PowerLab) -> None:
    target = lab.folder / "target"
    target.write_text("precious")
    lab.log.symlink_to(target)
    assert lab.start("off", "n1").returncode == 0
    until_s = time.monotonic() + 300
    while not done(lab) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert done(lab) == ["off n1"] and target.read_text() == "precious"


def refusal(lab: PowerLab) -> str:
    result = lab.start("off", "n1")
    assert result.returncode == 3 and done(lab) == [] and result.stderr.startswith("almanac-power-off: ")
    return result.stderr


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o400])
def test_another_mode_than_0600_is_refused(lab: PowerLab, mode: int) -> None:
    lab.bmc_file.chmod(mode)
    said = refusal(lab)
    assert f"has mode {mode:04o}, expected 0600" in said or (os.geteuid() and "cannot be opened" in said)


def test_a_link_a_folder_a_fifo_and_nothing_are_refused(lab: PowerLab) -> None:
    lab.bmc_file.rename(lab.folder / "real.toml")
    assert "No such file" in refusal(lab)
    lab.bmc_file.symlink_to(lab.folder / "real.toml")
    assert "cannot be opened" in refusal(lab)
    lab.bmc_file.unlink()
    lab.bmc_file.mkdir()
    assert "cannot be opened" in refusal(lab)
    lab.bmc_file.rmdir()
    os.mkfifo(lab.bmc_file, 0o600)
    assert "is not a regular file" in refusal(lab)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(lab: PowerLab) -> None:
    os.chown(lab.bmc_file, 65534, 65534)
    assert "belongs to uid 65534, but the programs run as root" in refusal(lab)


IPMI = 'nodes = "n1"\nmethod = "ipmi"\naddress = "b"\nuser = "u"\n'
COMMAND = 'nodes = "n1"\nmethod = "command"\noff_command = ["/x"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing required field `bmc`"),
        ("[[bmc]\n", "not TOML"),
        ('bmc = "s3cret"', "Expected `array`, got `str` - at `bmc`"),
        (f'paralel = 3\n[[bmc]]\n{COMMAND}on_command = ["/x"]', "unknown field `paralel`"),
        ('[[bmc]]\nnodes = "n1"\nmethod = "telepathy"', "Invalid value 'telepathy' - at `bmc[0].method`"),
        (f"[[bmc]]\n{IPMI}", "missing required field `password`"),
        (f'[[bmc]]\n{IPMI}password = ""', "Expected `str` of length >= 1 - at `bmc[0].password`"),
        (f'[[bmc]]\n{IPMI}password = "s3cret"\n[[bmc]]\n{IPMI}password = "x"', "bmc[1]: n1 is in an earlier table"),
        (f'[[bmc]]\n{IPMI}password = "s3cret\\nx"', "password is not a single line of text"),
        (f'[[bmc]]\n{IPMI}password = "s3cret"\nca_file = "/x"', "unknown field `ca_file`"),
        (f'[[bmc]]\n{IPMI.replace(chr(34) + "b" + chr(34), chr(34) + "-oProxyCommand=x" + chr(34))}password = "s3cret"',
         "address is not HOST"),
        (f'[[bmc]]\n{COMMAND}on_command = "s3cret"', "Expected `array`, got `str` - at `bmc[0].on_command`"),
        (f'[[bmc]]\n{COMMAND}on_command = ["x"]', "on_command does not begin with an absolute path"),
        (f'[[bmc]]\n{IPMI.replace("n1", "$(x)")}password = "s3cret"', "not a host list"),
        (f'parallel = true\n[[bmc]]\n{IPMI}password = "s3cret"', "Expected `int`, got `bool` - at `parallel`"),
        (f'timeout_s = nan\n[[bmc]]\n{IPMI}password = "s3cret"', "Expected `float` >= 1.0 - at `timeout_s`"),
        (f'log_file = "power.log"\n[[bmc]]\n{IPMI}password = "s3cret"', "at `log_file`"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_without_its_values(tmp_path: Path, text: str, said: str) -> None:
    error = file_error(tmp_path, text)
    assert said in str(error) and "s3cret" not in str(error) + error.hint


def file_error(folder: Path, text: str) -> ConfigError:
    path = folder / "bmc.toml"
    path.write_text(text)
    path.chmod(0o600)
    handle = open_bmc_file(path)
    with pytest.raises(ConfigError) as caught:
        read_bmc_file(path, handle)
    os.close(handle)
    return caught.value


FLAGS = ("DRAIN", "MAINT", "RESERVED", "NOT_RESPONDING", "POWER_DOWN", "POWERING_DOWN", "POWERED_DOWN", "POWER_UP",
         "POWERING_UP", "COMPLETING", "PLANNED", "FAIL", "INVALID_REG")  # fmt: skip
BASES = ("IDLE", "DOWN", "ALLOCATED", "MIXED", "UNKNOWN", "ERROR", "FUTURE", "ALLOC", "FLYING")


@given(st.sampled_from(BASES), st.frozensets(st.sampled_from(FLAGS)))
def test_power_is_cut_only_of_an_idle_node_that_slurm_powers_down(base: str, flags: frozenset[str]) -> None:
    if not why_not_off(flags | {base}):
        assert base in ("IDLE", "DOWN") and "COMPLETING" not in flags
        assert flags & {"POWER_DOWN", "POWERING_DOWN", "POWERED_DOWN"} and not flags & {"POWER_UP", "POWERING_UP"}
    if flags & {"POWER_UP", "POWERING_UP"}:
        assert why_not_on(flags | {base}) == ""


@given(st.text(alphabet="abz019.-_[],;$ \n'\"/@*!&^", max_size=40))
def test_whatever_is_expanded_is_a_safe_word(text: str) -> None:
    try:
        names = node_names(text, "test")
    except ConfigError:
        return
    assert names and all(re.fullmatch("[a-z0-9][a-z0-9_.-]*", name) for name in names)


def test_states_of_every_release_are_read() -> None:
    shared = Path(__file__).resolve().parents[4] / "shared/slurm-samples"
    for path in shared.glob("*/scontrol_show_node.txt"):
        lines = [" ".join(node.split()) for node in path.read_text().split("\n\n") if node.strip()]  # as with -o
        known = parse_states("\n".join(lines))
        assert len(known) == len(lines) > 0, path
        assert all(states and all(state.isupper() for state in states) for states in known.values()), (path, known)
    assert parse_states(
        "NodeName=n1 Arch=x86_64 State=IDLE*+DRAIN+POWERED_DOWN ThreadsPerCore=1 Reason=State=DOWN"
    ) == {"n1": frozenset({"IDLE", "DRAIN", "POWERED_DOWN"})}
    assert parse_states("Node n9 not found\nJobId=1 State=IDLE\n") == {}
