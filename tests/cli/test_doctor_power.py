"""Doctor's findings on node power, with settings as Slurm 24.11 shows them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from almanac.config_file import parse_config
from cli.app import App
from cli.doctor import Check
from cli.doctor.nodes import POWER
from cli.doctor.site import PROBES
from slurm.commands import Settings, parse_settings
from slurm.nodes import SlurmNode

SETTINGS = {
    "ReconfigFlags": "KeepPowerSaveSettings",
    "ResumeFailProgram": "/usr/bin/true",
    "ResumeProgram": "/usr/bin/true",
    "ResumeTimeout": "600 sec",
    "ReturnToService": "2",
    "SlurmUser": "slurm(64030)",
    "SlurmctldHost[0]": "elsewhere",
    "SLURM_VERSION": "24.11.5",
    "SuspendExcNodes": "(null)",
    "SuspendExcParts": "(null)",
    "SuspendProgram": "/usr/bin/true",
    "SuspendTime": "31536000 sec",
    "SuspendTimeout": "60 sec",
}
NODES = [
    SlurmNode(f"n{n}", frozenset({"IDLE"}), ("hbm80g",) if n > 2 else ("hbm40g",), "", ("all",)) for n in range(1, 5)
]
SETS = [{"name": "small", "feature": "hbm40g"}, {"name": "large", "nodes": "n[3-4]"}]

Examine = Callable[..., list[Check]]


class Backend:
    def __init__(self, settings: dict[str, str]) -> None:
        self._text = "".join(f"{key:<24}= {value}\n" for key, value in settings.items())

    def settings(self) -> Settings:
        return parse_settings(f"Configuration data as of 2026-11-21T02:50:24\n{self._text}")

    def nodes(self) -> list[SlurmNode]:
        return NODES


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch) -> Examine:
    def examine(
        power: dict[str, object] | None = None, sets: list[dict[str, object]] | None = None, **settings: str
    ) -> list[Check]:
        values = {**SETTINGS, **settings}
        monkeypatch.setattr(App, "backend", property(lambda app: Backend(values)))
        app = App()
        app.__dict__["config"] = parse_config({"power": power or {}, "node_sets": SETS if sets is None else sets})
        return list(PROBES[POWER](app))

    return examine


def one(checks: list[Check]) -> Check:
    (check,) = checks
    return check


def test_what_fits_is_ok_and_nothing_is_said_without_node_sets(examine: Examine) -> None:
    check = one(examine())
    assert (check.status, check.said) == ("ok", "slurm.conf and 2 node sets fit; actuator: names")
    assert examine(sets=[]) == [] and examine(power={"mode": "off"}) == []


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        ({"SuspendProgram": "(null)"}, "fail", "sets no SuspendProgram"),
        ({"SuspendTime": "INFINITE"}, "fail", "22.05 and 24.11 then refuse"),
        ({"SuspendTime": "NONE"}, "fail", "SuspendTime=NONE"),
        ({"ResumeTimeout": "60 sec"}, "fail", "ResumeTimeout=60 is shorter than power.boot_min (300 s)"),
        ({"ResumeFailProgram": "(null)"}, "warn", "sets no ResumeFailProgram"),
        ({"ReturnToService": "0"}, "warn", "stays DOWN"),
        ({"SuspendExcNodes": "n[1-2]"}, "warn", "node set small: SuspendExcNodes and SuspendExcParts keep all"),
        ({"SuspendExcNodes": "gpus"}, "fail", "names gpus, which is not a node"),
        ({"SuspendTime": "600 sec", "ReconfigFlags": "(null)"}, "warn", "lacks KeepPowerSaveSettings"),
    ],
)
def test_each_fault_of_slurm_conf_is_said(examine: Examine, settings: dict[str, str], status: str, said: str) -> None:
    check = one(examine(**settings))
    assert check.status == status and said in check.said and check.todo


def test_an_actuator_that_slurm_is_not_set_up_for(examine: Examine) -> None:
    assert "never power a node down by count" in one(examine(power={"actuator": "count"})).said
    check = one(examine(power={"actuator": "names"}, SuspendTime="600 sec"))
    assert "Slurm powers idle nodes down itself" in check.said


@pytest.mark.parametrize(
    ("sets", "status", "said"),
    [
        ([{"name": "none", "feature": "gh200"}], "fail", "node set none has no nodes"),
        (
            [*SETS, {"name": "all", "partition": "all"}],
            "fail",
            "4 nodes are in more than one node set, such as n1 in small",
        ),
        ([{"name": "x", "nodes": "n[3-12]"}], "warn", "does not know n10, n11, n12, n5, n6 and 3 more"),
        ([{"name": "x", "nodes": "n[3-4]", "exclude": "login1"}], "warn", "does not know login1"),
        ([{"name": "x", "nodes": "n[3-4]", "warm_minimum": 2}], "warn", "warm_minimum 2 keeps all 2 nodes on"),
    ],
)
def test_each_fault_of_the_node_sets_is_said(
    examine: Examine, sets: list[dict[str, object]], status: str, said: str
) -> None:
    check = one(examine(sets=sets))
    assert check.status == status and said in check.said


def test_programs_are_looked_at_on_the_controller_only(examine: Examine, tmp_path: Path) -> None:
    plain = tmp_path / "off"
    plain.write_text("#!/bin/sh\n")
    assert one(examine(SuspendProgram=str(plain))).status == "ok"
    host = f"{socket.gethostname().split('.')[0]}(127.0.0.1)"
    check = one(examine(SuspendProgram=str(plain), **{"SlurmctldHost[0]": host}))
    assert check.status == "fail" and f"SuspendProgram={plain} is not a program" in check.said


BMC = '[[bmc]]\nnodes = "n[1-4]"\nmethod = "ipmi"\naddress = "bmc-{node}"\nuser = "u"\npassword = "s3cret"\n'


@pytest.mark.parametrize(
    ("text", "mode", "timeout", "said"),
    [
        (BMC, 0o600, "60", "slurm.conf and 2 node sets fit"),
        (BMC, 0o640, "60", "has mode 0640, expected 0600"),
        (BMC, 0o600, "30", "SuspendTimeout=30 is shorter than soft_s + timeout_s"),
        (BMC.replace("[1-4]", "[1-3]"), 0o600, "60", "has no BMC for n4"),
        (BMC + "pasword = 1\n", 0o600, "60", "unknown field `pasword`"),
        (None, 0o600, "60", "No such file"),
    ],
)
def test_the_bmc_file_is_looked_at_where_our_programs_run(
    examine: Examine, tmp_path: Path, text: str | None, mode: int, timeout: str, said: str
) -> None:
    path, programs = tmp_path / "bmc.toml", {}
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    for key, name in (("SuspendProgram", "almanac-power-off"), ("ResumeProgram", "almanac-power-on")):
        (tmp_path / name).symlink_to("/usr/bin/true")
        programs[key] = str(tmp_path / name)
    host = {"SlurmctldHost[0]": socket.gethostname().split(".")[0], "SlurmUser": f"us({os.geteuid()})"}
    check = one(examine(power={"bmc_file": str(path)}, SuspendTimeout=f"{timeout} sec", **programs, **host))
    assert said in check.said and "s3cret" not in check.said + check.todo
