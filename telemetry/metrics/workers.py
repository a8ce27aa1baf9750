"""Dask workers for the metrics, of a scheduler that runs already."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator

from distributed import Client, Security
from distributed.utils import silence_logging_cmgr

from almanac.config import Dask
from almanac.errors import AlmanacError, ConfigError

WAIT_S = 600.0
"""Seconds without any worker after which a run fails. Slurm may need minutes to start jobs in a busy partition."""
_ANSWER_S = 30
# Errors reach the caller as exceptions; what distributed logs on the way would only garble the progress bar.
QUIET = logging.CRITICAL + 1


class Workers:
    """Workers of a scheduler that runs already. Raises AlmanacError if for WAIT_S there has been none."""

    def __init__(self, client: Client, address: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self._address = address
        self._clock = clock
        self._seen_s = clock()

    def want(self, tasks: int) -> None:
        """Start workers for so many tasks, without waiting for them. Somebody else starts these."""

    def tend(self) -> int:
        """The number of workers now. Called often while results are awaited."""
        present = len(self.client.nthreads())
        now_s = self._clock()
        if present:
            self._seen_s = now_s
        elif now_s - self._seen_s > WAIT_S:
            raise AlmanacError(*self.explain(f"no Dask worker came within {WAIT_S:g} s"))
        return present

    def explain(self, seen: str) -> tuple[str, str]:
        """Message and hint of the error that ends the wait."""
        where = self._address
        return f"{seen} at the scheduler {where}", f"start workers with `dask worker {where}`"


@contextlib.contextmanager
def scheduler_workers(address: str, section: Dask) -> Iterator[Workers]:
    """Workers of the scheduler at tcp://host:port or tls://host:port.

    Raises ConfigError for another address, AlmanacError if no scheduler answers.
    """
    if not re.fullmatch(r"(tcp|tls)://\S+:\d+", address):
        raise ConfigError(f"the scheduler's address is {address!r}", "write tcp://HOST:PORT or tls://HOST:PORT")
    security = _security(section) if address.startswith("tls://") else None
    with quiet_logs():
        try:
            client = Client(address, security=security, timeout=_ANSWER_S)
        except OSError as error:
            raise AlmanacError(
                f"no Dask scheduler answers at {address}: {error}",
                "start one with `dask scheduler`, or correct --scheduler",
            ) from error
        with client:
            yield Workers(client, address)


def _security(section: Dask) -> Security:
    """Keys from the files that [dask] names. Raises ConfigError if one of them cannot be read."""
    roles = {"tls_ca_file": "tls_ca_file", "tls_cert_file": "tls_client_cert", "tls_key_file": "tls_client_key"}
    for key in roles:
        if not os.access(getattr(section, key), os.R_OK):
            raise ConfigError(
                f"a tls:// scheduler needs certificates, but dask.{key} is {getattr(section, key)!r}",
                f"name readable files in: {', '.join(f'dask.{name}' for name in roles)}",
            )
    return Security(require_encryption=True, **{role: getattr(section, key) for key, role in roles.items()})


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """What distributed logs is not shown meanwhile; its two loggers have handlers of their own."""
    with silence_logging_cmgr(QUIET), silence_logging_cmgr(QUIET, "distributed.client"):
        yield
