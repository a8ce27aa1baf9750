"""Whose sample a series is, from its labels."""

from __future__ import annotations

import pytest

from telemetry.counters import COUNTERS
from telemetry.sources.exporters import (
    Gpu,
    UnusableSeriesError,
    identify,
    parse_job_label,
    presets,
    shared_names,
    short_host,
)

DCGM, JOBSTATS = presets()["dcgm"], presets()["jobstats"]


@pytest.mark.parametrize(
    ("host", "suffix", "expected"),
    [
        ("n1.cluster.example", "", "n1"),
        ("n1", "", "n1"),
        ("n1.cluster.example", "cluster.example", "n1"),
        ("n1.cluster.example", ".cluster.example", "n1"),
        ("n1.rack2.cluster.example", "cluster.example", "n1.rack2"),
        ("n1.other", "cluster.example", "n1.other"),
        ("10.0.0.5", "", "10.0.0.5"),
        ("fe80::1", "", "fe80::1"),
    ],
)
def test_short_host(host: str, suffix: str, expected: str) -> None:
    assert short_host(host, suffix) == expected


@pytest.mark.parametrize(
    ("hosts", "shared"),
    [
        (["n1.a.example", "n1.b.example", "n2.a.example"], {"n1"}),
        (["n1", "n1.a.example", "N1.A.example", "n1.a"], set()),
        (["N1.a.example", "n1.ab.example"], {"n1"}),
        (["10.0.0.5", "10.0.0.6", "fe80::1", ""], set()),
    ],
)
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
    [
        ({"gpu": "0"}, "no host label"),
        ({"gpu": "0", "Hostname": ""}, "no host label"),
        ({"gpu": "0", "instance": "n1:9400"}, "no host label"),
        ({"Hostname": "n1"}, "no gpu label"),
        ({"Hostname": "n1", "gpu": "nvidia0"}, "gpu label is no GPU index"),
        ({"Hostname": "n1", "gpu": "32768"}, "gpu label is no GPU index"),
        ({"Hostname": "n1", "gpu": "-1"}, "gpu label is no GPU index"),
        ({"Hostname": "n1", "gpu": "٣"}, "gpu label is no GPU index"),
        ({"Hostname": "n1\n", "gpu": "0"}, "host label is no host name"),
        ({"Hostname": "../n1", "gpu": "0"}, "host label is no host name"),
        ({"Hostname": "n1", "gpu": "0", "GPU_I_ID": "3\x1b"}, "MIG label is no instance id"),
    ],
)
def test_unusable_series(labels: dict[str, str], reason: str) -> None:
    with pytest.raises(UnusableSeriesError, match=reason):
        identify(labels, DCGM)


@pytest.mark.parametrize(
    ("labels", "profile"),
    [
        ({"GPU_I_ID": "7", "GPU_I_PROFILE": "1g.10gb"}, "1g.10gb"),
        ({"GPU_I_ID": "7", "GPU_I_PROFILE": "1g.10gb+me"}, "1g.10gb+me"),
        ({"GPU_I_ID": "7", "modelName": "NVIDIA A100-SXM4-80GB MIG 1g.10gb"}, "1g.10gb"),
        ({"GPU_I_ID": "7"}, ""),
        ({"GPU_I_ID": "7", "GPU_I_PROFILE": '1g.10gb"} 7'}, ""),
        ({"GPU_I_ID": "7", "GPU_I_PROFILE": "\x1b[31m1g"}, ""),
        ({"GPU_I_ID": "7", "GPU_I_PROFILE": "x" * 100_000}, ""),
        ({"GPU_I_ID": "", "GPU_I_PROFILE": "1g.10gb"}, ""),
    ],
)
def test_the_profile_of_an_instance_is_one_that_nvidia_could_name(labels: dict[str, str], profile: str) -> None:
    series = identify({"Hostname": "n1", "gpu": "0", **labels}, DCGM)
    assert series.profile == profile


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (None, "")),
        ("0", (None, "")),
        ("101", (101, "")),
        (str(2**53), (2**53, "")),
        (str(2**53 + 1), (None, str(2**53 + 1))),
        ("12_3", (None, "12_3")),
        ("1e3", (None, "1e3")),
    ],
)
def test_job_label(text: str, expected: tuple[int | None, str]) -> None:
    assert parse_job_label(text) == expected


def test_every_counter_has_a_dcgm_name_and_jobstats_has_six() -> None:
    assert all(DCGM.names_of(counter.column) for counter in COUNTERS)
    assert [metric.counter.column for metric in JOBSTATS.metrics] == [
        "gpu_util_pct",
        "hbm_used_mib",
        "hbm_total_mib",
        "gr_engine_active_frac",
        "power_w",
        "temp_c",
    ]
