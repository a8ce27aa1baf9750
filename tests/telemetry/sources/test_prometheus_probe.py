"""Doctor's findings from a real Prometheus: counters that are off, silent hosts, profiling faults, empty servers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import prometheus_ingest
import pytest

from almanac.config import Prometheus
from almanac.errors import ServerError
from cli.doctor import Check
from cli.doctor.prometheus import check_counters
from telemetry.counters import COUNTERS
from telemetry.sources.exporters import presets
from telemetry.sources.prometheus_probe import Group, PrometheusStatus, Silence, probe

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("prometheus_binaries")]

ROOT = Path(__file__).parents[3]
NOW_S = 1_790_000_000
METRICS = {counter.column: presets()["dcgm"].main(counter.column).name for counter in COUNTERS}
A100, L4 = "NVIDIA A100-SXM4-40GB", "NVIDIA L4"
RECENT, STOPPED = NOW_S - np.arange(290.0, -10.0, -10.0), NOW_S - np.arange(7500.0, 7200.0, -10.0)

Labels = Mapping[str, str]
History = dict[str, list[tuple[Labels, np.ndarray, np.ndarray]]]


class Site:
    """A history to be loaded into Prometheus."""

    def __init__(self) -> None:
        self.history: History = {}

    def add(self, metric: str, labels: Labels, times: np.ndarray, value: float) -> None:
        self.history.setdefault(metric, []).append((labels, times, np.full(len(times), value)))

    def host(
        self, name: str, model: str, gpus: int, *, without: tuple[str, ...] = (), values: Mapping[str, float] = {},
        times: np.ndarray = RECENT, **labels: str,
    ) -> None:  # fmt: skip
        """A host with every counter at 50 or 0.5, but for those named, and its target."""
        target = {"job": "dcgm", "instance": f"{name}:9400"}
        for column, metric in METRICS.items():
            for gpu in range(gpus) if column not in without else ():
                mine = {"Hostname": name, "gpu": str(gpu), "modelName": model, **target, **labels}
                self.add(metric, mine, times, values.get(column, 0.5 if column.endswith("_frac") else 50.0))
        self.add("up", target, RECENT, 1.0 if times is RECENT else 0.0)

    @contextmanager
    def serve(self, folder: Path) -> Iterator[str]:
        prometheus_ingest.write_openmetrics(folder / "history.om", self.history)
        server = prometheus_ingest.LocalPrometheus(folder / "server")
        if self.history:
            server.load(folder / "history.om")
        with server:
            yield server.url


def raw(name: str) -> float:
    """The value that jobstats' exporter shows for 50 in our unit, or for 0.5 of a fraction."""
    metric = presets()["jobstats"].named[name]
    return (0.5 if metric.counter.unit == "fraction" else 50) / metric.scale


PROFILING = tuple(column for column, metric in METRICS.items() if "_PROF_" in metric)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """n1 is well, n2 stuck, n3 an L4 without FP64, n4 without profiling, n5 and n6 silent, n7 MIG; FP16 nowhere."""
    site, off = Site(), ("fp16_active_frac",)
    site.host("n1", A100, 2, without=off)
    site.host("n1", A100, 1, without=off, hpc_job="7")  # the same GPU once more, under a job's label
    site.host("n2", A100, 2, without=off, values={"gpu_util_pct": 90.0, "gr_engine_active_frac": 0.0})
    site.host("n3", L4, 1, without=(*off, "fp64_active_frac"))
    site.host("n4", A100, 2, without=PROFILING)
    site.host("n5", A100, 2, times=STOPPED)
    site.host("n6", A100, 1, times=STOPPED)
    site.history["up"] = [series for series in site.history["up"] if series[0]["instance"] != "n6:9400"]
    for instance in ("1", "2"):
        card = ("gpu_util_pct", "power_w", "energy_mj", "temp_c", "nvlink_tx_bytes_s", "nvlink_rx_bytes_s",
                "pcie_tx_bytes_s", "pcie_rx_bytes_s", "sm_clock_mhz")  # fmt: skip
        missing = (*off, *card, "gr_engine_active_frac")
        site.host("n7", A100, 1, without=missing, GPU_I_ID=instance, GPU_I_PROFILE="1g.5gb")
    with site.serve(tmp_path_factory.mktemp("prometheus")) as url:
        yield url


@pytest.fixture(scope="module")
def status(url: str) -> PrometheusStatus:
    return probe(Prometheus(url=url), clock=lambda: NOW_S)


def findings(status: PrometheusStatus, **options: Any) -> list[Check]:
    return list(check_counters(status, Prometheus(**options)))


def finding(status: PrometheusStatus, said: str) -> Check:
    (found,) = [check for check in findings(status) if said in check.said]
    return found


