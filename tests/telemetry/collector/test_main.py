"""The program: its page, its peers, and what a hostile peer can do. On a stub of NVIDIA's library."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from ipaddress import ip_network
from pathlib import Path
from threading import Thread

import pytest
from prometheus_client.parser import text_string_to_metric_families

from almanac.exposition import exposition
from telemetry.collector.main import ABOUT, PageServer, families, main
from telemetry.collector.nvml import GPM
from telemetry.sources.exporters import exporters, presets
from tests.telemetry.collector.conftest import NvmlStub

PROGRAM = "import sys; from telemetry.collector.main import main; main()"
Start = Callable[..., str]


@pytest.fixture
def start(stub: NvmlStub) -> Iterator[Start]:
    """Start the program with options; return its page's address once it has samples."""
    processes: list[subprocess.Popen[bytes]] = []

    def started(*options: str, log: Path | None = None) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        argv = [sys.executable, "-c", PROGRAM, f"--listen=127.0.0.1:{port}", "--host=n1", "--interval=1", *options]
        with (log or Path(os.devnull)).open("wb") as errors:
            processes.append(subprocess.Popen(argv, stderr=errors))
        url, deadline_s = f"http://127.0.0.1:{port}/metrics", time.monotonic() + 300
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                if "almanac_collect_up" in page(url):
                    return url
            time.sleep(0.05)
        raise AssertionError("no page")

    yield started
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=300) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def wait_for(url: str, said: str, *, is_there: bool = True) -> str:
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        if (said in (text := page(url))) == is_there:
            return text
        time.sleep(0.1)
    raise AssertionError(f"{said!r}, {is_there}: {text}")


def test_the_page_follows_the_gpus(stub: NvmlStub, start: Start, tmp_path: Path) -> None:
    stub.set("count 2", "gpm 1")
    log = tmp_path / "log"
    url = start(log=log)
    text = wait_for(url, "DCGM_FI_PROF_SM_ACTIVE")
    used = re.findall(r"(?m)^DCGM_FI_DEV_FB_USED\{(.*)\} (.*)$", text)
    assert [value for _, value in used] == ["20000.0", "20000.0"]
    assert 'Hostname="n1"' in used[0][0] and 'gpu="0"' in used[0][0] and "hpc_job" not in used[0][0]
    assert re.search(r'(?m)^DCGM_FI_DEV_XID_ERRORS\{.*gpu="1".*\} 0.0$', text)
    stub.set("count 2", "gpm 1", "set 1 xid 48")
    text = wait_for(url, "} 48.0")
    assert re.search(r'(?m)^DCGM_FI_DEV_XID_ERRORS\{.*gpu="1".*\} 48.0$', text)
    stub.set("count 2", "set 0 lost 1")
    text = wait_for(url, "almanac_collect_lost_gpus 1.0")
    assert 'gpu="0"' not in text and 'gpu="1"' in text
    stub.set("count 2", "error nvmlDeviceGetTemperature 9")
    text = wait_for(url, "DCGM_", is_there=False)
    assert "almanac_collect_up 0.0" in text and "lost_gpus" not in text, "without a driver no GPU series is served"
    assert log.read_text() == "almanac-collect: no sample: NVML: Driver Not Loaded\n"


