"""A user at a terminal of the login node: their advice, the filter's guarded line, the wrapper, and what they see."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pexpect
from advice_files import TEXT, family, shown_advice, uid_of
from layout import PACKAGES
from native_site import NativeSite
from processes import PATIENCE_S
from sites import REPOSITORY, Site

ROW = family("train-bert-#", 2, 500, bound_mib=25396, tier="hbm40g", gains="hbm80g=40 min", text=f"{TEXT}.")
QUESTION = 'Submit with -C "gpu&hbm40g" instead?\n         [y]es, [N]o, [a]lways, or ne[v]er for this job: '
JOB = ("-J", "train-BERT-7", "--gpus=2", "-C", "gpu&hbm80g")
FILTER = """
function slurm_cli_setup_defaults(options, early_pass) return slurm.SUCCESS end
function slurm_cli_pre_submit(options, offset)
  local dirs = {{advice = "{dir}", prompt = "{prompt}", wait_s = {wait_s}}}
  pcall(function() dofile("{module}").pre_submit(options, offset, dirs) end)
  return slurm.SUCCESS
end
function slurm_cli_post_submit(offset, job_id, step_id) return slurm.SUCCESS end
return slurm.SUCCESS
"""


class FrontEnd:
    """alice on the login node, who has advice on train-bert-# with two GPUs: hbm40g."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.uid = uid_of(site, "alice")
        self.home = site.run("login", "alice", "sh", "-c", "echo $HOME").stdout.strip()
        self.state = f"{self.home}/.local/state/almanac"
        self.choices = f"{self.state}/choices"
        self.advice = f"{site.advice_dir}/user/{self.uid}/advice.json"
        self.config = f"{site.advice_dir}/almanac.toml"
        self.env = {"ALMANAC_CONFIG": self.config}
        site.write("login", self.config, f'[hooks]\nadvice_dir = "{site.advice_dir}"\n'.encode())
        site.run("login", "root", "install", "-d", "-m", "0711", f"{site.advice_dir}/user")
        site.run("login", "root", "install", "-d", "-m", "0711", f"{site.advice_dir}/user/{self.uid}")
        self.publish(shown_advice(ROW, prompt="ask"))
        self.forget()
        self.wrapper = self._wrapper()

    def publish(self, data: bytes) -> None:
        self.site.write("login", self.advice, data, owner="alice", mode=0o400)

    def forget(self) -> None:
        self.site.remove("login", f"{self.home}/.local")

    def filter_on(self, wait_s: int = 20) -> None:
        """wait_s: of a silent prompt; a loaded host needs more than the 2 s that users get."""
        module = f"{self.site.lua_dir}/cli_filter.lua"
        places = {"dir": self.site.advice_dir, "prompt": self.prompt, "wait_s": wait_s}
        self.site.hook("cli_filter", FILTER.format(module=module, **places))

    def _wrapper(self) -> str:
        """The installed one; on the native site one made of this checkout, in a place that users can reach."""
        if not isinstance(self.site, NativeSite):
            self.prompt = Path("/usr/libexec/almanac/almanac-prompt")
            return "/usr/bin/sbatch-almanac"
        folder = Path(self.site.advice_dir).parent / "wrapper"
        if not folder.exists():
            for name in PACKAGES:
                shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        can_use = self.site.run("login", "alice", "sh", "-c", f"test -x {sys.executable}", check=False).rc == 0
        head = f"#!{sys.executable if can_use else '/usr/bin/python3'} -I\n"
        start = f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport gc\n"
        path = folder / "sbatch-almanac"
        path.write_text(
            head + (folder / "slurm_hooks/submit/sbatch_almanac.py").read_text().replace("import gc\n", start, 1)
        )
        self.prompt = folder / "almanac-prompt"
        lines = (
            "import sys",
            f"sys.path.insert(0, {str(folder)!r})",
            "from slurm_hooks.submit.prompt import main",
            "main()",
        )
        self.prompt.write_text(head + "\n".join(lines))
        for each in (path, self.prompt):
            each.chmod(0o755)
        return str(path)

    def terminal(self, *argv: str, **env: str) -> Any:
        """alice's command on a terminal of her own."""
        command = self.site.command("login", "alice", argv, env={**self.env, **env}, tty=True)
        return pexpect.spawn(command[0], command[1:], timeout=PATIENCE_S, encoding="utf-8", dimensions=(50, 150))

    def run(self, *argv: str, stdin: bytes | None = None, **env: str) -> Any:
        """Without one."""
        return self.site.run_bytes("login", "alice", *argv, stdin=stdin, env={**self.env, **env})

    def answered(self, line: str, *argv: str, **env: str) -> str:
        """Return the output from the question on, once it was answered by a line; the command has to succeed."""
        shell = self.terminal(*argv, **env)
        shell.expect_exact("for this job: ")
        shell.sendline(line)
        return ended(shell)

    def constraint(self, shown: str) -> str:
        """Of the job that sbatch says it has submitted."""
        return self.site.job(shown.split("Submitted batch job ")[1].split()[0])["Features"]


def ended(shell: Any, rc: int = 0) -> str:
    """Everything shown up to the end, with a terminal's line ends made plain."""
    shell.expect(pexpect.EOF)
    shown = str(shell.before).replace("\r\n", "\n")
    shell.close()
    assert (shell.exitstatus, shell.signalstatus) == (rc, None), shown
    return shown
