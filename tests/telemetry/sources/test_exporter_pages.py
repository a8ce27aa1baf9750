"""Pages of exporters, scraped by a real Prometheus, as the rows that each preset makes of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import prometheus_ingest
import pytest

from almanac.config import Prometheus
from cli.doctor.prometheus import check_counters
from telemetry.counters import COUNTERS
from telemetry.sources.exporters import presets
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_probe import probe

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("prometheus_binaries")]

PAGES = Path(__file__).parents[1] / "fixtures" / "exporters"
L40S = {"model": "NVIDIA L40S", "gpu_util_pct": 0, "hbm_used_mib": 0, "hbm_total_mib": 45457, "temp_c": 32,
        "gr_engine_active_frac": 0, "tensor_active_frac": 0, "sm_clock_mhz": 210}  # fmt: skip
A100 = {"model": "NVIDIA A100-SXM4-40GB", "fp64_active_frac": 0, "fp16_active_frac": 0}
MI250X = {"model": "AMD INSTINCT MI250X", "hbm_total_mib": 65520, "sm_clock_mhz": 1502}
MI300X = {"model": "AMD Instinct MI300X OAM", "hbm_total_mib": 196592}
ROWS: dict[str, dict[tuple[str, int], dict[str, Any]]] = {
    "almanac-collect": {("n1", 0): {"model": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0", "job_label": 71,
                                    "gpu_util_pct": 80, "sm_clock_mhz": 1800,
                                    "hbm_used_mib": 20000, "hbm_total_mib": 81559, "power_w": 500, "temp_c": 60,
                                    "energy_mj": 3.68614e+10, "gr_engine_active_frac": 0.8, "sm_active_frac": 0.7,
                                    "tensor_active_frac": 0.4, "fp16_active_frac": 0, "xid": 0,
                                    "pcie_tx_bytes_s": 100 << 20, "pcie_rx_bytes_s": 100 << 20}},
    "dcgm": {("ubuntu-sv16", 0): {**L40S, "power_w": 34.156, "uuid": "GPU-a8affe7e-7930-ae20-3fc6-4b0edf3ebbf3"},
             ("ubuntu-sv16", 1): {**L40S, "power_w": 34.164, "uuid": "GPU-72ad4d20-cfed-f08d-c894-f620962ca3e4"}},
    "ceems": {("ubuntu-sv16", 0): {**L40S, "power_w": 34.156, "uuid": "GPU-a8affe7e-7930-ae20-3fc6-4b0edf3ebbf3"},
              ("ubuntu-sv16", 1): {**L40S, "power_w": 34.164, "uuid": "GPU-72ad4d20-cfed-f08d-c894-f620962ca3e4",
                                   "job_label": 1009248}},
    "jobstats": {("jobstats", 1): {"model": "NVIDIA A100-SXM4-80GB", "job_label": 555, "gpu_util_pct": 70,
                                   "uuid": "GPU-5e1a7c22-0000-4000-8000-00000000000a", "hbm_used_mib": 1024,
                                   "hbm_total_mib": 81920, "power_w": 123.456, "temp_c": 55}},
    "nvml": {("nvml", 0): {**A100, "job_label": 2, "gpu_util_pct": 92.634, "hbm_used_mib": 14828, "power_w": 248.523,
                           "tensor_active_frac": 0.00673, "fp32_active_frac": 0.35734,
                           "pcie_tx_bytes_s": 10392774, "pcie_rx_bytes_s": 44930668},
             ("nvml", 1): {**A100, "job_label": 1, "gpu_util_pct": 39.714, "hbm_used_mib": 22336, "power_w": 236.037,
                           "tensor_active_frac": 0.03662, "fp32_active_frac": 0.10947,
                           "pcie_tx_bytes_s": 96079424, "pcie_rx_bytes_s": 813152160}},
    "nvidia-smi": {("nvidia-smi", 0): {"model": "NVIDIA GeForce RTX 2080 SUPER", "gpu_util_pct": 7, "power_w": 28.07,
                                       "uuid": "df6e7a7c-7314-46f8-abc4-b88b36dcf3aa", "hbm_used_mib": 674,
                                       "hbm_total_mib": 8192, "temp_c": 34, "sm_clock_mhz": 6}},
    "omnistat": {("omnistat", 0): {**MI250X, "gpu_util_pct": 85.5, "hbm_used_mib": 8026.2, "dram_active_frac": 0.22,
                                   "power_w": 420, "energy_mj": 26181130255.356, "temp_c": 54, "uuid": "0xa2f0"},
                 ("omnistat", 1): {**MI250X, "gpu_util_pct": 79, "hbm_used_mib": 32760, "dram_active_frac": 0.2,
                                   "uuid": "0xa2f1"}},
    "amd-dme": {("tw038", 0): {**MI300X, "job_label": 8, "gpu_util_pct": 100, "hbm_used_mib": 183265, "power_w": 748,
                               "energy_mj": 1.4e14, "temp_c": 76, "sm_clock_mhz": 1533, "dram_active_frac": 0.37,
                               "sm_active_frac": 0.63,
                               "tensor_active_frac": 0.415, "uuid": "ccff74a1-0000-1000-80e0-c6d49f5b0d80"},
                ("tw038", 1): {**MI300X, "gpu_util_pct": 0, "hbm_used_mib": 283, "dram_active_frac": 0,
                               "sm_active_frac": 0, "tensor_active_frac": 0,
                               "uuid": "ccff74a1-0000-1000-80e0-c6d49f5b0d81"}},
    "ldms": {("nid001001", 0): {"job_label": 77, "gpu_util_pct": 95, "hbm_used_mib": 30000, "hbm_total_mib": 40000,
                                "gr_engine_active_frac": 0.93, "dram_active_frac": 0.41, "tensor_active_frac": 0.22,
                                "fp16_active_frac": 0, "fp32_active_frac": 0.1, "fp64_active_frac": 0,
                                "sm_active_frac": 0.8, "power_w": 301.5, "energy_mj": 1e9, "temp_c": 61,
                                "pcie_tx_bytes_s": 1e6},
             ("nid001001", 1): {"job_label": 77, "gpu_util_pct": 60, "hbm_used_mib": 1000, "hbm_total_mib": 40000,
                                "gr_engine_active_frac": 0.5, "dram_active_frac": 0.2, "tensor_active_frac": 0,
                                "fp16_active_frac": 0, "fp32_active_frac": 0, "fp64_active_frac": 0.3,
                                "sm_active_frac": 0.4, "power_w": 180, "energy_mj": 2e9, "temp_c": 40,
                                "pcie_tx_bytes_s": 0}},
}  # fmt: skip
"""The rows of each page: what is not named is null."""


class Page(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that has scraped every page three times, from a host of the preset's name."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Page, directory=str(PAGES)))
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    target = f"127.0.0.1:{server.server_port}"
    jobs = [
        {"job_name": name, "metrics_path": f"/{name}.txt", "static_configs": [{"targets": [target]}],
         "relabel_configs": [{"target_label": "instance", "replacement": f"{name}:9400"}]}
        for name in presets()
    ]  # fmt: skip
    with prometheus_ingest.LocalPrometheus(tmp_path_factory.mktemp("pages"), jobs=jobs) as prometheus:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and len(list(read(prometheus.url, "ldms"))) < 6:
            time.sleep(0.2)
        yield prometheus.url
    server.shutdown()
    server.server_close()


def config(url: str, names: str) -> Prometheus:
    return Prometheus(url=url, names=names, selector=f'job="{names}"', delay_s=0, retries=0)


def read(url: str, names: str) -> list[dict[str, Any]]:
    now_s = int(time.time())
    batches = PrometheusSource(config(url, names)).read(now_s - 300, now_s)
    return [row for batch in batches for row in batch.rows.to_pylist()]


def test_every_preset_has_a_page_and_a_public_source() -> None:
    assert set(ROWS) == set(presets()) == {path.stem for path in PAGES.iterdir()}
    assert all("github.com/" in exporter.source for exporter in presets().values())


@pytest.mark.parametrize("names", sorted(ROWS))
def test_a_page_gives_the_rows_of_its_preset(url: str, names: str) -> None:
    rows = read(url, names)
    assert {(row["host"], row["gpu"]) for row in rows} == set(ROWS[names])
    for row in rows:
        wanted = ROWS[names][row["host"], row["gpu"]]
        if names == "ceems" and row["gpu"] == 1 and row["job_label"] is None:
            continue  # the flag of its scrape is in the second that is not yet read
        assert row["job_label"] == wanted.get("job_label"), names
        assert (row["model"], row["uuid"]) == (wanted.get("model"), wanted.get("uuid"))
        for counter in COUNTERS:
            expected = wanted.get(counter.column)
            assert row[counter.column] == (None if expected is None else pytest.approx(expected, rel=1e-3))
    if names == "ceems":
        assert any(row["job_label"] == 1009248 for row in rows)


@pytest.mark.parametrize("names", sorted(ROWS))
def test_doctor_finds_no_unknown_metric_and_no_odd_scale_on_a_page(url: str, names: str) -> None:
    first, *others = check_counters(probe(config(url, names)), config(url, names))
    assert first.status == "ok" and f"{len(ROWS[names])} GPU" in first.said
    assert not [check.said for check in others if re.search("of the exporter that almanac|unit mismatch", check.said)]