def test_a_broken_page_request_gets_no_page_and_does_no_harm(stub: NvmlStub, start: Start) -> None:
    stub.set("count 1")
    url = start()
    port = int(url.rpartition(":")[2].partition("/")[0])

    def said(request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=300) as peer, contextlib.suppress(OSError):
            peer.sendall(request)
            peer.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: peer.recv(65536), b""))
        return b""

    assert said(b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    assert said(b"GET /../etc/passwd HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404 ")
    assert said(b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    for request in (b"", b"\r\n\r\n", b"GET /metrics", b"\xff\x00" * 10_000, b"G" * 20_000, b"GET\r\n\r\n"):
        assert b"200 OK" not in said(request)
    assert "DCGM_FI_DEV_FB_USED" in page(url)


@pytest.fixture
def server() -> Iterator[Callable[..., PageServer]]:
    made: list[PageServer] = []

    def serving(*allowed: str, stale_s: float = 30) -> PageServer:
        one = PageServer(("127.0.0.1", 0), [ip_network(each) for each in allowed], stale_s)
        Thread(target=one.serve_forever, args=(0.02,), daemon=True).start()
        made.append(one)
        return one

    yield serving
    for one in made:
        one.shutdown()
        one.server_close()


def url_of(server: PageServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/metrics"


def test_only_allowed_peers_see_the_page(server: Callable[..., PageServer]) -> None:
    closed, open_ = server("10.0.0.0/8", "::1"), server("10.0.0.0/8", "127.0.0.1")
    for one in (closed, open_):
        one.show(b"page")
    assert page(url_of(open_)) == "page"
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        page(url_of(closed))


def test_a_stale_page_is_not_served(server: Callable[..., PageServer]) -> None:
    one = server(stale_s=0.05)
    one.show(b"old")
    time.sleep(0.06)
    assert page(url_of(one)) == ""


def test_connections_that_say_nothing_end_and_new_ones_are_answered(
    server: Callable[..., PageServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.collector.main._REQUEST_S", 0.5)
    one = server()
    one.show(b"page")
    silent = [socket.create_connection(one.server_address[:2]) for _ in range(30)]
    for peer in silent[::2]:
        peer.sendall(b"G")
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            assert page(url_of(one)) == "page"
            break
        time.sleep(0.05)
    else:
        raise AssertionError("no page")
    for peer in silent:
        peer.close()


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--listen", "9401"], "not an IP address"), (["--listen", "localhost:9401"], "not an IP address"),
     (["--listen", "127.0.0.1:99999"], "is not ADDRESS:PORT"), (["--interval", "0.1"], "from 1 to 300"),
     (["--interval", "nan"], "from 1 to 300"), (["--allow", "10.0.0.0/99"], "invalid ip_network value")],
)  # fmt: skip
def test_wrong_options_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main(["--listen", f"127.0.0.1:{port}"])
    assert ended.value.code == 1
    assert f"error: cannot listen on 127.0.0.1 port {port}: Address already in use" in capsys.readouterr().err


def test_a_gpu_of_several_jobs_has_a_series_for_each_and_hostile_names_stay_labels() -> None:
    labels = {"gpu": "0", "UUID": "GPU-\udcff", "modelName": 'A"} 1\nDCGM_FI_DEV_FB_USED{gpu="1', "device": ""}
    answer = {"gpus": [{"labels": labels, "values": {"DCGM_FI_DEV_FB_USED": 5.0}, "jobs": [3, 4]}]}
    (read,) = text_string_to_metric_families(exposition(families(answer, "n1", {})))
    assert [sample.labels["hpc_job"] for sample in read.samples] == ["3", "4"]
    assert [(each.labels["modelName"], each.value) for each in read.samples] == [(labels["modelName"], 5.0)] * 2


def test_every_counter_is_one_that_almanac_knows() -> None:
    dcgm = presets()["dcgm"]
    assert GPM.keys() <= ABOUT.keys()
    assert dcgm.unknown(name for name in ABOUT if not name.startswith("ALMANAC_")) == []
    read = {dcgm.named[name].counter.column for name in ABOUT if name in dcgm.named}
    assert read >= {"gpu_util_pct", "hbm_used_mib", "hbm_total_mib", "power_w", "energy_mj", "temp_c", "sm_active_frac"}
    assert read & {"dram_active_frac", "fp32_active_frac"} == set(), "GPM's are other measurements"
    own = presets()["almanac-collect"]
    assert own.names_of("dram_active_frac") == own.names_of("fp32_active_frac") == (), "and never both in one job"


def test_the_documented_preset_reads_a_counter_by_the_sites_factor() -> None:
    text = (Path(__file__).parents[3] / "docs/collector.md").read_text().partition("```toml\n")[2].partition("```")[0]
    (metric,) = exporters(tomllib.loads(text)["prometheus_names"])["ours"].names_of("dram_active_frac")
    assert (metric.name, metric.scale) == ("ALMANAC_GPM_DRAM_BW_RATIO", 1.05)
