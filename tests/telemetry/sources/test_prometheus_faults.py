"""A server that fails, refuses or lies: what is tried again, what is said, and that no secret is ever said."""

from __future__ import annotations

import json
import random
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from almanac.config import Prometheus
from almanac.errors import AlmanacError, ConfigError, ServerError
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_probe import probe
from telemetry.sources.source import RowBatch

HOUR_S = 1_790_002_800
NOW_S = HOUR_S + 7200
Serve = Callable[[Callable[[str, int], Any]], Any]
SECRETS = ("s3cret-password", "t0ken.value", "fr0m-url")


def matrix(time_s: float, **labels: str) -> str:
    series = {"metric": {"gpu": "0", "Hostname": "n1", **labels}, "values": [[time_s, "5"]]}
    return answer("matrix", [series])


def answer(kind: str, result: list[Any], **more: Any) -> str:
    data = {"resultType": kind, "result": result}
    return json.dumps({"status": "success", "data": data, **more}, separators=(",", ":"))


def refusal(said: str, kind: str = "execution") -> str:
    return json.dumps({"status": "error", "errorType": kind, "error": said})


def healthy(path: str, samples: int = 1) -> str:
    """Answer each of our queries as a server with one counter and one GPU does."""
    if "last_over_time" in path:
        return answer("vector", [{"metric": {"__name__": "DCGM_FI_DEV_FB_USED"}, "value": [0, "1"]}])
    end_s, span_s = span_of(path)
    if "count_over_time" in path:
        number = samples * span_s if "FB_USED" in path else 0
        return answer("vector", [{"metric": {}, "value": [0, str(number)]}] if number else [])
    return matrix(end_s - span_s)


def span_of(path: str) -> tuple[int, int]:
    """End and length, s, of a query's range."""
    ends, length = re.search(r"time=(\d+)", path), re.search(r"%5B(\d+)ms%5D", path)
    assert ends and length
    return int(ends[1]), (int(length[1]) - 1) // 1000


