"""doctor on slurm.backend, with commands and a pyslurm that answer as Slurm does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from almanac.config_file import parse_config
from cli.app import App
from cli.doctor.backend import NAME
from cli.doctor.findings import Check
from cli.doctor.main import PROBES

SCONTROL = """#!/bin/sh
case "$*" in
--version) echo "slurm-wlm 25.11.7";;
"show config") {config};;
"show nodes --json") echo '{{"nodes": [{{"name": "n1"}}, {{"name": "n2"}}]}}';;
*) exit 9;;
esac
"""
CONFIG = "echo ClusterName=lab; echo 'SLURM_VERSION = 25.11.7'"
AWAY = "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
PYSLURM = """
from types import SimpleNamespace as Space
class RPCError(Exception): pass
class Job: gpus = {}
node = Space(name="n1", state="IDLE", available_features=[], configured_gres={}, partitions=[], reason=None)
Nodes = Space(load=lambda: {"n1": node})
slurmctld = Space(Config=Space(load=lambda: Space(cluster_name="lab")))
"""

Examine = Callable[..., Check]


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Examine]:
    """The finding on a backend. config: what scontrol does when it is asked for the settings."""

    def examine(backend: str, pyslurm: str = "", config: str = CONFIG, mode: str = "observe") -> Check:
        for name, text in {"scontrol": SCONTROL.format(config=config), "sinfo": "#!/bin/sh\necho '{}'\n"}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        (tmp_path / "pyslurm.py").write_text(pyslurm)
        slurm = {"backend": backend, "bin_dir": str(tmp_path)}
        app = App()
        app.__dict__["config"] = parse_config({"slurm": slurm, "priority": {"mode": mode}})
        (check,) = PROBES[NAME](app)
        return check

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyslurm", raising=False)
    yield examine
    sys.modules.pop("pyslurm", None)


def test_commands_that_work_are_in_order(examine: Examine) -> None:
    check = examine("commands")
    assert (check.status, check.todo) == ("ok", "")
    assert check.said == "commands: scontrol 25.11.7 reaches slurmctld 25.11.7 of lab, 2 nodes"
    assert check.details["slurmctld"] == "25.11.7"


def test_a_pyslurm_that_fits_is_in_order(examine: Examine) -> None:
    check = examine("pyslurm", PYSLURM + "__version__ = '25.11.2'\n")
    assert (check.status, check.todo) == ("ok", "")
    assert check.said == "pyslurm: pyslurm 25.11.2 reaches slurmctld 25.11.7 of lab, 1 node"


@pytest.mark.parametrize(
    ("pyslurm", "config", "said"),
    [
        (PYSLURM + "__version__ = '25.05.0'\n", CONFIG, "pyslurm: pyslurm 25.05.0 does not support Slurm 25.11.7"),
        ("import os\nos._exit(1)\n", CONFIG, "pyslurm: pyslurm crashed with exit code 1"),
        ("raise ImportError('no module')\n", CONFIG, "pyslurm: pyslurm cannot be imported: no module"),
        (PYSLURM, AWAY, "Unable to contact slurm controller"),
    ],
)
def test_a_pyslurm_that_does_not_work_is_a_fault(examine: Examine, pyslurm: str, config: str, said: str) -> None:
    check = examine("pyslurm", pyslurm, config)
    assert check.status == "fail"
    assert said in check.said
    assert check.todo


@pytest.mark.parametrize(("mode", "status"), [("observe", "warn"), ("apply", "fail")])
def test_commands_that_do_not_work_are_a_fault_where_factors_are_set(examine: Examine, mode: str, status: str) -> None:
    check = examine("commands", config=AWAY, mode=mode)
    assert check.status == status
    assert check.said.startswith("commands: scontrol show config failed with exit code 1: ")
    assert check.todo
