"""Asking one Prometheus server through prometheus-api-client: credentials, retries, and errors that say what to do.

The client's own retries are switched off: they know neither what the server said nor an injected sleep.
Credentials are never part of an address, an error, a log line or a repr.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit, urlunsplit

import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from requests.auth import AuthBase, HTTPBasicAuth
from urllib3.util.retry import Retry

from almanac.config import Prometheus
from almanac.errors import ConfigError, ServerError
from almanac.files import read_trusted, require_trusted
from almanac.scrub import forms, scrub
from almanac.units import format_duration
from telemetry.sources.bounded_session import AnswerTooLargeError, BoundedAdapter, BoundedSession
from telemetry.sources.prometheus_json import Point, SeriesSamples, parse_answer

MOST_ANSWER_BYTES = 256 << 20
"""One metric in one span takes about 27 bytes a sample. A span whose answer is larger is halved."""
_MOST_SECRET_BYTES = 1 << 16
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_TOO_MUCH = (
    "too many samples", "too many bytes", "exceeds the limit", "exceeded the limit", "limit exceeded",
    "exceeded the maximum number of", "maxSamplesPerQuery",
)  # fmt: skip
"""Phrases with which Prometheus, Thanos, Mimir, and VictoriaMetrics refuse the amount of a query."""


_Result = TypeVar("_Result")
_MOST = 2**53
"""Counts above this are no longer exact."""
_CAUSES = re.compile(
    "Connection refused|Name or service not known|No route to host|Network is unreachable|Connection reset"
    "|Temporary failure in name resolution|Connection aborted"
)


class TooMuchError(ServerError):
    """The server refuses the amount of a query, or its answer is too large: ask for less."""


class _TroubleError(Exception):
    """One failed try: what was said, and whether another may help, after at least wait_s."""

    def __init__(self, said: str, *, is_passing: bool = False, wait_s: float = 0.0, status: int = 0) -> None:
        super().__init__(said)
        self.said, self.is_passing, self.wait_s, self.status = said, is_passing, wait_s, status


class _Token(AuthBase):
    """A bearer token; as `auth` and not as a header, so that ~/.netrc does not replace it."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class _Answer:
    """A response as the client sees it: status 200, and JSON whose matrix is `SeriesSamples`."""

    status_code = 200

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def json(self) -> dict[str, Any]:
        return self._answer


class _Session(BoundedSession):
    """The session under the client: reads JSON its own way; a refusal is a _TroubleError or TooMuchError.

    secrets: what no text that the server says may hold.
    """

    secrets: tuple[str, ...] = ()

    def request(self, method: str | bytes, url: str | bytes, **kwargs: Any) -> Any:  # type: ignore[override]
        # Compressing costs the server more time than the bytes cost a cluster's network.
        kwargs["headers"] = {**(kwargs.get("headers") or {}), "Accept-Encoding": "identity"}
        try:
            response, body = self.fetch(str(method), str(url), most_bytes=MOST_ANSWER_BYTES, **kwargs)
        except AnswerTooLargeError as error:
            raise TooMuchError(str(error)) from error
        if response.status_code != 200:
            raise _refusal(response, body, self.secrets)
        try:
            answer = parse_answer(body)
        except ValueError as error:
            kind = scrub(response.headers.get("Content-Type", "unknown"), self.secrets, 60)
            why = scrub(str(error), self.secrets, 120)
            raise _TroubleError(f"an answer that is not Prometheus' JSON (content type {kind}): {why}") from error
        if answer.get("status") != "success" or not isinstance(answer.get("data"), dict):
            raise _TroubleError("an answer without status and data")
        if answer.get("isPartial") or answer.get("warnings"):
            said = scrub(str(answer.get("warnings", "")), self.secrets, 200)
            raise _TroubleError(f"only part of the data: {said}", is_passing=True)
        return _Answer(answer)


def _refusal(response: requests.Response, body: bytes, secrets: tuple[str, ...]) -> Exception:
    """Return the error for an answer other than 200: TooMuchError or _TroubleError."""
    try:
        answer = json.loads(body)
        said, kind = str(answer.get("error", "")), str(answer.get("errorType", ""))
    except (ValueError, AttributeError, RecursionError):
        said, kind = body.decode("utf-8", "replace"), ""
    status = response.status_code
    if response.is_redirect:
        said = f"to {response.headers['Location']}, another server"
    if any(phrase in said for phrase in _TOO_MUCH) or kind == "timeout" or "query timed out" in said:
        return TooMuchError(scrub(said, secrets, 200))
    text = f"HTTP {status} {scrub(said, secrets)}".strip()
    wait = response.headers.get("Retry-After", "")
    wait_s = float(wait) if re.fullmatch(r"[0-9]{1,6}", wait) else 0.0
    return _TroubleError(text, is_passing=status in _RETRIED, wait_s=wait_s, status=status)


