"""A site with MIG nodes: fake GPUs (fake_mig.py) on some of its nodes, and an include file tells Slurm about them.

    with mig_site(site, ("n1",)) as mig:
        mig.parted("n1", {"1g.5gb": 7}, None, None, None)   # GPU 0 in slices, GPUs 1 to 3 whole
        mig.take("n1")                                      # Slurm has the new Gres, the node is idle or drained

slurm.conf includes mig-nodes.conf (the NodeName lines of these nodes) on the controller and on each of them; their
gres.conf includes gres-mig-NODE.conf, which the fake writes. Commands of the node: mig.smi("n1", "-L"), or by path,
mig.bin_dir("n1") + "/nvidia-smi". Leaving puts every file back, and fails where a job that has ended is still in the
exporter's mapping folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from layout import GPUS_PER_NODE
from native_site import NativeSite
from processes import MARK, wait_until
from sites import Result, Site

WHOLE_NODE = {"n1": "a100-40", "n2": "a100-40", "n3": "a100-80", "n4": "a100-80"}
TYPES = (
    "1g.5gb", "1g.10gb", "1g.20gb", "2g.10gb", "2g.20gb", "3g.20gb", "3g.40gb", "4g.20gb", "4g.40gb", "7g.40gb",
    "7g.80gb",
)  # fmt: skip
BAD = re.compile("UNKNOWN|NOT_RESPONDING|INVALID_REG|INVAL")
NVML_PROLOG = """#!/bin/sh
PATH=/usr/bin:/bin
if [ "$SLURMD_NODENAME" = {node} ] && [ "$SLURM_SCRIPT_CONTEXT" != epilog_slurmd ] && [ -n "$SLURM_JOB_GPUS" ]; then
    set -- $(python3 {program} {state} cuda "$SLURM_JOB_GPUS")
    CUDA_VISIBLE_DEVICES=$1 ALMANAC_NVIDIA_SMI={bin}/nvidia-smi ALMANAC_MIG_MAP={map}
    export CUDA_VISIBLE_DEVICES ALMANAC_NVIDIA_SMI ALMANAC_MIG_MAP
    shift
    mkdir -p {jobs}
    for place; do case $place in *.*) echo "$SLURM_JOB_ID" >"{jobs}/$place.quiet" ;; esac; done
fi
exec {kept}
"""
Slices = Mapping[str, int] | None
"""The instances of one GPU by profile; None: MIG is off."""


def mig_config(*gpus: Slices) -> str:
    """mig-parted's config "wanted", in JSON, with an entry for each GPU."""
    entries = [
        {"devices": [index], "mig-enabled": False}
        if wanted is None
        else {"devices": [index], "mig-enabled": True, "mig-devices": dict(wanted)}
        for index, wanted in enumerate(gpus)
    ]
    return json.dumps({"version": "v1", "mig-configs": {"wanted": entries}})


