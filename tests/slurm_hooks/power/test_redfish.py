"""almanac-power-off and -on over Redfish: real HTTPS to a BMC stand-in, and everything that can go wrong with it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmc_lab import Bmcs, PowerLab, redfish

TABLE = """
[[bmc]]
nodes = "n[1-2]"
method = "redfish"
address = "localhost:{port}"
user = "almanac"
password = "s3cret"
ca_file = "{ca_file}"
system = "{{node}}"
"""


class Site:
    def __init__(self, lab: PowerLab, bmcs: Bmcs, port: int, ca_file: Path) -> None:
        self.lab, self.bmcs, self.port, self.ca_file = lab, bmcs, port, ca_file
        self.configure()

    def configure(self, old: str = "", new: str = "", **numbers: object) -> None:
        table = TABLE.format(port=self.port, ca_file=self.ca_file)
        assert old in table
        self.lab.bmc(table.replace(old, new), **numbers)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with redfish(tmp_path) as (bmcs, port, ca_file):
        yield Site(PowerLab(tmp_path), bmcs, port, ca_file)


def test_nodes_go_off_and_come_back(site: Site) -> None:
    off = site.lab.run("off", "n[1-2]")
    assert {node: line["result"] for node, line in off.items()} == {"n1": "done", "n2": "done"}
    assert {machine.power for machine in site.bmcs.machines.values()} == {"off"}
    assert {line["result"] for line in site.lab.run("off", "n[1-2]").values()} == {"already"}
    site.lab.states({"n1": "IDLE+POWERING_UP", "n2": "IDLE+POWERED_DOWN+POWER_UP"})
    assert {line["result"] for line in site.lab.run("on", "n[1-2]").values()} == {"done"}
    assert {machine.power for machine in site.bmcs.machines.values()} == {"on"}


def test_status_says_the_power_and_changes_nothing(site: Site) -> None:
    site.bmcs.machines["n2"].power = "off"
    done = site.lab.start("off", "--status", "n[1-3]")
    assert done.stdout == "n1: on\nn2: off\nn3: no [[bmc]] table names this node\n"
    assert done.returncode == 1 and site.bmcs.told == []


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ("ALLOCATED+POWERING_DOWN", "it may run a job"),
        ("MIXED+POWERED_DOWN", "it may run a job"),
        ("IDLE+COMPLETING+POWERING_DOWN", "it may run a job"),
        ("IDLE", "nobody powers it down"),
        ("IDLE*+DRAIN", "nobody powers it down"),
        ("IDLE+POWERED_DOWN+POWER_UP", "it is being woken"),
        ("IDLE+NOT_RESPONDING+POWERING_UP", "it is being woken"),
        ("UNKNOWN+POWERED_DOWN", "it may run a job"),
    ],
)
def test_power_is_not_cut_unless_slurm_powers_the_node_down(site: Site, states: str, said: str) -> None:
    site.lab.states({"n1": states})
    line = site.lab.run("off", "n1")["n1"]
    assert line["result"] == "refused" and said in str(line["message"])
    assert site.bmcs.told == []


def test_power_is_not_cut_where_slurm_does_not_answer(site: Site) -> None:
    (site.lab.folder / "slurm_is_lost").touch()
    (site.lab.folder / "nodes").write_text("")
    line = site.lab.run("off", "n1")["n1"]
    assert line["result"] == "failed" and "Slurm does not answer" in str(line["message"])
    assert site.bmcs.told == []
    site.bmcs.machines["n1"].power = "off"
    assert site.lab.run("on", "n1")["n1"]["result"] == "done"


def test_a_node_that_is_allocated_while_it_shuts_down_is_not_cut(site: Site) -> None:
    """The soft shutdown hangs; meanwhile Slurm gives the node to a job."""
    site.configure(soft_s=6)
    site.bmcs.handler.fault = ""
    ask, sent = site.bmcs.machines["n1"].switch, threading.Event()

    def hang(power: str) -> None:
        if not sent.is_set():
            site.lab.states({"n1": "MIXED+POWERING_UP"})
            sent.set()
            return
        ask(power)

    site.bmcs.machines["n1"].switch = hang  # type: ignore[method-assign]
    line = site.lab.run("off", "n1")["n1"]
    assert sent.is_set() and line["result"] == "refused" and "may run a job" in str(line["message"])
    assert site.bmcs.told == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [("500", "HTTP status 500"), ("drop", "localhost"), ("slow 30", "localhost"), ("302", "HTTP status 302")],
)
def test_a_sick_bmc_fails_its_node_and_no_other(site: Site, fault: str, said: str) -> None:
    site.configure(timeout_s=1)
    site.bmcs.handler.fault = fault
    started_s = time.monotonic()
    line = site.lab.run("off", "n1")["n1"]
    assert line["result"] == "failed" and said in str(line["message"])
    assert time.monotonic() - started_s < 15


def test_it_tries_again_after_a_fault_that_passes(site: Site) -> None:
    site.configure(retries=3)
    site.bmcs.handler.fault = "503"
    threading.Timer(3.0, lambda: setattr(site.bmcs.handler, "fault", "")).start()
    line = site.lab.run("off", "n1")["n1"]
    assert line["result"] == "done" and int(str(line["tries"])) > 1


def test_a_byte_now_and_then_does_not_hold_it_for_ever(tmp_path: Path, site: Site) -> None:
    def trickle(handler: object) -> None:
        for _ in range(200):
            handler.wfile.write(b"H")  # type: ignore[attr-defined]
            handler.wfile.flush()  # type: ignore[attr-defined]
            time.sleep(0.2)

    site.configure(timeout_s=1)
    site.bmcs.handler.do_GET = trickle  # type: ignore[method-assign, assignment]
    started_s = time.monotonic()
    assert site.lab.run("off", "n1")["n1"]["result"] == "failed"
    assert time.monotonic() - started_s < 10


def test_a_wrong_password_is_final_and_not_shown(site: Site) -> None:
    site.configure("s3cret", "hunter2", retries=5)
    line = site.lab.run("off", "n1")["n1"]
    assert line["result"] == "failed" and line["tries"] == 1
    assert "refuses user almanac" in str(line["message"])
    assert "hunter2" not in site.lab.log.read_text()


def test_a_certificate_of_nobody_we_know_gets_no_password(site: Site) -> None:
    site.configure(str(site.ca_file), "")
    seen: list[str] = []
    site.bmcs.handler.do_GET = lambda handler: seen.append("asked")  # type: ignore[method-assign]
    line = site.lab.run("off", "n1")["n1"]
    assert line["result"] == "failed" and "certificate refused" in str(line["message"]) and seen == []


def test_a_certificate_of_another_host_is_refused(tmp_path: Path) -> None:
    with redfish(tmp_path, name="other.example") as (bmcs, port, ca_file):
        site = Site(PowerLab(tmp_path), bmcs, port, ca_file)
        line = site.lab.run("off", "n1")["n1"]
        assert line["result"] == "failed" and "certificate refused" in str(line["message"]) and bmcs.told == []


@pytest.mark.parametrize("path", ["https://evil.example/x", "//evil.example/redfish/v1/x", "/redfish/v1/x y", 7])
def test_a_bmc_cannot_send_it_elsewhere(site: Site, path: object) -> None:
    root = {"Systems": {"@odata.id": path}}
    site.bmcs.handler._redfish = lambda handler, body: handler._json(root)  # type: ignore[method-assign]
    line = site.lab.run("off", "n1")["n1"]
    assert line["result"] == "failed" and "not a Redfish path" in str(line["message"]) and line["tries"] == 1


@pytest.mark.parametrize("power", [None, "Paused", 7, "off"])
def test_a_power_state_that_says_nothing_is_no_success(site: Site, power: object) -> None:
    site.bmcs.handler._system = lambda handler, path, body: handler._json({"PowerState": power})  # type: ignore[method-assign]
    line = site.lab.run("off", "n1")["n1"]
    assert line["result"] == "failed" and "PowerState is" in str(line["message"])


@pytest.mark.parametrize("answer", ["[]", "{", "[" * 100_000, '{"Systems": 7}', "null"])
def test_nonsense_is_an_error_of_that_node(site: Site, answer: str) -> None:
    site.bmcs.handler._redfish = lambda handler, body: handler._answer(200, answer)  # type: ignore[method-assign]
    assert site.lab.run("off", "n1")["n1"]["result"] == "failed"


def test_several_systems_need_a_choice(site: Site) -> None:
    site.configure('system = "{node}"', "")
    line = site.lab.run("off", "n1")["n1"]
    assert "2 of 2 systems fit" in str(line["message"]) and site.bmcs.told == []


def test_a_port_where_nobody_listens(site: Site) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        site.configure(f"localhost:{site.port}", f"localhost:{closed.getsockname()[1]}")
        assert "ConnectionRefusedError" in str(site.lab.run("off", "n1")["n1"]["message"])
