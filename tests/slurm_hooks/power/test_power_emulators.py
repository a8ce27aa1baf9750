"""almanac-power-off and -on with emulators of BMCs: OpenIPMI's for IPMI, sushy-tools' for Redfish over TLS."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from bmc_lab import Bmcs, PowerLab, ipmi, redfish

KINDS = {"ipmi": ipmi, "redfish": redfish}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bmcs]]:
    """Emulators by kind; each is started by the first test that needs it."""
    with contextlib.ExitStack() as stack:

        class Started(dict[str, Bmcs]):
            def __missing__(self, kind: str) -> Bmcs:
                lab = PowerLab(tmp_path_factory.mktemp(kind))
                self[kind] = stack.enter_context(KINDS[kind](lab))
                return self[kind]

        yield Started()


@pytest.fixture(params=KINDS)
def bmcs(request: pytest.FixtureRequest, running: dict[str, Bmcs]) -> Bmcs:
    running[request.param].reset()
    return running[request.param]


@pytest.fixture
def secure(running: dict[str, Bmcs]) -> Bmcs:
    """BMCs that speak Redfish."""
    running["redfish"].reset()
    return running["redfish"]


def test_a_node_is_cut_and_comes_back(bmcs: Bmcs) -> None:
    line = bmcs.lab.run("off", "n1")["n1"]
    assert line["result"] == "done", line["message"]
    assert bmcs.lab.start("off", "--status", "n1").stdout == "n1: off\n"
    assert bmcs.lab.run("off", "n1")["n1"]["result"] == "already"
    bmcs.lab.states({"n1": "IDLE+POWERING_UP"})
    assert bmcs.lab.run("on", "n1")["n1"]["result"] == "done"
    assert bmcs.lab.start("on", "--status", "n1").stdout == "n1: on\n"
    assert bmcs.told == ["off n1", "on n1"]


def test_a_node_shuts_down_by_itself_and_is_cut_if_it_hangs(bmcs: Bmcs) -> None:
    bmcs.configure(soft_s=3)
    assert bmcs.lab.run("off", "n1")["n1"]["message"] == "shut down by itself"
    bmcs.power("n1", "on")
    bmcs.let_hang("n1")
    line = bmcs.lab.run("off", "n1")["n1"]
    assert (line["result"], line["message"], bmcs.power("n1")) == ("done", "", "off")


def test_a_node_that_is_allocated_while_it_shuts_down_is_not_cut(bmcs: Bmcs) -> None:
    """The soft shutdown hangs; meanwhile Slurm gives the node to a job."""
    bmcs.configure(soft_s=4)
    asked = bmcs.let_hang("n1")
    bmcs.lab.log.unlink(missing_ok=True)
    assert bmcs.lab.start("off", "n1").returncode == 0
    until_s = time.monotonic() + 30
    while not asked.read_text() and time.monotonic() < until_s:
        time.sleep(0.05)
    bmcs.lab.states({"n1": "MIXED+POWERING_UP"})
    line = bmcs.lab.wait()["n1"]
    assert line["result"] == "refused" and "may run a job" in str(line["message"]) and bmcs.told == []


def test_a_wrong_password_fails_and_is_not_shown(bmcs: Bmcs) -> None:
    bmcs.configure('"dock"', '"hunter2"', timeout_s=30)
    line = bmcs.lab.run("off", "n1")["n1"]
    assert line["result"] == "failed" and "hunter2" not in bmcs.lab.log.read_text() and bmcs.told == []


def test_power_is_not_cut_of_a_busy_node_or_if_slurm_does_not_answer(secure: Bmcs) -> None:
    secure.lab.states({"n1": "ALLOCATED+POWERING_DOWN"})
    line = secure.lab.run("off", "n1")["n1"]
    assert line["result"] == "refused" and "it may run a job" in str(line["message"])
    (secure.lab.folder / "slurm_is_lost").touch()
    (secure.lab.folder / "nodes").write_text("")
    line = secure.lab.run("off", "n1")["n1"]
    assert line["result"] == "failed" and "Slurm does not answer" in str(line["message"]) and secure.told == []
    secure.power("n1", "off")
    assert secure.lab.run("on", "n1")["n1"]["result"] == "done"


def test_status_says_the_power_of_each_node_and_changes_nothing(secure: Bmcs) -> None:
    secure.power("n2", "off")
    done = secure.lab.start("off", "--status", "n[1-3]")
    assert done.stdout == "n1: on\nn2: off\nn3: no [[bmc]] table names this node\n"
    assert done.returncode == 1 and secure.told == ["off n2"]


def test_what_is_not_to_be_mended_is_tried_once_and_nothing_is_told(secure: Bmcs) -> None:
    for old, new, said in (
        ('"dock"', '"hunter2"', "refuses user and password"),
        ('system = "{node}"', "", "2 of 2 systems fit"),
        ('"{node}"', '"n7"', "0 of 2 systems fit, expected one named n7"),
        (secure.table.split('ca_file = "')[1].split('"')[0], "", "certificate refused: self-signed"),
        ("localhost", "127.0.0.1", "certificate refused: IP address mismatch"),
    ):
        secure.configure(old, new, retries=3)
        line = secure.lab.run("off", "n1")["n1"]
        assert (line["result"], line["tries"], said in str(line["message"])) == ("failed", 1, True), line
    assert secure.told == []
