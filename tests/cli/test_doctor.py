"""doctor on Slurm's weights and on open days, with commands that answer as Slurm does."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from almanac.config import Config
from almanac.config_file import load_config, parse_config
from almanac.errors import CommandError, SourceError
from cli.app import App
from cli.doctor import Check, run_probes
from cli.doctor.hosts import check_priority
from cli.doctor.site import check_config, check_store
from cli.doctor.slurm import check_slurm
from telemetry.counters import GPU_METRICS, JOB_METRICS
from telemetry.store.schema import JOBS
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
    Store.open(tmp_path).of("lab").reopen([today - age for age in ages])
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


def test_one_cause_is_one_finding() -> None:
    """Also for checks that catch the error, and for those that only warn."""

    def broken(app: App) -> Iterator[Check]:
        yield Check("before", "ok", "fine", "install it")
        raise CommandError("sacct was not found", "install it")

    def caught(app: App) -> Iterator[Check]:
        yield Check("priority", "warn", "mode observe; scontrol was not found", "install it")
        yield Check("other", "warn", "slow", "look")

    found = run_probes(App(), {"Slurm": broken, "priority": caught, "power": broken})
    assert [(check.name, check.status) for check in found] == [
        ("before", "ok"), ("Slurm", "fail"), ("other", "warn"), ("before", "ok"),
    ]  # fmt: skip
    assert found[1].said == "sacct was not found; for the same reason not checked: priority, power"
    assert found[1].details == {"not_checked": ["priority", "power"]}


@pytest.mark.parametrize(
    ("figures", "verdict", "status", "said"),
    [
        ({"sacct_hbm_peak_mib": 1000.0, "gpu_memory_mib": 40960.0}, "no telemetry", "ok", "of 1 of 2 GPU jobs"),
        ({"sacct_hbm_peak_mib": 1000.0}, "no telemetry", "warn", "no tier describes their nodes' GPUs"),
        ({}, "no telemetry", "warn", "of 0 of 2 GPU jobs of 30 days; no imbalance, no roofline"),
        ({}, "ok", None, ""),
    ],
)
def test_a_site_without_telemetry_learns_what_accounting_has(
    tmp_path: Path, figures: Any, verdict: str, status: str | None, said: str
) -> None:
    app = App(store_path=str(tmp_path))
    app.__dict__["config"] = Config()
    store, now_s = Store.create(tmp_path).of("lab"), app.now_s()
    job = {"submit_s": now_s - 900, "start_s": now_s - 900, "end_s": now_s - 300, "elapsed_s": 600, "gpu_count": 1}
    store.write("jobs", pa.Table.from_pylist([{"job_id": 1, **job, **figures}, {"job_id": 2, **job}], JOBS))
    measured = [{"job_id": 1, "submit_s": now_s - 900, "verdict": verdict}]
    store.write("job_metrics", pa.Table.from_pylist(measured, JOB_METRICS))
    found = [check for check in check_store(app) if check.name == "GPU memory"]
    assert [check.status for check in found] == ([status] if status else [])
    assert all(said in check.said for check in found)
    assert all(("AutoDetect=nvml" in check.todo) == (not figures) for check in found)


@pytest.mark.parametrize("label", ["NVIDIA Rubin R100", 'odd "card" \\ 3', "x\x1b[31m\ny"])
def test_the_entry_for_an_unknown_gpu_model_can_be_pasted(tmp_path: Path, label: str) -> None:
    def findings() -> list[Check]:
        return [check for check in check_store(app) if check.name == "GPU models"]

    app = App(store_path=str(tmp_path))
    app.__dict__["config"] = Config()
    store, now_s = Store.create(tmp_path).of("lab"), app.now_s()
    run = {"job_id": 1, "submit_s": now_s - 900, "host": "n1", "mig": "", "gpu_model": label}
    rows = [{**run, "gpu": gpu, "hbm_capacity_mib": 294_912.0} for gpu in range(4)]
    store.write("gpu_metrics", pa.Table.from_pylist(rows, GPU_METRICS))
    (unknown,) = findings()
    assert unknown.status == "warn" and "4 GPUs of jobs" in unknown.said
    entry = unknown.todo.partition("\n")[2].replace("# tensor_flops =", "tensor_flops = 1e15")
    assert "\x1b" not in unknown.said + unknown.todo
    path = tmp_path / "almanac.toml"
    path.write_text(entry, encoding="utf-8")
    try:
        app.__dict__["config"] = load_config(path)
        (own,) = app.config.gpu_models
        assert (own.hbm_mib, own.tensor_flops) == (294_912.0, 1e15)
        assert [check.status for check in findings()] == (["ok"] if label.isprintable() else ["ok", "warn"])
    finally:
        load_config(None)
