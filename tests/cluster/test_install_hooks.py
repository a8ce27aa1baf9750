"""Files of `almanac install-hooks` in a running Slurm: called, harmless without us, and removed again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import Result, Site

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

ROOT = Path(__file__).resolve().parents[2]
OWN_SUBMIT = """\
-- function slurm_job_submit(old, one, here) end
slurm_job_submit = function(jd, parts, uid)
\tif jd.name == "refused" then return slurm.ERROR end
\treturn slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
OWN_FILTER = """\
function slurm_cli_setup_defaults(options, early_pass) return slurm.SUCCESS end
function slurm_cli_pre_submit(o, offset) return slurm.SUCCESS end
function slurm_cli_post_submit(offset, job_id, step_id) return slurm.SUCCESS end
return slurm.SUCCESS
"""
SUBMIT_PROBE = 'return { submit = function(job, uid) job.admin_comment = "submitted by " .. uid end }\n'
FILTER_PROBE = 'return { pre_submit = function(options) options["comment"] = "filtered" end }\n'


@pytest.fixture
def hooks(site: Site) -> Iterator[Site]:
    """The site, with a configuration that names its advice folder; backups are taken away."""
    for host in ("ctl", "login"):
        site.write(host, f"{site.etc_dir}/almanac.toml", f'[hooks]\nadvice_dir = "{site.advice_dir}"\n'.encode())
    yield site
    for host in ("ctl", "login"):
        site.run(host, "root", "sh", "-c", f"rm -f {site.etc_dir}/*.lua.almanac-* {site.etc_dir}/almanac.toml")


def install_hooks(site: Site, host: str, *options: str, check: bool = True) -> Result:
    """Run as root, by the package's command if installed, else by this tree's."""
    has_package = site.run(host, "root", "test", "-x", "/usr/bin/almanac", check=False).rc == 0
    program = ["/usr/bin/almanac"] if has_package else [sys.executable, "-m", "cli.main"]
    places = ["--prefix", site.etc_dir, "--lua-dir", site.lua_dir]
    env = {"ALMANAC_CONFIG": f"{site.etc_dir}/almanac.toml", **({} if has_package else {"PYTHONPATH": str(ROOT)})}
    done = site.run(host, "root", *program, "install-hooks", *places, *options, env=env, check=check)
    if host == "ctl":  # slurmctld tells files apart by whole seconds
        site.touch_job_submit()
    return done


def test_the_line_is_called_and_goes_again_without_a_trace(hooks: Site) -> None:
    hooks.hook("job_submit", OWN_SUBMIT)
    shown = install_hooks(hooks, "ctl", "job-submit")
    path = f"{hooks.etc_dir}/job_submit.lua"
    assert "Nothing was written" in shown.stdout
    assert hooks.read("ctl", path).decode() == OWN_SUBMIT
    install_hooks(hooks, "ctl", "job-submit", "--yes")
    hooks.write("ctl", f"{hooks.lua_dir}/job_submit.lua", SUBMIT_PROBE.encode())
    uid = hooks.run("ctl", "alice", "id", "-u").stdout.strip()
    shown_job = hooks.run("ctl", "root", "scontrol", "-o", "show", "job", str(hooks.sbatch("alice"))).stdout
    assert f"AdminComment=submitted by {uid}" in shown_job
    assert hooks.run("login", "alice", "sbatch", "-J", "refused", "--wrap", "true", check=False).rc != 0
    install_hooks(hooks, "ctl", "job-submit", "--remove", "--yes")
    assert hooks.read("ctl", path).decode() == OWN_SUBMIT
    assert "AdminComment" not in hooks.job(hooks.sbatch("alice"))


def test_with_the_package_purged_and_the_line_left_slurmctld_starts_and_takes_jobs(hooks: Site) -> None:
    hooks.hook("job_submit", OWN_SUBMIT)
    hooks.hook("cli_filter", OWN_FILTER)
    install_hooks(hooks, "ctl", "job-submit", "--yes")
    install_hooks(hooks, "login", "cli-filter", "--yes")
    for host in ("ctl", "login"):
        hooks.remove(host, hooks.lua_dir)
    hooks.restart_controller()
    hooks.wait_for(hooks.sbatch("alice", "--gpus=1", "-J", "train"), "COMPLETED")


def test_a_filter_in_one_line_is_called(hooks: Site) -> None:
    hooks.hook("cli_filter", OWN_FILTER)
    install_hooks(hooks, "login", "cli-filter", "--yes")
    hooks.write("login", f"{hooks.lua_dir}/cli_filter.lua", FILTER_PROBE.encode())
    assert hooks.job(hooks.sbatch("alice"))["Comment"] == "filtered"
    install_hooks(hooks, "login", "cli-filter", "--remove", "--yes")
    assert hooks.read("login", f"{hooks.etc_dir}/cli_filter.lua").decode() == OWN_FILTER


def test_stand_alone_scripts_serve_a_site_without_its_own_and_stay_while_slurm_conf_names_them(hooks: Site) -> None:
    for host, name in (("ctl", "job_submit"), ("login", "cli_filter")):
        hooks.remove(host, f"{hooks.etc_dir}/{name}.lua")
        install_hooks(hooks, host, f"--{name.replace('_', '-')}", "--yes")
    hooks.write("ctl", f"{hooks.lua_dir}/job_submit.lua", SUBMIT_PROBE.encode())
    hooks.write("login", f"{hooks.lua_dir}/cli_filter.lua", FILTER_PROBE.encode())
    hooks.restart_controller()
    job = hooks.job(hooks.sbatch("bob"))
    assert job["Comment"] == "filtered"
    assert job["AdminComment"] == "submitted"
    refused = install_hooks(hooks, "ctl", "job-submit", "--remove", "--yes", check=False)
    assert refused.rc == 3
    assert "JobSubmitPlugins" in refused.stderr
    assert b"stand-alone script" in hooks.read("ctl", f"{hooks.etc_dir}/job_submit.lua")
