"""Doctor's findings on cli_filter.lua: on this host by looking, on others by the record made there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from almanac.config import Config
from almanac.config_file import parse_config
from cli.app import App
from cli.doctor import Check, hooks
from cli.doctor.hooks import SCRIPT, check_filter, check_node, read_record
from cli.doctor.main import readiness

NOW_S = 1_795_003_200
SCRIPT_PATH = Path(__file__).parents[2] / "slurm_hooks/lua" / SCRIPT
LOADS = """test -f "${SLURM_CONF%/*}/cli_filter.lua" || {
    echo "sbatch: fatal: failed to initialize cli_filter plugin" >&2
    exit 1
}"""


@dataclass
class SiteApp(App):
    """Three nodes, one of which has another host name; an sbatch that needs the filter, and this host's slurm.conf."""

    folder: Path = Path()
    told: str = "CliFilterPlugins        = lua\n"

    @property
    def config(self) -> Config:  # type: ignore[override]
        config = parse_config({"slurm": {"bin_dir": str(self.folder / "bin")}})
        object.__setattr__(config, "source", str(self.folder / "almanac.toml"))
        return config

    def now_s(self) -> int:
        return NOW_S


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SiteApp:
    app = SiteApp(folder=tmp_path)

    def commands(argv: Sequence[str]) -> bytes:
        nodes = "n1 n1 {0}n2 n2 {0}n3 gpu-n3 {0}n1 n1 {0}".format("(null) idle\n")
        return (app.told if argv[0] == "scontrol" else nodes).encode()

    app.commands = commands  # type: ignore[assignment]
    (tmp_path / "etc").mkdir()
    for name in ("slurm.conf", "cli_filter.lua"):
        (tmp_path / "etc" / name).touch(0o644)
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text(f"#!/bin/sh\n{LOADS}\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "etc/slurm.conf"))
    monkeypatch.setenv("SLURMD_NODENAME", "login")
    return app


def record(app: SiteApp, *lines: str) -> None:
    (app.folder / "checked-hosts").write_text("\n".join(lines) + "\n")


def found(app: App) -> list[tuple[str, bool]]:
    return [(check.status, check.is_blocking) for check in check_filter(app)]


def test_a_site_is_not_ready_before_every_node_was_checked(app: SiteApp) -> None:
    (check,) = check_filter(app)
    assert (check.status, check.is_blocking) == ("warn", True)
    assert check.said == "not checked on 3 compute nodes: n1, n2, n3"
    assert SCRIPT in check.todo and "clush" in check.todo
    record(app, f"n1: n1 ok {NOW_S}", "clush: n2: exited with exit code 1", f"gpu-n3 ok {NOW_S}")
    assert [check.details["hosts"] for check in check_filter(app)] == [["n2"]]
    record(app, *(f"{host} ok {NOW_S - 60}" for host in ("n1", "n2", "gpu-n3")))
    assert found(app) == [("ok", False)]


def test_old_records_do_not_count(app: SiteApp) -> None:
    record(app, *(f"{host} ok {NOW_S - 40 * 86_400}" for host in ("n1", "n2", "gpu-n3")))
    assert found(app) == [("warn", True)]


@pytest.mark.parametrize("status", ["broken", "absent", "unknown"])
def test_a_host_without_it_is_named_and_fails(app: SiteApp, status: str) -> None:
    record(app, *(f"{host} ok {NOW_S}" for host in ("n1", "n2", "gpu-n3")), f"login9 {status} {NOW_S}")
    (check,) = check_filter(app)
    assert (check.status, check.details["hosts"]) == ("fail", ["login9"])
    assert "remove lua from CliFilterPlugins" in check.todo
    record(app, f"login9 {status} {NOW_S - 60}", *(f"{host} ok {NOW_S}" for host in ("n1", "n2", "gpu-n3", "login9")))
    assert found(app) == [("ok", False)], "the newer one counts"


def test_this_host_is_looked_at_itself(app: SiteApp) -> None:
    record(app, *(f"{host} ok {NOW_S}" for host in ("n1", "n2", "gpu-n3", "login")))
    (app.folder / "etc/cli_filter.lua").unlink()
    (check,) = check_filter(app)
    assert (check.status, check.details["hosts"]) == ("fail", ["login"])


def test_before_lua_is_switched_on_the_record_says_whether_it_may_be(app: SiteApp) -> None:
    app.told = "CliFilterPlugins        = (null)\n"
    assert found(app) == [], "a site without the filter is told nothing"
    record(app, f"n1 absent {NOW_S}", f"n2 ok {NOW_S}", f"gpu-n3 ok {NOW_S}")
    assert found(app) == [("warn", True)]
    record(app, *(f"{host} ok {NOW_S}" for host in ("n1", "n2", "gpu-n3")))
    (check,) = check_filter(app)
    assert check.said.endswith("you can set CliFilterPlugins=lua")


def test_a_store_host_without_slurm_conf_needs_no_filter(app: SiteApp) -> None:
    (app.folder / "etc/slurm.conf").unlink()
    (app.folder / "bin/sbatch").unlink()
    record(app, *(f"{host} ok {NOW_S}" for host in ("n1", "n2", "gpu-n3")))
    assert "fail" not in [status for status, _ in found(app)]


@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        (lambda etc: None, "ok"),
        (lambda etc: (etc / "cli_filter.lua").unlink(), "fail"),
        (lambda etc: (etc / "cli_filter.lua").chmod(0o640), "fail"),
        (lambda etc: ((etc / "cli_filter.lua").unlink(), (etc / "cli_filter.lua").mkdir()), "fail"),
    ],
)
def test_node_checks_this_host_alone(app: SiteApp, spoil: object, status: str) -> None:
    spoil(app.folder / "etc")  # type: ignore[operator]
    (check,) = check_node(app)
    assert check.status == status
    assert check.said.startswith("login: ")


