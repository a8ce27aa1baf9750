"""The real Prometheus of the distribution, scraping the lab's exporter every second."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from lab import SlurmLab
from processes import Daemon, LabError, wait_until


class Prometheus:
    """Starts, stops and starts again on the same data. The lab's end is its end."""

    def __init__(self, lab: SlurmLab, port: int, target_port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._lab, self._port, self._target_port = lab, port, target_port
        self._folder = lab.root / "prometheus"
        self._daemon: Daemon | None = None

    def start(self) -> None:
        """Return when it answers. Raises LabError, with its log, if it does not."""
        self._folder.mkdir(exist_ok=True)
        conf = self._folder / "prometheus.yml"
        # honor_labels: the exporter's own labels win over Prometheus' job and instance.
        conf.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 900ms}\n"
            "scrape_configs:\n"
            "  - job_name: dcgm\n"
            "    honor_labels: true\n"
            f"    static_configs: [{{targets: ['127.0.0.1:{self._target_port}']}}]\n"
        )
        daemon = self._lab.start_daemon(
            "prometheus", "prometheus", f"--config.file={conf}", f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=warn",
        )  # fmt: skip
        self._daemon = daemon

        def is_ready() -> bool:
            daemon.check()
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        wait_until("Prometheus to be ready", is_ready, [daemon.log])
        # It scrapes a target for the first time only seconds after it is ready.
        fresh = f"timestamp(DCGM_FI_DEV_FB_USED) > {time.time():.3f}"
        wait_until("the first scrape", lambda: bool(self.query(fresh)), [daemon.log])

    def stop(self) -> None:
        """Prometheus is down until start(); what happened meanwhile it will never know."""
        if self._daemon is not None:
            self._daemon.stop()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query's series: {"metric": labels, "value"|"values": ...}. Raises LabError."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=60) as answer:
            body = json.load(answer)
        if body["status"] != "success":
            raise LabError(f"Prometheus refused {expression}: {body}")
        return list(body["data"]["result"])
