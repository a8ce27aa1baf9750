"""The native site: the host's own Slurm as tests/cluster/lab.py starts it; every host name stands for this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lab import SlurmLab
from layout import HERE, slurm_release
from sites import HOSTS, Site

MODULES = HERE.parents[1] / "slurm_hooks/lua"


class NativeSite(Site):
    """On a running lab. Lua modules are copies that a test may break."""

    different_hosts = ("ctl",)

    def __init__(self, lab: SlurmLab) -> None:
        self._lab = lab
        year, month = slurm_release()
        self.release = f"{year}.{month:02d}"
        self.etc_dir = str(lab.root / "etc")
        self.lua_dir = str(lab.root / "lua")
        self.advice_dir = str(lab.root / "advice")
        self.kept_dir = str(lab.root / "kept")
        self.power_off = str(lab.root / "hooks/node-power-off")
        self.power_log = str(lab.root / "log/power.jsonl")
        Path(self.advice_dir).mkdir(mode=0o711, exist_ok=True)
        self.keep(str(MODULES))

    def command(
        self, host: str, user: str, argv: Sequence[str], env: Mapping[str, str] | None = None, tty: bool = False
    ) -> list[str]:
        if host not in HOSTS:
            raise ValueError(f"no host {host!r}: expected one of {HOSTS}")
        home = self._lab.root / "home" / user
        whole = {
            **self._lab.env,
            "HOME": str(home),
            "USER": user,
            "LOGNAME": user,
            **({"TERM": "xterm"} if tty else {}),
            **(env or {}),
        }
        folder = home if home.is_dir() else self._lab.root / "out"
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user != "root" else []
        return ["env", "-i", f"--chdir={folder}", *(f"{k}={v}" for k, v in whole.items()), *become, *argv]

    def restart_controller(self) -> None:
        self._lab.restart_controller()
        self.wait_for_nodes()

    def stop_server(self, name: str) -> None:
        self._lab.stop_server(name)

    def start_server(self, name: str) -> None:
        self._lab.start_server(name)

    def bmc(self, wanted: str, *nodes: str) -> str:
        return self._lab.bmc(wanted, *nodes)

    def controller_log(self) -> str:
        return (self._lab.root / "log/slurmctld.log").read_text(errors="replace")
