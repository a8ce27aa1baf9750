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
from cli.main import cli
from cli.tasks import ROOT_STATE, TASKS
from telemetry.collector.main import PORT, read_options

SYSTEM = Path(__file__).parents[3] / "slurm_hooks" / "system"
SERVICES, TIMERS = (
    sorted((SYSTEM / "systemd").glob(f"*.{kind}"), key=lambda path: path.stem) for kind in ("service", "timer")
)
COPY = [SYSTEM / "copy" / f"almanac-copy.{kind}" for kind in ("service", "timer")]
"""Units of slurm-almanac-client."""
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


def test_each_task_runs_a_command_that_exists() -> None:
    """With options that it takes."""
    for task in TASKS.values():
        program, *words = shlex.split(task.command)
        if program == "almanac-distribute":
            assert not words
            continue
        assert program == "almanac"
        command: click.Command = cli
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words[0])
            assert found is not None, task.command
            command = found
            words.pop(0)
        command.make_context(task.name, words)


def test_no_task_is_unbounded_and_what_acts_on_the_present_is_not_made_up() -> None:
    """A hung power run ends before the next but one."""
    for task in TASKS.values():
        assert 0 < task.limit_min <= 360 and 0 < task.memory_percent <= 50
        assert 0 <= task.at_min < task.every_min and 1440 % task.every_min == 0
    late = {name for name, task in TASKS.items() if not task.is_made_up}
    assert late == {"power", "mig", "mig-raise", "place", "watch"}
    assert TASKS["power"].limit_min <= TASKS["power"].every_min


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_each_service_looks_every_minute_for_what_is_due(path: Path) -> None:
    assert service_of(path)["ExecStart"] == "/usr/bin/almanac run"
    timer = unit(path.with_suffix(".timer"))
    assert timer["Install"]["WantedBy"] == "timers.target"
    assert timer["Timer"]["OnCalendar"] == "minutely"
    assert timer["Timer"]["AccuracySec"] == "1s"


def test_one_timer_for_each_privilege() -> None:
    assert [path.stem for path in TIMERS] == [path.stem for path in SERVICES] == ["almanac", "almanac-root"]


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_services_are_hardened(path: Path) -> None:
    service = service_of(path)
    for key in ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "ProtectHome", "RestrictSUIDSGID"):
        assert service[key] == "yes", key
    assert service["ProtectSystem"] == "strict"
    assert service["OOMPolicy"] == "continue", "one task's memory is not the end of the others"
    folders = set(service["ReadWritePaths"].split())
    if path.stem == "almanac-root":
        assert service["User"] == "root"
        assert set(service["CapabilityBoundingSet"].split()) == {"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER"}
        assert folders == {"/var/lib/almanac-advice"}
        assert Path("/run") / service["RuntimeDirectory"] == ROOT_STATE
    else:
        assert service["User"] == "almanac"
        assert service["CapabilityBoundingSet"] == ""
        # Notices of ended jobs, and the mark that users' choices are read.
        optional = {"-/var/lib/almanac-metrics", "-/var/spool/almanac/ended", "-/var/lib/almanac-advice/mail"}
        assert folders == {"/var/lib/almanac"} | optional


def test_the_copy_is_hardened_as_roots_tasks_are_and_writes_to_the_advice_only() -> None:
    copy, publish = (unit(path)["Service"] for path in (COPY[0], SYSTEM / "systemd" / "almanac-root.service"))
    assert copy["ExecStart"] == "/usr/libexec/almanac/almanac-copy.sh"
    assert (copy["StateDirectory"], copy["StateDirectoryMode"]) == ("almanac-advice", "0711")
    own = {
        "ExecStart", "StateDirectory", "StateDirectoryMode", "RuntimeDirectory", "RuntimeDirectoryPreserve",
        "OOMPolicy", "ReadWritePaths", "Type", "SuccessExitStatus", "TimeoutStartSec", "RuntimeMaxSec", "MemoryMax",
    }  # fmt: skip
    assert {key: value for key, value in copy.items() if key not in own} == {
        key: value for key, value in publish.items() if key not in own
    }
    assert "ReadWritePaths" not in copy
    text = (SYSTEM / "copy" / "defaults").read_text()
    assert not [line for line in text.splitlines() if line and not line.startswith("#")], "it is off"


