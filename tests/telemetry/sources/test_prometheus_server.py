"""A real Prometheus with a written history, and servers that drip, flood, or redirect for ever."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import resource
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from almanac.config import Prometheus
from almanac.errors import ServerError
from telemetry.sources import prometheus_server
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_server import PrometheusServer, TooMuchError
from telemetry.sources.source import RowBatch

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("prometheus_binaries")]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


RECORD = load(Path(__file__).parents[1] / "fixtures" / "prometheus" / "record.py")
HOUR_S, SINCE_S, UNTIL_S = RECORD.HOUR_S, RECORD.SINCE_S, RECORD.UNTIL_S
LIMIT = "--query.max-samples=60"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("prometheus")
    RECORD.write_openmetrics(root / "history.om", RECORD.history())
    RECORD.LocalPrometheus(root / "server").load(root / "history.om")
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with RECORD.LocalPrometheus(root / "server") as server:
        yield server.url


def read(url: str, since_s: int = SINCE_S, until_s: int = UNTIL_S, **options: Any) -> list[RowBatch]:
    source = PrometheusSource(Prometheus(url=url, **options), clock=lambda: UNTIL_S + 3600, sleep=lambda _: None)
    return list(source.read(since_s, until_s))


def rows(batches: list[RowBatch]) -> list[dict[str, Any]]:
    found = [row for batch in batches for row in batch.rows.to_pylist()]
    return sorted(found, key=lambda row: (row["host"], row["gpu"], row["mig"], row["time_ms"]))


def test_any_cut_gives_the_same_rows_once(url: str) -> None:
    whole = rows(read(url))
    assert len(whole) == 18 * 5
    for minutes in (1, 2, 45, 120):
        assert rows(read(url, chunk_minutes=minutes)) == whole
    pieces = [
        batch for start_s in range(SINCE_S, UNTIL_S, 7) for batch in read(url, start_s, min(start_s + 7, UNTIL_S))
    ]
    assert rows(pieces) == whole


def test_a_server_that_refuses_many_samples_gives_the_same_rows(root: Path, url: str, tmp_path: Path) -> None:
    RECORD.LocalPrometheus(tmp_path).load(root / "history.om")
    with RECORD.LocalPrometheus(tmp_path, LIMIT) as strict:
        batches = read(strict.url)
    assert len(batches) > 2
    assert rows(batches) == rows(read(url))


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ANSWER = json.dumps(
    {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [0, "7"]}]}}
)
Send = Callable[[bytes], None]
Talk = Callable[[Send, str], None]
"""Answers one request, of which it gets the path. Each connection has one request."""


@contextlib.contextmanager
def server(talk: Talk, asked: list[str] | None = None) -> Iterator[str]:
    """A server on loopback that says what `talk` sends, until the client hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            request = connection.recv(65536).decode()
            if asked is not None:
                asked.append(request)
            talk(connection.sendall, request.split()[1] if request else "")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=[listener.accept()[0]], daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def count(url: str, timeout_s: float = 30, **options: object) -> int:
    config = Prometheus(url=url, timeout_s=timeout_s, retries=0, **options)  # type: ignore[arg-type]
    return PrometheusServer(config).number("count(up)", 0, "the test")


def for_ever(start: bytes, part: bytes, pause_s: float = 0.0) -> Talk:
    def talk(send: Send, _: str) -> None:
        send(start)
        while True:
            send(part)
            time.sleep(pause_s)

    return talk


