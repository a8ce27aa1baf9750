"""Samples go to the job that had the GPU, and to nobody where that cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.attribution.allocations import (
    DOUBLY_BOUND,
    NO_NODES,
    SHARED_GPU,
    UNBOUND,
    UNBOUND_COUNT,
    JobRun,
    attribute,
    parse_hosts,
    shared_jobs,
)
from telemetry.attribution.seen_units import (
    CONTRADICTED,
    UNBOUND_MIG,
    Binding,
    InstanceSpan,
    Inventory,
    held,
    joined,
    present,
)


def job(job_id: int, start_s: int, end_s: int, gpus: int, *hosts: str) -> JobRun:
    return JobRun(job_id, start_s, start_s, end_s, gpus, hosts or ("n1",))


def nodes(gpus: int = 4, hosts: Sequence[str] = ("n1", "n2"), days: int = 3) -> Inventory:
    units = frozenset((gpu, "") for gpu in range(gpus))
    return Inventory({(host, day): units for host in hosts for day in range(days)})


SPLIT = frozenset({(0, "1"), (0, "2"), (1, "5"), (2, "")})
PARENTS = {0: "GPU-a", 1: "GPU-b", 2: "GPU-c"}
# A node with GPU 0 in two MIG instances, GPU 1 in one, and GPU 2 whole; the exporter gives the GPU's UUID.
MIXED = Inventory({("n1", 0): SPLIT}, {("n1", 0): frozenset((PARENTS[gpu], (gpu, mig)) for gpu, mig in SPLIT)})
OWN_NAMES = Inventory({("n1", 0): SPLIT}, {("n1", 0): frozenset({("MIG-x", (0, "1")), ("MIG-y", (0, "2"))})})
WHOLE = Inventory(
    {("n1", 0): frozenset((gpu, "") for gpu in range(4))},
    {("n1", 0): frozenset((f"GPU-{gpu}", (gpu, "")) for gpu in range(3))},
)
# The node started again during the job, and the driver counted its GPUs in another order.
MOVED = Inventory(
    {("n1", 0): frozenset({(0, ""), (1, ""), (2, "")})},
    {("n1", 0): frozenset((uuid, (gpu, "")) for uuid in ("GPU-a", "GPU-b") for gpu in (0, 1))},
)
NODES, ONE = nodes(), job(7, 0, 100, 1)


def prolog(index: int, seen_s: int = 0, job_id: int = 7, host: str = "n1", **names: str) -> Binding:
    return Binding(job_id, host, index, "prolog", seen_s, **names)


def squeue(index: int, seen_s: int = 0, job_id: int = 7) -> Binding:
    return Binding(job_id, "n1", index, "squeue", seen_s)


def given_units(
    jobs: list[JobRun], seen: Inventory, records: Sequence[Binding] = (), labels: Any = None
) -> tuple[str, ...]:
    """Of each job, how its units are known and which: "prolog n1:2"; or the reason why it has none."""
    found = attribute(jobs, seen, labels or {}, list(records))
    units: dict[int, list[str]] = {}
    for row in found.allocations.to_pylist():
        assert (row["start_ms"], row["end_ms"]) == (jobs[row["job"]].start_s * 1000, jobs[row["job"]].end_s * 1000)
        units.setdefault(row["job"], []).append(f"{row['host']}:{row['gpu']}" + f"/{row['mig']}" * bool(row["mig"]))
    assert units.keys() == found.origin.keys() and not units.keys() & found.failed.keys()
    return tuple(
        " ".join([found.origin[number], *sorted(units[number])]) if number in units else found.failed[number]
        for number in range(len(jobs))
    )


ALL_OF_N1 = "whole node n1:0 n1:1 n1:2 n1:3"


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([job(1, 100, 200, 8, "n1", "n2")], (f"{ALL_OF_N1} n2:0 n2:1 n2:2 n2:3",)),
        ([job(1, 0, 100, 4), job(2, 100, 200, 4)], (ALL_OF_N1, ALL_OF_N1)),  # in the same second, but not at once
        ([job(1, 0, 100, 2)], (UNBOUND,)),
        ([job(1, 0, 100, 3, "n1", "n2")], (UNBOUND_COUNT,)),  # do not divide
        # Accounting must be wrong of one of them (a runaway job), and does not say of which.
        ([job(1, 0, 100, 4), job(2, 50, 150, 4)], (UNBOUND, UNBOUND)),
    ],
)
def test_only_a_job_with_every_gpu_of_its_nodes_owns_them_without_any_binding(
    jobs: list[JobRun], expected: tuple[str, ...]
) -> None:
    assert given_units(jobs, NODES) == expected


def test_a_host_of_which_telemetry_misses_gpus_is_not_taken_for_a_smaller_one() -> None:
    assert shared_jobs([job(1, 0, 100, 8, "n1", "dark")], NODES) == []
    assert shared_jobs([job(1, 0, 100, 4, "n1", "dark")], NODES) == [0]
    seen = Inventory({("n1", 0): frozenset({(3, "")})})
    assert shared_jobs([job(1, 0, 100, 1)], seen) == [0]
    one = Inventory({("n1", 0): frozenset({(0, "")})})
    assert shared_jobs([job(1, 0, 100, 1), job(2, 200, 300, 4)], one) == [0]


@pytest.mark.parametrize(
    ("records", "labels", "expected"),
    [
        ([prolog(2, 1), squeue(3, 1)], {("n1", 1, "")}, "label n1:1"),
        ([squeue(3, 1), prolog(2, 1)], {}, "prolog n1:2"),
        ([squeue(3, 1)], {}, "squeue n1:3"),
        ([prolog(2, 1)], {("n1", 0, ""), ("n1", 1, "")}, "prolog n1:2"),  # a label on more GPUs than the job has
        ([prolog(0, 1, host="n2"), prolog(9, 1)], {}, UNBOUND),  # of a foreign node, of an unseen GPU
    ],
)
def test_labels_come_before_the_prolog_and_the_prolog_before_squeue(
    records: list[Binding], labels: set[tuple[str, int, str]], expected: str
) -> None:
    assert given_units([ONE], NODES, records, {0: labels} if labels else {}) == (expected,)


def test_a_whole_node_needs_no_label_and_does_not_believe_one() -> None:
    assert given_units([job(7, 0, 100, 4)], NODES, labels={0: {("n2", 0, "")}}) == (ALL_OF_N1,)


def test_a_gpu_bound_to_two_jobs_at_once_belongs_to_neither() -> None:
    jobs = [job(1, 0, 100, 1), job(2, 50, 150, 1), job(3, 50, 150, 1)]
    records = [prolog(0, 0, 1), prolog(0, 50, 2), prolog(1, 50, 3)]
    assert given_units(jobs, NODES, records) == (DOUBLY_BOUND, DOUBLY_BOUND, "prolog n1:1")
    # Two compute instances of one GPU instance: the exporter's counters are of both.
    records = [prolog(n, job_id=n, uuid="GPU-a", mig="1") for n in (1, 2)]
    assert given_units([job(1, 0, 100, 1), job(2, 0, 100, 1)], MIXED, records) == (DOUBLY_BOUND, DOUBLY_BOUND)


def part(job_id: int, start_s: int, end_s: int) -> JobRun:
    """A job with two shards of a GPU."""
    return replace(job(job_id, start_s, end_s, 1), shares=2)


@pytest.mark.parametrize(
    ("jobs", "on", "expected"),
    [
        ([part(1, 0, 100)], {1: 2}, ("squeue n1:2",)),
        ([part(1, 0, 100), part(2, 0, 100)], {1: 2, 2: 3}, ("squeue n1:2", "squeue n1:3")),
        ([part(1, 0, 100), part(2, 99, 200)], {1: 2, 2: 2}, (SHARED_GPU, SHARED_GPU)),
        ([part(1, 0, 100), part(2, 100, 200)], {1: 2, 2: 2}, ("squeue n1:2", "squeue n1:2")),
        # Nobody knows which GPU the other one had; it is not charged, and it may have used this one.
        ([part(1, 0, 100), part(2, 50, 60)], {1: 2}, (SHARED_GPU, UNBOUND)),
        ([part(1, 0, 100), part(2, 50, 60), part(3, 60, 70)], {1: 2, 3: 1}, (SHARED_GPU, UNBOUND, "squeue n1:1")),
        ([part(1, 0, 100), job(2, 0, 100, 2)], {1: 2}, ("squeue n1:2", UNBOUND)),  # whole GPUs, so others
        ([part(1, 0, 100)], {}, (UNBOUND,)),
    ],
)
def test_a_part_of_a_gpu_is_charged_only_if_nobody_else_had_a_part(
    jobs: list[JobRun], on: dict[int, int], expected: tuple[str, ...]
) -> None:
    records = [squeue(gpu, jobs[job_id - 1].start_s, job_id) for job_id, gpu in on.items()]
    assert given_units(jobs, NODES, records) == expected


def test_a_part_of_the_only_gpu_of_a_node_needs_no_binding() -> None:
    assert given_units([part(1, 0, 100), part(2, 100, 200)], nodes(1)) == ("whole node n1:0", "whole node n1:0")
    assert given_units([part(1, 0, 100), part(2, 99, 200)], nodes(1)) == (UNBOUND, UNBOUND)


def test_each_run_of_a_requeued_job_has_its_own_gpus() -> None:
    runs = [job(7, 0, 1000, 1), job(7, 1100, 2000, 1)]
    assert given_units(runs, NODES, [squeue(0, 900), squeue(3, 1500)]) == ("squeue n1:0", "squeue n1:3")


@pytest.mark.parametrize(("seen_s", "expected"), [(990, "prolog n1:2"), (600, UNBOUND), (2000, UNBOUND)])
def test_a_prolog_record_may_be_a_little_older_than_the_start(seen_s: int, expected: str) -> None:
    assert given_units([job(7, 1000, 2000, 1)], NODES, [prolog(2, seen_s)]) == (expected,)


def test_a_gpu_split_into_mig_instances_counts_as_its_instances() -> None:
    split = Inventory({("n1", 0): frozenset({(0, ""), (0, "1"), (0, "2"), (1, "")})})
    assert shared_jobs([job(1, 0, 100, 2)], split) == [0]
    assert given_units([job(1, 0, 100, 3)], split) == ("whole node n1:0/1 n1:0/2 n1:1",)
    assert given_units([job(2, 0, 100, 1)], split, labels={0: {("n1", 0, "2")}}) == ("label n1:0/2",)


def test_two_jobs_on_two_instances_of_one_gpu_get_one_each() -> None:
    """Slurm counts the instances 0 and 1, which are no GPU indices."""
    records = [prolog(0, 0, 1, uuid="GPU-a", mig="2"), prolog(1, 50, 2, uuid="GPU-a", mig="1")]
    jobs = [job(1, 0, 100, 1), job(2, 50, 150, 1)]
    assert given_units(jobs, MIXED, records) == ("prolog n1:0/2", "prolog n1:0/1")


def test_an_exporter_that_names_instances_by_their_own_uuid_binds_them() -> None:
    assert given_units([ONE], OWN_NAMES, [prolog(0, uuid="MIG-y")]) == ("prolog n1:0/2",)


@pytest.mark.parametrize(
    "record",
    [
        squeue(2), prolog(2), prolog(2, uuid="GPU-a"), prolog(2, uuid="GPU-a", mig="9"), prolog(2, uuid="MIG-unknown"),
    ],
)  # fmt: skip
def test_an_index_is_no_gpu_on_a_node_with_mig(record: Binding) -> None:
    """Index 2 of Slurm is an instance there; GPU 2 may be another job's."""
    assert given_units([ONE], MIXED, [record]) == (UNBOUND_MIG,)


