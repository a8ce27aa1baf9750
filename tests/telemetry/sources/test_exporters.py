"""Series of exporters: their owner by labels, names of all releases, and units, also on a real Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import prometheus_ingest
import pytest
from click.testing import CliRunner, Result

from almanac.config import Prometheus
from almanac.errors import SourceError
from almanac.records import Counts
from cli.doctor import Check
from cli.doctor.prometheus import check_counters
from cli.main import cli
from telemetry.counters import COUNTERS
from telemetry.sources.exporters import presets
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_probe import probe
from telemetry.sources.series import (
    Gpu,
    UnusableSeriesError,
    identify,
    parse_job_label,
    shared_names,
    short_host,
    within_unit,
)  # fmt: skip
from telemetry.sources.source import RowBatch

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
LETTER = {name[:-1] + "Q": value for name, value in NEW.items()}
SITES = {
    "letter": LETTER,
    "prefix": {name.replace("DCGM", "DCGN"): value for name, value in NEW.items()},
    "one": {**NEW, "DCGM_FI_DEV_GPU_UTIL_RATIO": None, "DCGM_FI_DEV_GPU_UTIL_RATIQ": 0.95},
    "many": {**NEW, **{f"DCGM_FI_DEV_FUTURE_{number:02}": 1.0 for number in range(60)}},
    "unused": {"DCGM_FI_DEV_MEM_CLOCK": 0.0, "DCGM_EXP_XID_ERRORS_COUNT": 0.0},
    "percent": {**NEW, "DCGM_FI_DEV_GPU_UTIL_RATIO": 95.0, "DCGM_FI_DEV_XID_ERRORS": 0.0},
}


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
    folder = tmp_path_factory.mktemp("prometheus")
    prometheus_ingest.write_openmetrics(folder / "history.om", history())
    server = prometheus_ingest.LocalPrometheus(folder / "server")
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


DCGM, JOBSTATS = presets()["dcgm"], presets()["jobstats"]


@pytest.mark.parametrize(
    ("host", "suffix", "expected"),
    [("n1.cluster.example", "", "n1"), ("n1", "", "n1"), ("n1.cluster.example", "cluster.example", "n1"),
     ("n1.cluster.example", ".cluster.example", "n1"), ("n1.rack2.cluster.example", "cluster.example", "n1.rack2"),
     ("n1.other", "cluster.example", "n1.other"), ("10.0.0.5", "", "10.0.0.5"), ("fe80::1", "", "fe80::1")],
)  # fmt: skip
def test_short_host(host: str, suffix: str, expected: str) -> None:
    assert short_host(host, suffix) == expected


@pytest.mark.parametrize(
    ("hosts", "shared"),
    [(["n1.a.example", "n1.b.example", "n2.a.example"], {"n1"}),
     (["n1", "n1.a.example", "N1.A.example", "n1.a"], set()), (["N1.a.example", "n1.ab.example"], {"n1"}),
     (["10.0.0.5", "10.0.0.6", "fe80::1", ""], set())],
)  # fmt: skip
def test_hosts_that_differ_only_in_their_domain_keep_it(hosts: list[str], shared: set[str]) -> None:
    found = shared_names([{"Hostname": host} for host in hosts], DCGM)
    assert found == shared
    kept = {identify({"Hostname": host, "gpu": "0"}, DCGM, "", found).gpu.host for host in hosts if host}
    assert {host for host in hosts if host.lower().partition(".")[0] in shared} <= kept
    assert len(kept) == (len(hosts) if shared else len({short_host(host) for host in hosts if host}))


@pytest.mark.parametrize(
    ("instance", "host"),
    [("d1.cluster.example:9445", "d1"), ("d1", "d1"), ("[fe80::1]:9445", "fe80::1"), ("10.1.2.3:9445", "10.1.2.3")],
)
def test_jobstats_hosts_are_instances_without_the_port(instance: str, host: str) -> None:
    assert identify({"instance": instance, "minor_number": "3"}, JOBSTATS).gpu == Gpu(host, 3)


def test_minor_number_goes_before_ordinal() -> None:
    labels = {"instance": "d1:9445", "minor_number": "1", "ordinal": "0", "jobid": "7", "uuid": "u", "name": "A100"}
    series = identify(labels, JOBSTATS)
    assert (series.gpu.gpu, series.job_id, series.uuid, series.model) == (1, 7, "u", "A100")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [({"gpu": "0"}, "no host label"), ({"gpu": "0", "Hostname": ""}, "no host label"),
     ({"gpu": "0", "instance": "n1:9400"}, "no host label"), ({"Hostname": "n1"}, "no gpu label"),
     ({"Hostname": "n1", "gpu": "nvidia0"}, "gpu label is no GPU index"),
     ({"Hostname": "n1", "gpu": "32768"}, "gpu label is no GPU index"),
     ({"Hostname": "n1", "gpu": "-1"}, "gpu label is no GPU index"),
     ({"Hostname": "n1", "gpu": "٣"}, "gpu label is no GPU index"),
     ({"Hostname": "n1\n", "gpu": "0"}, "host label is no host name"),
     ({"Hostname": "../n1", "gpu": "0"}, "host label is no host name"),
     ({"Hostname": "n1", "gpu": "0", "GPU_I_ID": "3\x1b"}, "MIG label is no instance id")],
)  # fmt: skip
def test_unusable_series(labels: dict[str, str], reason: str) -> None:
    with pytest.raises(UnusableSeriesError, match=reason):
        identify(labels, DCGM)


@pytest.mark.parametrize(
    ("labels", "profile"),
    [({"GPU_I_ID": "7", "GPU_I_PROFILE": "1g.10gb"}, "1g.10gb"),
     ({"GPU_I_ID": "7", "GPU_I_PROFILE": "1g.10gb+me"}, "1g.10gb+me"),
     ({"GPU_I_ID": "7", "modelName": "NVIDIA A100-SXM4-80GB MIG 1g.10gb"}, "1g.10gb"), ({"GPU_I_ID": "7"}, ""),
     ({"GPU_I_ID": "7", "GPU_I_PROFILE": '1g.10gb"} 7'}, ""), ({"GPU_I_ID": "7", "GPU_I_PROFILE": "\x1b[31m1g"}, ""),
     ({"GPU_I_ID": "7", "GPU_I_PROFILE": "x" * 100_000}, ""), ({"GPU_I_ID": "", "GPU_I_PROFILE": "1g.10gb"}, "")],
)  # fmt: skip
def test_the_profile_of_an_instance_is_one_that_nvidia_could_name(labels: dict[str, str], profile: str) -> None:
    series = identify({"Hostname": "n1", "gpu": "0", **labels}, DCGM)
    assert series.profile == profile


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", (None, "")), ("0", (None, "")), ("101", (101, "")), (str(2**53), (2**53, "")),
     (str(2**53 + 1), (None, str(2**53 + 1))), ("12_3", (None, "12_3")), ("1e3", (None, "1e3"))],
)  # fmt: skip
def test_job_label(text: str, expected: tuple[int | None, str]) -> None:
    assert parse_job_label(text) == expected


def test_every_counter_has_a_dcgm_name_and_jobstats_has_six() -> None:
    assert all(DCGM.names_of(counter.column) for counter in COUNTERS)
    columns = "gpu_util_pct hbm_used_mib hbm_total_mib gr_engine_active_frac power_w temp_c"
    assert [metric.counter.column for metric in JOBSTATS.metrics] == columns.split()


NAMED = {name: metric for exporter in presets().values() for name, metric in exporter.named.items()}


def kept(name: str, *series: Sequence[float]) -> tuple[list[list[float]], Counts]:
    """The values that are kept of each series, as the metric gives them."""
    metric, counts = NAMED[name], Counts()
    raw = np.concatenate([np.array(values, dtype=np.float64) for values in series])
    number = np.repeat(np.arange(len(series)), [len(values) for values in series])
    flags = within_unit(metric, raw * metric.scale, number, np.ones(len(raw), dtype=bool), counts)
    assert sum(counts.dropped.values()) == int((~flags).sum())
    return [raw[flags & (number == at)].tolist() for at in range(len(series))], counts


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", 95, "0 to 1"),
        ("DCGM_FI_PROF_SM_UTIL_RATIO", 88, "0 to 1"),
        ("DCGM_FI_PROF_SM_ACTIVE", 88, "0 to 1"),
        ("DCGM_FI_DEV_GPU_UTIL", 0.95, "1 to 100"),
        ("DCGM_FI_DEV_GPU_UTIL", 101, "1 to 100"),
        ("DCGM_FI_DEV_FB_USED_BYTES", 2**44, "1048576 to 1.099512e+12"),  # 16 TiB
        ("DCGM_FI_DEV_FB_USED_BYTES", 30_000, "1048576 to 1.099512e+12"),
        ("DCGM_FI_DEV_FB_CAPACITY_BYTES", 81_920, "1048576 to 1.099512e+12"),
        ("DCGM_FI_DEV_FB_USED", 3e10, "1 to 1048576"),
        ("DCGM_FI_DEV_BOARD_POWER_WATTS", -1, "1 to 2000"),
        ("DCGM_FI_DEV_POWER_USAGE", 301_500, "1 to 2000"),
        ("nvidia_gpu_power_usage_milliwatts", 301, "1000 to 2000000"),
        ("nvidia_gpu_duty_cycle", 0.5, "1 to 100"),
    ],
)
def test_a_value_that_the_unit_forbids_is_named_with_its_metric(name: str, value: float, limits: str) -> None:
    found, counts = kept(name, [value, value])
    assert found == [[]]
    assert counts.dropped == {f"unit mismatch: {name}": 2}
    assert counts.examples[f"unit mismatch: {name}"] == f"{float(value):.7g} (expected: {limits})"


@pytest.mark.parametrize(("name", "full"), [("DCGM_FI_PROF_SM_ACTIVE", 1.0), ("DCGM_FI_DEV_GPU_UTIL", 100.0)])
def test_a_share_that_rounding_took_above_its_limit_is_kept(name: str, full: float) -> None:
    found, counts = kept(name, [1.0002 * full] * 3, [1.02 * full, full])
    assert (found, counts.dropped) == ([[1.0002 * full] * 3, [full]], {f"unit mismatch: {name}": 1})


def test_a_series_in_another_unit_leaves_nothing_and_one_value_that_no_unit_explains_costs_no_other() -> None:
    """Else 1% would be 100%, and the zeros alone an idle GPU; a series of 0 and 1 may mean either."""
    found, _ = kept("DCGM_FI_DEV_GPU_UTIL_RATIO", [0, 1, 95, 97, 0], [0.5, 0.93, 1.0], [0, 1, 1.002], [0, 0])
    assert found == [[], [0.5, 0.93, 1.0], [], [0, 0]]
    assert kept("DCGM_FI_DEV_GPU_UTIL", [0, 0.95, 1, 0.97], [0, 1, 50], [100, 100])[0] == [[], [0, 1, 50], [100, 100]]
    assert kept("DCGM_FI_DEV_GPU_UTIL", [1e17], [1], [0, 1e17, 1])[0] == [[], [1], [0, 1]]


def test_every_name_reads_the_range_of_its_counter_in_its_own_unit() -> None:
    for metric in NAMED.values():
        low, high = metric.limits
        values = [low, (low + high) / 2, high] if low or metric.zero else [high / 3, high / 2, high]
        found, counts = kept(metric.name, values)
        assert len(found[0]) == 3 and not counts.dropped, metric
