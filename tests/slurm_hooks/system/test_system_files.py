"""Units, cron lines, and what makes user and folders: they name what exists, and grant no more than is needed."""

from __future__ import annotations

import configparser
import grp
import os
import pwd
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from almanac.config_file import parse_config
from cli.main import COMMANDS, cli

SYSTEM = Path(__file__).parents[3] / "slurm_hooks" / "system"
SERVICES = sorted((SYSTEM / "systemd").glob("*.service"))
TIMERS = sorted((SYSTEM / "systemd").glob("*.timer"))
COPY = [SYSTEM / "copy" / f"almanac-copy.{kind}" for kind in ("service", "timer")]
"""Units of slurm-almanac-client."""
TELL = 'echo "$(umask)" "$@"'
NOBODY = (
    pwd.getpwnam("nobody").pw_uid,
    pwd.getpwnam("nobody").pw_gid,
    grp.getgrgid(pwd.getpwnam("nobody").pw_gid).gr_name,
)
CRON = [line for line in (SYSTEM / "cron").read_text().splitlines() if re.match(r"[\d*]", line)]


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text())
    return parser


def service_of(path: Path) -> configparser.SectionProxy:
    return unit(path)["Service"]


def parses(words: list[str]) -> str:
    """The command that a line runs; fails where it or one of its options does not exist."""
    if Path(words[0]).name == "almanac-distribute":
        assert len(words) == 1
        return "distribute"
    assert Path(words[0]).name == "almanac"
    assert words[1] in COMMANDS
    command = cli.get_command(click.Context(cli), words[1])
    assert command is not None
    if isinstance(command, click.Group):
        member = command.get_command(click.Context(command), words[2])
        assert member is not None
        member.make_context(words[2], list(words[3:]))
        # `mig apply` is what its group is for.
        return words[1] if words[2] == "apply" else f"{words[1]}-{words[2]}"
    command.make_context(words[1], list(words[2:]))
    return words[1]


def cron_words(line: str) -> tuple[str, list[str]]:
    """The user of a line and the words from `almanac` on, without the redirection."""
    user, command = line.split(maxsplit=6)[5:]
    words = shlex.split(re.split(">>|2>&1", command.split(";", 1)[1])[0])
    return user, words[max(at for at, word in enumerate(words) if word in ("almanac", "almanac-distribute")) :]


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_each_service_runs_a_command_that_exists_and_has_its_timer(path: Path) -> None:
    service = unit(path)["Service"]
    assert service["Type"] == "oneshot"
    assert path.stem == f"almanac-{parses(shlex.split(service['ExecStart']))}"
    assert service["ExecStart"].startswith(("/usr/bin/almanac ", "/usr/sbin/almanac-distribute"))
    timer = unit(path.with_suffix(".timer"))
    assert timer["Install"]["WantedBy"] == "timers.target"
    assert timer["Timer"]["OnCalendar"]


def test_every_timer_has_its_service() -> None:
    assert [path.stem for path in TIMERS] == [path.stem for path in SERVICES]
    assert len(TIMERS) == 13


def test_a_missed_power_run_is_not_made_up_for_and_one_that_hangs_ends_before_the_next_but_one() -> None:
    """At 10 minutes; of the past state that a late run saw nothing may be left to act on."""
    power = SYSTEM / "systemd" / "almanac-power.timer"
    assert unit(power)["Timer"]["OnCalendar"] == "*:06/10"
    assert unit(power)["Timer"]["Persistent"] == "no"
    assert unit(power.with_suffix(".service"))["Service"]["TimeoutStartSec"] == "10min"


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_services_are_hardened(path: Path) -> None:
    service = unit(path)["Service"]
    for key in ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "ProtectHome", "RestrictSUIDSGID"):
        assert service[key] == "yes", key
    assert service["ProtectSystem"] == "strict"
    folders = {"/var/lib/almanac"}
    if path.stem in ("almanac-publish", "almanac-report"):
        assert (
            service["TimeoutStartSec"] == "1h"
        )  # systemd sets none, and a run that hangs keeps the next from starting
    if path.stem == "almanac-distribute":
        assert service["User"] == "root"
        assert set(service["CapabilityBoundingSet"].split()) == {"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER"}
        assert service["TimeoutStartSec"] and service["MemoryMax"]
        folders = {"/var/lib/almanac-advice"}
    else:
        assert service["User"] == "almanac"
        assert service["CapabilityBoundingSet"] == ""
    folders |= {"/var/lib/almanac-metrics"} if path.stem == "almanac-metrics" else set()
    if path.stem == "almanac-report":  # notices of ended jobs, and the mark that users' choices are read
        folders |= {"-/var/spool/almanac/ended", "-/var/lib/almanac-advice/mail"}
    assert set(service["ReadWritePaths"].split()) == folders