@pytest.mark.parametrize(
    ("seen", "records", "expected"),
    [
        (WHOLE, [prolog(1, uuid="GPU-1")], "prolog n1:1"),
        # Slurm and the exporter may count GPUs in different orders. squeue has the index only, and would repeat it.
        (WHOLE, [prolog(1, uuid="GPU-2"), squeue(1)], "prolog n1:2"),
        (WHOLE, [prolog(1, uuid="GPU-gone"), squeue(1)], CONTRADICTED),  # the index has another UUID
        (WHOLE, [prolog(3, uuid="GPU-3")], "prolog n1:3"),  # the index has none
        (MOVED, [prolog(1, uuid="GPU-a")], "prolog n1:1"),  # a UUID at several indices is believed with one of them
        (MOVED, [prolog(2, uuid="GPU-a")], CONTRADICTED),
    ],
)
def test_a_uuid_wins_over_an_index(seen: Inventory, records: list[Binding], expected: str) -> None:
    assert given_units([ONE], seen, records) == (expected,)


def test_a_contradicted_record_does_not_keep_a_label_from_counting() -> None:
    records = [prolog(1, uuid="GPU-gone")]
    assert given_units([ONE], WHOLE, records, {0: {("n1", 3, "")}}) == ("label n1:3",)


def test_an_unreadable_node_list_is_said() -> None:
    assert parse_hosts("n[1-") == ()
    assert parse_hosts(None) == ()
    assert parse_hosts("n[2-3],n1") == ("n1", "n2", "n3")
    assert attribute([JobRun(1, 0, 0, 100, 1, ())], nodes(), {}, []).failed == {0: NO_NODES}


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 30), st.integers(1, 4), st.sampled_from(["n1", "n2", "n1,n2"])),
        max_size=12,
    ),
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["n1", "n2"]), st.integers(0, 4), st.integers(0, 80))),
)
def test_no_gpu_is_ever_claimed_twice_and_never_off_the_jobs_own_nodes(
    drawn: list[tuple[int, int, int, str]], seen: list[tuple[int, str, int, int]]
) -> None:
    jobs = [job(n, start, start + length, gpus, *parse_hosts(on)) for n, (start, length, gpus, on) in enumerate(drawn)]
    records = [Binding(job_id, host, gpu, "squeue", seen_s) for job_id, host, gpu, seen_s in seen]
    found = attribute(jobs, nodes(), {}, records)
    rows = found.allocations.to_pylist()
    for one in rows:
        assert one["host"] in jobs[one["job"]].hosts
        for other in rows:
            if one["job"] < other["job"] and (one["host"], one["gpu"]) == (other["host"], other["gpu"]):
                assert one["end_ms"] <= other["start_ms"] or other["end_ms"] <= one["start_ms"]
    assert set(found.origin) | set(found.failed) == set(range(len(jobs)))


