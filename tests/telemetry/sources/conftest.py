"""A Prometheus that answers as the test says: from recorded answers, or with any fault."""

from __future__ import annotations

import decimal
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

RECORDED = Path(__file__).parents[1] / "fixtures" / "prometheus"


Answer = Callable[[str, int], tuple[Any, ...]]
"""The reply to a path with its query and the number of requests before it: status, body, and optionally headers, the
seconds before it is sent, and the number of bytes of the promised body that never are."""


@dataclass
class Stub:
    """url, and what was asked so far: paths, and the Authorization header of each."""

    url: str
    paths: list[str] = field(default_factory=list)
    authorization: list[str | None] = field(default_factory=list)


@pytest.fixture(scope="session")
def prometheus_binaries() -> None:
    """For tests on a real Prometheus: skipped without its programs, but not where nothing may be skipped."""
    absent = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if absent and os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1":
        pytest.fail(f"{' and '.join(absent)} not found, and ALMANAC_REQUIRE_CLUSTER=1 forbids to skip")
    if absent:
        pytest.skip(f"{' and '.join(absent)} not found")


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Stub]]:
    """Starts a stub for an `Answer`; ended with the test."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> Stub:
        stub = Stub("")

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                number = len(stub.paths)
                stub.paths.append(self.path)
                stub.authorization.append(self.headers.get("Authorization"))
                given = answer(self.path, number)
                status, text, headers, delay_s, cut = (*given, *({}, 0.0, 0)[len(given) - 2 :])
                time.sleep(delay_s)
                body = text.encode()
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body[: len(body) - cut])
                except OSError:
                    pass  # The client gave up first: that is what such a test is about.

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        stub.url = f"http://127.0.0.1:{server.server_port}"
        return stub

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def replay(serve: Callable[[Answer], Stub]) -> Callable[[str], Stub]:
    """Starts a stub that gives the answers a real Prometheus gave to fixtures/prometheus/record.py."""

    def start(exporter: str) -> Stub:
        answers = json.loads((RECORDED / f"{exporter}.json").read_text(encoding="utf-8"))

        def answer(path: str, number: int) -> tuple[int, str]:
            status, body = answers.get(path, (404, f"not recorded: {path}"))
            return status, body

        return serve(answer)

    return start


@pytest.fixture
def tried() -> None:
    """The test's Parquet files are tried in a process of their own first, as everybody's are."""


@pytest.fixture(autouse=True)
def _untried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process for each file: tests/telemetry/store/test_database.py is about those."""
    if "tried" not in request.fixturenames:
        monkeypatch.setattr("telemetry.sources.file_columns.require_readable", lambda path: None)


ODD = {
    "u64": pa.array([2**64 - 1, 5], pa.uint64()), "f16": pa.array([1, 2]).cast(pa.float16()),
    "infinite": pa.array([float("inf"), float("nan")]), "binary": pa.array([b"1", b"\xff"]),
    "dictionary": pa.array(["1", "2"]).dictionary_encode(),
    "decimal": pa.array([decimal.Decimal("1.5"), decimal.Decimal(2)]),
    "date": pa.array([2**31 - 1, -(2**31)], pa.int32()).cast(pa.date32()),
    "ns": pa.array([2**62, -(2**62)], pa.timestamp("ns")), "far": pa.array([2**60, -(2**60)], pa.timestamp("ms")),
    "no zone": pa.array([2**50, 5], pa.timestamp("us", "Mars/Phobos")), "null": pa.nulls(2),
}  # fmt: skip
"""Parquet columns of every plain type, with values that are hard to convert."""


@pytest.fixture
def odd_columns() -> dict[str, pa.Array[Any]]:
    return ODD
