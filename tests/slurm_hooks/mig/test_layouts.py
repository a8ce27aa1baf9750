"""Layouts in the words of Slurm, of mig-parted, and of the decision; the include file; the demand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mig_world import HALVES, SEVEN

from advisor.mig.compute_need import Activity, slow_downs
from advisor.mig.decide import SliceJob
from almanac.actions_config import Mig
from almanac.config import AdviceSection
from almanac.errors import CommandError, ConfigError, SourceError
from almanac.submit_config import Tier
from almanac.tres import gpu_types, named_types
from slurm.queue import parse_job
from slurm_hooks.mig.layouts import check_layout, gres_names, mig_settings, parse_export, parted_config, shown
from slurm_hooks.mig.planning import LayoutDemand, busy_slices, demand_of, row_activity, smallest_shape
from slurm_hooks.mig.sides import (
    IncludeFile,
    SlurmSide,
    for_node,
    gres_of_nodes,
    last_message,
    run_bounded,
    with_node_gres,
)
from slurm_hooks.mig.steps import NodeChange, NodeSight, next_step

A100 = gres_names("A100-80", (), "{profile}")
MIXED = (("1g",) * 7, ("3g", "4g"), ("gpu",))


@pytest.mark.parametrize(
    ("gres", "types"),
    [
        ("", {}),
        ("(null)", {}),
        ("gpu:a100:4", {"a100": 4}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:1g.10gb:7(S:0,2-3),gpu:a100:3,shard:8,nvme:1", {"1g.10gb": 7, "a100": 3}),
        ("gpu:2", {"": 2}),
        ("gpu:2(S:0)", {"": 2}),
        ("gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
        ("gpu:3090:2", {"3090": 2}),
    ],
)
def test_gpus_of_a_gres_text(gres: str, types: dict[str, int]) -> None:
    assert gpu_types(gres) == types


def test_types_registered_are_named_also_where_none_is_used() -> None:
    assert named_types("gpu:1g.10gb:0(IDX:N/A),gpu:a100:1(IDX:7,9),shard:0") == {"1g.10gb", "a100"}
    assert named_types("gpu:(null):0(IDX:N/A)") == set()


def test_mig_parted_reads_a_layout_that_names_every_gpu_and_gives_it_back() -> None:
    content = json.loads(parted_config(A100.model, MIXED))
    [entries] = content["mig-configs"].values()
    assert [entry["devices"] for entry in entries] == [[0], [1], [2]]
    assert entries[2] == {"devices": [2], "mig-enabled": False}
    assert parse_export(A100.model, json.dumps(content).encode()) == MIXED


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b'{"mig-configs": {}}', b"[" * 9999,
        b'{"mig-configs": {"c": [{"devices": "all", "mig-enabled": false}]}}',
        b'{"mig-configs": {"c": [{"devices": [1], "mig-enabled": false}]}}',
        b'{"mig-configs": {"c": [{"devices": [0, 0], "mig-enabled": false}]}}',
        b'{"mig-configs": {"c": [{"devices": [0], "mig-enabled": true, "mig-devices": {"9g.1gb": 1}}]}}',
        b'{"mig-configs": {"c": [{"devices": [0], "mig-enabled": true, "mig-devices": {"1g.10gb": 99999999999}}]}}',
    ],
)  # fmt: skip
def test_an_export_that_says_something_else_is_refused(text: bytes) -> None:
    with pytest.raises(SourceError):
        parse_export(A100.model, text)


@pytest.mark.parametrize("gpu", [(), ("gpu", "1g"), ("3g", "3g", "1g"), ("1g",) * 8, ("9g",)])
def test_a_layout_that_no_gpu_can_hold_is_refused(gpu: tuple[str, ...]) -> None:
    said = f"GPU 1 cannot hold {'+'.join(gpu) or 'an empty layout'} on A100-80"
    assert check_layout(A100.model, (("gpu",), gpu)) == said


@pytest.mark.parametrize(
    ("entry", "gpu_count", "layout"),
    [
        ({"mig-enabled": False, "mig-devices": {}}, 4, (("gpu",),) * 4),
        ({"mig-enabled": False}, 1, (("gpu",),)),
        ({"mig-enabled": True, "mig-devices": {"1g.10gb": 7}}, 14, (("1g",) * 7,) * 2),
        ({"mig-enabled": True, "mig-devices": {"1g.10gb": 7}}, 13, "1g+1g+1g+1g+1g+1g+1g"),
        ({"mig-enabled": True, "mig-devices": {"1g.10gb": 7}}, 0, "1g+1g+1g+1g+1g+1g+1g"),
        ({"mig-enabled": True, "mig-devices": {}}, 7, "nothing"),
        ({"mig-enabled": False}, 10**9, "gpu"),
    ],
)
def test_an_export_of_gpus_that_are_all_alike_is_as_many_as_slurm_has(
    entry: dict[str, object], gpu_count: int, layout: object
) -> None:
    text = json.dumps({"version": "v1", "mig-configs": {"current": [{"devices": "all", **entry}]}}).encode()
    if isinstance(layout, str):
        with pytest.raises(SourceError, match=re.escape(f"every GPU holds {layout}, and Slurm has {gpu_count} ")):
            parse_export(A100.model, text, gpu_count)
    else:
        assert parse_export(A100.model, text, gpu_count) == layout


def test_a_mixed_layout_is_allowed_and_shown_in_short() -> None:
    assert check_layout(A100.model, MIXED) == ""
    assert shown((*MIXED, ("gpu",))) == "7*1g, 3g+4g, 2x gpu"


CONF = """# NodeName=n1 Gres=gpu:old:1
NodeName=n1 CPUs=8 Gres=gpu:a100:4,shard:8 State=UNKNOWN # Gres=gpu:a100:4
nodename = n2 gres = gpu:a100:4
NodeName=n[3-4] Gres=gpu:a100:4
NodeName=n10 Gres=gpu:a100:4\r
"""


def test_only_the_gres_of_one_nodes_own_line_changes() -> None:
    assert gres_of_nodes(CONF) == {"n1": "gpu:a100:4,shard:8", "n2": "gpu:a100:4", "n10": "gpu:a100:4"}
    new = with_node_gres(CONF, "n1", {"1g.10gb": 7, "a100": 3})
    old_line = "CPUs=8 Gres=gpu:a100:4,shard:8 State"
    assert new == CONF.replace(old_line, "CPUs=8 Gres=gpu:1g.10gb:7,gpu:a100:3,shard:8 State")
    assert gres_of_nodes(with_node_gres(CONF, "n2", {"a100": 3}))["n2"] == "gpu:a100:3"


@pytest.mark.parametrize("node", ["n3", "n[3-4]", "n9", ""])
def test_a_node_without_a_line_of_its_own_is_refused(node: str) -> None:
    with pytest.raises(ConfigError):
        with_node_gres(CONF if node != "n[3-4]" else "", node, {"a100": 4})


def test_a_line_over_several_lines_or_without_gres_is_refused() -> None:
    for text in ("NodeName=n1 \\\nGres=gpu:a100:4\n", "X=1 \\\nNodeName=n1 Gres=gpu:a100:4\n", "NodeName=n1 CPUs=8\n"):
        with pytest.raises(ConfigError):
            with_node_gres(text, "n1", {"a100": 4})


def test_the_include_file_is_replaced_with_its_mode_and_through_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.conf", tmp_path / "link.conf"
    real.write_bytes(b"NodeName=n1 Gres=gpu:a100:4 # \xff\n")
    real.chmod(0o640)
    link.symlink_to(real)
    file = IncludeFile(link)
    file.write(with_node_gres(file.read(), "n1", {"a100": 3}))
    assert real.read_bytes() == b"NodeName=n1 Gres=gpu:a100:3 # \xff\n"
    assert (real.stat().st_mode & 0o777, link.is_symlink()) == (0o640, True)
    with pytest.raises(ConfigError):
        IncludeFile(tmp_path).read()


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"nodes": ("n1",)}, {"nodes": ("n1=B17",)}, {"nodes": ("n1=A100-80", "n[1-2]=A100-80")},
        {"nodes": ("@all=A100-80",)}, {"nodes": ("n1=A100-80",), "slice_type": "slice"},
        {"nodes": ("n1=A100-80",), "whole_types": ("a100",)}, {"nodes": ("n1=A100-80",), "exclude": "n*"},
        {"nodes": ("n1=A100-80",), "whole_types": ("A100-80=1g.10gb",)},
    ],
)  # fmt: skip
def test_settings_that_name_no_node_or_model_are_refused(settings: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError):
        mig_settings(Mig(**settings))  # type: ignore[arg-type]


def test_a_command_that_hangs_is_ended_with_what_it_started() -> None:
    with pytest.raises(CommandError, match="timed out"):
        run_bounded(["sh", "-c", "sleep 60 & wait"], b"", 0.3)
    with pytest.raises(CommandError):
        run_bounded(["/no/such/program"], b"", 1)
    assert run_bounded(["cat"], b"x", 5).stdout == b"x"
    with pytest.raises(CommandError):
        for_node(("ssh", "{node}"), "n1; rm -rf /")
    with pytest.raises(CommandError):
        for_node(("ssh", "{node}"), "-oProxyCommand=x")


ADVICE = AdviceSection()


@pytest.mark.parametrize(
    ("peak_mib", "level", "shape"),
    [
        (5000.0, 0.1, "1g"),
        (5000.0, 0.2, "2g"),
        (15000.0, 0.1, "2g"),
        (5000.0, 0.4, "3g"),
        (30000.0, 0.1, "3g"),
        (60000.0, 0.1, "gpu"),
        (5000.0, 0.9, "gpu"),
        (None, 0.1, "gpu"),
        (math.nan, 0.1, "gpu"),
        (5000.0, None, "gpu"),
    ],
)
def test_the_smallest_shape_that_holds_a_job(peak_mib: float | None, level: float | None, shape: str) -> None:
    """level: the mean share of the multiprocessors, all the time."""
    activity = None if level is None else Activity(level, 0.0, 1.0, "A100-80")
    assert smallest_shape(A100.model, "gpu", peak_mib, activity, ADVICE) == shape


@pytest.mark.parametrize("ran_on", ["gpu", "3g"])
@pytest.mark.parametrize("level", [0.05, 0.2, 0.5, 0.8])
def test_the_layouts_follow_the_slow_down_that_the_advice_states(ran_on: str, level: float) -> None:
    """The same numbers as slow_downs, which tiers are advised by: on a GPU, or on a slice that the run did not fill."""
    tiers = [Tier(name=each.shape, gres=each.name, gpu_model="A100-80") for each in A100.model.profiles]
    row = {"mean_sm_active_frac": level, "mean_dram_active_frac": 0.1, "mean_gr_engine_active_frac": 1.0}
    activity = row_activity(row, A100.model, ran_on)
    assert activity is not None
    stated = slow_downs([activity], tiers, 1)
    shape = smallest_shape(A100.model, ran_on, 2000.0, activity, ADVICE)
    smaller = [each.shape for each in A100.model.profiles if each.shape in ("1g", "2g", "3g", "4g")]
    smaller = smaller[: smaller.index(shape)] if shape in smaller else smaller
    assert shape == ran_on or stated[shape] <= 1.5
    assert all(stated[each] > 1.5 for each in smaller if each <= ran_on)
    busy = busy_slices(A100.model, shape, activity)
    assert shape == "gpu" or busy == pytest.approx(stated[shape] * int(shape[0]))


def test_a_slice_that_was_full_or_whose_counters_were_dead_says_nothing_of_the_need() -> None:
    full = {"mean_sm_active_frac": 0.95, "mean_dram_active_frac": 0.2, "mean_gr_engine_active_frac": 1.0}
    assert row_activity(full, A100.model, "1g") is None
    assert row_activity(full, A100.model, "gpu") is not None
    assert row_activity(full | {"has_profiling_fault": True}, A100.model, "gpu") is None
    dead = {"mean_sm_active_frac": 0.0, "mean_dram_active_frac": 0.0, "mean_gpu_util_pct": 90.0}
    assert row_activity(dead, A100.model, "gpu") is None
    assert row_activity({}, A100.model, "gpu") is None
    assert busy_slices(A100.model, "1g", None) is None


def test_a_job_without_measured_memory_keeps_the_shape_that_it_had() -> None:
    row = {"submit_s": 1, "start_s": 5, "elapsed_s": 600, "gpu_count": 1, "gpu_type": "2g.20gb", "gpu_type_req": None,
           "hbm_peak_mib": None, "mean_sm_active_frac": None, "mean_dram_active_frac": None,
           "mean_gr_engine_active_frac": None, "mean_gpu_util_pct": None, "has_profiling_fault": None}  # fmt: skip
    rows = [row, row | {"gpu_count": 4, "gpu_type": "a100"}, row | {"gpu_type": None, "gpu_type_req": "v100"}]
    waits = {"job_id": 7, "submit_time": 20, "job_state": ["PENDING"], "state_reason": "BadConstraints", "priority": 0,
             "tres_per_job": "gres/gpu:3g.40gb:1", "tres_req_str": "gres/gpu=1", "time_limit": 5}  # fmt: skip
    runs = {"job_state": ["RUNNING"], "tres_per_job": "gres/gpu:1", "priority": 9, "start_time": 40, "nodes": "n1"}
    others = {"state_reason": "JobHeldUser"}, {"tres_per_job": "gres/gpu:3g.40gb:2", "tres_req_str": "gres/gpu=2"}
    queue = [parse_job(waits | change) for change in ({}, runs, *others)]
    jobs = (
        SliceJob("2g", 1, 600.0, 5, ran_on="2g", model="A100-80"), SliceJob("3g", 20, 300, model="A100-80"),
        SliceJob("gpu", 20, 1020.0, 40, node="n1", model="A100-80"),
    )  # fmt: skip
    types = frozenset({"2g.20gb", "a100", "v100", "3g.40gb"})
    assert demand_of(rows, queue, [A100], ADVICE, 1000) == LayoutDemand(jobs, types, past=1, waiting=1, unknown=1)


@pytest.mark.parametrize("lost", [b"", b",gres/gpu=16,gres/gpu:a100=16"])
def test_whole_nodes_that_a_job_holds_are_not_planned_as_one_gpu(lost: bytes) -> None:
    """Job 2060, recorded: -N4 --exclusive, no GPU asked for, 16 given. AccountingStorageTRES may not count them."""
    recorded = (Path(__file__).parents[2] / "slurm/fixtures/22.05.8/queue.json").read_bytes()
    assert lost in recorded
    slurm = SlurmSide(None, lambda argv: recorded.replace(lost, b""), 0, "lab")  # type: ignore[arg-type]
    running = [job for job in slurm.queue() if job.holds_nodes]
    assert [(job.job_id, job.gpu_count, job.gpu_type) for job in running] == [(2060, 16, "a100")]
    assert demand_of([], running, [A100], ADVICE, 2**31).jobs == ()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (b'time="1" level=info msg="begins"\ntime="2" level=fatal msg="a \\"busy\\" GPU"\n', 'a "busy" GPU'),
        (b"no log\n in use \n\n", "in use"),
        (b"\n", ""),
    ],
)
def test_what_a_command_said_last(output: bytes, said: str) -> None:
    assert last_message(output) == said


CHANGE = NodeChange("n1", "A100-80", SEVEN, HALVES, {"1g.10gb": 7}, {"3g.40gb": 1}, 0, stage_s=1000)
SEEN = NodeSight(frozenset({"DRAIN"}), CHANGE.reason, "gpu:3g.40gb:1", False, False)
IDLE = {"states": {"IDLE"}, "reason": ""}
OTHER = {"reason": "bad fan"}
SLURMS = {"reason": "gres/gpu count too low"}
DYNAMIC = {"dynamic_gres": "gpu:1g.10gb:7"}


@pytest.mark.parametrize(
    ("stage", "after_s", "sight", "rest", "expected"),
    [
        ("drain", 0, None, {}, "DROP Slurm does not list the node"),
        ("drain", 0, IDLE, {}, "DRAIN "),
        ("drain", 0, {**IDLE, "has_jobs": True}, {}, "DROP it has a job"),
        ("drain", 0, {**IDLE, "has_jobs": True}, {"is_patient": True}, "DRAIN "),
        ("drain", 0, {**IDLE, "is_reserved": True}, {}, "DROP it is reserved"),
        ("drain", 0, {**IDLE, "refusal": "not now"}, {}, "DROP not now"),
        ("drain", 0, OTHER, {}, "DROP drained by somebody else: bad fan"),
        ("drain", 0, {"reason": "almanac mig failed: apply"}, {}, "DRAIN "),
        ("wait", 0, {}, {}, "APPLY "),
        ("wait", 300, {"has_jobs": True}, {}, "WAIT a job that began before the drain is running"),
        ("wait", 301, {"has_jobs": True}, {}, "UNDO a job that began before the drain runs for more than 300 s"),
        ("wait", 301, {"has_jobs": True}, {"is_patient": True}, "WAIT a job that began before the drain is running"),
        ("wait", 0, {"is_reserved": True}, {}, "UNDO the node was reserved meanwhile"),
        ("wait", 0, {"refusal": "last of its type"}, {"is_patient": True}, "UNDO last of its type"),
        ("wait", 0, {"refusal": "last of its type"}, {}, "APPLY "),
        ("apply", 180, None, {}, "WAIT Slurm does not list the node"),
        ("apply", 181, None, {}, "FAIL Slurm does not list the node"),
        ("apply", 0, None, DYNAMIC, "APPLY "),
        ("gres", 0, None, DYNAMIC, "WRITE_GRES "),
        ("apply", 0, {"has_jobs": True}, {}, "FAIL a job is on the node, which was drained, at stage apply"),
        ("gres", 0, {}, {}, "WRITE_GRES "),
        ("gres", 0, SLURMS, DYNAMIC, "WRITE_GRES "),
        ("gres", 0, IDLE, {}, "LEAVE resumed by somebody else, at stage gres; check its layout and its Gres"),
        ("gres", 0, OTHER, DYNAMIC,
         "LEAVE drained by somebody else: bad fan, at stage gres; check its layout and its Gres"),
        ("reconfigure", 0, {}, {}, "RECONFIGURE "),
        ("register", 180, None, DYNAMIC, "REGISTER "),
        ("register", 181, None, DYNAMIC, "FAIL the node did not register again"),
        ("register", 0, IDLE, DYNAMIC,
         "FAIL the node registered without State=DRAIN, or was resumed; check its layout"),
        ("register", 0, {"has_jobs": True}, DYNAMIC, "FAIL a job is on the node, which was drained, at stage register"),
        ("register", 180, SLURMS, DYNAMIC, "DELETE "),
        ("register", 181, SLURMS, DYNAMIC,
         "FAIL Slurm did not delete the node, or slurmd registers otherwise: gres/gpu count too low"),
        ("register", 0, {"is_reserved": True}, DYNAMIC,
         "FAIL the node was reserved meanwhile, and the reservation would lose it"),
        ("register", 0, {"reason": ""}, DYNAMIC, "MARK "),
        ("settle", 0, {"reason": "almanac-mig"}, DYNAMIC, "MARK "),
        ("settle", 0, {}, DYNAMIC, "SETTLE "),
        ("settle", 0, {"gres": "gpu:1g.10gb:7"}, DYNAMIC, "FAIL slurmd registered 1g.10gb:7, expected 3g.40gb:1"),
        ("verify", 0, {}, {}, "VERIFY "),
        ("verify", 0, {"has_jobs": True, "gres": "gpu:1g.10gb:7"}, {"is_undone": True}, "VERIFY "),
        ("verify", 180, {"gres": ""}, {}, "WAIT Slurm shows no GPU, expected 3g.40gb:1"),
        ("verify", 181, {"gres": "gpu:2"}, {}, "FAIL Slurm shows gpu:2, expected 3g.40gb:1"),
        ("verify", 0, {"states": {"DRAIN", "DOWN"}}, {}, "WAIT Slurm shows DOWN"),
        ("verify", 0, {"gres_used": "gpu:1g.10gb:0"}, {}, "WAIT slurmd registered 1g.10gb, expected 3g.40gb"),
        ("resume", 180, {}, {}, "VERIFY "),
        ("resume", 181, {}, {}, "FAIL Slurm did not resume the node"),
        ("resume", 0, IDLE, {}, "DONE "),
        ("apply", 0, IDLE, {"fault": "broke"}, "DROP the node was resumed by hand"),
        ("apply", 0, {}, {"fault": "broke"}, "FAIL broke"),
        ("apply", 0, OTHER, {"fault": "broke"}, "KEEP broke"),
    ],
)  # fmt: skip
def test_the_next_step(
    stage: Any, after_s: int, sight: dict[str, Any] | None, rest: dict[str, Any], expected: str
) -> None:
    seen = None if sight is None else NodeSight(**{**vars(SEEN), **sight})
    change = NodeChange(**{**vars(CHANGE), "stage": stage, **rest})
    step = next_step(change, seen, 1000 + after_s)
    assert f"{step.action.name} {step.why}" == expected


def test_a_patient_change_waits_for_jobs_until_its_first_order() -> None:
    waits = replace(CHANGE, stage="wait", is_patient=True)
    others: list[dict[str, Any]] = [{"stage": "apply"}, {"is_patient": False}, {"is_undone": True}, {"fault": "broke"}]
    assert waits.waits_for_jobs and not any(replace(waits, **other).waits_for_jobs for other in others)
