"""Sites whose dcgm-exporter is upgraded, and pages with unknown names or units, on a real Prometheus."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from almanac.config import Prometheus
from almanac.errors import SourceError
from cli.doctor.counters import check_counters
from cli.doctor.findings import Check
from cli.main import cli
from telemetry.sources.base import RowBatch
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_probe import probe

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("prometheus_binaries")]

NOW_S = 1_790_000_000
TIMES = NOW_S - np.arange(290.0, -10.0, -10.0)
OLD = {
    "DCGM_FI_DEV_GPU_UTIL": 95.0, "DCGM_FI_DEV_FB_USED": 30_000.0, "DCGM_FI_DEV_FB_FREE": 51_920.0,
    "DCGM_FI_DEV_POWER_USAGE": 301.5, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 1e9, "DCGM_FI_DEV_GPU_TEMP": 61.0,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.93, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.22, "DCGM_FI_PROF_DRAM_ACTIVE": 0.41,
}  # fmt: skip
NEW = {
    "DCGM_FI_DEV_GPU_UTIL_RATIO": 0.95, "DCGM_FI_DEV_FB_USED_BYTES": 30_000.0 * 2**20,
    "DCGM_FI_DEV_FB_FREE_BYTES": 51_000.0 * 2**20, "DCGM_FI_DEV_FB_CAPACITY_BYTES": 81_920.0 * 2**20,
    "DCGM_FI_DEV_BOARD_POWER_WATTS": 301.5, "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL": 1e6,
    "DCGM_FI_DEV_GPU_TEMP_CELSIUS": 61.0, "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": 0.93,
    "DCGM_FI_PROF_TENSOR_UTIL_RATIO": 0.22, "DCGM_FI_PROF_DRAM_UTIL_RATIO": 0.41,
}  # fmt: skip
OURS = {
    "gpu_util_pct": 95, "hbm_used_mib": 30_000, "hbm_total_mib": 81_920, "power_w": 301.5, "energy_mj": 1e9,
    "temp_c": 61, "gr_engine_active_frac": 0.93, "tensor_active_frac": 0.22, "dram_active_frac": 0.41,
}  # fmt: skip
LETTER = {name[:-1] + "Q": value for name, value in NEW.items()}
SITES = {
    "letter": LETTER,
    "prefix": {name.replace("DCGM", "DCGN"): value for name, value in NEW.items()},
    "one": {**NEW, "DCGM_FI_DEV_GPU_UTIL_RATIO": None, "DCGM_FI_DEV_GPU_UTIL_RATIQ": 0.95},
    "many": {**NEW, **{f"DCGM_FI_DEV_FUTURE_{number:02}": 1.0 for number in range(60)}},
    "unused": {"DCGM_FI_DEV_XID_ERRORS": 0.0, "DCGM_EXP_XID_ERRORS_COUNT": 0.0},
    "percent": {**NEW, "DCGM_FI_DEV_GPU_UTIL_RATIO": 95.0, "DCGM_FI_DEV_XID_ERRORS": 0.0},
}


def load(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def history() -> dict[str, list[tuple[Mapping[str, str], np.ndarray, np.ndarray]]]:
    """k1 is upgraded after 150 s, in the middle of job 7; k2 was not, k3 was before. The other sites have one GPU."""
    found: dict[str, list[tuple[Mapping[str, str], np.ndarray, np.ndarray]]] = {}

    def add(site: str, host: Mapping[str, str], names: Mapping[str, float | None], times: np.ndarray) -> None:
        card = {"gpu": "0", "UUID": "GPU-0", "modelName": "NVIDIA H100 80GB HBM3", "hpc_job": "7", "site": site}
        for name, value in names.items():
            if value is not None:
                found.setdefault(name, []).append(({**card, **host}, times, np.full(len(times), value)))

    add("mixed", {"Hostname": "k1", "DCGM_FI_DRIVER_VERSION": "570.1"}, OLD, TIMES[:15])
    add("mixed", {"hostname": "k1", "DCGM_FI_SYSTEM_DRIVER_VERSION": "580.0"}, NEW, TIMES[15:])
    add("mixed", {"Hostname": "k2"}, OLD, TIMES)
    add("mixed", {"hostname": "k3"}, NEW, TIMES)
    add("turned", {"hostname": "k1"}, NEW, TIMES[:5])
    add("turned", {"hostname": "k1"}, LETTER, TIMES[5:])
    add("between", {"hostname": "k1"}, NEW, TIMES)
    add("between", {"hostname": "k2"}, LETTER, TIMES + 5)
    for site, names in SITES.items():
        add(site, {"hostname": "k1"}, names, TIMES)
    found["up"] = [({"job": "dcgm", "instance": "k1:9400"}, TIMES, np.ones(len(TIMES)))]
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    local, folder = load("local_prometheus"), tmp_path_factory.mktemp("prometheus")
    local.write_openmetrics(folder / "history.om", history())
    server = local.LocalPrometheus(folder / "server")
    server.load(folder / "history.om")
    with server:
        yield server.url


def config(url: str, site: str) -> Prometheus:
    return Prometheus(url=url, selector=f'site="{site}"', delay_s=0, retries=0)


def read(url: str, site: str) -> list[RowBatch]:
    source = PrometheusSource(config(url, site), clock=lambda: NOW_S + 60)
    return list(source.read(NOW_S - 300, NOW_S + 10))


def findings(url: str, site: str) -> list[Check]:
    return list(check_counters(probe(config(url, site), clock=lambda: NOW_S + 5), config(url, site)))


def ingest(tmp_path: Path, url: str, site: str, *argv: str) -> Result:
    file = tmp_path / "almanac.toml"
    file.write_text(
        f'[site]\ncluster = "c"\n[store]\npath = "{tmp_path}/store"\n'
        f'[prometheus]\nurl = "{url}"\ndelay_s = 0\nselector = \'site="{site}"\'\n'
    )
    span = ("-S", f"@{NOW_S - 3600}", "-E", f"@{NOW_S + 10}")
    argv = ("--config", str(file), "ingest", "--source", "prometheus", *span, *argv)
    return CliRunner().invoke(cli, argv, standalone_mode=False)


def test_nodes_that_are_upgraded_one_by_one_are_read_whole(url: str) -> None:
    batches = read(url, "mixed")
    rows: list[dict[str, Any]] = [row for batch in batches for row in batch.rows.to_pylist()]
    assert [row["host"] for row in rows].count("k1") == len(TIMES) == len(rows) / 3
    assert all({name: row[name] for name in OURS} == pytest.approx(OURS) for row in rows)
    assert all(row["job_label"] == 7 for row in rows)
    assert not any(batch.counts.dropped for batch in batches)


def test_a_job_that_runs_is_read_from_its_upgraded_node_alone(url: str) -> None:
    """As the report of a running job does; it is not the place to say that names are unknown."""
    source = PrometheusSource(config(url, "mixed"), hosts=("k1",), clock=lambda: NOW_S + 60)
    rows = [row for batch in source.read(NOW_S - 300, NOW_S + 10) for row in batch.rows.to_pylist()]
    assert {row["host"] for row in rows} == {"k1"} and len(rows) == len(TIMES)
    unknown = PrometheusSource(config(url, "letter"), hosts=("k1",), clock=lambda: NOW_S + 60)
    assert list(unknown.read(NOW_S - 300, NOW_S + 10)) == []


def test_doctor_says_which_hosts_have_the_names_of_a_newer_release(url: str) -> None:
    first, *others = findings(url, "mixed")
    assert (first.status, first.details["counters"]["gpu_util_pct"]) == ("ok", {"gpus_with": 3, "gpus": 3})
    assert "names of release 4.9 and newer on k[1,3]" in first.said
    assert all("is missing on all 3 GPUs" in check.said for check in others)


@pytest.mark.parametrize("site", ["letter", "prefix", "unused"])
def test_an_exporter_without_a_known_counter_is_a_failed_source_and_its_metrics_are_named(url: str, site: str) -> None:
    if site == "unused":
        assert read(url, site) == []  # GPUs may be powered down where other exporters run
    else:
        with pytest.raises(SourceError, match="no counter that almanac knows") as raised:
            read(url, site)
        assert f"but {len(SITES[site])} unknown metrics ({min(SITES[site])}, " in str(raised.value)
    (check,) = [check for check in findings(url, site) if check.status == "fail"]
    assert set(check.details["other_metrics"]) >= set(SITES[site]) and all(name in check.said for name in SITES[site])
    assert "install dcgm-exporter" not in check.said + check.todo


def test_one_unknown_name_is_counted_and_named_beside_what_is_read(url: str) -> None:
    *_, last = read(url, "one")
    assert (last.rows.num_rows, last.watermark_s) == (0, None)
    assert last.counts.dropped == {"series of an unknown metric: DCGM_FI_DEV_GPU_UTIL_RATIQ": 1}
    (check,) = [check for check in findings(url, "one") if "does not know" in check.said]
    assert check.details == {"unknown_metrics": ["DCGM_FI_DEV_GPU_UTIL_RATIQ"]}


def test_names_that_all_become_unknown_are_named_with_what_was_read_before(url: str) -> None:
    first, last = read(url, "turned")
    assert first.rows.num_rows == 5
    assert set(last.counts.dropped) == {f"series of an unknown metric: {name}" for name in LETTER}


def test_very_many_unknown_names_are_counted_and_not_all_written_out(url: str) -> None:
    *_, last = read(url, "many")
    assert (last.counts.seen, len(last.counts.dropped), max(last.counts.dropped.values())) == (60, 41, 20)


def test_a_ratio_in_percent_is_dropped_counted_and_named(url: str) -> None:
    (batch,) = read(url, "percent")
    assert batch.counts.dropped == {"unit mismatch: DCGM_FI_DEV_GPU_UTIL_RATIO": len(TIMES)}
    assert all(row["gpu_util_pct"] is None and row["power_w"] == 301.5 for row in batch.rows.to_pylist())
    (check,) = [check for check in findings(url, "percent") if "unit mismatch" in check.said]
    assert "DCGM_FI_DEV_GPU_UTIL_RATIO has the value 95 on k1, its unit allows 0 to 1" in check.said


@pytest.mark.parametrize("site", ["mixed", "percent"])
def test_what_is_right_gives_no_finding_of_unknown_metrics(url: str, site: str) -> None:
    assert not [check for check in findings(url, site) if re.search("does not know|other metric", check.said)]


def test_ingest_ends_with_5_where_no_name_is_known(tmp_path: Path, url: str) -> None:
    found = ingest(tmp_path, url, "letter")
    assert found.return_value == 5
    assert "no counter that almanac knows" in found.output and min(LETTER) in found.output


def test_a_span_without_a_scrape_is_no_failure_beside_other_metrics(url: str) -> None:
    """Between two scrapes of a counter there can be one of an unknown metric of another target."""
    source = PrometheusSource(config(url, "between"), clock=lambda: NOW_S + 60)
    assert list(source.read(NOW_S - 9, NOW_S - 4)) == []


def test_ingest_of_an_empty_span_ends_with_0_and_a_warning(tmp_path: Path, url: str) -> None:
    found = ingest(tmp_path, url, "nowhere")
    assert found.return_value == 0
    assert "warning: prometheus gave no record of the 1 h that were read" in found.output
    assert "almanac doctor" in found.output


def test_ingest_of_a_short_empty_span_and_of_a_full_one_warns_of_nothing(tmp_path: Path, url: str) -> None:
    full = ingest(tmp_path, url, "mixed")
    short = ingest(tmp_path, url, "nowhere", "-S", f"@{NOW_S - 60}")
    assert (full.return_value, short.return_value) == (0, 0)
    assert "warning" not in full.output + short.output
