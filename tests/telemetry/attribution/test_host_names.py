"""Hosts of telemetry and nodes of Slurm that are the same host, and those that only look the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_site import Rows, Site, is_same, job, prolog, samples

from telemetry.attribution.allocations import JobRun, match_days, match_hosts

DAY_S = 86_400


def test_one_host_that_slurm_and_the_exporter_write_in_two_ways() -> None:
    for host, node in [
        ("NL2", "nl2"), ("nl2", "NL2"), ("nid001.cluster.example", "nid001"), ("nid001", "nid001.cluster.example"),
        ("nid001.cluster", "nid001.cluster.example"), ("NID001.Cluster.Example", "nid001"), ("n1:9400", "n1"),
        ("n1.cluster.example:9400", "N1"), ("n1.", "n1"), ("[fe80::1]:9445", "fe80::1"), ("10.0.0.5:9400", "10.0.0.5"),
    ]:  # fmt: skip
        found = match_hosts({host, "other"}, {node, "another"})
        assert (dict(found.nodes), found.unclear) == ({host: node}, frozenset())


def test_hosts_that_only_their_domain_tells_apart_stay_apart() -> None:
    for hosts, nodes, expected, unclear in [
        ({"n1.a.example", "n1.b.example"}, {"n1"}, {}, {"n1.a.example", "n1.b.example"}),
        ({"n1", "n1.a.example", "n1.b.example"}, {"n1"}, {}, {"n1.a.example", "n1.b.example"}),
        ({"n1"}, {"n1.a.example", "n1.b.example"}, {}, {"n1"}),
        ({"n1", "n1.b.example"}, {"n1.a.example"}, {}, {"n1", "n1.b.example"}),
        ({"N1.A.example", "n1.b.example"}, {"n1.a.example"}, {"N1.A.example": "n1.a.example"}, {"n1.b.example"}),
        ({"n1"}, {"n1", "N1"}, {}, set()), ({"n1.x"}, {"n1", "N1"}, {}, {"n1.x"}), ({"10.0.0.5"}, {"10"}, {}, set()),
        ({"10.0.0.5"}, {"10.0.0.6"}, {}, set()),
    ]:  # fmt: skip
        found = match_hosts(hosts, nodes)
        assert (dict(found.nodes), found.unclear) == (expected, unclear)


def test_a_host_that_changed_its_name_is_one_node() -> None:
    found = match_hosts({"NL2", "nl2.cluster.example", "nl2"}, {"nl2"})
    assert dict(found.nodes) == {"NL2": "nl2", "nl2.cluster.example": "nl2"}


def test_each_day_is_matched_on_its_own() -> None:
    hosts = {0: {"n1.a.example"}, 1: {"n1.a.example", "n1.b.example"}, 2: {"n1.a.example"}}
    found = match_days(hosts, [JobRun(1, 0, 100, 2 * DAY_S, 4, ("n1",))])
    assert {day: dict(names.nodes) for day, names in found.items()} == {0: {"n1.a.example": "n1"}, 1: {}}


NAMES = st.sampled_from(["n1", "N1", "n1.a", "n1.b", "n1.a.x", "n2", "n2.a", "N2.A", "n1:9400", "10.0.0.1"])


@given(st.sets(NAMES), st.sets(NAMES))
def test_no_two_hosts_with_different_domains_become_one_node(hosts: set[str], nodes: set[str]) -> None:
    found = match_hosts(hosts, nodes)
    assert set(found.nodes) <= hosts and set(found.nodes.values()) <= nodes
    assert not set(found.nodes) & (nodes | found.unclear)
    by_node: dict[str, set[str]] = {}
    for host, node in {**{name: name for name in hosts & nodes}, **found.nodes}.items():
        by_node.setdefault(node, set()).add(host.lower().partition(":")[0])
    for together in by_node.values():
        assert not {"n1.a", "n1.b"} <= together and not {"n1.b", "n1.a.x"} <= together


@given(st.sets(st.text(max_size=8)), st.sets(st.text(max_size=8)))
def test_no_name_breaks_it(hosts: set[str], nodes: set[str]) -> None:
    match_hosts(hosts, nodes)


def two_gpus(host: str, first_h: float, last_h: float) -> Rows:
    named = ((0, "GPU-a", 30.0), (1, "GPU-b", 70.0))
    return [
        {**row, "uuid": uuid}
        for gpu, uuid, util in named
        for row in samples(host, gpu, first_h, last_h, util=util + first_h)
    ]


def site_of(root: Path, host: Callable[[str, float], str], node: Callable[[str], str]) -> Site:
    """Two days of n1 and n2. host: the exporter's name of a node at an hour. node: Slurm's name of it."""
    site = Site(root)
    hours = [half / 2 for half in (*range(14), *range(42, 54))]
    site.telemetry(*(two_gpus(host(name, hour), hour, hour + 0.5) for name in ("n1", "n2") for hour in hours))
    site.jobs(
        job(1, 1, 3, node("n1"), 2),
        job(2, 22, 26, f"{node('n1')},{node('n2')}", 4),
        job(3, 4, 6, node("n2"), 1),
        job(4, 5, 6, node("n2"), 1),
    )
    site.steps(
        {"job_id": 1, "submit_s": SITE_S + 3600, "step": "0", "start_s": SITE_S + 3600, "end_s": SITE_S + 7200,
         "node_list": node("n1"), "gpu_count": 2},
        {"job_id": 1, "submit_s": SITE_S + 3600, "step": "1", "start_s": SITE_S + 7200, "end_s": SITE_S + 10800,
         "node_list": node("n1"), "gpu_count": 2},
    )  # fmt: skip
    site.bindings(
        {**prolog(3, node("n2"), 0, 4), "uuid": "GPU-b"},  # the UUID of GPU 1
        {**prolog(4, node("n2"), 0, 5), "uuid": "GPU-a"},
    )
    return site


SITE_S = 20_156 * DAY_S


def plain(name: str) -> str:
    return name


HOSTS: list[tuple[Callable[[str, float], str], Callable[[str], str]]] = [
    (lambda name, hour: name.upper(), plain),
    (lambda name, hour: f"{name}.cluster.example", plain),
    (lambda name, hour: f"{name}:9400", plain),
    (lambda name, hour: name, lambda name: f"{name}.cluster.example"),
    (lambda name, hour: name if hour < 23.5 else name.upper(), plain),
    (lambda name, hour: name if int(hour * 2) % 2 else f"{name}.cluster.example", plain),
]


@pytest.mark.parametrize(("host", "node"), HOSTS)
def test_the_metrics_of_a_job_do_not_depend_on_how_its_hosts_are_written(
    tmp_path: Path, host: Callable[[str, float], str], node: Callable[[str], str]
) -> None:
    """Also where a host has two names in one hour, and for steps and UUIDs. Metrics name hosts as Slurm does."""
    same, other = site_of(tmp_path / "a", lambda name, hour: name, plain), site_of(tmp_path / "b", host, node)
    same.summarize()
    other.summarize()
    assert same.verdicts() == other.verdicts() == dict.fromkeys((1, 2, 3, 4), "ok")
    assert other.gpus(3) == [(node("n2"), 1, "")] and other.gpus(4) == [(node("n2"), 0, "")]
    assert {row["verdict"] for row in other.store.of("c").read("step_metrics").to_pylist()} == {"ok"}
    assert is_same(without_hosts(same), without_hosts(other))


def without_hosts(site: Site) -> tuple[Any, ...]:
    jobs, gpus = site.tables()
    steps = site.store.of("c").read("step_metrics")
    return tuple(table.drop_columns([name for name in ("host",) if name in table.column_names])
                 for table in (jobs, gpus, steps))  # fmt: skip


def test_two_hosts_that_only_their_domain_tells_apart_are_no_telemetry_of_the_node(tmp_path: Path) -> None:
    site = Site(tmp_path / "s")
    site.telemetry(two_gpus("n1.a.example", 0, 3), two_gpus("n1.b.example", 0, 3))
    site.jobs(job(1, 1, 2, "n1", 2))
    counts = site.summarize()
    assert site.verdicts() == {1: "no telemetry"}
    assert counts.hosts.lines() == [
        "  no telemetry from 1 node (n1) of GPU jobs",
        "  not matched, because only the domain differs: 2 hosts (n1.a.example, n1.b.example)",
        "  try: almanac doctor, which compares these names with Slurm's nodes",
    ]


def test_a_summary_names_the_first_hosts_that_only_one_side_knows(tmp_path: Path) -> None:
    hostile = "x\x1b[31m\n; rm -rf"
    site = Site(tmp_path / "s")
    site.telemetry(*(two_gpus(host, 0, 3) for host in ("n1", "idle", hostile)))
    site.jobs(job(1, 1, 2, "n1", 2))
    counts = site.summarize().hosts
    assert counts.lines() == [], "an idle host is ordinary while every node of a job has telemetry"
    site.jobs(job(2, 1, 2, "gpu[1-6]", 2))
    counts = site.summarize().hosts
    assert counts.lines()[:2] == [
        "  no telemetry from 6 nodes (gpu1, gpu2, gpu3, gpu4, ...) of GPU jobs",
        "  no GPU job on 2 hosts (idle, x?[31m?; rm -rf) with telemetry",
    ]
    assert counts.as_dict()["nodes_without_telemetry"] == [f"gpu{n}" for n in range(1, 7)]
    assert counts.as_dict()["hosts_without_jobs"] == ["idle", hostile]


def test_a_store_without_telemetry_names_no_host(tmp_path: Path) -> None:
    site = Site(tmp_path / "s")
    site.jobs(job(1, 1, 2, "n1", 2))
    assert site.summarize().hosts.lines() == []


def test_what_is_found_of_a_job_does_not_depend_on_the_span_although_a_host_is_renamed(tmp_path: Path) -> None:
    site = site_of(tmp_path / "a", HOSTS[4][0], plain)
    site.summarize()
    whole = site.tables()
    for first in (5, 24):
        site.summarize(SITE_S + first * 3600, SITE_S + first * 3600 + 1800)
        assert is_same(whole, site.tables())