def test_the_collector_has_no_rights_but_to_read_and_is_off() -> None:
    unit_file = SYSTEM / "collect" / "almanac-collect.service"
    collector, copy = service_of(unit_file), service_of(COPY[0])
    assert collector["DynamicUser"] == "yes" and collector["CapabilityBoundingSet"] == ""
    assert "User" not in collector and "ReadWritePaths" not in collector
    needed = {"PrivateDevices": "/dev/nvidia*", "User": "", "CapabilityBoundingSet": ""}
    hardened = {key for key, value in copy.items() if value == "yes"} | {"RestrictAddressFamilies"}
    assert {key: collector.get(key) for key in hardened - needed.keys()} == {
        key: copy[key] for key in hardened - needed.keys()
    }
    assert float(collector["CPUQuota"].rstrip("%")) <= 10 and int(collector["TasksMax"]) <= 64
    text = (SYSTEM / "collect" / "defaults").read_text()
    assert not [line for line in text.splitlines() if line and not line.startswith("#")]
    (options,) = re.findall(r"(?m)^# OPTIONS=(.*)$", text)
    given = read_options(options.split())
    assert given.listen[1] == PORT and given.allow
    assert collector["ExecStart"] == "/usr/sbin/almanac-collect $OPTIONS"
    assert collector["EnvironmentFile"] == "-/etc/default/almanac-collect"


def test_every_unit_bounds_the_time_and_the_memory_of_a_run() -> None:
    """systemd sets no limits of its own."""
    services = {path.name: service_of(path) for path in SYSTEM.rglob("*.service")}
    assert len(services) == len(SERVICES) + 2
    assert services["almanac-collect.service"]["Restart"] == "always", "a service that does not end"
    unbounded = {
        f"{name}: {key}"
        for name, service in services.items()
        for key, form in (
            ("TimeoutStartSec" if service.get("Type") == "oneshot" else "RuntimeMaxSec", r"[1-9][0-9]*(min|h|d)"),
            ("MemoryMax", r"[1-9][0-9]*(%|[MG])"),
        )
        if not re.fullmatch(form, service.get(key, ""))
    }
    unbounded.remove("almanac-collect.service: RuntimeMaxSec")
    assert not unbounded


def test_cron_runs_what_the_timers_run_as_the_same_users() -> None:
    assert [line.split(maxsplit=6)[:6] for line in CRON] == [[*"*****", service_of(path)["User"]] for path in SERVICES]


@pytest.mark.parametrize("line", CRON, ids=lambda line: line.split()[5])
def test_cron_lines_run(line: str, tmp_path: Path) -> None:
    """With an almanac that tells its arguments, and a logger that writes a file."""
    log = f'cat >>"{tmp_path}/run.log"'
    for name, script in (("almanac", 'echo "$(umask)" "$@"'), ("logger", log)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    user, words = line.split(maxsplit=6)[5:]
    assert "%" not in line, "cron takes it for a line's end"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shell = ["/bin/sh", "-c", words.replace("/var/log/almanac", str(tmp_path))]
    subprocess.run(shell, check=True, env=environment, timeout=300)
    expected = ["0077", "run"] if user == "root" else ["0027", "run", "--logs", str(tmp_path)]
    assert (tmp_path / "run.log").read_text().split() == expected


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
        capture_output=True, text=True, check=False, timeout=300,
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
        subprocess.run([*program, f"--root={tmp_path}", str(file)], check=True, capture_output=True, timeout=300)
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
    names = ["run.log", *(f"{task}.log" for task in TASKS)]
    ids = ["--reuid", str(uid), "--regid", str(gid), "--clear-groups"]
    for _ in range(3):
        for name in names:
            command = f"umask 027; echo words >>{logs}/{name}"
            subprocess.run(["setpriv", *ids, "sh", "-c", command], check=True, timeout=300)
        rotate = ["logrotate", "--force", "--state", str(logs.parent / "state"), str(rule)]
        done = subprocess.run(rotate, capture_output=True, text=True, check=False, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in logs.iterdir()} == {
        f"{name}.{end}" for name in names for end in ("1", "2.gz", "3.gz")
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
    assert units == [path.stem for path in TIMERS]