SPAN = InstanceSpan("1", 0, 1000, 100.0, 10, "1g.10gb", 10_000.0)


def test_spans_of_one_instance_without_a_pause_are_one() -> None:
    for change, expected in [
        ({"first_ms": 1250}, replace(SPAN, last_ms=2000, samples=18)), ({"first_ms": 1251}, None),
        ({"first_ms": 1500, "gap_ms": 200.0}, replace(SPAN, last_ms=2000, samples=18)),
        ({"samples": 11, "gap_ms": 200.0}, replace(SPAN, last_ms=2000, samples=21, gap_ms=200.0)),
        ({"samples": 11, "gap_ms": 0.0}, replace(SPAN, last_ms=2000, samples=21)),
        ({"last_ms": 900}, replace(SPAN, samples=18)), ({"mig": "2"}, None), ({"profile": "2g.20gb"}, None),
        ({"profile": None, "total_mib": None, "samples": 11}, replace(SPAN, last_ms=2000, samples=21)),
        ({"total_mib": 10_204.0}, replace(SPAN, last_ms=2000, samples=18)), ({"total_mib": 10_205.0}, None),
        ({"total_mib": 10_100.0, "samples": 11}, replace(SPAN, last_ms=2000, samples=21, total_mib=10_100.0)),
    ]:  # fmt: skip
        later = replace(SPAN, **{"first_ms": 1100, "last_ms": 2000, "samples": 8, **change})
        assert joined([later, SPAN]) == ([SPAN, later] if expected is None else [expected])