def test_the_copy_is_hardened_as_distribute_is_and_writes_to_the_advice_only() -> None:
    copy, publish = (unit(path)["Service"] for path in (COPY[0], SYSTEM / "systemd" / "almanac-distribute.service"))
    assert copy["ExecStart"] == "/usr/libexec/almanac/almanac-copy.sh"
    assert (copy["StateDirectory"], copy["StateDirectoryMode"]) == ("almanac-advice", "0711")
    own = {"ExecStart", "StateDirectory", "StateDirectoryMode", "ReadWritePaths", "TimeoutStartSec", "MemoryMax"}
    assert {key: value for key, value in copy.items() if key not in own} == {
        key: value for key, value in publish.items() if key not in own
    }
    assert "ReadWritePaths" not in copy
    text = (SYSTEM / "copy" / "defaults").read_text()
    assert not [line for line in text.splitlines() if line and not line.startswith("#")], "it is off"


def test_every_unit_bounds_the_time_and_the_memory_of_a_run() -> None:
    """systemd sets no limits of its own on a oneshot service."""
    services = {path.name: unit(path)["Service"] for path in SYSTEM.rglob("*.service")}
    assert len(services) == len(SERVICES) + 1
    unbounded = {
        f"{name}: {key}"
        for name, service in services.items()
        for key, form in (("TimeoutStartSec", r"[1-9][0-9]*(min|h)"), ("MemoryMax", r"[1-9][0-9]*(%|[MG])"))
        if not re.fullmatch(form, service.get(key, ""))
    }
    assert not unbounded


def test_cron_ends_a_run_when_its_unit_would() -> None:
    limits = {parses(shlex.split(one["ExecStart"])): one["TimeoutStartSec"] for one in map(service_of, SERVICES)}
    found = {
        parses(cron_words(line)[1]): re.findall(r"\btimeout -k 90 (\S+) almanac(?:-distribute)?\b", line)
        for line in CRON
    }
    assert found == {name: [limit.replace("min", "m")] for name, limit in limits.items()}


def test_cron_runs_what_the_timers_run_as_the_same_users() -> None:
    services = {path: unit(path)["Service"] for path in SERVICES}
    starts = ((service["User"], service["ExecStart"]) for service in services.values())
    expected = {(user, re.sub("^/usr/s?bin/", "", start)) for user, start in starts}
    assert {(user, " ".join(words)) for user, words in map(cron_words, CRON)} == expected
    for line in CRON:
        assert "%" not in line, "cron takes it for a line's end"


