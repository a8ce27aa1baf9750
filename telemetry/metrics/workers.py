"""Dask workers for the metrics: processes on this machine, or those of a scheduler that is already there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from dask.system import CPU_COUNT
from distributed import Client, LocalCluster, Security, SpecCluster
from distributed.system import MEMORY_LIMIT
from distributed.utils import silence_logging_cmgr

from almanac.config import Dask
from almanac.errors import AlmanacError, ConfigError

GIB = 2**30
WAIT_S = 600.0
"""Seconds without any worker after which a run fails. Slurm may need minutes to start jobs in a busy partition."""
# Errors reach the caller as exceptions; what distributed logs on the way would only garble the progress bar.
QUIET = logging.CRITICAL + 1
NO_DASHBOARD = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}


class Present:
    """Workers that somebody else starts. Raises AlmanacError where for WAIT_S there has been none."""

    def __init__(self, client: Client, address: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self._address = address
        self._clock = clock
        self._seen_s = clock()

    def want(self, tasks: int) -> None:
        """Nothing to start."""

    def tend(self) -> int:
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


class Local(Present):
    """Processes on this machine."""

    def __init__(self, client: Client, cluster: LocalCluster, section: Dask) -> None:
        super().__init__(client)
        self._cluster = cluster
        self._most = section.workers or CPU_COUNT

    def want(self, tasks: int) -> None:
        wanted = min(self._most, tasks)
        if wanted > len(self._cluster.worker_spec):
            self._cluster.scale(wanted)

    def explain(self, seen: str) -> tuple[str, str]:
        return f"{seen} on this machine", "lower dask.workers, or use --engine local"


@contextlib.contextmanager
def local_workers(section: Dask) -> Iterator[Local]:
    """Workers on loopback that only this process can talk to: anybody who reached them could run code as this user."""
    most = section.workers or CPU_COUNT
    memory = min(section.memory_gib * GIB, MEMORY_LIMIT / most)
    settings: dict[str, Any] = {
        "n_workers": 0,
        "threads_per_worker": 1,
        "processes": True,
        "memory_limit": int(memory),
        "security": True,
        "scheduler_kwargs": NO_DASHBOARD,
        "silence_logs": QUIET,  # in the workers
    }
    with quiet_logs(), LocalCluster(**settings) as cluster, Client(cluster) as client:
        shield(cluster)
        yield Local(client, cluster, section)


@contextlib.contextmanager
def scheduler_workers(address: str, section: Dask) -> Iterator[Present]:
    """Workers of the scheduler at tcp://host:port or tls://host:port.

    Raises ConfigError where the address is another, AlmanacError where no scheduler answers.
    """
    if not re.fullmatch(r"(tcp|tls)://\S+:\d+", address):
        raise ConfigError(f"the scheduler's address is {address!r}", "write tcp://HOST:PORT or tls://HOST:PORT")
    security = _security(section) if address.startswith("tls://") else None
    with quiet_logs():
        try:
            client = Client(address, security=security, timeout=min(30, WAIT_S))
        except OSError as error:
            raise AlmanacError(
                f"no Dask scheduler answers at {address}: {error}",
                "start one with `dask scheduler`, or correct --scheduler",
            ) from error
        with client:
            yield Present(client, address)


def _security(section: Dask) -> Security:
    """Raises ConfigError where a file that TLS needs is not named or cannot be read."""
    roles = {"tls_ca_file": "tls_ca_file", "tls_cert_file": "tls_client_cert", "tls_key_file": "tls_client_key"}
    for key in roles:
        if not os.access(getattr(section, key), os.R_OK):
            raise ConfigError(
                f"a tls:// scheduler needs certificates, but dask.{key} is {getattr(section, key)!r}",
                f"name readable files in: {', '.join(f'dask.{name}' for name in roles)}",
            )
    return Security(require_encryption=True, **{role: getattr(section, key) for key, role in roles.items()})


def shield(cluster: SpecCluster) -> None:
    """Let Ctrl-C stop this process only, which then ends in order what it started.

    A terminal sends it to all. The thread of Dask's loop starts the workers' processes, sbatch and scancel, and what it
    starts inherits its signal mask.
    """
    resource_tracker.ensure_running()  # Python 3.11 unblocks SIGINT in the thread that starts it

    async def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    cluster.sync(block)


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """What distributed logs is not shown meanwhile; its two loggers have handlers of their own."""
    with silence_logging_cmgr(QUIET), silence_logging_cmgr(QUIET, "distributed.client"):
        yield