@dataclass
class MigSite:
    """See above. Nodes are also host names of the site. extra: more lines of the controller's slurm.conf."""

    site: Site
    nodes: Sequence[str]
    extra: str = ""
    _before: dict[tuple[str, str], bytes] = field(default_factory=dict)
    _hooks: dict[tuple[str, str], bytes] = field(default_factory=dict)

    @property
    def is_old(self) -> bool:
        """22.05: a new Gres needs a new slurmctld."""
        return self.site.release == "22.05"

    @property
    def include(self) -> str:
        """The file with the NodeName lines, on the controller and on the nodes."""
        return f"{self.site.etc_dir}/mig-nodes.conf"

    @property
    def _is_native(self) -> bool:
        return isinstance(self.site, NativeSite)

    @property
    def _root(self) -> str:
        return str(self.site.etc_dir).removesuffix("/etc") if self._is_native else ""

    @property
    def program(self) -> str:
        """fake_mig.py, on a node."""
        return f"{__file__.rpartition('/')[0]}/fake_mig.py" if self._is_native else "/usr/local/lib/cluster/fake_mig.py"

    def state(self, node: str) -> str:
        return f"{self._root}/mig/{node}/state.json" if self._is_native else f"/run/almanac/fake-mig/{node}/state.json"

    def bin_dir(self, node: str) -> str:
        return f"{self._root}/mig/{node}" if self._is_native else "/usr/local/bin"

    def gres_conf(self, node: str) -> str:
        return f"{self.site.etc_dir}/gres-mig-{node}.conf"

    def fake(self, node: str, *argv: str, check: bool = True) -> str:
        """Return the output of fake_mig.py: fail KIND, busy GPU INSTANCE PID, idle, slow SECONDS, calls, show, gres."""
        return self.site.run(node, "root", "python3", self.program, self.state(node), *argv, check=check).stdout

    def smi(self, node: str, *argv: str, check: bool = True) -> Result:
        return self.site.run(node, "root", f"{self.bin_dir(node)}/nvidia-smi", *argv, check=check)

    def parted(self, node: str, *gpus: Slices, verb: str = "apply", check: bool = True) -> Result:
        """nvidia-mig-parted apply, or assert, of a layout."""
        path = f"{self.bin_dir(node)}/mig-config.json"
        self.site.write(node, path, mig_config(*gpus).encode())
        argv = (f"{self.bin_dir(node)}/nvidia-mig-parted", verb, "-f", path, "-c", "wanted")
        return self.site.run(node, "root", *argv, check=check)

    def node(self, name: str) -> dict[str, str]:
        """Return the fields of `scontrol show node`; {} if slurmctld does not know it."""
        shown = self.site.run("ctl", "root", "scontrol", "-d", "-o", "show", "node", name, check=False).stdout
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def write_gres(self, node: str, gres: str) -> None:
        """Gres= of the node's line in the include files of slurm.conf. Slurm is not told."""
        for host in self._hosts(node):
            text = self.site.read(host, self.include).decode()
            text = re.sub(rf"(?m)^(NodeName={node} .*?Gres=)\S+", rf"\g<1>{gres}", text)
            self.site.write(host, self.include, text.encode())

    def reconfigure(self) -> None:
        self.site.run("ctl", "root", "scontrol", "reconfigure")
        wait_until("slurmctld", lambda: self.site.run("ctl", "root", "scontrol", "ping", check=False).rc == 0)

    def take(self, node: str, gres: str | None = None) -> None:
        """Tells Slurm what the node's GPUs are now, or `gres`, and waits until it has it."""
        wanted = gres or self.fake(node, "gres").strip()
        self.write_gres(node, wanted)
        self.reconfigure()
        if self.is_old:
            self.restart()
        self.wait_for_gres(node, wanted)

    def give_uuids(self, node: str) -> None:
        """A Prolog that tells almanac's one the UUIDs of a job's instances, as slurmd with AutoDetect=nvml does.

        The exporter then shows the instances busy, without a label. Until `stop`.
        """
        hook = f"{self._root}/hooks/prolog" if self._is_native else "/etc/slurm/node-hook"
        kept = f"{self.state(node).rpartition('/')[0]}/node-hook"
        text = self.site.read(node, hook)
        self._hooks[node, hook] = text
        self.site.write(node, kept, text, mode=0o755)
        values = {
            "node": node, "program": self.program, "state": self.state(node), "kept": kept, "bin": self.bin_dir(node),
            "map": f"{kept}.map", "jobs": f"{self._mapping(node)}",
        }  # fmt: skip
        self.site.write(node, hook, NVML_PROLOG.format(**values).encode(), mode=0o755)

    def restart(self) -> None:
        """A new slurmctld, and the nodes asked at once what they have: by themselves they say so after up to 10 s."""
        self.site.stop_server("slurmctld")
        self.site.start_server("slurmctld")
        self.reconfigure()
        self.site.wait_for_nodes()

    def wait_for_gres(self, node: str, wanted: str) -> None:
        """Until slurmctld has heard from the node and has this Gres: after a reconfigure it first shows the old one."""

        def is_there() -> bool:
            shown = self.node(node)
            return shown.get("Gres") == wanted and not BAD.search(shown["State"])

        wait_until(f"{node} with Gres={wanted}", is_there)

    def layout(self, node: str, *gpus: Slices) -> str:
        """Drained, changed, verified by mig-parted, taken and resumed; the Gres= that it has now."""
        self.drain(node)
        self.parted(node, *gpus)
        self.parted(node, *gpus, verb="assert")
        self.take(node)
        self.resume(node)
        return self.node(node)["Gres"]

    def drain(self, node: str) -> None:
        self.site.run("ctl", "root", "scontrol", "update", f"nodename={node}", "state=drain", "reason=mig test")

    def resume(self, node: str) -> None:
        if "DRAIN" in self.node(node)["State"]:
            self.site.run("ctl", "root", "scontrol", "update", f"nodename={node}", "state=resume")
        self.site.wait_for_nodes()

    def _hosts(self, *nodes: str) -> tuple[str, ...]:
        return ("ctl",) if self._is_native else ("ctl", *nodes)

    def start(self) -> None:
        """Fake GPUs, all whole; include files; a slurmctld that accounts slices."""
        for node in self.nodes:
            self._start_fake(node)
        for host in self._hosts(*self.nodes):
            text = self._slurm_conf(self._keep(host, "slurm.conf").decode())
            self._change(host, "slurm.conf", text + (self.extra if host == "ctl" else ""))
        for host in self.nodes[:1] if self._is_native else self.nodes:
            included = self.nodes if self._is_native else [host]
            self._change(host, "gres.conf", self._gres_conf(self._keep(host, "gres.conf").decode(), included))
        self._settle()

    def stop(self) -> None:
        for (node, hook), text in self._hooks.items():
            self.site.write(node, hook, text, mode=0o755)
        for node in self.nodes:
            for command in ("nvidia-smi", "nvidia-mig-parted"):
                self.site.remove(node, f"{self.bin_dir(node)}/{command}")
            self.site.remove(node, self.state(node).rpartition("/")[0])
        for (host, name), content in self._before.items():
            self.site.write(host, f"{self.site.etc_dir}/{name}", content)
        self._settle()
        for node in self.nodes:
            self.resume(node)
        for node in self.nodes:
            assert self.mapped(node) == {}, f"jobs that ended, by GPU of {node}"

    def _mapping(self, node: str) -> str:
        return f"{self._root}/hpc_job/{node}" if self._is_native else f"/run/almanac/hpc_job/{node}"

    def mapped(self, node: str) -> dict[str, str]:
        """The jobs in the exporter's mapping folder, by GPU."""
        found = self.site.run(node, "root", "grep", "-rs", ".", self._mapping(node), check=False).stdout
        return {path.rpartition("/")[2]: jobs for path, _, jobs in (line.partition(":") for line in found.splitlines())}

    def _settle(self) -> None:
        self.site.reset()
        self.reconfigure()
        self.restart()
        for node in self.nodes:
            self.wait_for_gres(node, f"gpu:a100:{GPUS_PER_NODE}")

    def _start_fake(self, node: str) -> None:
        folder = self.state(node).rpartition("/")[0]
        self.site.run(node, "root", "mkdir", "-p", folder)
        self.fake(
            node, "init", "--model", WHOLE_NODE[node], "--gpus", str(GPUS_PER_NODE), "--node", node,
            "--gres-conf", self.gres_conf(node), "--devices", f"{self._root}/dev",
        )  # fmt: skip
        self.fake(node, "install", self.bin_dir(node))

    def _keep(self, host: str, name: str) -> bytes:
        self._before[host, name] = self.site.read(host, f"{self.site.etc_dir}/{name}")
        return self._before[host, name]

    def _change(self, host: str, name: str, text: str) -> None:
        self.site.write(host, f"{self.site.etc_dir}/{name}", text.encode())

    def _slurm_conf(self, text: str) -> str:
        """With the MIG nodes' lines in the include file, each a line of its own."""
        kept, own = [], []
        for line in text.splitlines():
            found = re.match(r"NodeName=n\[(\d)-(\d)\] ", line)
            lines = [line] if found is None else [
                _one_of(line, number - int(found[1]), number) for number in range(int(found[1]), int(found[2]) + 1)
            ]  # fmt: skip
            for each in lines:
                (own if each.partition(" ")[0].removeprefix("NodeName=") in self.nodes else kept).append(each)
        types = "".join(f",gres/gpu:{name}" for name in TYPES)
        text = "\n".join(line + types if line.startswith("AccountingStorageTRES=") else line for line in kept)
        for host in self._hosts(*self.nodes):
            self.site.write(host, self.include, "".join(f"{line}\n" for line in own).encode())
        return re.sub("(?m)^PartitionName", "Include mig-nodes.conf\nPartitionName", text, count=1) + "\n"

    def _gres_conf(self, text: str, included: Sequence[str]) -> str:
        others = [f"n{number}" for number in range(1, 5) if f"n{number}" not in self.nodes]
        text = text.replace("NodeName=n[1-4]", f"NodeName={','.join(others)}")
        return text + "".join(f"Include {self.gres_conf(node)}\n" for node in included)

    def mark(self) -> dict[str, str]:
        """The environment of a server that a test starts by itself, so that a lab's end finds it."""
        return {MARK: self._root} if self._is_native else {}


def _one_of(line: str, place: int, number: int) -> str:
    """One node's line of that for n[1-2], with its own port."""
    line = re.sub(r"^NodeName=n\[\d-\d\]", f"NodeName=n{number}", line)
    return re.sub(r" Port=\[(\d+)-\d+\]", lambda found: f" Port={int(found[1]) + place}", line)


@contextmanager
def mig_site(site: Site, nodes: Sequence[str] = ("n1",), extra: str = "") -> Iterator[MigSite]:
    mig = MigSite(site, nodes, extra)
    try:
        mig.start()
        yield mig
    finally:
        mig.stop()