def test_gpus_are_counted_once_and_by_model(status: PrometheusStatus) -> None:
    assert status.groups == {
        Group("n1", A100): 2, Group("n2", A100): 2, Group("n3", L4): 1, Group("n4", A100): 2,
        Group("n7", A100, is_mig=True): 2,
    }  # fmt: skip
    assert (status.hosts, status.gpus, status.instances, status.scrape_interval_s) == (5, 7, 2, 10.0)
    said = findings(status)[0].said
    assert said.startswith("7 GPUs and 2 MIG instances on 5 hosts, scrape interval 10 s, ")


def test_counters_are_there_off_everywhere_or_off_somewhere(status: PrometheusStatus) -> None:
    held = {counter.counter.column: (counter.present, counter.expected) for counter in status.counters}
    assert held["hbm_used_mib"] == (9, 9)
    assert held["gpu_util_pct"] == held["energy_mj"] == (7, 7)  # not expected of MIG instances
    assert held["fp16_active_frac"] == (0, 9)
    assert held["fp64_active_frac"] == (6, 9)
    assert held["gr_engine_active_frac"] == (5, 9)
    assert held["pcie_rx_bytes_s"] == (5, 7)


def test_a_counter_that_is_off_everywhere(status: PrometheusStatus) -> None:
    check = finding(status, "DCGM_FI_PROF_PIPE_FP16_ACTIVE")
    assert check.status == "warn"
    assert check.said == (
        "DCGM_FI_PROF_PIPE_FP16_ACTIVE is missing on all 9 GPUs; without it, class_fp16, compute_frac_fp16, "
        "compute_sample_frac_fp16, placed_samples_fp16 and 4 more are null"
    )
    assert '"DCGM_FI_PROF_PIPE_FP16_ACTIVE, gauge, Cycles the FP16 pipe was active (fraction)."' in check.todo
    assert "commented out" in check.todo and "CAP_SYS_ADMIN" in check.todo
    assert check.details["gpus_with"] == 0
    assert "class_fp16" in check.details["null_without"] and "mean_fp16_active_frac" in check.details["null_without"]


def test_a_counter_that_some_hosts_and_models_lack(status: PrometheusStatus) -> None:
    check = finding(status, "DCGM_FI_PROF_PIPE_FP64_ACTIVE")
    assert f"missing on 3 of 9 GPUs: n[3-4] ({A100}: 6 of 8 have it; {L4}: none of 1 has it)" in check.said
    assert f"no {L4} has it: run `dcgmi profile --list`" in check.todo
    assert check.details["hosts_without"] == ["n3", "n4"]
    assert check.details["models"] == {A100: {"gpus_with": 6, "gpus": 8}, L4: {"gpus_with": 0, "gpus": 1}}


def test_a_counter_at_0_on_a_busy_gpu_is_a_fault_and_a_pipe_at_0_is_not(status: PrometheusStatus) -> None:
    assert {c.metric.name: c.stuck_hosts for c in status.counters if c.stuck_hosts} == {
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("n2",)
    }
    assert "reads 0 on busy GPUs of n2: a profiling fault" in finding(status, "reads 0").said


def test_silent_hosts_and_what_prometheus_says_of_their_targets(status: PrometheusStatus) -> None:
    assert status.silent == (Silence("n5", "n5:9400", False), Silence("n6", "n6:9400", None))
    said = finding(status, "none for 10 min").said
    assert "n5 (down), n6 (no longer a target)" in said


def test_nothing_essential_is_missing_and_nothing_is_said_of_what_is_there(status: PrometheusStatus) -> None:
    assert {check.status for check in findings(status)} == {"ok", "warn"}
    assert not any("FB_USED" in check.said or "TOTAL_ENERGY" in check.said for check in findings(status))


def test_an_essential_counter_that_is_off_everywhere_is_a_failure(tmp_path: Path) -> None:
    site = Site()
    site.host("n1", A100, 1, without=("hbm_total_mib",))
    with site.serve(tmp_path) as url:
        (check,) = [c for c in findings(probe(Prometheus(url=url), clock=lambda: NOW_S)) if c.status == "fail"]
    assert check.said.startswith("DCGM_FI_DEV_FB_FREE is missing on all 1 GPUs; ")
    assert '"DCGM_FI_DEV_FB_FREE, gauge, Device memory not in use (MiB)."' in check.todo


def only(url: str, **options: Any) -> Check:
    (check,) = findings(probe(Prometheus(url=url, **options), clock=lambda: NOW_S), **options)
    return check


