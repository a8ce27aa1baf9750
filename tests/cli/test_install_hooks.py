"""`almanac install-hooks` as an administrator runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from almanac.errors import ConfigError
from cli.app import App
from cli.install_hooks import command

SITE = "function slurm_job_submit(a, b, c)\n  return slurm.SUCCESS\nend\nfunction slurm_job_modify() end\n"
FILTER = "function slurm_cli_pre_submit(options, offset)\n  return slurm.SUCCESS\nend\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "lua").mkdir()
    for name, script in (("job_submit.lua", SITE), ("cli_filter.lua", FILTER)):
        (tmp_path / name).write_text(script)
        (tmp_path / "lua" / name).write_text("")
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nCliFilterPlugins=lua\n")
    return tmp_path


def run(site: Path, *options: str) -> Result:
    """By the command itself: within `almanac`, click would keep that group's spelling of --help for later tests."""
    return CliRunner().invoke(command, ["--prefix", str(site), "--lua-dir", str(site / "lua"), *options], obj=App())


def contents(site: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in site.glob("*.lua")}


def test_without_yes_it_only_shows(site: Path) -> None:
    before = contents(site)
    done = run(site)
    assert done.exit_code == 0, done.output
    assert contents(site) == before
    assert "Nothing was written" in done.output
    assert done.output.count("-- almanac") == 2
    assert "  JobSubmitPlugins=lua\n" in done.output
    assert "CliFilterPlugins=lua\n" not in done.output, "slurm.conf has it"


def test_it_says_where_cli_filter_lua_has_to_be_before_slurm_conf_names_it(site: Path) -> None:
    """Without it a compute node fails every job step."""
    (site / "slurm.conf").write_text("ClusterName=x\n")
    said = run(site, "cli-filter").output
    assert "on EVERY host that runs srun, sbatch, or\nsalloc: login and compute nodes" in said
    assert said.index("EVERY host") < said.index("  CliFilterPlugins=lua\n")
    assert "EVERY host" not in run(site, "job-submit").output
    assert "EVERY host" not in run(site, "cli-filter", "--remove").output


def test_there_and_back_again(site: Path) -> None:
    before = contents(site)
    done = run(site, "--yes")
    assert done.exit_code == 0, done.output
    assert all("-- almanac" in text for text in contents(site).values())
    assert done.output.count("backup: ") == 2
    assert "nothing to change" in run(site, "--yes").output
    shown = run(site, "--remove")
    assert "Nothing was written" in shown.output
    assert run(site, "--remove", "--yes").exit_code == 0
    assert contents(site) == before


def test_one_hook_at_a_time(site: Path) -> None:
    run(site, "cli-filter", "--yes")
    assert "almanac" not in (site / "job_submit.lua").read_text()
    assert "almanac" in (site / "cli_filter.lua").read_text()


def test_where_one_of_two_is_refused_neither_is_written(site: Path) -> None:
    (site / "cli_filter.lua").write_text("slurm_cli_pre_submit = require('site').filter\n")
    before = contents(site)
    done = run(site, "--yes")
    assert done.exit_code != 0
    assert contents(site) == before
    assert "pre_submit(options, offset) end); -- almanac" in str(getattr(done.exception, "hint", ""))


def ended(site: Path, *options: str) -> Result:
    return CliRunner().invoke(command, ["--prefix", str(site), "ended", *options], obj=App())


def conf(site: Path, *lines: str) -> None:
    (site / "slurm.conf").write_text("ClusterName=x\n" + "".join(f"{line}\n" for line in lines))


def test_the_hook_of_ended_jobs_is_put_beside_slurm_conf_and_called(site: Path) -> None:
    script = site / "almanac-ended.sh"
    before = contents(site)
    assert "Nothing was written" in ended(site).output and not script.exists()
    done = ended(site, "--yes")
    assert done.exit_code == 0, done.output
    assert script.stat().st_mode & 0o777 == 0o755
    assert f"  EpilogSlurmctld={script}\n" in done.output
    assert contents(site) == before
    spool = site / "spool"
    spool.mkdir()
    subprocess.run([script], env={"SLURM_JOB_ID": "7", "ALMANAC_SPOOL_DIR": str(spool)}, check=True)
    assert [path.read_text() for path in spool.iterdir()] == ["job_id=7\ncluster=\n"]
    assert "nothing to change" in ended(site, "--yes").output


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["EpilogSlurmctld=/opt/epilog"], ["JobCompType=jobcomp/script", "JobCompLoc={}"]),
        (["JobCompType=jobcomp/mysql"], ["EpilogSlurmctld={}"]),
        (["EpilogSlurmctld=/opt/epilog", "epilogslurmctld={}"], []),
        (["JobCompType=jobcomp/script", "JobCompLoc={}"], []),
    ],
)
def test_what_slurm_conf_needs_for_the_hook_of_ended_jobs(site: Path, lines: list[str], said: list[str]) -> None:
    script = site / "almanac-ended.sh"
    conf(site, *(line.format(script) for line in lines))
    output = ended(site, "--yes").output
    assert ("on every host, then restart slurmctld" in output) == bool(said)
    for line in said:
        assert f"  {line.format(script)}" in output


def test_a_program_of_the_sites_own_has_to_call_the_hook(site: Path) -> None:
    conf(site, "EpilogSlurmctld=/opt/epilog", "JobCompType=jobcomp/mysql")
    output = ended(site, "--yes").output
    script = site / "almanac-ended.sh"
    assert f"/opt/epilog does not call it yet, add this line to it: [ ! -x {script} ] || {script}" in output
    assert "on every host, then restart slurmctld" not in output


def test_the_hook_of_ended_jobs_stays_while_slurm_conf_names_it(site: Path) -> None:
    """Without the script slurmctld does not start."""
    script = site / "almanac-ended.sh"
    ended(site, "--yes")
    for line in (f"EpilogSlurmctld={script}", f"JobCompLoc={script}"):
        conf(site, line)
        done = ended(site, "--remove", "--yes")
        assert isinstance(done.exception, ConfigError) and line in str(done.exception)
        assert script.exists()
    (site / "slurm.conf").unlink()
    assert isinstance(ended(site, "--remove", "--yes").exception, ConfigError) and script.exists()
    conf(site)
    done = ended(site, "--remove", "--yes")
    assert done.exit_code == 0, done.output
    assert not script.exists() and list(site.glob("almanac-ended.sh.almanac-*"))