class Slept:
    """A sleep that is only noted, with the clock moved by it."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.waits_s.append(seconds)

    def clock(self) -> float:
        return NOW_S + sum(self.waits_s)


def source(url: str, slept: Slept | None = None, **options: Any) -> PrometheusSource:
    slept = slept or Slept()
    config = Prometheus(**{"url": url, "timeout_s": 5.0, **options})
    return PrometheusSource(config, clock=slept.clock, sleep=slept, rng=random.Random(1))


def fails(url: str, slept: Slept | None = None, **options: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        list(source(url, slept, **options).read(HOUR_S, HOUR_S + 60))
    return caught.value


def test_a_passing_fault_is_tried_again(serve: Serve) -> None:
    """500, 503 and a broken connection, then health: the same rows, and growing waits with jitter."""
    faults = [(500, "oops"), (503, "busy"), (200, healthy("last_over_time"), {}, 0, 9)]
    stub = serve(lambda path, n: faults[n] if n < 3 else (200, healthy(path)))
    slept = Slept()
    batches = list(source(stub.url, slept).read(HOUR_S, HOUR_S + 60))
    assert [batch.rows.num_rows for batch in batches] == [1]
    assert len(slept.waits_s) == 3
    assert all(low <= wait <= 2 * low for low, wait in zip((0.25, 0.5, 1.0), slept.waits_s, strict=True))


def test_it_gives_up_and_says_what_was_tried_how_often_and_how_long(serve: Serve) -> None:
    stub, slept = serve(lambda path, n: (503, "busy")), Slept()
    error = fails(stub.url, slept, retries=2)
    assert len(stub.paths) == 3
    for said in ("3 times in", "503 busy", "names of the counters of 2026-09-21 15:00:00", stub.url):
        assert said in str(error)
    assert "/-/ready" in error.hint


def test_a_server_that_is_not_there() -> None:
    slept = Slept()
    error = fails("http://127.0.0.1:9", slept, retries=3)
    assert "connection refused" in str(error) and "4 times" in str(error)
    assert len(slept.waits_s) == 3


def test_a_server_that_does_not_answer_in_time(serve: Serve) -> None:
    stub = serve(lambda path, n: (200, healthy(path), {}, 0.5))
    error = fails(stub.url, retries=1, timeout_s=0.1)
    assert "no answer within 0.1 s" in str(error) and "timeout_s" in error.hint


def test_retry_after_is_waited_for_but_not_for_ever(serve: Serve) -> None:
    waits = ["7", "86400", "soon"]
    stub = serve(lambda path, n: (429, "", {"Retry-After": waits[n]}) if n < 3 else (200, healthy(path)))
    slept = Slept()
    list(source(stub.url, slept).read(HOUR_S, HOUR_S + 60))
    assert slept.waits_s[:2] == [7.0, 30.0] and slept.waits_s[2] <= 2.0


@pytest.mark.parametrize(
    ("status", "body", "hint"),
    [(400, refusal("parse error: unexpected character", "bad_data"), "selector"),
     (401, "Unauthorized", "password_file"), (403, "Forbidden", "ask the administrator of Prometheus"),
     (404, "no such page", "prometheus.url")],
)  # fmt: skip
def test_a_refusal_fails_at_once(serve: Serve, status: int, body: str, hint: str) -> None:
    stub, slept = serve(lambda path, n: (status, body)), Slept()
    error = fails(stub.url, slept)
    assert (len(stub.paths), slept.waits_s) == (1, [])
    assert hint in error.hint and str(status) in str(error)


@pytest.mark.parametrize(
    "body", ["<html>log in</html>", '{"status":"success"}', "[]", "", '{"status":"success","data":1}']
)
def test_an_answer_that_is_not_prometheus(serve: Serve, body: str) -> None:
    error = fails(serve(lambda path, n: (200, body)).url)
    assert "prometheus.url" in error.hint


def counted(point: Any) -> Callable[[str], str]:
    """A server that names counters as it should, and counts their samples so."""
    return lambda ask: healthy(ask) if "last_over" in ask else answer("vector", [point])


def POINT(value: Any) -> dict[str, Any]:  # noqa: N802 - beside SPOILED
    return {"metric": {}, "value": [0, value]}


SPOILED = {
    "no name": lambda ask: answer("vector", [{"metric": {}, "value": [0, "1"]}]),
    "a list for a label": lambda ask: answer("vector", [{"metric": {"__name__": ["x"]}, "value": [0, "1"]}]),
    "an infinite count": counted(POINT("+Inf")), "a negative count": counted(POINT("-1")),
    "a count of 400 digits": counted(POINT(10**400)), "one number": counted({"metric": {}, "value": [1]}),
    "a matrix for a vector": lambda ask: matrix(HOUR_S),
    "a vector for a matrix": lambda ask: healthy(ask) if "_over_" in ask else answer("vector", [POINT("1")]),
    "no result": lambda ask: json.dumps({"status": "success", "data": {}}),
    "an endless time": lambda ask: healthy(ask) if "_over_" in ask else matrix(1e300),
    "a label that is a number": lambda ask: healthy(ask) if "_over_" in ask else matrix(HOUR_S, gpu=0),
    "cut short": lambda ask: healthy(ask) if "_over_" in ask else matrix(HOUR_S)[:-20],
    "nested deeply": lambda ask: "[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("fault", SPOILED)
def test_a_malformed_answer_is_an_error_of_the_server(serve: Serve, fault: str) -> None:
    """ "no name" is no counter that is looked for: then there is nothing to read."""
    stub = serve(lambda path, n: (200, SPOILED[fault](path)))
    if fault == "no name":
        assert list(source(stub.url).read(HOUR_S, HOUR_S + 60)) == []
        return
    error = fails(stub.url, retries=0)
    assert len(str(error)) < 600 and error.hint


@pytest.mark.parametrize("fault", SPOILED)
def test_doctor_says_that_an_answer_is_malformed(serve: Serve, fault: str) -> None:
    stub = serve(lambda path, n: (200, SPOILED[fault](path)))
    try:
        probe(Prometheus(url=stub.url), clock=lambda: NOW_S)
    except ServerError as error:
        assert len(str(error)) < 600 and error.hint


def test_half_the_data_is_not_taken_for_all_of_it(serve: Serve) -> None:
    """Thanos warns, VictoriaMetrics sets isPartial, when a part of their stores is down."""
    for more in ({"warnings": ["store-2 is down"]}, {"isPartial": True}):
        error = fails(serve(lambda path, n, more=more: (200, answer("vector", [], **more))).url, retries=0)
        assert "only part of the data" in str(error)


def test_control_characters_of_an_answer_are_not_repeated(serve: Serve) -> None:
    error = fails(serve(lambda path, n: (400, refusal("\x1b[2Jgone\n"))).url)
    assert "\x1b" not in str(error) and "\n" not in str(error)


def test_too_many_samples_halves_the_chunk(serve: Serve) -> None:
    """The server takes at most 1,000 s: 3,600 s are asked for in quarters, each span once, none left out."""

    def limited(path: str, number: int) -> tuple[int, str]:
        if span_of(path)[1] > 1000 and "count" not in path:
            return 422, refusal("query processing would load too many samples into memory in query execution")
        return 200, healthy(path)

    stub = serve(limited)
    batches = list(source(stub.url).read(HOUR_S, HOUR_S + 3600))
    assert [batch.watermark_s for batch in batches] == [HOUR_S + 900 * n + 1 for n in range(4)]
    assert [batch.rows["time_ms"].to_pylist() for batch in batches] == [[(HOUR_S + 900 * n) * 1000] for n in range(4)]

    def slow(path: str, number: int) -> tuple[int, str]:
        late = span_of(path)[1] > 2000
        return (503, refusal("query timed out in expression evaluation", "timeout")) if late else (200, healthy(path))

    assert len(list(source(serve(slow).url).read(HOUR_S, HOUR_S + 3600))) == 2


def test_memory_is_bounded_before_samples_are_asked_for(serve: Serve) -> None:
    """10 samples a second and at most 1,000 of them: spans of 56 s, and no longer range is ever read."""
    stub = serve(lambda path, n: (200, healthy(path, samples=10)))
    batches = list(source(stub.url, max_samples=1000).read(HOUR_S, HOUR_S + 112))
    read_s = [span_of(path)[1] for path in stub.paths if "over_time" not in path]
    assert (len(batches), read_s) == (2, [56, 56])


def test_one_second_that_is_still_too_much(serve: Serve) -> None:
    stub = serve(lambda path, n: (422, refusal("would load too many samples")))
    with pytest.raises(ServerError, match="one second") as caught:
        list(source(stub.url).read(HOUR_S, HOUR_S + 10))
    assert "max-samples" in caught.value.hint


def test_what_was_read_before_a_failure_stays_read(serve: Serve) -> None:
    down = lambda path: span_of(path)[0] > HOUR_S + 3600  # noqa: E731
    stub = serve(lambda path, n: (500, "") if down(path) else (200, healthy(path)))
    got: list[RowBatch] = []
    with pytest.raises(ServerError):
        for batch in source(stub.url, retries=1).read(HOUR_S, HOUR_S + 5400):
            got.append(batch)
    assert [batch.watermark_s for batch in got] == [HOUR_S + 1], "behind its only sample"


def test_a_span_without_samples_moves_no_watermark(serve: Serve) -> None:
    stub = serve(lambda path, n: (200, answer("vector", [])))
    assert list(source(stub.url).read(HOUR_S, HOUR_S + 7200)) == []


def test_a_clock_that_is_ahead_moves_no_watermark_past_what_was_scraped(serve: Serve) -> None:
    """The server's newest sample is of HOUR_S; this host says that it is two hours later."""
    stub = serve(lambda path, n: (200, healthy(path) if span_of(path)[0] <= HOUR_S + 3600 else answer("vector", [])))
    (batch,) = source(stub.url).read(HOUR_S, NOW_S)
    assert batch.watermark_s == HOUR_S + 1, "the rest of the hour is still to come"


