"""GPU errors of hand-made sites: whose they are, what counts as one, and which jobs count as failed by a node."""

from __future__ import annotations

from typing import Any

import pytest
from made_site import HOUR_S, T0_S, Rows, Site, job, samples

from slurm.states import NODE_FAILED
from telemetry.health.errors import NODE_CAUSES, failed_node, fatal_error, gpu_error, gpu_errors, lost_context
from telemetry.health.failures import JobFailure, gpu_exposure, node_days, node_failures
from telemetry.history import load_history

END_S = T0_S + 48 * HOUR_S


def gauge(rows: Rows, *changes: tuple[float, float | None]) -> Rows:
    """The rows with an XID gauge that has this value from so many hours on, 0 before."""
    for row in rows:
        hours = (row["time_ms"] / 1000 - T0_S) / HOUR_S
        row["xid"] = next((value for from_h, value in reversed(changes) if hours >= from_h), 0.0)
    return rows


def failures(site: Site) -> list[JobFailure]:
    return node_failures(site.store.of("c"), T0_S, END_S, T0_S)


def errors(site: Site) -> dict[int, Any]:
    return {job_id: row["gpu_errors"] for (job_id, _), row in site.found().items()}


def test_a_job_that_failed_at_an_error_of_the_node_is_no_failure_of_its_user(site: Site) -> None:
    """The sample after the end shows the error, and the next job already has the GPU; the gauge then keeps 79."""
    site.telemetry(gauge(samples("n1", 0, 0, 8), (3.05, 79.0)))
    site.jobs(job(1, 1, 3, "n1", 1, state="FAILED", user="ann"), job(2, 3.01, 5, "n1", 1, user="bob"))
    site.summarize()
    assert errors(site) == {1: [f"n1:0:XID 79:{T0_S + 3 * HOUR_S + 600}"], 2: None}
    (failure,) = failures(site)
    assert (failure.job_id, failure.user, failure.node, failure.gpu, failure.code) == (1, "ann", "n1", "0", "XID 79")
    assert failure.error is not None and failure.error.about == "the GPU fell off the bus"
    assert load_history(site.store.of("c")).set_index("job_id")["state"].to_dict() == {1: "NODE_FAIL", 2: "COMPLETED"}


@pytest.mark.parametrize(
    ("changes", "state", "found"),
    [
        ([(0, 79.0)], "FAILED", None),  # it was there before
        ([(0, None), (2.9, 79.0)], "FAILED", None),  # the counter was switched on
        ([(2.9, 31.0)], "FAILED", "XID 31"),  # the program's own
        ([(2.9, 79.0)], "COMPLETED", "XID 79"),
        ([(1.5, 79.0), (2.5, 0.0)], "FAILED", "XID 79"),  # long before its end
        ([(2.9, 777.0)], "FAILED", "XID 777"),
    ],
)
def test_no_failure_of_the_node(site: Site, changes: list[tuple[float, float]], state: str, found: str | None) -> None:
    site.telemetry(gauge(samples("n1", 0, 0, 8), *changes))
    site.jobs(job(1, 1, 3, "n1", 1, state=state))
    site.summarize()
    texts = errors(site)[1]
    assert [text.split(":")[2] for text in texts or []] == ([found] if found else [])
    assert failures(site) == []
    assert load_history(site.store.of("c"))["state"].tolist() == [state]


def test_an_error_in_a_hole_of_the_record_has_no_time(site: Site) -> None:
    site.telemetry(gauge(samples("n1", 0, 0, 2), (9, 1.0)), gauge(samples("n1", 0, 3, 6), (0, 79.0)))
    site.jobs(job(1, 1, 3, "n1", 1, state="FAILED"))
    site.summarize()
    assert errors(site) == {1: None} and failures(site) == []


def test_a_tenant_of_a_slice_is_not_blamed_for_another_tenant_s_program(site: Site) -> None:
    both = [gauge(samples("n1", 0, 0, 6, mig=mig), (2.9, 31.0), (3.2, 95.0)) for mig in ("1", "2")]
    site.telemetry(*both)
    site.jobs(job(1, 1, 3.3, "n1", 2, state="FAILED"))
    site.summarize()
    assert {text.split(":")[2] for text in errors(site)[1]} == {"XID 95"}


def test_ten_thousand_errors_a_minute_are_bounded(site: Site) -> None:
    rows = samples("n1", 0, 0, 48)
    for place, row in enumerate(rows):
        row["xid"] = float(place % 200 + 1)
    site.telemetry(rows)
    site.jobs(job(1, 0.5, 47, "n1", 1, state="FAILED"))
    site.summarize()
    kept = [int(text.rsplit(":", 1)[1]) for text in errors(site)[1]]
    assert len(kept) == 100 and kept == sorted(kept)
    assert kept[0] < T0_S + HOUR_S and kept[-1] > T0_S + 46 * HOUR_S


