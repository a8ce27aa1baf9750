"""CliFilterPlugins=lua with a compute node that lacks cli_filter.lua: what breaks there, and that doctor catches it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

ROOT = Path(__file__).resolve().parents[2]
CHECK = (ROOT / "slurm_hooks/lua/almanac-cli-filter.sh").read_text()
NODES = ("n1", "n2", "n3", "n4")
JOB = """#!/bin/sh
{conf}
srun echo step is done
echo "status $?"
sh -s <<'END'
{check}
END
exit 0
"""


class Bare:
    """A Slurm whose node n1 has a slurm.conf in a folder without cli_filter.lua (where all nodes are one host: for the
    jobs there), and doctor on the controller with a record of its own.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.folder = f"{site.etc_dir}-bare"
        self.record = f"{site.etc_dir}/checked-hosts"
        site.write("ctl", f"{site.etc_dir}/almanac.toml", b"")
        self.copy_conf = f"mkdir -p {self.folder} && cp {site.etc_dir}/*.conf {self.folder}"
        site.run("n1", "root", "sh", "-c", self.copy_conf)

    def job(self, node: str) -> str:
        """Return the output of a job that starts a step on the node and then looks whether it could."""
        conf = f"export SLURM_CONF={self.folder}/slurm.conf" if node == "n1" else ""
        out = f"/tmp/almanac-{node}-{id(self)}"
        script = JOB.format(conf=conf, check=CHECK)
        job = self.site.run("login", "alice", "sbatch", "--parsable", "-w", node, "-o", out, stdin=script)
        self.site.wait_for(int(job.stdout.split(";")[0]), "COMPLETED")
        said = self.site.read(node, out).decode()
        self.site.remove(node, out)
        return said

    def doctor(self) -> Any:
        has_package = self.site.run("ctl", "root", "test", "-x", "/usr/bin/almanac", check=False).rc == 0
        program = ["/usr/bin/almanac"] if has_package else [sys.executable, "-m", "cli.main"]
        env = {"ALMANAC_CONFIG": f"{self.site.etc_dir}/almanac.toml", "PYTHONPATH": str(ROOT)}
        said = self.site.run("ctl", "root", *program, "doctor", "--json", env=env, check=False)
        (found,) = [check for check in json.loads(said.stdout) if check["name"] == "cli_filter"]
        assert found["status"] != "fail" or said.rc == 1
        return found


@pytest.fixture
def bare(site: Site) -> Iterator[Bare]:
    made = Bare(site)
    yield made
    site.remove("n1", made.folder)
    for name in ("almanac.toml", "checked-hosts"):
        site.remove("ctl", f"{site.etc_dir}/{name}")


def test_a_node_without_it_fails_its_steps_and_doctor_says_so_until_it_is_mended(bare: Bare) -> None:
    unchecked = bare.doctor()
    assert (unchecked["status"], unchecked["is_blocking"]) == ("warn", True)
    assert unchecked["details"]["hosts"] == list(NODES)

    said = {node: bare.job(node) for node in NODES}
    assert re.search("failed to initialize cli_filter plugin|cli_filter plugin terminated with error", said["n1"])
    assert "step is done" not in said["n1"] and "status 0" not in said["n1"]
    assert all("step is done" in said[node] for node in NODES[1:])
    lines = {node: text.splitlines()[-1] for node, text in said.items()}
    assert {node: line.split()[:2] for node, line in lines.items()} == {
        node: [node, "broken" if node == "n1" else "ok"] for node in NODES
    }
    bare.site.write("ctl", bare.record, "\n".join(lines.values()).encode() + b"\n")
    found = bare.doctor()
    assert (found["status"], found["details"]["hosts"]) == ("fail", ["n1"])

    bare.site.run("n1", "root", "cp", f"{bare.site.etc_dir}/cli_filter.lua", bare.folder)
    mended = bare.job("n1")
    assert "step is done" in mended and "status 0" in mended
    bare.site.write("ctl", bare.record, "\n".join([*lines.values(), mended.splitlines()[-1]]).encode() + b"\n")
    assert bare.doctor()["status"] == "ok"


def test_doctor_on_the_node_itself_fails(bare: Bare) -> None:
    env = {"SLURM_CONF": f"{bare.folder}/slurm.conf", "PYTHONPATH": str(ROOT)}
    program = "almanac" if bare.site.etc_dir == "/etc/slurm" else f"{shlex.quote(sys.executable)} -m cli.main"
    said = bare.site.run("n1", "root", "sh", "-c", f"{program} doctor --host filter", env=env, check=False)
    assert said.rc == 1
    assert "do not start" in said.stdout
