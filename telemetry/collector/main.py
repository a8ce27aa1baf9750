"""almanac-collect: serve the counters of this node's GPUs to Prometheus (docs/collector.md)."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from prometheus_client import Metric

from almanac.exposition import Labels, exposition, family
from almanac.units import printable
from telemetry.collector.reader import ReaderProcess

PORT = 9401
PROLOG_DIR = "/var/spool/almanac/gpus"
_MOST_CONNECTIONS, _REQUEST_S, _MOST_REQUEST = 16, 5.0, 8192
_STALE = 3
"""Intervals after which a page without a newer one is not served."""

XID, ENERGY = "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
ABOUT = {
    "DCGM_FI_DEV_GPU_UTIL": "Time during which at least one kernel ran (%).",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "Time during which device memory was read or written (%).",
    "DCGM_FI_DEV_FB_USED": "Device memory in use (MiB).",
    "DCGM_FI_DEV_FB_FREE": "Device memory not in use (MiB).",
    "DCGM_FI_DEV_FB_RESERVED": "Device memory that the driver keeps for itself (MiB).",
    "DCGM_FI_DEV_FB_TOTAL": "Device memory (MiB).",
    "DCGM_FI_DEV_POWER_USAGE": "Power drawn (W).",
    ENERGY: "Energy since the driver was loaded (mJ).",
    "DCGM_FI_DEV_GPU_TEMP": "Temperature of the GPU (degC).",
    "DCGM_FI_DEV_SM_CLOCK": "Clock of the multiprocessors (MHz).",
    "DCGM_FI_DEV_MAX_SM_CLOCK": "Highest clock of the multiprocessors (MHz).",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "Reasons of the present clock (bits of nvml.h).",
    XID: "The last XID error since the collector started; 0 if there was none.",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "Time during which the compute or graphics engine was busy (ratio).",
    "DCGM_FI_PROF_SM_ACTIVE": "Time during which a warp was active, mean over multiprocessors (ratio).",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "Time during which the tensor pipe was active (ratio).",
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": "Time during which the FP64 pipe was active (ratio).",
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": "Time during which the FP16 pipe was active (ratio).",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "Sent over PCIe (bytes/s).",
    "DCGM_FI_PROF_PCIE_RX_BYTES": "Received over PCIe (bytes/s).",
    "DCGM_FI_PROF_NVLINK_TX_BYTES": "Sent over NVLink (bytes/s).",
    "DCGM_FI_PROF_NVLINK_RX_BYTES": "Received over NVLink (bytes/s).",
    "ALMANAC_GPM_DRAM_BW_RATIO": "Share of the peak bandwidth of device memory. Not DCGM's share of cycles.",
    "ALMANAC_GPM_FP32_RATIO": "Time during which the FP32 pipe did FP32 operations. DCGM counts integers, too (ratio).",
}
"""The counters, in the order of the page. DCGM has the same measurement under the names that begin with DCGM."""


def families(answer: dict[str, Any], host: str, xids: dict[str, int]) -> Iterator[Metric]:
    """Yield each counter's metric, with one series per GPU and job on it, as DCGM's exporter has.

    A GPU without jobs has one series. answer: the reader's. host: the label Hostname. xids: the last XID error by GPU
    UUID.
    """
    found: dict[str, list[tuple[Labels, float]]] = {name: [] for name in ABOUT}
    for gpu in answer["gpus"]:
        labels = (*((name, text) for name, text in gpu["labels"].items() if text), ("Hostname", host))
        values = gpu["values"] | ({XID: xids.get(gpu["uuid"], 0)} if "uuid" in gpu else {})
        for job in gpu["jobs"] or (None,):
            series = labels if job is None else (*labels, ("hpc_job", str(job)))
            for name, value in values.items():
                found[name].append((series, value))
    for name, about in ABOUT.items():
        yield family(name, "untyped" if name == ENERGY else "gauge", about, found[name])


def own_families(reader: ReaderProcess, answer: dict[str, Any] | None, took_s: float) -> Iterator[Metric]:
    """Yield the state of the collector."""
    lost = [] if answer is None else [((), answer["lost"])]
    starts = "Starts of the process that reads NVML."
    yield family("almanac_collect_up", "gauge", "1 if the last sample succeeded.", [((), answer is not None)])
    yield family("almanac_collect_gpm", "gauge", "1 if GPM is in use, where a GPU has it.", [((), reader.has_gpm)])
    yield family("almanac_collect_reader_starts_total", "counter", starts, [((), reader.starts)])
    yield family("almanac_collect_sample_seconds", "gauge", "Time that the last sample took.", [((), took_s)])
    yield family("almanac_collect_lost_gpus", "gauge", "GPUs that did not answer.", lost)


class PageServer(socketserver.ThreadingTCPServer):
    """Serves `page`, made once per sample, to `allowed` networks; to all without any. stale_s: its longest life."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], allowed: Sequence[Any] = (), stale_s: float = 30) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._allowed, self._stale_s = allowed, stale_s
        self._page, self._made_s = b"", 0.0
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(address, _Request)

    def show(self, page: bytes) -> None:
        """Serve this page from now on."""
        self._page, self._made_s = page, time.monotonic()

    @property
    def page(self) -> bytes:
        """The page; empty if it is stale."""
        return self._page if time.monotonic() - self._made_s < self._stale_s else b""

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return True if the peer may see the page."""
        peer = ipaddress.ip_address(client_address[0].partition("%")[0])
        plain = getattr(peer, "ipv4_mapped", None) or peer
        return not self._allowed or any(plain in network for network in self._allowed)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if one is free; else end the connection."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Let the next connection in at the end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that went away is no error."""


