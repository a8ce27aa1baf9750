"""What the scenario tests rely on, on every site."""

from __future__ import annotations

import pexpect
import pytest
from sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

SAYS = """
function slurm_job_submit(job_desc, part_list, submit_uid)
    job_desc.admin_comment = "%s"
    return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
ASKS = """
function slurm_cli_setup_defaults(options, early_pass) return slurm.SUCCESS end
function slurm_cli_pre_submit(options, pack_offset)
    local result = os.execute("test -t 0") -- 0 in Lua 5.1, true in later releases
    if result == 0 or result == true then
        io.stderr:write("which tier? ")
        options["constraint"] = io.stdin:read("*l")
    end
    return slurm.SUCCESS
end
function slurm_cli_post_submit(offset, job_id, step_id) return slurm.SUCCESS end
return slurm.SUCCESS
"""


def test_commands_run_as_the_user_in_a_small_environment(site: Site) -> None:
    done = site.run(
        "login", "alice", "sh", "-c", 'id -un; echo "$HOME $X"; pwd; cat; exit 3', env={"X": "a b"}, check=False
    )
    name, home, folder = done.stdout.splitlines()
    assert (done.rc, name) == (3, "alice")
    assert home == f"{folder} a b"
    shown = site.run("login", "bob", "env").stdout
    assert {line.split("=")[0] for line in shown.splitlines()} <= {
        "PATH", "HOME", "USER", "LOGNAME", "LC_ALL", "SLURM_CONF",
    }  # fmt: skip


def test_bytes_come_back_as_they_were(site: Site) -> None:
    data = bytes(range(256)) * 300
    path = f"{site.advice_dir}/probe"
    site.write("ctl", path, data, owner="slurm", mode=0o640)
    assert site.read("ctl", path) == data
    assert site.run("ctl", "root", "stat", "-c", "%U %a", path).stdout == "slurm 640\n"
    site.remove("ctl", path)
    assert site.run("ctl", "root", "test", "-e", path, check=False).rc == 1


def test_a_job_of_each_user_runs_and_is_accounted(site: Site) -> None:
    jobs = [site.sbatch(user, "--gpus=1", "-C", "gpu&hbm80g") for user in ("alice", "bob")]
    for job in jobs:
        site.wait_for(job, "COMPLETED")
        assert site.job(job)["NodeList"] in ("n3", "n4")
    assert set(site.wait_for_accounting(*jobs).values()) == {"COMPLETED"}


def test_each_new_job_submit_script_counts_at_the_next_submission(site: Site) -> None:
    said = []
    for word in ("first", "second"):
        site.hook("job_submit", SAYS % word)
        said.append(site.job(site.sbatch("alice"))["AdminComment"])
    site.hook("job_submit", None)
    assert said == ["first", "second"]
    assert "AdminComment" not in site.job(site.sbatch("alice"))


def test_a_cli_filter_asks_on_a_terminal_only(site: Site) -> None:
    site.hook("cli_filter", ASKS)
    quiet = site.sbatch("alice")
    program, *argv = site.command("login", "alice", ["sbatch", "-o", "/dev/null", "--wrap", "true"], tty=True)
    child = pexpect.spawn(program, argv, encoding="utf-8", timeout=30)
    child.expect_exact("which tier? ")
    child.sendline("hbm40g")
    child.expect(r"Submitted batch job (\d+)")
    asked = int(child.match[1])
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert (site.job(quiet)["Features"], site.job(asked)["Features"]) == ("(null)", "hbm40g")


def test_the_controller_comes_back_with_its_jobs(site: Site) -> None:
    job = site.sbatch("alice", "--hold")
    site.restart_controller()
    assert site.job(job)["JobState"] == "PENDING"
    site.wait_for(site.sbatch("bob"), "COMPLETED")
    assert "slurmctld" in site.controller_log()
