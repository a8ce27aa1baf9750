"""HTTP through requests with a deadline over the whole exchange, and a limit on the decoded bytes of an answer.

requests' own timeout counts from one byte to the next, and its `content` has no limit. Redirects are followed only
where requests would send the password along: to the same host, at the same port, or from http to https.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from almanac.bounded import watch, within

MOST_REDIRECTS = 5
_PIECE = 1 << 20


class AnswerTooLargeError(Exception):
    """An answer has more decoded bytes than were allowed."""


class _WatchedConnection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        """Watched before a proxy's answer to CONNECT, and before TLS."""
        connected = super()._new_conn()
        watch(connected)
        return connected

    def getresponse(self) -> Any:
        """Watched again: the connection can be one of an earlier exchange."""
        watch(self.sock)
        return super().getresponse()


class _TlsConnection(_WatchedConnection, HTTPSConnection):
    pass


class _WatchedPool(HTTPConnectionPool):
    ConnectionCls = _WatchedConnection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS = {"http": _WatchedPool, "https": _TlsPool}


class BoundedAdapter(HTTPAdapter):
    """An adapter whose sockets `within` can shut down, behind a proxy, too."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager


class BoundedSession(requests.Session):
    """Needs a `BoundedAdapter` for each address that it asks."""

    def fetch(
        self, method: str, url: str, *, timeout: float, most_bytes: int, **kwargs: Any
    ) -> tuple[requests.Response, bytes]:
        """The answer and its body, of a refusal the first 64 KiB. timeout: seconds for all of it.

        Raises requests.Timeout, AnswerTooLargeError.
        """
        try:
            with within(timeout), self._followed(method, url, timeout=timeout, **kwargs) as response:
                if response.status_code != 200:
                    return response, next(response.iter_content(1 << 16), b"")
                return response, b"".join(_pieces(response, most_bytes))
        except TimeoutError as error:
            raise requests.Timeout(str(error)) from error

    def resolve_redirects(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Follow none: requests would first read a redirect's body, however long it is."""
        return iter(())

    def _followed(self, method: str, url: str, **kwargs: Any) -> requests.Response:
        for _ in range(MOST_REDIRECTS):
            response = super().request(method, url, stream=True, **kwargs)
            target = urljoin(url, self.get_redirect_target(response) or url)
            if target == url or self.should_strip_auth(url, target):  # type: ignore[no-untyped-call]
                return response
            response.close()
            url, kwargs = target, {**kwargs, "params": None}
        raise requests.TooManyRedirects(f"more than {MOST_REDIRECTS} redirects")


def _pieces(response: requests.Response, most_bytes: int) -> Iterator[bytes]:
    size = 0
    for piece in response.iter_content(_PIECE):
        size += len(piece)
        if size > most_bytes:
            raise AnswerTooLargeError(f"an answer of more than {most_bytes >> 20} MiB")
        yield piece
