"""A MIG node that slurm.conf does not name: its slurmd registers it, as `slurmd -Z --conf` (Slurm 22.05 and later)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from layout import GPUS_PER_NODE
from mig_site import MigSite
from native_site import NativeSite
from processes import MARK, wait_until
from sites import Site

NODE = "n1"
# As docs/mig-layouts.md, with a pid file in place of systemd.
REGISTER = """#!/bin/sh
cd {folder} && cat >conf.new && mv conf.new conf || exit 1
is_running() {{ grep -qs '^State:.[^ZX]' "/proc/$pid/status"; }}
if pid=$(cat {pid_file} 2>/dev/null) && is_running; then
    kill "$pid"
    for _ in $(seq 60); do is_running && sleep 0.05; done
fi
{mark} exec slurmd -Z -N {node} --conf "$(cat own) $(cat conf)" </dev/null >/dev/null 2>&1
"""


@dataclass
class DynamicMigSite(MigSite):
    """n1 is dynamic, with the parameters that slurm.conf had for it."""

    own: str = ""
    port: str = ""

    @property
    def _folder(self) -> str:
        return self.state(NODE).rpartition("/")[0]

    def register(self, parameters: str) -> None:
        """Restart slurmd with these parameters and its own."""
        self.site.run(NODE, "root", f"{self.bin_dir(NODE)}/register", stdin=f"{parameters}\n")

    def delete(self) -> None:
        self.site.run("ctl", "root", "scontrol", "delete", f"nodename={NODE}")

    def come(self, gres: str) -> None:
        """As slurmd at the boot of a node that slurmctld does not know."""
        self.register(f"Gres={gres}")
        self.wait_for_gres(NODE, gres)

    def layout(self, node: str, *gpus: object) -> str:
        """By hand: deleted, changed, registered again."""
        self.drain(node)
        self.parted(node, *gpus)  # type: ignore[arg-type]
        self.delete()
        self.come(self.fake(node, "gres").strip())
        return self.node(node)["Gres"]

    def _slurm_conf(self, text: str) -> str:
        changed = super()._slurm_conf(text)
        for host in self._hosts(NODE):
            line = self.site.read(host, self.include).decode()
            if line:
                self.own = re.sub(r"(NodeName|NodeHostname|NodeAddr|Port|Gres|State)=\S+ ?", "", line).strip()
                self.port = "".join(re.findall(r" Port=(\d+)", line)) or self.port
            self.site.write(host, self.include, b"")
        port = f"SlurmdPort={self.port}\n" if self.port else ""
        return f"MaxNodeCount=10\nTreeWidth=65533\n{port}{changed}"

    def _settle(self) -> None:
        if "MaxNodeCount" in self.site.read("ctl", f"{self.site.etc_dir}/slurm.conf").decode():
            self._become_dynamic()
        else:
            self._become_static()

    def _become_dynamic(self) -> None:
        self.site.reset()
        self._stop_slurmd()
        pid_file = f"{self._root}/spool/slurmd.{NODE}.pid" if self._is_native else "/run/slurm/slurmd.pid"
        mark = f"{MARK}={self._root} SLURM_CONF={self.site.etc_dir}/slurm.conf" if self._is_native else ""
        text = REGISTER.format(folder=self._folder, pid_file=pid_file, node=NODE, mark=mark)
        self.site.write(NODE, f"{self.bin_dir(NODE)}/register", text.encode(), mode=0o755)
        self.site.write(NODE, f"{self._folder}/own", self.own.encode())
        self.restart()
        self.come(f"gpu:a100:{GPUS_PER_NODE}")

    def _become_static(self) -> None:
        self._start_slurmd()
        self.restart()
        self.wait_for_gres(NODE, f"gpu:a100:{GPUS_PER_NODE}")

    def stop(self) -> None:
        self.site.reset()
        wait_until("no jobs", lambda: not self.site.run("ctl", "root", "squeue", "-h").stdout)
        pid_file = f"{self._root}/spool/slurmd.{NODE}.pid" if self._is_native else "/run/slurm/slurmd.pid"
        self.site.run(NODE, "root", "sh", "-c", f"kill $(cat {pid_file})", check=False)
        if self.node(NODE):
            self.delete()
        super().stop()

    def _stop_slurmd(self) -> None:
        if isinstance(self.site, NativeSite):
            self.site._lab.stop_node(NODE)
        else:
            self.site.run(NODE, "root", "sv", "-w", "20", "down", "slurmd")

    def _start_slurmd(self) -> None:
        if isinstance(self.site, NativeSite):
            self.site._lab.start_node(NODE)
        else:
            self.site.run(NODE, "root", "sv", "-w", "20", "up", "slurmd")


@contextmanager
def dynamic_mig_site(site: Site) -> Iterator[DynamicMigSite]:
    mig = DynamicMigSite(site, (NODE,))
    try:
        mig.start()
        yield mig
    finally:
        mig.stop()