def test_a_job_that_died_of_the_second_error_of_one_code_is_found(site: Site) -> None:
    """The first was long before its end, the third one counts: those between say nothing more."""
    site.telemetry(gauge(samples("n1", 0, 0, 12), (1.5, 79.0), (2, 0.0), (5, 79.0), (6, 0.0), (9.9, 79.0)))
    site.jobs(job(1, 1, 10, "n1", 1, state="FAILED"))
    site.summarize()
    assert [round((int(text.rsplit(":", 1)[1]) - T0_S) / HOUR_S) for text in errors(site)[1]] == [2, 10]
    (failure,) = failures(site)
    assert (failure.node, failure.code) == ("n1", "XID 79") and failure.time_s > T0_S + 9.8 * HOUR_S


def test_uncorrected_errors_count_when_they_grow(site: Site) -> None:
    rows = samples("n1", 0, 0, 6)
    for row in rows:
        row["ecc_uncorrected"] = 3.0 if row["time_ms"] < (T0_S + 2.9 * HOUR_S) * 1000 else 4.0
    site.telemetry(rows)
    site.jobs(job(1, 1, 3, "n1", 1, state="FAILED"), job(2, 4, 5, "n1", 1, state="FAILED"))
    site.summarize()
    assert [(each.job_id, each.code) for each in failures(site)] == [(1, "ECC")]


def test_slurm_s_own_node_failures_name_the_node_that_accounting_knows(site: Site) -> None:
    site.jobs(
        job(1, 1, 2, "n[1-2]", 2, state="NODE_FAIL", failed_node="n2", node_count=2),
        job(1, 3, 4, "n7", 1, node_count=1),  # the same job, requeued
        job(3, 1, 2, "n[1-2]", 2, state="NODE_FAIL", node_count=2),
        job(4, 1, 2, "n5", 1, state="BOOT_FAIL", node_count=1),
    )  # fmt: skip
    assert {(each.job_id, each.node) for each in failures(site)} == {(1, "n2"), (3, ""), (4, "n5")}
    store = site.store.of("c")
    assert node_days(store, T0_S, END_S, T0_S) == {"n1": 1, "n2": 1, "n5": 1, "n7": 1}
    assert gpu_exposure(store, T0_S, END_S, T0_S) == [(1, 2.0), (2, 2.0)]


def test_the_error_of_the_node_goes_before_that_of_the_program() -> None:
    texts = ["n1:0:XID 31:990", "n1.example:9400:3:XID 79:1000", "n1:1:XID 45:1000"]
    found = fatal_error("FAILED", 1000, texts)
    assert found is not None and (found.host, found.gpu, found.code) == ("n1.example:9400", "3", "XID 79")
    assert fatal_error("FAILED", 10_000, texts) is None
    assert fatal_error("TIMEOUT", 1000, texts) is None and fatal_error("FAILED", None, texts) is None


@pytest.mark.parametrize(
    ("state", "accounted", "texts", "code", "node"),
    [
        ("NODE_FAIL", None, ["n1:0:XID 31:990", "n1:0:XID 13:995"], "", ""),  # the program's own errors: no cause
        ("NODE_FAIL", "n2", ["n1:0:XID 31:990"], "", "n2"),
        ("NODE_FAIL", "n2", ["n1:0:XID 79:990", "n2:1:XID 48:995"], "XID 48", "n2"),  # accounting before inference
        ("NODE_FAIL", "n2", ["n1:0:XID 79:990"], "", "n2"),
        ("NODE_FAIL", None, ["n1:0:XID 79:990"], "XID 79", "n1"),
        ("FAILED", "n2", ["n1:0:XID 79:990"], "XID 79", "n1"),  # --no-kill: it outlived n2
        ("FAILED", None, ["n1:0:XID 31:990"], "XID 31", ""),
        ("FAILED", "n2", [], "", ""),
        ("COMPLETED", None, ["n1:0:XID 79:990"], "", ""),
    ],
)
def test_one_reader_says_what_ended_a_job_and_where(
    state: str, accounted: str | None, texts: list[str], code: str, node: str
) -> None:
    error = fatal_error(state, 1000, texts, accounted)
    assert (error.code if error else "") == code
    assert failed_node(state, "n[1-2]", accounted, error) == node


def test_every_error_has_a_cause_and_unknown_ones_blame_nobody() -> None:
    assert {error.cause for error in gpu_errors().values()} == NODE_CAUSES | {"code", "none"}
    assert all(error.about and error.action for error in gpu_errors().values())
    assert gpu_error("XID 9999").cause == "unknown" and not gpu_error("XID 9999").is_of_node
    assert lost_context().search("CUDA error: an illegal memory access was encountered")
    assert set(NODE_FAILED) == {"NODE_FAIL", "BOOT_FAIL"}
