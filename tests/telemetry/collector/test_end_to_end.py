"""From GPUs to the report of a job: the collector, a real Prometheus, `almanac ingest`, and `almanac report`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import cli
from tests.telemetry.collector.conftest import NvmlStub

PROGRAM = "import sys; from telemetry.collector.main import main; main()"
HEAD = (
    "job_id,submit_s,start_s,end_s,elapsed_s,user,account,partition,qos,name,state,node_count,node_list,cpu_count,"
    "gpu_count"
)
RUN_S = 16


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(*argv: object) -> Iterator[None]:
    process = subprocess.Popen([*map(str, argv)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(300)


def wait_for(url: str, said: str) -> None:
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        with suppress(OSError), urllib.request.urlopen(url, timeout=300) as answer:
            if said in answer.read().decode():
                return
        time.sleep(0.1)
    raise AssertionError(f"{url} does not say {said}")


@pytest.mark.cluster
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, whose job mapping counts")
def test_a_jobs_report_has_the_figures_of_its_gpu(stub: NvmlStub, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus not found")
    collector, prometheus, gpus = free_port(), free_port(), ("count 2", "gpm 1", "set 1 used 5000", "set 1 sm 20")
    jobs = tmp_path / "map"
    jobs.mkdir(mode=0o755)
    (jobs / "0").write_text("71\n")
    (jobs / "1").write_text("72\n")
    scrapes = tmp_path / "prometheus.yml"
    target = f"static_configs: [{{targets: ['127.0.0.1:{collector}']}}]"
    scrapes.write_text(f"global: {{scrape_interval: 1s}}\nscrape_configs:\n  - job_name: gpus\n    {target}\n")
    stub.set(*gpus)
    options = (f"--listen=127.0.0.1:{collector}", "--host=n1", "--interval=1", f"--job-mapping-dir={jobs}")
    server = ("prometheus", f"--config.file={scrapes}", f"--storage.tsdb.path={tmp_path / 'data'}",
              f"--web.listen-address=127.0.0.1:{prometheus}")  # fmt: skip
    config = tmp_path / "almanac.toml"
    config.write_text(
        f'[site]\ncluster = "c"\n[store]\npath = "{tmp_path}/store"\n[filters]\nmin_elapsed_s = 5\n'
        f'[prometheus]\nurl = "http://127.0.0.1:{prometheus}"\ndelay_s = 0\n'
    )
    with running(sys.executable, "-c", PROGRAM, *options), running(*server):
        wait_for(f"http://127.0.0.1:{prometheus}/api/v1/query?query=DCGM_FI_PROF_SM_ACTIVE", '"hpc_job":"71"')
        start_s = int(time.time())
        time.sleep(RUN_S / 2)
        stub.set(*gpus, "set 0 used 41234.5")
        time.sleep(RUN_S / 2)
        end_s = int(time.time())
        rows = [f"{job},{start_s},{start_s},{end_s},{end_s - start_s},ann,a,gpu,normal,train,COMPLETED,1,n1,8,1"
                for job in (71, 72)]  # fmt: skip
        (tmp_path / "jobs.csv").write_text("\n".join([HEAD, *rows, ""]))
        ingest = ["ingest", "--source", "prometheus", "-S", f"@{start_s - 60}"]
        for words in (["ingest", "--no-summary", "--jobs", str(tmp_path / "jobs.csv")], ingest):
            done = CliRunner().invoke(cli, ["--config", str(config), *words])
            assert done.exit_code == 0, done.output
    said = CliRunner().invoke(cli, ["--config", str(config), "report", "71", "72", "--json"])
    first, second = (each["metrics"] for each in json.loads(said.output))
    assert (first["verdict"], first["attributed_by"], first["gpu_model"]) == ("ok", "label", "H100-80")
    # Found in the second half only: the peak is exact, the mean is of both halves.
    assert (first["hbm_peak_mib"], first["hbm_capacity_mib"], second["hbm_peak_mib"]) == (41234.5, 81559, 5000)
    assert 22000 < first["mean_hbm_used_mib"] < 39000
    assert first["mean_gpu_util_pct"] == 80 and first["mean_power_w"] == 500 and first["max_temp_c"] == 60
    assert first["mean_sm_active_frac"] == pytest.approx(0.7) and second["mean_sm_active_frac"] == pytest.approx(0.2)
    assert first["mean_tensor_active_frac"] == pytest.approx(0.4) and first["pipes_used"] == ["tensor"]
    assert first["energy_j"] == pytest.approx(500 * (end_s - start_s), rel=0.01)
    assert first["mean_pcie_tx_bytes_s"] == 100 << 20
    for name in ("mean_dram_active_frac", "mean_fp32_active_frac", "mean_fp64_active_frac", "mean_nvlink_tx_bytes_s"):
        assert first[name] is None, "GPM means something else, or the stub lacks it: absent, never 0"
