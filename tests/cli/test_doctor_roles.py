"""`almanac doctor --host`: what a controller, a login node, and a compute node need."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from almanac.config import Priority
from almanac.config_file import parse_config
from almanac.errors import CommandError
from cli.app import App
from cli.doctor import Check
from cli.doctor import hosts as host_roles
from cli.doctor.hosts import ROLES, examine_host
from cli.doctor.main import readiness
from slurm_hooks.advice.file import ADVICE, AdviceFile
from slurm_hooks.advice.sched import render

CALL = (
    'pcall(function() dofile("/usr/share/almanac/lua/job_submit.lua").submit(job_desc, submit_uid) end); -- almanac\n'
)


class Host:
    """A host with its own folder of Slurm's files and of advice, and commands that answer as Slurm does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.advice = root / "advice"
        self.settings = {
            "SLURM_CONF": f"{root}/slurm.conf",
            "SlurmUser": f"{pwd.getpwuid(os.getuid()).pw_name}(0)",
            "JobSubmitPlugins": "lua",
            "CliFilterPlugins": "(null)",
            "Prolog": "(null)",
        }
        self.mail = {}

    def answer(self, argv: Sequence[str]) -> bytes:
        if list(argv) != ["scontrol", "show", "config"]:
            raise CommandError(f"{argv[0]} is missing", "install it")
        return "".join(f"{key:24}= {value}\n" for key, value in self.settings.items()).encode()

    def publish(self, name: str, hours: float = 1, mode: int = 0o644) -> None:
        now_s = int(time.time())
        expires_s = now_s + int(hours * 3600)
        file = AdviceFile("v", now_s - 60, expires_s, "observe", False, "ask", Priority(), (), ())
        path = self.advice / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(render(file) if name.startswith("sched") else ADVICE.render(file))
        path.chmod(mode)
        (self.advice / name.split("/")[0]).chmod(0o750 if name.startswith("sched") else 0o711)
        self.advice.chmod(0o711)

    def findings(self, role: str) -> list[Check]:
        app = App()
        app.__dict__["config"] = parse_config({"hooks": {"advice_dir": str(self.advice)}, **self.mail})
        app.__dict__["commands"] = self.answer
        return list(examine_host(app, role))

    def said(self, role: str, name: str) -> list[tuple[str, str]]:
        return [(check.status, check.said) for check in self.findings(role) if check.name == name]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = [Check("cli_filter", "ok", "here")]
    monkeypatch.setattr(host_roles, "check_node", lambda app: iter(found))
    return Host(tmp_path)


def test_a_controller_is_ready_with_its_line_and_fresh_advice_and_needs_no_copies_for_users(host: Host) -> None:
    (host.root / "job_submit.lua").write_text(f"function slurm_job_submit(job_desc)\n  {CALL}end\n")
    host.publish("sched/_site", mode=0o640)
    host.publish("sched/2001", mode=0o640)
    checks = host.findings("controller")
    assert [check.name for check in checks if check.status == "fail"] == []
    assert ("ok", f"{host.root}/job_submit.lua calls almanac") in [(check.status, check.said) for check in checks]
    assert ("ok", "2 files, the newest written 1 min ago") in host.said("controller", "advice files")
    assert readiness(checks, "host") == "This host is ready."


def test_a_controller_without_its_parts_says_which_are_missing(host: Host) -> None:
    script = host.root / "job_submit.lua"
    assert host.said("controller", "job_submit") == [("fail", f"{script} cannot be read: No such file or directory")]
    script.write_text("-- almanac is not called\nfunction slurm_job_submit(job_desc)\nend\n")
    assert host.said("controller", "job_submit") == [("fail", f"{script} does not call almanac")]
    script.write_text(f"function slurm_job_submit(job_desc)\n  {CALL}end\n")
    host.settings["JobSubmitPlugins"] = "(null)"
    assert host.said("controller", "job_submit") == [("fail", "JobSubmitPlugins does not name lua")]
    (missing,) = host.said("controller", "advice files")
    assert missing == ("warn", f"{host.advice}/sched does not exist: job_submit has no advice")
    assert readiness(host.findings("controller"), "host") == "This host is not ready: job_submit, advice files."


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder away")
def test_a_sched_folder_of_another_group_than_slurm_users_is_a_fault(host: Host) -> None:
    host.publish("sched/_site", mode=0o640)
    nobody = pwd.getpwnam("nobody")
    host.settings["SlurmUser"] = f"nobody({nobody.pw_uid})"
    assert any("no advice is read" in said for _, said in host.said("controller", "advice files"))
    os.chown(host.advice / "sched", 0, nobody.pw_gid)
    assert not any("no advice is read" in said for _, said in host.said("controller", "advice files"))


def test_a_login_node_shows_advice_as_long_as_the_copy_is_fresh(host: Host) -> None:
    path = host.advice / "user/_site/advice.json"
    (missing,) = host.findings("login")[-1:]
    assert missing.said == f"{path} does not exist: no advice was copied to this host"
    assert missing.is_blocking and "almanac-copy" in missing.todo
    host.publish("user/_site/advice.json", mode=0o444)
    assert host.said("login", "advice files") == [("ok", f"{path} was written 1 min ago")]
    host.publish("user/_site/advice.json", hours=-0.001)
    assert host.said("login", "advice files") == [("warn", f"{path} was written 1 min ago, and has expired")]
    path.write_text("nonsense\n")
    ((status, said),) = host.said("login", "advice files")
    assert status == "warn" and said.startswith(f"{path} is not used: ")
    path.unlink()
    os.mkfifo(path)
    assert host.said("login", "advice files") == [("warn", f"{path} is not used: not a regular file")]
    (host.advice / "user").chmod(0o777)
    assert ("fail", f"{host.advice / 'user'} has mode 0777: others can write to it") in host.said(
        "login", "advice files"
    )


def test_a_login_node_of_a_site_that_mails_says_where_the_choice_is_kept(host: Host) -> None:
    assert host.said("login", "mail") == []
    host.mail = {"mail": {"server": "mx.example", "sender": "almanac@example.org"}}
    assert host.said("login", "mail")[0][0] == "warn"
    (host.advice / "mail").mkdir(parents=True)
    assert host.said("login", "mail") == [("ok", f"`almanac mail` writes to {host.advice / 'mail'}")]


def test_a_prolog_that_slurm_names_must_be_on_the_node(host: Host) -> None:
    assert host.said("compute", "prolog")[0][0] == "ok"
    script = host.root / "almanac-gpus.sh"
    host.settings["Prolog"] = str(script)
    ((status, said),) = host.said("compute", "prolog")
    assert status == "fail" and said.endswith("slurmd drains this node")
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert host.said("compute", "prolog") == [("ok", f"Prolog={script} is here")]


@pytest.mark.parametrize(("plugins", "status"), [("(null)", "warn"), ("lua", "fail"), (None, "fail")])
def test_a_missing_filter_is_a_fault_only_where_slurm_needs_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, plugins: str | None, status: str
) -> None:
    absent = Check("cli_filter", "fail", "cli_filter.lua is missing", "install it")
    monkeypatch.setattr(host_roles, "check_node", lambda app: iter([absent]))
    if plugins is None:
        monkeypatch.setattr(host, "answer", lambda argv: (_ for _ in ()).throw(CommandError("no answer")))
    else:
        host.settings["CliFilterPlugins"] = plugins
    for role in ROLES.keys() - {"filter"}:
        assert [found for found, _ in host.said(role, "cli_filter")] == [status]
    assert host.said("filter", "cli_filter")[0][0] == "fail"