class PrometheusServer:
    """One server. Nothing is read or sent before the first query."""

    def __init__(
        self,
        config: Prometheus,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._clock, self._sleep = clock, sleep
        self._rng = rng or random.Random()
        self._client: PrometheusConnect | None = None
        self._secrets: tuple[str, ...] = ()
        self._address = ""

    @property
    def address(self) -> str:
        """The server's address without user name and password. Raises ConfigError if there is none."""
        if not self._address:
            self._address = _clean_address(self._config)
        return self._address

    def samples(self, promql: str, time_s: float, what: str) -> SeriesSamples:
        """The result of an instant query of a range selector. An error says `what`.

        Raises ServerError, TooMuchError where the server refuses the amount, ConfigError.
        """
        return self._query(promql, time_s, what, SeriesSamples)

    def vector(self, promql: str, time_s: float, what: str) -> list[Point]:
        """The result of any other instant query. Raises as `samples` does."""
        return self._query(promql, time_s, what, list)

    def number(self, promql: str, time_s: float, what: str) -> int:
        """The one value of a query that counts; 0 where there is nothing to count. Raises as `samples` does."""
        found = self.vector(promql, time_s, what)
        if not found:
            return 0
        return self.whole(found[0], what)

    def whole(self, point: Point, what: str) -> int:
        """The value of a count. Raises ServerError for any other value."""
        if not 0 <= point.value <= _MOST:
            raise self._failure(what, _TroubleError(f"an answer that counts {point.value:g}"), 1, 0.0)
        return int(point.value)

    def _query(self, promql: str, time_s: float, what: str, kind: type[_Result]) -> _Result:
        client = self._connect()
        params = {"time": f"{time_s:.3f}", "timeout": f"{self._config.timeout_s:g}s"}

        def ask() -> _Result:
            try:
                found = client.custom_query(promql, params=params)
            except KeyError as error:
                raise _TroubleError("an answer without a result") from error
            if not isinstance(found, kind):
                raise _TroubleError("an answer of another type than asked for")
            return found

        return cast(_Result, self._insist(ask, what))

    def version(self) -> str:
        """The server's version; empty if unknown. Raises ServerError, ConfigError."""
        client = self._connect()
        url = f"{self.address}/api/v1/status/buildinfo"
        timeout = self._config.timeout_s
        try:
            answer = self._insist(lambda: client._session.request("GET", url, auth=client.auth, timeout=timeout), url)
        except _NotThereError:
            return ""
        return scrub(str(answer.json()["data"].get("version", "")), self._secrets, 40)

    def _insist(self, ask: Callable[[], Any], what: str) -> Any:
        """The answer, asked for again after passing troubles: connection errors, timeouts, 429 and 5xx."""
        began, tries = self._clock(), 1 + self._config.retries
        for number in range(1, tries + 1):
            try:
                return ask()
            except _TroubleError as error:
                trouble = error
            except (requests.RequestException, PrometheusApiClientException) as error:
                trouble = _TroubleError(
                    _plain(error, self._config.timeout_s, self._secrets), is_passing=_may_pass(error)
                )
            if not trouble.is_passing or number == tries:
                raise self._failure(what, trouble, number, self._clock() - began)
            wait_s = min(_FIRST_WAIT_S * 2 ** (number - 1), _LONGEST_WAIT_S) * self._rng.uniform(0.5, 1.0)
            self._sleep(max(wait_s, min(trouble.wait_s, _LONGEST_WAIT_S)))
        raise AssertionError("the last try returned or raised")

    def _failure(self, what: str, trouble: _TroubleError, tries: int, elapsed_s: float) -> ServerError:
        often = "once" if tries == 1 else f"{tries} times in {format_duration(elapsed_s)}"
        message = f"Prometheus at {self.address}: the query for {what} failed {often}: {trouble.said}"
        kind = _NotThereError if trouble.status == 404 else ServerError
        return kind(message, _advice(trouble, self.address))

    def _connect(self) -> PrometheusConnect:
        if self._client is None:
            session = _Session()
            if self._config.ca_file:
                if not Path(self._config.ca_file).is_file():
                    raise ConfigError(
                        f"{self._config.place}ca_file {self._config.ca_file} is not a file", "correct the path"
                    )
                require_trusted(self._config.ca_file)
                session.verify = self._config.ca_file
            once = Retry(total=0, read=False, status_forcelist=(), raise_on_status=False)
            self._client = PrometheusConnect(
                self.address, retry=once, auth=self._credentials(), session=session, timeout=self._config.timeout_s
            )
            session.mount(self.address, BoundedAdapter(max_retries=once))  # over the client's own
            session.secrets = self._secrets
        return self._client

    def _credentials(self) -> AuthBase | None:
        """Token, else user and password of the files, else those within the address; None where there are none."""
        config, split = self._config, urlsplit(self._config.url)
        if config.token_file:
            token = _read_secret(config.token_file, f"{config.place}token_file")
            self._secrets = forms(token)
            return _Token(token)
        if config.username or config.password_file:
            password = (
                _read_secret(config.password_file, f"{config.place}password_file") if config.password_file else ""
            )
            user = config.username
        elif split.username:
            user, password = unquote(split.username), unquote(split.password or "")
        else:
            return None
        self._secrets = forms(password, user)
        return HTTPBasicAuth(user.encode(), password.encode())


class _NotThereError(ServerError):
    """The server has no such address."""


def _clean_address(config: Prometheus) -> str:
    url = config.url
    if not url:
        raise ConfigError(f"{config.place}url is empty", "set it, such as http://prometheus.example:9090")
    try:
        split = urlsplit(url)
        port, host = split.port, split.hostname
    except ValueError:
        port, host, split = None, None, urlsplit("")
    if split.scheme not in ("http", "https") or not host or split.query or split.fragment:
        raise ConfigError(
            f"{config.place}url is not the address of a server", "write it as http://prometheus.example:9090, or https"
        )
    netloc = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
    return urlunsplit((split.scheme, netloc, split.path.rstrip("/"), "", ""))


def _read_secret(path: str, key: str) -> str:
    """The one line of a file that holds a secret. Raises ConfigError, which never quotes the content."""
    try:
        secret = read_trusted(Path(path), (), _MOST_SECRET_BYTES, is_strict=False).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file of UTF-8 text"
        raise ConfigError(f"{key} {path} cannot be read: {reason}", "make it readable to this user") from error
    if not secret or not secret.isprintable():
        raise ConfigError(f"{key} {path} is empty or holds more than one line", "write the secret on one line")
    return secret


def _may_pass(error: Exception) -> bool:
    """Return True if the same request may succeed later; a certificate or an address that is wrong stays wrong."""
    return isinstance(
        error, requests.ConnectionError | requests.Timeout | requests.exceptions.ChunkedEncodingError
    ) and not isinstance(error, requests.exceptions.SSLError)


def _plain(error: Exception, timeout_s: float, secrets: tuple[str, ...]) -> str:
    if isinstance(error, requests.exceptions.SSLError):
        return f"TLS failed: {scrub(str(error), secrets, 200)}"
    if isinstance(error, requests.Timeout):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke during the answer"
    if isinstance(error, requests.ConnectionError):
        cause = _CAUSES.search(str(error))
        return f"no connection ({cause[0].lower()})" if cause else "no connection"
    return scrub(f"{type(error).__name__}: {error}", secrets, 200)


def _advice(trouble: _TroubleError, address: str) -> str:
    if trouble.status == 401:
        return "check prometheus.username, password_file, or token_file"
    if trouble.status == 403:
        return "ask the administrator of Prometheus to let this user query"
    if trouble.status in (400, 422):
        return 'check prometheus.selector: it must be PromQL label matchers such as job="dcgm"'
    if trouble.said.startswith("TLS"):
        return "check prometheus.ca_file, and the server's certificate and name"
    if trouble.said.startswith("an answer") or trouble.status == 404:
        return f"check prometheus.url: {address} must be Prometheus itself, not a page in front of it"
    if trouble.said.startswith("no connection") or trouble.status >= 500:
        return f"check that Prometheus runs and is reachable from here: curl {address}/-/ready"
    if trouble.said.startswith("no answer"):
        return "raise prometheus.timeout_s"
    return "run `almanac doctor`; the next run continues after what is stored"