class _Request(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        deadline_s, request = time.monotonic() + _REQUEST_S, b""
        while b"\r\n\r\n" not in request and b"\n\n" not in request:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or len(request) > _MOST_REQUEST:
                return
            self.request.settimeout(left_s)
            part = self.request.recv(4096)
            if not part:
                return
            request += part
        assert isinstance(self.server, PageServer)
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] != b"GET":
            status, page = "405 Method Not Allowed", b""
        elif words[1].partition(b"?")[0] not in (b"/metrics", b"/"):
            status, page = "404 Not Found", b"almanac-collect: /metrics has the counters\n"
        else:
            status, page = "200 OK", self.server.page
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        self.request.settimeout(_REQUEST_S)
        self.request.sendall(f"{head}Content-Length: {len(page)}\r\nConnection: close\r\n\r\n".encode() + page)


def collect(reader: ReaderProcess, server: PageServer, host: str, interval_s: float, stop: threading.Event) -> None:
    """Take samples until `stop` is set."""
    xids: dict[str, int] = {}
    said, next_s = "", time.monotonic()
    while not stop.is_set():
        start_s = time.monotonic()
        answer = reader.sample()
        xids.update(answer["xids"] if answer else ())
        shown = list(families(answer, host, xids)) if answer else []
        own = own_families(reader, answer, time.monotonic() - start_s)
        server.show(exposition([*shown, *own]).encode())
        if reader.fault != said:
            said = reader.fault
            _say(f"no sample: {said}" if said else "samples are taken again")
        next_s = max(next_s + interval_s, time.monotonic())
        stop.wait(next_s - time.monotonic())


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="almanac-collect",
        description="Serve the counters of this node's NVIDIA GPUs to Prometheus, under dcgm-exporter's names. "
        "Needs no root. docs/collector.md says more.",
    )
    add = parser.add_argument
    add("--listen", metavar="ADDRESS:PORT", type=_address, default=("127.0.0.1", PORT),
        help=f"where Prometheus finds it [127.0.0.1:{PORT}]")  # fmt: skip
    add("--allow", metavar="NETWORK", type=ipaddress.ip_network, action="append", default=[],
        help="answer only this address or network, such as Prometheus' host; repeat it for more [all]")  # fmt: skip
    add("--interval", metavar="SECONDS", type=_interval, default=10.0, help="time between samples, 1 to 300 [10]")
    add("--host", metavar="NAME", default=socket.gethostname(), help="the label Hostname, Slurm's NodeName [hostname]")
    add("--job-mapping-dir", metavar="DIR", help="dcgm-exporter's --hpc-job-mapping-dir [none]")
    add("--prolog-dir", metavar="DIR", default=PROLOG_DIR, help=f"records of almanac's prolog [{PROLOG_DIR}]")
    add("--no-gpm", action="store_true", help="leave GPM alone: no activity of SMs, pipes, and links")
    return parser.parse_args(argv)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not ADDRESS:PORT, such as 10.0.0.7:{PORT}")
    try:
        return str(ipaddress.ip_address(host.strip("[]"))), int(port)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{host!r} is not an IP address; [::] and 0.0.0.0 are all") from None


def _interval(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= float(text) <= 300:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 300")


def _say(line: str) -> None:
    print(f"almanac-collect: {printable(line, 500)}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the launcher."""
    given = read_options(argv)
    folders = {"mapping_dir": given.job_mapping_dir, "prolog_dir": given.prolog_dir}
    # Made by systemd (RuntimeDirectory). It outlives the service, and not the boot.
    kept = Path(os.environ.get("RUNTIME_DIRECTORY") or "/nonexistent") / "gpm-off"
    is_off = given.no_gpm or kept.exists()
    reader = ReaderProcess({"host": given.host.partition(".")[0], **folders}, has_gpm=not is_off, gpm_off_file=kept)
    try:
        server = PageServer(given.listen, given.allow, _STALE * given.interval + 10)
    except OSError as error:
        _say(f"error: cannot listen on {given.listen[0]} port {given.listen[1]}: {error.strerror}")
        _say("try: another --listen, or stop the program that uses the port")
        sys.exit(1)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        collect(reader, server, given.host, given.interval, stop)
    finally:
        reader.close()
    sys.exit(0)