@pytest.mark.parametrize("line", CRON, ids=lambda line: " ".join(cron_words(line)[1][:3]))
def test_cron_lines_run(line: str, tmp_path: Path) -> None:
    """With programs that tell their arguments, a timeout that sets none, and a logger that writes a file."""
    log = f'cat >>"{tmp_path}/${{2#almanac-}}.log"'
    for name, script in (
        ("almanac", TELL),
        ("almanac-distribute", TELL),
        ("timeout", 'shift 3; exec "$@"'),
        ("logger", log),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    user, words = cron_words(line)
    command = line.split(maxsplit=6)[6].replace("/var/log/almanac", str(tmp_path))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-c", command], check=True, env=environment, timeout=30)
    mask = "0077" if user == "root" else "0027"
    assert (tmp_path / f"{parses(words)}.log").read_text().split() == [mask, *words[1:]]


def test_modes_of_the_folders() -> None:
    lines = (line.split() for line in (SYSTEM / "tmpfiles.conf").read_text().splitlines() if line.startswith("d"))
    assert {path: (mode, user) for _, path, mode, user, _, _ in lines} == {
        "/var/lib/almanac": ("0750", "almanac"),
        "/var/lib/almanac-advice": ("0711", "root"),
        "/var/lib/almanac-advice/mail": ("3733", "root"),
        "/var/lib/almanac-advice/sched": ("0750", "root"),
        "/var/lib/almanac-advice/user": ("0711", "root"),
        "/var/lib/almanac-metrics": ("0755", "almanac"),
        "/var/log/almanac": ("0750", "almanac"),
        "/var/spool/almanac": ("0755", "root"),
        # The colon: who owns it already keeps it.
        "/var/spool/almanac/ended": (":0770", ":root"),
    }


def test_the_shipped_configuration_is_valid_and_so_are_its_examples() -> None:
    text = (SYSTEM / "almanac.toml").read_text()
    assert tomllib.loads(text) == {}
    examples = re.sub(r"(?m)^# ?(?=\[|\w+ = |$)", "", text)
    config = parse_config(tomllib.loads(examples))
    assert [tier.name for tier in config.tiers] == ["hbm40g", "hbm80g"]
    assert config.site.operators_group
    assert [node_set.feature for node_set in config.node_sets] == ["a100"]
    assert config.power.mode == "observe"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("path", [*SERVICES, *TIMERS, *COPY], ids=lambda path: path.name)
def test_systemd_takes_the_units(path: Path, tmp_path: Path) -> None:
    """Copies, whose program is one that is here."""
    for file in (*SERVICES, *TIMERS, *COPY):
        text = re.sub(r"/usr/s?bin/almanac(-distribute)?|/usr/libexec/almanac/\S+", "/bin/true", file.read_text())
        (tmp_path / file.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "almanac" not in done.stderr, done.stderr


@pytest.mark.skipif(
    shutil.which("systemd-tmpfiles") is None or shutil.which("systemd-sysusers") is None or os.getuid() != 0,
    reason="needs systemd-sysusers, systemd-tmpfiles and root",
)
def test_systemd_makes_user_and_folders(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for program in (["systemd-sysusers"], ["systemd-tmpfiles", "--create"]):
        file = SYSTEM / ("sysusers.conf" if program[0].endswith("sysusers") else "tmpfiles.conf")
        subprocess.run([*program, f"--root={tmp_path}", str(file)], check=True, capture_output=True, timeout=60)
    assert re.search(
        r"(?m)^almanac:x:\d+:\d+:almanac:/var/lib/almanac:/\S*nologin$", (tmp_path / "etc/passwd").read_text()
    )
    modes = {
        path: (tmp_path / path).stat().st_mode & 0o7777 for path in ("var/lib/almanac", "var/lib/almanac-advice/sched")
    }
    assert set(modes.values()) == {0o750}
    assert (tmp_path / "var/lib/almanac").stat().st_uid != 0


@pytest.fixture
def logs() -> Iterator[Path]:
    """nobody's, as /var/log/almanac is almanac's; not in pytest's folder, which is closed to nobody."""
    root = Path(tempfile.mkdtemp(prefix="almanac-logs-", dir="/var/tmp"))
    root.chmod(0o755)
    (root / "log").mkdir(mode=0o750)
    os.chown(root / "log", *NOBODY[:2])
    yield root / "log"
    shutil.rmtree(root)


@pytest.mark.skipif(shutil.which("logrotate") is None or os.getuid() != 0, reason="needs logrotate and root")
def test_what_the_cron_lines_write_is_rotated_again_and_again(logs: Path) -> None:
    """By the rule that is shipped, with nobody for almanac."""
    uid, gid, group = NOBODY
    rule = logs.parent / "rule"
    text = (SYSTEM / "logrotate").read_text().replace("/var/log/almanac", str(logs))
    rule.write_text(text.replace("su almanac almanac", f"su nobody {group}"))
    rule.chmod(0o644)
    names = [(line.split()[5], name) for line in CRON for name in re.findall(r">>/var/log/almanac/(\S+)", line)]
    assert len(names) >= 4
    for _ in range(3):
        for user, name in names:
            ids = ["--reuid", str(uid), "--regid", str(gid)] if user == "almanac" else ["--reuid=0", "--regid=0"]
            command = f"umask {'027' if user == 'almanac' else '007'}; echo words >>{logs}/{name}"
            subprocess.run(["setpriv", *ids, "--clear-groups", "sh", "-c", command], check=True, timeout=30)
        rotate = ["logrotate", "--force", "--state", str(logs.parent / "state"), str(rule)]
        done = subprocess.run(rotate, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in logs.iterdir()} == {
        f"{name}.{end}" for _, name in names for end in ("1", "2.gz", "3.gz")
    }


def test_root_writes_to_no_folder_of_almanacs() -> None:
    for line in CRON:
        if line.split()[5] == "root":
            assert ">>" not in line
            assert "/var/log/almanac" not in line


def test_a_package_makes_the_same_folders_without_systemd_and_ends_every_timer() -> None:
    scripts = Path(__file__).parents[3] / "scripts" / "debian"
    lines = (line.split() for line in (SYSTEM / "tmpfiles.conf").read_text().splitlines() if line.startswith("d"))
    wanted = {path: (mode.lstrip(":"), owner.lstrip(":")) for _, path, mode, owner, *_ in lines}
    calls = [line.split() for line in (scripts / "slurm-almanac.postinst").read_text().splitlines()]
    assert {each[1]: (each[4], each[2]) for each in calls if each[:1] == ["make_folder"] and len(each) == 5} == wanted
    units = (scripts / "slurm-almanac.prerm").read_text().split("for unit in ")[1].split(";")[0].split()
    assert sorted(f"almanac-{name}.timer" for name in units) == [path.name for path in TIMERS]
