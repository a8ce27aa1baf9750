"""Layouts in the words of Slurm, of mig-parted, and of the decision; the include file; the demand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from advisor.mig.compute_need import Activity, slow_downs
from almanac.actions_config import Mig
from almanac.config import AdviceSection
from almanac.errors import CommandError, ConfigError, SourceError
from almanac.submit_config import Tier
from slurm_hooks.mig.demand import busy_slices, demand_of, row_activity, smallest_shape
from slurm_hooks.mig.include import IncludeFile, gres_of_nodes, with_node_gres
from slurm_hooks.mig.layouts import (
    check_layout,
    gpu_types,
    gres_names,
    named_types,
    parse_export,
    parted_config,
    shown,
    with_gpus,
)
from slurm_hooks.mig.node_side import for_node, run_bounded
from slurm_hooks.mig.settings import mig_settings
from telemetry.slurm.gpu_queue import gpu_jobs

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


def test_other_gres_stay_when_the_gpus_change() -> None:
    assert with_gpus("gpu:a100:3(S:0-1),shard:8", A100.types(MIXED)) == (
        "gpu:1g.10gb:7,gpu:3g.40gb:1,gpu:4g.40gb:1,gpu:a100:1,shard:8"
    )


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
    assert check_layout(A100.model, (gpu,))


@pytest.mark.parametrize(
    ("entry", "gpu_count", "layout"),
    [
        ({"mig-enabled": False, "mig-devices": {}}, 4, (("gpu",),) * 4),
        ({"mig-enabled": False}, 1, (("gpu",),)),
        ({"mig-enabled": True, "mig-devices": {"1g.10gb": 7}}, 14, (("1g",) * 7,) * 2),
        ({"mig-enabled": True, "mig-devices": {"1g.10gb": 7}}, 13, None),
        ({"mig-enabled": True, "mig-devices": {"1g.10gb": 7}}, 0, None),
        ({"mig-enabled": True, "mig-devices": {}}, 7, None),
        ({"mig-enabled": False}, 10**9, None),
    ],
)
def test_an_export_of_gpus_that_are_all_alike_is_as_many_as_slurm_has(
    entry: dict[str, object], gpu_count: int, layout: object
) -> None:
    text = json.dumps({"version": "v1", "mig-configs": {"current": [{"devices": "all", **entry}]}}).encode()
    if layout is None:
        with pytest.raises(SourceError, match="and Slurm has"):
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
    row = {"submit_s": 1, "start_s": 5, "elapsed_s": 60, "gpu_count": 1, "gpu_type": "2g.20gb", "gpu_type_req": None,
           "hbm_peak_mib": None, "mean_sm_active_frac": None, "mean_dram_active_frac": None,
           "mean_gr_engine_active_frac": None, "mean_gpu_util_pct": None, "has_profiling_fault": None}  # fmt: skip
    rows = [row, row | {"gpu_count": 4, "gpu_type": "a100"}, row | {"gpu_type": "v100"}]
    demand = demand_of(rows, [], [A100], ADVICE, 100)
    assert [job.shape for job in demand.jobs] == ["2g"]
    assert demand.types == {"2g.20gb", "a100", "v100"}
    assert (demand.past, demand.unknown) == (1, 1)


def test_the_queue_names_types_on_every_release_and_skips_what_it_cannot_read() -> None:
    old = {"job_id": 1, "submit_time": 10, "job_state": "PENDING", "priority": 0, "tres_per_node": "gres:gpu:1g.10gb:1",
           "tres_req_str": "cpu=1,gres/gpu=1", "state_reason": "BadConstraints", "time_limit": 5}  # fmt: skip
    new = {"job_id": {"set": True, "number": 2}, "submit_time": {"set": True, "number": 11}, "job_state": ["RUNNING"],
           "tres_per_job": "gres/gpu:a100:2", "tres_req_str": "gres/gpu=2", "start_time": {"set": True, "number": 12},
           "nodes": "n1"}  # fmt: skip
    bad = {"job_id": None, "job_state": "PENDING", "tres_req_str": "gres/gpu=1"}
    first, second = gpu_jobs(json.dumps({"jobs": [old, new, bad, old | {"job_state": "COMPLETED"}]}).encode())
    assert (first.address, first.gpu_type, first.is_held, first.reason) == ("1", "1g.10gb", True, "BadConstraints")
    assert (second.gpu_type, second.gpu_count, second.start_s, second.is_pending) == ("a100", 2, 12, False)