def test_the_script_says_the_same_from_standard_input(app: SiteApp) -> None:
    """As clush and pdsh run it; the host's name without its domain, as Slurm has it."""
    environ = {**os.environ, "PATH": f"{app.folder}/bin:/usr/bin:/bin", "SLURMD_NODENAME": "n7.cluster.example"}
    done = subprocess.run(
        ["sh", "-s"], input=SCRIPT_PATH.read_text(), env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("n7 ok 1")
    (app.folder / "etc/cli_filter.lua").unlink()
    done = subprocess.run(
        ["sh", "-s"], input=SCRIPT_PATH.read_text(), env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()[:2], done.stderr) == (1, ["n7", "broken"], "")


def test_a_record_with_other_lines_is_read(tmp_path: Path) -> None:
    path = tmp_path / "checked-hosts"
    path.write_bytes(b"\xff\x00\nn1 ok\nn2 fine 5\n n3: n3 ok 1795003000\r\nn4 ok 99999999999999\n")
    assert [check.host for check in read_record(path, NOW_S)] == ["n3"]
    assert read_record(tmp_path / "absent", NOW_S) == []


def test_the_last_line_says_whether_the_site_is_ready() -> None:
    ok, warn = Check("a", "ok", ""), Check("b", "warn", "")
    assert readiness([ok, warn]) == "The site is ready."
    blocked = Check("cli_filter", "warn", "", is_blocking=True)
    assert readiness([ok, blocked, Check("c", "fail", ""), blocked]) == "The site is not ready: cli_filter, c."


def test_an_sbatch_that_hangs_does_not_end_doctor(app: SiteApp, monkeypatch: pytest.MonkeyPatch) -> None:
    (app.folder / "bin/sbatch").write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(hooks, "_TIMEOUT_S", 0.5)
    (check,) = check_node(app)
    assert (check.status, "did not answer" in check.said) == ("fail", True)