@pytest.mark.parametrize(
    "talk",
    [for_ever(b"", b"H", 0.02), for_ever(HEAD, b"X", 0.02),
     for_ever(HEAD + b"Content-Length: 1000000\r\n\r\n", b" ", 0.02), for_ever(HEAD + b"\r\n", b" ", 0.02),
     for_ever(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 0.02),
     for_ever(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0", 0.02),
     for_ever(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02), for_ever(b"HTTP/1.1 503 Busy\r\n\r\n", b" ", 0.02),
     for_ever(b"HTTP/1.1 302 Found\r\nLocation: /other\r\n", b"X", 0.02)],
    ids=["status", "header", "body", "body to the end", "chunks", "chunk size", "continue", "refusal", "redirect"],
)  # fmt: skip
def test_a_server_that_drips_ends_with_the_timeout(talk: Talk) -> None:
    with server(talk) as url, pytest.raises(ServerError, match=r"no answer within 0\.2 s") as raised:
        count(url, timeout_s=0.2)
    assert raised.value.hint == "raise prometheus.timeout_s"


def compressed(kind: str) -> Talk:
    """64 MiB of blanks."""
    body = (gzip.compress if kind == "gzip" else zlib.compress)(b" " * (64 << 20), 1)

    def talk(send: Send, _: str) -> None:
        send(HEAD + f"Content-Encoding: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    return talk


FLOOD = b" " * (1 << 16)


@pytest.mark.parametrize(
    "talk",
    [for_ever(HEAD + b"\r\n", FLOOD), for_ever(HEAD + b"Content-Length: 3000000000\r\n\r\n", FLOOD),
     for_ever(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + FLOOD + b"\r\n"),
     for_ever(HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffff0\r\n", FLOOD), compressed("gzip"),
     compressed("deflate")],
    ids=["to the end", "length", "chunks", "one chunk", "gzip", "deflate"],
)  # fmt: skip
def test_an_answer_that_is_too_large_is_asked_for_in_smaller_parts(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """TooMuchError makes the caller halve the span. What was read is a few MiB, not the whole answer."""
    monkeypatch.setattr(prometheus_server, "MOST_ANSWER_BYTES", 4 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with server(talk) as url, pytest.raises(TooMuchError, match="more than 4 MiB"):
        count(url)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10


@pytest.mark.parametrize(
    ("talk", "said"),
    [(for_ever(b"HTTP/1.1 500 Broken\r\n\r\n", FLOOD), "HTTP 500"), (for_ever(HEAD, b"X: y\r\n"), ".")],
    ids=["a refusal, of which the start is read", "headers without end"],
)
def test_what_has_no_end_is_an_error(talk: Talk, said: str) -> None:
    with server(talk) as url, pytest.raises(ServerError, match=said):
        count(url)


def test_an_answer_that_a_proxy_compresses_is_read() -> None:
    body = gzip.compress(ANSWER.encode())

    def talk(send: Send, _: str) -> None:
        send(HEAD + f"Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    with server(talk) as url:
        assert count(url) == 7


def redirect(location: Callable[[str], str], is_flooding: bool = False) -> Talk:
    def talk(send: Send, path: str) -> None:
        send(f"HTTP/1.1 307 Elsewhere\r\nLocation: {location(path)}\r\n\r\n".encode())
        while is_flooding:
            send(FLOOD)

    return talk


def answered(send: Send, _: str) -> None:
    send(HEAD + f"Content-Length: {len(ANSWER)}\r\n\r\n{ANSWER}".encode())


@pytest.mark.parametrize("is_flooding", [False, True])
def test_a_redirect_within_the_server_is_followed_and_its_body_is_not_read(is_flooding: bool) -> None:
    def talk(send: Send, path: str) -> None:
        if path.startswith("/new"):
            return answered(send, path)
        return redirect(lambda path: f"/new{path}", is_flooding)(send, path)

    asked: list[str] = []
    with server(talk, asked) as url:
        assert count(url) == 7
    assert [request.split()[1].count("query=") for request in asked] == [1, 1]


def test_a_redirect_to_another_server_is_not_followed_and_it_is_named() -> None:
    asked: list[str] = []
    with (
        server(answered, asked) as other,
        server(redirect(lambda path: f"{other}{path}")) as url,
        pytest.raises(ServerError, match=r"HTTP 307 to http://127\.0\.0\.1:[0-9]+/.*, another server"),
    ):
        count(url)
    assert not asked


def test_redirects_without_end_are_an_error() -> None:
    asked: list[str] = []
    with server(redirect(lambda path: f"/x{path}"), asked) as url, pytest.raises(ServerError, match="redirects"):
        count(url)
    assert len(asked) == 5


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_drips_ends_with_the_timeout(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """For https, it is the answer to CONNECT that has no end."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with server(for_ever(b"", b"H", 0.02)) as proxy:
        monkeypatch.setenv(f"{scheme}_proxy", proxy)
        with pytest.raises(ServerError, match=r"no answer within 0\.2 s"):
            count(f"{scheme}://prometheus.example:9090", timeout_s=0.2)


def test_a_second_answer_on_the_same_connection_is_bounded_too() -> None:
    connections: list[str] = []

    def talk(send: Send, path: str) -> None:
        connections.append(path)
        if len(connections) == 1:  # a client that sees the drip between its requests takes a new connection
            answered(send, path)
        for_ever(b"", b"H", 0.02)(send, path)

    with server(talk) as url:
        asked = PrometheusServer(Prometheus(url=url, timeout_s=0.8, retries=0))
        assert asked.number("up", 0, "the first") == 7
        with pytest.raises(ServerError):
            asked.number("up", 0, "the second")
