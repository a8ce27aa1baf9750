"""doctor on hosts that only Prometheus or only Slurm knows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from almanac.config_file import parse_config
from cli.app import App
from cli.doctor.findings import Check
from cli.doctor.hosts import check_hosts

Examine = Callable[[str, Collection[str]], list[Check]]


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    """The findings with these lines of sinfo (NodeName, NodeHostName, GRES, state) and these hosts of telemetry."""

    def examine(lines: str, hosts: Collection[str]) -> list[Check]:
        (tmp_path / "lines").write_text(lines)
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\ncat {tmp_path / 'lines'}\n")
        (tmp_path / "sinfo").chmod(0o755)
        app = App()
        app.__dict__["config"] = parse_config({"slurm": {"bin_dir": str(tmp_path)}})
        return list(check_hosts(app, hosts))

    return examine


def sinfo(*nodes: str, state: str = "idle") -> str:
    return "".join(f"{node} {node} gpu:a100:4(S:0-1) {state}\n" for node in nodes)


def test_names_that_fit_are_in_order(examine: Examine) -> None:
    lines = (
        sinfo("nl1", "nl2", "nl2")
        + sinfo("nl3", state="idle~")
        + sinfo("nl4", state="down*")
        + "cpu1 cpu1 (null) idle\n"
    )
    [check] = examine(lines, {"NL1", "nl2.cluster.example"})
    assert (check.status, check.said) == ("ok", "Prometheus and Slurm know the same 2 GPU nodes")


def test_gpu_nodes_without_counters_are_counted_and_the_first_are_named(examine: Examine) -> None:
    [check] = examine(sinfo(*(f"n{number}" for number in range(1, 7))), {"n1"})
    assert (check.status, check.said) == ("warn", "no GPU counters from 5 GPU nodes (n2, n3, n4, n5, ...) of Slurm")
    assert "scrape_configs" in check.todo
    assert check.details["nodes"] == ["n2", "n3", "n4", "n5", "n6"]


def test_a_host_that_slurm_does_not_know_is_named_printably(examine: Examine) -> None:
    hostile = "x\x1b[31m\n"
    [check] = examine(sinfo("n1"), {"n1", hostile})
    assert check.said == "1 host (x?[31m?) with GPU counters is no GPU node of Slurm"
    assert check.details["hosts"] == [hostile]


def test_a_node_host_name_is_not_taken_for_a_node_name(examine: Examine) -> None:
    silent, strange = examine("gpu-st-1 ip-10-0-0-5 gpu:1 idle\n", {"IP-10-0-0-5.ec2.internal"})
    assert silent.said == "no GPU counters from 1 GPU node (gpu-st-1) of Slurm; gpu-st-1 has NodeHostName ip-10-0-0-5"
    assert "relabel_configs" in silent.todo
    assert strange.details["hosts"] == ["IP-10-0-0-5.ec2.internal"]


def test_hosts_of_one_short_name_are_said_with_the_setting_that_tells_them_apart(examine: Examine) -> None:
    unclear, silent = examine(sinfo("n1"), {"n1.a.example", "n1.b.example"})
    assert unclear.said.startswith("2 hosts (n1.a.example, n1.b.example) may be one of several nodes")
    assert "host_suffix" in unclear.todo
    assert "(n1)" in silent.said


def test_nothing_is_said_without_slurm_or_counters(examine: Examine, tmp_path: Path) -> None:
    assert examine(sinfo("n1"), set()) == []
    assert examine("", {"n1"}) == []
    app = App()
    app.__dict__["config"] = parse_config({"slurm": {"bin_dir": str(tmp_path / "nowhere")}})
    assert list(check_hosts(app, {"n1"})) == []
