"""Files and programs that others can change: doctor warns, root obeys none, and nobody becomes an operator by them."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from advisor.service import load_own
from almanac.errors import ConfigError
from cli.app import App
from cli.doctor.hosts import check_trust
from cli.main import cli
from slurm_hooks.submit.sbatch_almanac import configured

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
NOBODY = pwd.getpwnam("nobody").pw_uid
Written = Callable[..., Path]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir(mode=0o755)
    for name in ("sacct", "squeue", "scontrol", "sinfo", "address"):
        (folder / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/started\necho slurm 24.11.5\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def config(tmp_path: Path, programs: Path) -> Path:
    path = tmp_path / "almanac.toml"
    secret = tmp_path / "secret"
    secret.write_text("password\n")
    path.write_text(
        f'[slurm]\nbin_dir = "{programs}"\n[site]\noperators_group = "{grp.getgrgid(0).gr_name}"\n'
        f'[mail]\naddress_command = ["{programs}/address", "-x"]\npassword_file = "{secret}"\n'
        f'[mig]\napply_command = ["{programs}/address"]\n[store]\npath = "{tmp_path}/store"\n'
    )
    return path


def said(config: Path) -> list[str]:
    return [f"{check.status} {check.said} | {check.todo}" for check in check_trust(App(str(config)))]


def test_nothing_is_said_of_what_only_root_can_change(config: Path) -> None:
    assert said(config) == []


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("almanac.toml", "the configuration file"),
        ("rules.toml", "rules.toml"),
        ("bin/scontrol", "slurm.bin_dir (scontrol)"),
        ("bin/address", "mail.address_command"),
        ("secret", "mail.password_file"),
        ("bin", "slurm.bin_dir (sacct)"),
    ],
)
def test_each_file_program_and_folder_is_named_once(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str, subject: str
) -> None:
    path = config.parent / name
    path.touch()
    path.chmod(path.stat().st_mode | 0o022)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    [line] = said(config)
    assert line.startswith(f"warn {subject}: {path} belongs to root and has mode 0")
    assert line.endswith(f"chmod go-w {path}")


@pytest.mark.parametrize("how", ["mode", "owner"])
def test_root_obeys_no_such_configuration_and_starts_no_such_program(
    config: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def spoil(path: Path) -> None:
        path.chmod(0o666 | path.stat().st_mode) if how == "mode" else os.chown(path, NOBODY, -1)

    spoil(programs / "scontrol")
    with pytest.raises(ConfigError, match="scontrol belongs to"):
        App(str(config)).commands(["scontrol", "--version"])
    assert not (config.parent / "started").exists()
    spoil(config)
    monkeypatch.setenv("ALMANAC_CONFIG", str(config))
    for argv in (["doctor"], ["--config", str(config), "doctor"]):
        assert f"FAIL  configuration: {config} belongs to" in CliRunner().invoke(cli, argv).output
    with pytest.raises(ConfigError, match=r"almanac\.toml belongs to"):
        _ = App().config


@pytest.mark.parametrize("spoiled", ["almanac.toml", "."])
def test_a_submission_of_root_goes_on_without_such_a_configuration(config: Path, spoiled: str) -> None:
    environ = {"ALMANAC_CONFIG": str(config)}
    assert configured(environ, "slurm", "bin_dir") == str(config.parent / "bin")
    (config.parent / spoiled).chmod(0o777)
    assert configured(environ, "slurm", "bin_dir") == ""


@pytest.mark.parametrize(("mode", "is_loaded"), [(0o644, True), (0o666, False)])
def test_root_loads_no_service_that_others_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_loaded: bool
) -> None:
    module = f"own_service_{mode}"
    (tmp_path / f"{module}-1.dist-info").mkdir()
    (tmp_path / f"{module}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    entry = f"[almanac.services]\n{module} = {module}:Service\n"
    (tmp_path / f"{module}-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / f"{module}.py").write_text(
        "from pathlib import Path\nPath(__file__ + '.ran').touch()\nService = object\n"
    )
    (tmp_path / f"{module}.py").chmod(mode)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = load_own([module])
    assert (module in own.services) == is_loaded == (tmp_path / f"{module}.py.ran").exists()
    assert is_loaded or "has mode 0666" in own.faults[module]


def test_a_configuration_that_others_can_write_makes_no_operators(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: NOBODY)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    monkeypatch.setattr(os, "getgroups", lambda: [0])
    assert App(str(config)).is_operator
    link = config.parent / "own.toml"
    link.symlink_to(config)
    os.lchown(link, NOBODY, -1)
    assert not App(str(link)).is_operator
    config.chmod(0o666)
    assert not App(str(config)).is_operator
