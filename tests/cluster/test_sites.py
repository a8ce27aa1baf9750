"""Facts that the scenario tests rely on, on every site."""

from __future__ import annotations

import pexpect
import pytest
from processes import PATIENCE_S
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
    child = pexpect.spawn(program, argv, encoding="utf-8", timeout=PATIENCE_S)
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