def test_a_selector_that_hides_everything(url: str) -> None:
    check = only(url, selector='job="gpu"')
    assert check.status == "fail"
    assert "match prometheus.selector; without it there are " in check.said
    assert "'job=\"gpu\"'" in check.todo


def test_the_wrong_exporter(url: str) -> None:
    check = only(url, names="jobstats")
    assert (check.status, check.todo) == ("fail", 'set prometheus.names = "dcgm"')


def test_an_exporter_that_is_not_scraped_any_more(tmp_path: Path) -> None:
    site = Site()
    site.host("n1", A100, 1, times=STOPPED)
    with site.serve(tmp_path) as url:
        check = only(url)
    assert check.status == "fail"
    assert "no GPU series of the last 10 min; hosts" in check.said and "n1 (down)" in check.said


def test_a_prometheus_without_any_exporter(tmp_path: Path) -> None:
    site = Site()
    for number in range(3):
        site.add("up", {"job": "node", "instance": f"n{number}:9100"}, RECENT, float(number > 0))
    with site.serve(tmp_path) as url:
        check = only(url)
    assert check.status == "fail"
    assert "Prometheus scrapes 3 targets (1 down), and none has GPU counters" in check.said


def test_an_exporter_without_host_names(tmp_path: Path) -> None:
    site = Site()
    site.host("", A100, 2)
    with site.serve(tmp_path) as url:
        check = only(url)
    assert check.status == "fail"
    assert "40 series belong to no host: no host label" in check.said and "--no-hostname" in check.todo


def test_what_jobstats_exporter_never_has_is_said_once(tmp_path: Path) -> None:
    site = Site()
    for metric in presets()["jobstats"].named:
        site.add(metric, {"instance": "d1:9445", "minor_number": "0", "name": A100}, RECENT, raw(metric))
    with site.serve(tmp_path) as url:
        checks = findings(probe(Prometheus(url=url, names="jobstats"), clock=lambda: NOW_S), names="jobstats")
    assert [check.status for check in checks] == ["ok", "warn"]
    assert "fp64_active_frac" in checks[1].said and "energy_mj" in checks[1].said


def test_jobstats_engine_activity_is_missed_only_on_mig_instances(tmp_path: Path) -> None:
    site, engine = Site(), "nvidia_gpu_graphics_util_percent"
    for metric in presets()["jobstats"].named:
        if metric != engine:
            site.add(metric, {"instance": "d1:9445", "minor_number": "0", "name": A100}, RECENT, raw(metric))
            mig = {"instance": "d2:9445", "minor_number": "0", "name": A100, "GPU_I_ID": "7"}
            site.add(metric, mig, RECENT, raw(metric))
    with site.serve(tmp_path) as url:
        checks = findings(probe(Prometheus(url=url, names="jobstats"), clock=lambda: NOW_S), names="jobstats")
    assert [check.said.split(" is ")[0] for check in checks if "missing" in check.said] == [engine]
    assert checks[1].details["hosts_without"] == ["d2"] and "0.2.3" in checks[1].todo


@contextmanager
def exporter(collectors: Path) -> Iterator[str]:
    """The address of a small dcgm-exporter of two busy GPUs, whose counters are those of its --collectors file."""
    lines = [line for line in collectors.read_text().splitlines() if line.startswith("DCGM_")]
    text = ""
    for name, kind, about in (line.split(", ", 2) for line in lines):
        text += f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
        value = 0.6 if "(fraction)" in about else 60
        text += "".join(f'{name}{{gpu="{gpu}",Hostname="n1",modelName="{A100}"}} {value}\n' for gpu in range(2))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("name", "off"), [("almanac-counters.csv", 0), ("almanac-counters-basic.csv", 11)])
def test_an_exporter_with_our_list_is_scraped_and_nothing_of_the_list_is_off(
    tmp_path: Path, name: str, off: int
) -> None:
    with exporter(ROOT / "slurm_hooks" / "exporter" / name) as address:
        with prometheus_ingest.LocalPrometheus(tmp_path, scrapes=[address]) as server:
            for _ in range(3000):
                status = probe(Prometheus(url=server.url))
                if status.scrape_interval_s:
                    break
                time.sleep(0.1)
            checks = findings(status)
    assert (status.gpus, status.hosts) == (2, 1)
    assert checks[0].details["counters"]["energy_mj"] == {"gpus_with": 2, "gpus": 2}
    assert len(checks) == 1 + off
    assert all("DCGM_FI_PROF_" in check.said and " is missing on all 2 GPUs" in check.said for check in checks[1:])


def test_a_selector_that_is_no_promql_is_told(url: str) -> None:
    with pytest.raises(ServerError, match="parse error"):
        probe(Prometheus(url=url, selector="job=dcgm"), clock=lambda: NOW_S)
