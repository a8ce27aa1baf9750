"""almanac-power-off and -on with emulators of BMCs: OpenIPMI's for IPMI, sushy-tools' for Redfish over TLS."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from bmc_emulators import make_certificate
from bmc_lab import Bmcs, PowerLab, ipmi, redfish

from slurm_hooks.power.bmc_file import BmcError, RedfishTable
from slurm_hooks.power.redfish import Redfish

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


def test_a_node_that_is_allocated_while_it_shuts_down_is_not_cut(secure: Bmcs) -> None:
    """The soft shutdown hangs; meanwhile Slurm gives the node to a job."""
    secure.configure(soft_s=3)
    asked = secure.let_hang("n1")
    secure.lab.log.unlink(missing_ok=True)
    assert secure.lab.start("off", "n1").returncode == 0
    until_s = time.monotonic() + 300
    while not asked.read_text() and time.monotonic() < until_s:
        time.sleep(0.05)
    secure.lab.states({"n1": "MIXED+POWERING_UP"})
    line = secure.lab.wait()["n1"]
    assert line["result"] == "refused" and "may run a job" in str(line["message"]) and secure.told == []


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


ROOT, SYSTEM = "/redfish/v1/", "/redfish/v1/Systems/n1"
RESET = {"#ComputerSystem.Reset": {"target": f"{SYSTEM}/Reset", "ResetType@Redfish.AllowableValues": ["ForceOff"]}}
SANE: dict[str, object] = {
    ROOT: {"Id": "r", "Systems": {"@odata.id": "/redfish/v1/Systems"}},
    "/redfish/v1/Systems": {"Members": [{"@odata.id": SYSTEM}]},
    SYSTEM: {"Id": "n1", "PowerState": "On", "Actions": RESET},
}


class Handler(BaseHTTPRequestHandler):
    """`answers` by path: a JSON value, text, a status with headers, or what writes to the handler."""

    answers: dict[str, object]
    seen: list[str]

    def do_GET(self) -> None:
        type(self).seen.append(f"{self.command} {self.path}")
        answer = self.answers.get(self.path, (404, {}))
        if callable(answer):
            answer(self)
            return
        status, headers = answer if isinstance(answer, tuple) else (200, {})
        body = (
            b"" if isinstance(answer, tuple) else (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        )
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Service:
    """A BMC that answers as a test says."""

    def __init__(self, folder: Path) -> None:
        make_certificate(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "bmc.crt", folder / "bmc.key")
        self.handler = type("Here", (Handler,), {"answers": dict(SANE), "seen": []})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.table = RedfishTable(
            nodes="n1",
            address=f"localhost:{self.server.server_address[1]}",
            user="almanac",
            password="pässwörd €",
            ca_file=str(folder / "bmc.crt"),
        )

    def error(self, timeout_s: float = 5) -> BmcError:
        with pytest.raises(BmcError) as caught:
            Redfish(self.table, "n1", timeout_s).status()
        assert "pässwörd" not in str(caught.value)
        return caught.value


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_sane_answer_is_read_anew_each_time(service: Service) -> None:
    bmc = Redfish(service.table, "n1", 5)
    assert bmc.status() == "on"
    service.handler.answers[SYSTEM] = {"Id": "n1", "PowerState": "Off"}
    assert bmc.status() == "off"


def drop(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def trickle(handler: BaseHTTPRequestHandler) -> None:
    for _ in range(200):
        handler.wfile.write(b"H")
        time.sleep(0.2)


def pour(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + b" " * (3 << 20))


@pytest.mark.parametrize(
    ("path", "answer", "said", "is_final"),
    [
        (ROOT, (500, {}), "HTTP status 500", False),
        (ROOT, (429, {}), "HTTP status 429", False),
        (ROOT, (404, {}), "HTTP status 404", True),
        (ROOT, (401, {}), "refuses user and password", True),
        (ROOT, (302, {"Location": "https://evil.example/redfish/v1/"}), "HTTP status 302", False),
        (ROOT, (302, {"Location": "http://localhost/redfish/v1/"}), "HTTP status 302", False),
        (ROOT, drop, "ConnectionError", False),
        (ROOT, trickle, "no whole answer within 1 s", False),
        (ROOT, lambda handler: time.sleep(3), "within 1 s", False),
        (ROOT, pour, "more than 1 MiB", False),
        (ROOT, "{", "JSONDecodeError", False),
        (ROOT, "[]", "Error", False),
        (ROOT, "null", "Error", False),
        (ROOT, "[" * 100_000, "Recursion", False),
        (ROOT, {"Id": "r", "Systems": 7}, "Error", False),
        (ROOT, {"Id": "r", "Systems": {"@odata.id": "https://evil.example/x"}}, "InvalidSchema", False),
        (ROOT, {"Id": "r", "Systems": {"@odata.id": "//evil.example/redfish/v1/x"}}, "InvalidSchema", False),
        (ROOT, {"Id": "r", "Systems": {"@odata.id": 7}}, "Error", False),
        ("/redfish/v1/Systems", {"Members": []}, "0 of 0 systems fit", True),
        ("/redfish/v1/Systems", {"Members": 7}, "Error", False),
        (SYSTEM, {"Id": "n1", "PowerState": None}, "PowerState is not On or Off", False),
        (SYSTEM, {"Id": "n1", "PowerState": 7}, "PowerState is not On or Off", False),
        (SYSTEM, {"Id": "n1", "PowerState": "off"}, "PowerState is not On or Off", False),
        (SYSTEM, {"Id": "n1", "PowerState": ["On"]}, "", False),
    ],
)
def test_nonsense_is_an_error_in_time(service: Service, path: str, answer: object, said: str, is_final: bool) -> None:
    service.handler.answers[path] = answer
    error = service.error(timeout_s=1 if callable(answer) else 60)
    assert said in str(error) and error.is_final == is_final


@pytest.mark.parametrize("status", [500, 503, 400, 302])
def test_an_order_is_one_request(service: Service, status: int) -> None:
    """Slurm is asked before each order: another try is the caller's."""
    service.handler.answers[f"{SYSTEM}/Reset"] = (status, {"Location": "https://evil.example/x"})
    bmc = Redfish(service.table, "n1", 5)
    bmc.status()
    service.handler.seen.clear()
    with pytest.raises(BmcError, match=f"HTTP status {status}"):
        bmc.set("off")
    assert service.handler.seen == [f"POST {SYSTEM}/Reset"]


def test_an_order_that_the_bmc_does_not_offer_is_not_sent(service: Service) -> None:
    with pytest.raises(BmcError, match="GRACEFUL_SHUTDOWN"):
        Redfish(service.table, "n1", 5).set("soft")
    assert not any(line.startswith("POST") for line in service.handler.seen)


def test_an_order_goes_to_this_bmc_only(service: Service) -> None:
    reset = {"#ComputerSystem.Reset": {"target": "https://evil.example/x"}}
    service.handler.answers[SYSTEM] = {"Id": "n1", "PowerState": "On", "Actions": reset}
    with pytest.raises(BmcError, match="InvalidSchema"):
        Redfish(service.table, "n1", 5).set("off")