def test_an_instance_of_a_time_is_the_one_seen_longest() -> None:
    other = replace(SPAN, first_ms=2000, last_ms=4000, profile="2g.20gb")
    again = replace(SPAN, first_ms=6000, last_ms=6500, samples=3)
    both = replace(SPAN, last_ms=6500, samples=13)
    assert held([SPAN, other, again], "1", 0, 7000) == other
    assert held([SPAN, other, again], "1", 0, 3501) == other
    assert held([SPAN, other, again], "1", 0, 3000) == SPAN
    assert held([SPAN, again], "1", 1000, 6001) == both
    assert held([SPAN, other, again], "2", 0, 7000) is None


@pytest.mark.parametrize(
    ("start_ms", "end_ms", "expected"),
    [
        (0, 1000, "1"), (999, 1100, "2"), (1001, 1500, "2"), (0, 1124, "1"), (0, 1125, "12"), (9000, 9500, "2"),
        (12_000, 13_000, "23"), (30_000, 40_000, "3"),
    ],
)  # fmt: skip
def test_instances_that_a_gpu_had_at_a_time(start_ms: int, end_ms: int, expected: str) -> None:
    """A GPU that was not scraped has those just before and just after; the whole GPU does not count with them."""
    spans = [
        SPAN, replace(SPAN, mig="2", first_ms=1012, last_ms=9000), replace(SPAN, mig="", last_ms=3000),
        replace(SPAN, mig="3", first_ms=20_000, last_ms=21_000),
    ]  # fmt: skip
    assert "".join(sorted(present(spans, start_ms, end_ms))) == expected