def test_samples_of_the_future_are_noted_and_left(serve: Serve) -> None:
    def ahead(path: str, number: int) -> tuple[int, str]:
        if span_of(path)[0] > NOW_S:
            return 200, answer("vector", [] if "_RATIO" in path else [{"metric": {}, "value": [0, "42"]}])
        return 200, healthy(path)

    (batch,) = source(serve(ahead).url).read(NOW_S - 200, NOW_S + 100)
    assert batch.counts.notes["time in the future, left for later"] == 42
    assert (batch.counts.seen, batch.counts.kept) == (1, 1)


def test_the_selector_is_part_of_every_query(serve: Serve) -> None:
    stub = serve(lambda path, n: (200, healthy(path)))
    list(source(stub.url, selector='{job="dcgm"}').read(HOUR_S, HOUR_S + 60))
    assert stub.paths and all("job%3D%22dcgm%22%7D" in path for path in stub.paths)


@pytest.mark.parametrize("url", ["", "prometheus:9090", "ftp://host", "http://", "http://host:port", "http://h/?q=1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"prometheus\.url"):
        list(source(url).read(0, 60))


def secrets_in(tmp_path: Path, url: str) -> list[dict[str, Any]]:
    """Configurations that hold a secret each, in order password_file, token_file, address."""
    password, token = tmp_path / "password", tmp_path / "token"
    password.write_text(SECRETS[0] + "\n")
    token.write_text(SECRETS[1] + "\n")
    return [
        {"url": url, "username": "almanac", "password_file": str(password)},
        {"url": url, "token_file": str(token)},
        {"url": url.replace("http://", f"http://almanac:{SECRETS[2]}@")},
    ]


def test_credentials_are_sent(serve: Serve, tmp_path: Path) -> None:
    stub = serve(lambda path, n: (200, healthy(path)))
    for options in secrets_in(tmp_path, stub.url):
        list(source(**options).read(HOUR_S, HOUR_S + 60))
    basic = ("Basic YWxtYW5hYzpzM2NyZXQtcGFzc3dvcmQ=", "Basic YWxtYW5hYzpmcjBtLXVybA==")
    assert list(dict.fromkeys(stub.authorization)) == [basic[0], f"Bearer {SECRETS[1]}", basic[1]]


def everything_said(error: BaseException, record: Any, *objects: object) -> str:
    trace = "".join(traceback.format_exception(error))
    return "\n".join([trace, getattr(error, "hint", ""), record.text, *map(repr, objects)])


@pytest.mark.parametrize("echo", [True, False])
def test_credentials_are_never_said(serve: Serve, tmp_path: Path, caplog: Any, echo: bool) -> None:
    """Not by an error, its trace, a log at level DEBUG or a repr; not even where the server repeats them."""
    caplog.set_level("DEBUG")
    stub = serve(lambda path, n: (401, f"wrong: {' '.join(SECRETS)}" if echo else "wrong"))
    for number, options in enumerate(secrets_in(tmp_path, stub.url)):
        for where in (stub.url, "http://127.0.0.1:9"):
            options["url"] = options["url"].replace(stub.url.removeprefix("http://"), where.removeprefix("http://"))
            one = source(**options, retries=0)
            with pytest.raises(ServerError) as caught:
                list(one.read(HOUR_S, HOUR_S + 60))
            said = everything_said(caught.value, caplog, one, one.__dict__)
            assert SECRETS[number] not in said


@pytest.mark.parametrize("status", [401, 422, 503])
@pytest.mark.parametrize("start", [0, 290])
def test_a_header_that_a_server_says_back_is_not_said(serve: Serve, tmp_path: Path, status: int, start: int) -> None:
    """Not in base64 either, and not the half of it where the text is cut off."""
    stub = serve(lambda path, n: (status, "x" * start + " ".join(["got", *stub.authorization])))
    for options in secrets_in(tmp_path, stub.url):
        with pytest.raises(ServerError) as caught:
            list(source(**options, retries=0).read(HOUR_S, HOUR_S + 60))
        sent = stub.authorization[-1].partition(" ")[2]
        assert sent[:4] not in str(caught.value), caught.value


@pytest.mark.parametrize("content", ["", "two\nlines", "bad\x00byte", None])
def test_a_secret_file_that_cannot_be_used(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="token_file") as caught:
        list(source("http://127.0.0.1:9", token_file=str(path)).read(HOUR_S, HOUR_S + 60))
    assert not content or content not in str(caught.value)


def test_a_certificate_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ca_file"):
        list(source("https://127.0.0.1:9", ca_file=str(tmp_path / "ca.pem")).read(HOUR_S, HOUR_S + 60))


def one_counter(path: str, number: int) -> tuple[int, str]:
    """A server of one GPU with one counter, that does not say its version and refuses to look back a day."""
    labels = {"__name__": "DCGM_FI_DEV_FB_USED", "Hostname": "n1", "modelName": "A100"}
    if "buildinfo" in path:
        return 404, ""
    if "86400001ms" in path:
        return 422, refusal("query processing would load too many samples into memory")
    if "count+by+%28__name__" in path and "%21%3D%22%22" not in path:
        return 200, answer("vector", [{"metric": labels, "value": [0, "1"]}])
    if "_over_time" in path:
        return 200, answer("vector", [])
    return 200, matrix(NOW_S - 600)


def test_probe_tells_what_is_there_and_what_is_not(serve: Serve) -> None:
    stub = serve(one_counter)
    status = probe(Prometheus(url=stub.url), clock=lambda: NOW_S)
    assert (status.version, status.hosts, status.gpus, status.scrape_interval_s) == ("", 1, 1, None)
    assert [counter.metric.name for counter in status.counters if counter.present] == ["DCGM_FI_DEV_FB_USED"]
    assert {(counter.present, counter.expected) for counter in status.counters} == {(0, 1), (1, 1)}
    assert (status.silent, status.nothing) == ((), None)
    assert sum("unless" in path for path in stub.paths) == 2, "a day is refused, an hour is not"


def test_probe_of_nothing_fails_at_once() -> None:
    with pytest.raises(AlmanacError, match="failed once"):
        probe(Prometheus(url="http://127.0.0.1:9"))
