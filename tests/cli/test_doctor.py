"""doctor on Slurm's weights and on open days, with commands that answer as Slurm does."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from almanac.config import Config
from almanac.config_file import parse_config
from almanac.errors import CommandError, SourceError
from cli.app import App
from cli.doctor.findings import Check
from cli.doctor.main import check_config, check_slurm
from cli.doctor.priority import check_priority
from cli.doctor.store import check_store
from telemetry.store.marks import Marks
from telemetry.store.store import Store

SHOWN = """Configuration data as of 2026-11-21T08:00:00
PriorityParameters      = (null)
PrioritySiteFactorParameters = (null)
PriorityType            = {kind}
PriorityDecayHalfLife   = 7-00:00:00
PriorityMaxAge          = {max_age}
PriorityUsageResetPeriod = NONE
PriorityWeightAge       = {weight}
PriorityWeightAssoc     = 0
PriorityWeightTRES      = (null)
SlurmctldHost[0]        = ctl

Slurmctld(primary) at ctl is UP
"""
"""Lines of `scontrol show config` of Slurm 22.05; without multifactor it prints none of the weights."""


@dataclass
class FakeScontrol:
    kind: str = "priority/multifactor"
    max_age: str = "7-00:00:00"
    weight: str = "0"

    def __call__(self, argv: Sequence[str]) -> bytes:
        assert list(argv) == ["scontrol", "show", "config"]
        return SHOWN.format(**vars(self)).encode()


def stopped(argv: Sequence[str]) -> bytes:
    raise CommandError("scontrol show config ended with 1: Unable to contact slurm controller", "run scontrol by hand")


def asked_of_accounting(argv: Sequence[str]) -> bytes:
    answers = {
        "--version": b"slurm 24.11.5\n",
        "show": b"lab\n",
        "config": b"ClusterName = lab\n",
        "--json": b'{"jobs": []}',
    }
    return next((answer for word, answer in answers.items() if word in argv), b"")


def slurm_findings(cluster: str) -> list[Check]:
    app = App(cluster_name=cluster)
    app.__dict__["commands"] = asked_of_accounting
    return list(check_slurm(app))


def test_a_cluster_that_accounting_does_not_know_is_a_fault() -> None:
    """`almanac ingest` refuses it."""
    with pytest.raises(SourceError, match="has no cluster 'demo'; it has: lab"):
        slurm_findings("demo")
    assert [check.status for check in slurm_findings("LAB")] == ["ok", "ok"]


def finding(commands: Any, mode: str = "observe") -> Check:
    app = App()
    app.__dict__["config"] = parse_config({"priority": {"mode": mode}})
    app.__dict__["commands"] = commands
    (check,) = check_priority(app)
    return check


@pytest.mark.parametrize("mode", ["observe", "apply"])
def test_weights_that_fit_are_in_order(mode: str) -> None:
    check = finding(FakeScontrol(max_age="12-00:00:00", weight="12000"), mode)
    assert (check.status, check.todo) == ("ok", "")
    assert check.said == f"mode {mode}; Slurm's weights give a tau of 24.0 h, the goal is 24 h: fits"
    assert check.details["tau_s"] == pytest.approx(86_400)


@pytest.mark.parametrize(("mode", "status"), [("observe", "warn"), ("apply", "fail")])
def test_weights_that_do_not_fit_are_a_fault_where_the_term_is_applied(mode: str, status: str) -> None:
    check = finding(FakeScontrol(), mode)
    assert check.status == status
    assert "give no tau (age does not count), the goal is 24 h: PriorityMaxAge is too short" in check.said
    assert check.todo.endswith("in slurm.conf: PriorityMaxAge=12-0, PriorityWeightAge=12000")
    assert check.todo.startswith("before priority.mode") == (mode == "observe")
    assert check.details["lines"] == ("PriorityMaxAge=12-0", "PriorityWeightAge=12000")


def test_the_tau_of_other_weights_is_told() -> None:
    assert "a tau of 72.0 h" in finding(FakeScontrol(max_age="12-00:00:00", weight="4000")).said


def test_priority_basic_never_adds_a_site_factor() -> None:
    check = finding(FakeScontrol("priority/basic", "12-00:00:00", "12000"), "apply")
    assert (check.status, check.todo) == ("fail", "in slurm.conf: PriorityType=priority/multifactor")


@pytest.mark.parametrize(("mode", "status"), [("observe", "warn"), ("apply", "fail")])
def test_settings_that_cannot_be_read_are_said(mode: str, status: str) -> None:
    check = finding(stopped, mode)
    assert (check.status, check.todo) == (status, "run scontrol by hand")
    assert "Unable to contact slurm controller" in check.said
    assert finding(FakeScontrol(max_age="UNLIMITED"), mode).status == status


@pytest.mark.parametrize(
    ("ages", "said"),
    [
        ((), None),
        ((0, 1), None),
        ((1, 2), "1 stale day, the oldest {oldest}"),
        ((0, 30, 3), "2 stale days, the oldest {oldest}"),
    ],
)
def test_days_that_no_summary_has_closed_are_a_warning(tmp_path: Path, ages: tuple[int, ...], said: str | None) -> None:
    app = App(store_path=str(tmp_path))
    app.__dict__["config"] = Config()
    Store.create(tmp_path)
    (tmp_path / "jobs" / "cluster=lab").mkdir(parents=True)
    today = app.now_s() // 86_400
    Marks(tmp_path / "watermarks").reopen("lab", [today - age for age in ages])
    found = [check for check in check_store(app) if check.name == "job metrics of lab"]
    if said is None:
        assert found == []
        return
    (check,) = found
    oldest = dt.datetime.fromtimestamp((today - max(ages)) * 86_400, dt.UTC).date().isoformat()
    assert (check.status, check.said, check.todo) == ("warn", said.format(oldest=oldest), "run `almanac summarize`")


def test_keys_that_are_no_longer_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "almanac.toml"
    path.write_text('[mail]\nkeep_days = 3\n[dask]\nqos = "low"\n')
    _, found, *_ = check_config(App(str(path)))
    said = "removed keys: mail.keep_days (always 90); dask.qos (--qos=... in dask.directives)"
    assert found == Check("configuration", "warn", said, "remove these keys")
