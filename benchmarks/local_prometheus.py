"""A real Prometheus on a free port of 127.0.0.1, with a history written beforehand. For benchmarks and tests."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

Series = tuple[Mapping[str, str], np.ndarray, np.ndarray]
"""Labels, times (s) and values."""


def find_binaries() -> tuple[str, str] | None:
    """Paths of prometheus and promtool; None where one is missing."""
    found = shutil.which("prometheus"), shutil.which("promtool")
    return (found[0], found[1]) if found[0] and found[1] else None


def write_openmetrics(path: Path, metrics: Mapping[str, Iterable[Series]]) -> int:
    """Write a history as OpenMetrics text, all series of a metric together; the number of samples."""
    number = 0
    with path.open("w", encoding="utf-8") as out:
        for name, series in metrics.items():
            out.write(f"# TYPE {name} gauge\n")
            for labels, time_s, value in series:
                inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
                head = f"{name}{{{inside}}} "
                out.writelines(f"{head}{v!r} {t:.3f}\n" for v, t in zip(value.tolist(), time_s.tolist(), strict=True))
                number += len(value)
        out.write("# EOF\n")
    return number


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class LocalPrometheus:
    """A server over `root`; used as a context manager it is stopped at the end. scrapes: host:port of exporters."""

    def __init__(self, root: Path, *options: str, scrapes: Sequence[str] = ()) -> None:
        binaries = find_binaries()
        if binaries is None:
            raise FileNotFoundError("prometheus and promtool are not installed (Debian: apt-get install prometheus)")
        self._prometheus, self._promtool = binaries
        self._root, self._options, self._scrapes = root, options, scrapes
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def load(self, openmetrics: Path) -> None:
        """Make blocks of a history; the server must not run."""
        argv = [self._promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(openmetrics)]
        subprocess.run([*argv, str(self._root / "data")], check=True, capture_output=True)

    def __enter__(self) -> LocalPrometheus:
        self._root.mkdir(parents=True, exist_ok=True)
        config = self._root / "prometheus.yml"
        # honor_labels: the exporter's own labels win over Prometheus' job and instance. JSON is YAML.
        job = {"job_name": "dcgm", "honor_labels": True, "static_configs": [{"targets": list(self._scrapes)}]}
        wanted = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]} if self._scrapes else {"global": {}}
        config.write_text(json.dumps(wanted) + "\n")
        with (self._root / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._prometheus,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._root / 'data'}",
                    "--storage.tsdb.retention.time=20y",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    *self._options,
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "TZ": "UTC"},
            )
        self._wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)

    def _wait(self, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise TimeoutError((self._root / "prometheus.log").read_text()[-2000:])
