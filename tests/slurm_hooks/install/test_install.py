"""The hooks are put into a site's folder, and taken out, without touching anything else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from almanac.errors import ConfigError
from slurm_hooks.install.guarded_line import HOOKS, Places
from slurm_hooks.install.scripts import (
    FileChange,
    apply,
    diff_text,
    plan_install,
    plan_remove,
    slurm_conf_line,
    slurm_conf_plugins,
)

JOB_SUBMIT, CLI_FILTER = HOOKS["job_submit"], HOOKS["cli_filter"]
SITE = "function slurm_job_submit(a, b, c)\n  return slurm.SUCCESS\nend\nfunction slurm_job_modify() end\n"
STANDALONE = b"""\
function slurm_job_submit(a, b, c)
  pcall(function() dofile("/usr/share/almanac/lua/job_submit.lua").submit(a, c) end)
  return slurm.SUCCESS
end
"""
NOW_S = 1795255200  # 2026-11-21 10:00 UTC


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    return folder


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """Modules and stand-alone scripts as a package installs them."""
    for name in ("lua", "slurm"):
        (tmp_path / name).mkdir()
        for hook in HOOKS.values():
            (tmp_path / name / hook.script).write_bytes(STANDALONE)
    return tmp_path


def installed(prefix: Path, shipped: Path, fault: str | None = None) -> FileChange:
    return plan_install(JOB_SUBMIT, prefix, Places(str(shipped / "lua")), shipped / "slurm", lambda script: fault)


def removed(prefix: Path, fault: str | None = None) -> FileChange:
    return plan_remove(JOB_SUBMIT, prefix, lambda script: fault)


def test_the_file_keeps_owner_mode_and_attributes_and_is_backed_up_beside(prefix: Path, shipped: Path) -> None:
    script = prefix / "job_submit.lua"
    script.write_text(SITE)
    script.chmod(0o604)
    os.utime(script, (1, 1))
    if os.getuid() == 0:
        os.chown(script, 12, 34)
    backup = apply(installed(prefix, shipped), NOW_S)
    assert backup == prefix / "job_submit.lua.almanac-20261121T100000Z"
    assert backup.read_text() == SITE
    for path in (script, backup):
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
        if os.getuid() == 0:
            assert (path.stat().st_uid, path.stat().st_gid) == (12, 34)
    assert script.stat().st_mtime > 1, "slurmctld reads a script again when its time has changed"
    assert sorted(path.name for path in prefix.iterdir()) == [script.name, backup.name]


def test_a_link_is_followed(prefix: Path, shipped: Path, tmp_path: Path) -> None:
    real = tmp_path / "managed.lua"
    real.write_text(SITE)
    (prefix / "job_submit.lua").symlink_to(real)
    backup = apply(installed(prefix, shipped), NOW_S)
    assert (prefix / "job_submit.lua").is_symlink()
    assert "-- almanac" in real.read_text()
    assert backup is not None
    assert backup.parent == tmp_path


def test_without_a_script_the_stand_alone_one_is_installed_with_the_modules_folder_in_it(
    prefix: Path, shipped: Path
) -> None:
    change = installed(prefix, shipped)
    assert apply(change, NOW_S) is None
    script = prefix / "job_submit.lua"
    assert f'"{shipped}/lua/job_submit.lua"' in script.read_text()
    assert stat.S_IMODE(script.stat().st_mode) == 0o644
    assert not installed(prefix, shipped).is_needed
    apply(removed(prefix), NOW_S)
    assert not script.exists()


def test_an_untouched_stand_alone_script_follows_the_package(prefix: Path, shipped: Path) -> None:
    apply(installed(prefix, shipped), NOW_S)
    (shipped / "slurm" / "job_submit.lua").write_bytes(STANDALONE + b"-- newer\n")
    apply(installed(prefix, shipped), NOW_S)
    assert (prefix / "job_submit.lua").read_bytes().endswith(b"-- newer\n")


def test_a_stand_alone_script_that_the_site_edited_stays(prefix: Path, shipped: Path) -> None:
    apply(installed(prefix, shipped), NOW_S)
    script = prefix / "job_submit.lua"
    script.write_text(script.read_text() + "-- the site's\n")
    apply(installed(prefix, shipped), NOW_S)
    assert "-- the site's" in script.read_text()
    apply(removed(prefix), NOW_S)
    assert "-- the site's" in script.read_text()
    assert "pcall" not in script.read_text()


def test_a_script_that_slurm_conf_asks_for_is_not_deleted(prefix: Path, shipped: Path) -> None:
    """A missing cli_filter.lua refuses every submission, a missing job_submit.lua the start of slurmctld."""
    apply(installed(prefix, shipped), NOW_S)
    (prefix / "slurm.conf").write_text("JobSubmitPlugins=lua\n")
    with pytest.raises(ConfigError, match="JobSubmitPlugins"):
        removed(prefix)
    (prefix / "slurm.conf").write_text("# JobSubmitPlugins=lua\n")
    assert removed(prefix).after is None
    assert removed(prefix).notes == ()
    (prefix / "slurm.conf").unlink()
    assert "make sure that JobSubmitPlugins does not name lua" in removed(prefix).notes[0]


def test_what_would_not_parse_is_refused(prefix: Path, shipped: Path) -> None:
    (prefix / "job_submit.lua").write_text(SITE)
    with pytest.raises(ConfigError, match="near 'x'") as caught:
        installed(prefix, shipped, fault="near 'x'")
    assert "-- almanac" in caught.value.hint


def test_a_file_that_was_edited_meanwhile_is_left_alone(prefix: Path, shipped: Path) -> None:
    script = prefix / "job_submit.lua"
    script.write_text(SITE)
    change = installed(prefix, shipped)
    script.write_text(SITE + "-- edited\n")
    with pytest.raises(ConfigError, match="has changed in the meantime"):
        apply(change, NOW_S)
    assert script.read_text() == SITE + "-- edited\n"
    assert list(prefix.iterdir()) == [script]


def test_what_is_missing_is_named(prefix: Path, shipped: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        installed(prefix / "absent", shipped)
    with pytest.raises(ConfigError, match="does not exist"):
        plan_install(JOB_SUBMIT, prefix, Places("/absent"), shipped, lambda script: None)
    for places in (Places('/x"); os.execute("'), Places(str(shipped / "lua"), "/srv/my advice"), Places("lua")):
        with pytest.raises(ConfigError, match="cannot be written into a script"):
            plan_install(JOB_SUBMIT, prefix, places, shipped, lambda script: None)


def test_what_still_names_almanac_is_said(prefix: Path) -> None:
    line = '-- dofile("/usr/share/almanac/lua/job_submit.lua")\n'
    (prefix / "job_submit.lua").write_text(SITE + line)
    assert "line 5" in removed(prefix).notes[0]


def test_control_characters_of_a_script_do_not_reach_the_terminal() -> None:
    change = FileChange(Path("/etc/slurm/job_submit.lua"), b"a\x1b[2J\nb\n", b"a\x1b[2J\nc\n")
    assert "\x1b" not in diff_text(change)


@pytest.mark.parametrize(
    ("conf", "plugins", "line"),
    [
        ("", [], "JobSubmitPlugins=lua"),
        ("jobsubmitplugins = lua # ours", ["lua"], None),
        ("JobSubmitPlugins=job_submit/lua", ["lua"], None),
        ("JobSubmitPlugins=all_partitions,require_timelimit", ["all_partitions", "require_timelimit"],
         "JobSubmitPlugins=all_partitions,require_timelimit,lua"),
        ("CliFilterPlugins=lua", [], "JobSubmitPlugins=lua"),
        ("include more.conf", ["lua"], None),
        ("Include slurm.conf", [], "JobSubmitPlugins=lua"),
        ("Include absent.conf", [], "JobSubmitPlugins=lua"),
    ],
)  # fmt: skip
def test_the_line_that_slurm_conf_needs(prefix: Path, conf: str, plugins: list[str], line: str | None) -> None:
    (prefix / "slurm.conf").write_text(f"ClusterName=x\n{conf}\n")
    (prefix / "more.conf").write_text("JobSubmitPlugins=lua\n")
    assert slurm_conf_plugins(prefix, JOB_SUBMIT) == plugins
    assert slurm_conf_line(prefix, JOB_SUBMIT) == line
