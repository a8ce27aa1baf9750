"""Samples go to the job that had the GPU, and to nobody where that cannot be told."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from telemetry.attribution.allocations import (
    DOUBLY_BOUND,
    NO_NODES,
    UNBOUND,
    UNBOUND_COUNT,
    JobRun,
    attribute,
    parse_hosts,
    shared_jobs,
)
from telemetry.attribution.bindings import CONTRADICTED, UNBOUND_MIG, Binding, Unit
from telemetry.attribution.seen_units import Inventory

DAY_S = 86_400


def job(job_id: int, start_s: int, end_s: int, gpus: int, *hosts: str) -> JobRun:
    return JobRun(job_id, start_s, start_s, end_s, gpus, hosts or ("n1",))


def nodes(gpus: int = 4, hosts: Sequence[str] = ("n1", "n2"), days: int = 3) -> Inventory:
    units = frozenset((gpu, "") for gpu in range(gpus))
    return Inventory({(host, day): units for host in hosts for day in range(days)})


def owned(result_allocations: object, number: int) -> set[tuple[str, int]]:
    rows = result_allocations.to_pylist()  # type: ignore[attr-defined]
    return {(row["host"], row["gpu"]) for row in rows if row["job"] == number}


def test_a_job_with_every_gpu_of_its_nodes_owns_them_without_any_binding() -> None:
    found = attribute([job(1, 100, 200, 8, "n1", "n2")], nodes(), {}, [])
    assert owned(found.allocations, 0) == {(host, gpu) for host in ("n1", "n2") for gpu in range(4)}
    assert found.origin == {0: "whole node"}
    assert set(found.allocations["start_ms"].to_pylist()) == {100_000}
    assert set(found.allocations["end_ms"].to_pylist()) == {200_000}


def test_jobs_that_follow_each_other_within_the_same_second_do_not_share_a_node() -> None:
    found = attribute([job(1, 0, 100, 4), job(2, 100, 200, 4)], nodes(), {}, [])
    assert found.origin == {0: "whole node", 1: "whole node"}


def test_a_job_with_some_gpus_of_a_node_gets_nothing_without_a_binding() -> None:
    found = attribute([job(1, 0, 100, 2)], nodes(), {}, [])
    assert found.allocations.num_rows == 0
    assert found.failed == {0: UNBOUND}


def test_a_multi_node_job_whose_gpus_do_not_divide_says_that_the_split_is_unknown() -> None:
    found = attribute([job(1, 0, 100, 3, "n1", "n2")], nodes(), {}, [])
    assert found.failed == {0: UNBOUND_COUNT}


def test_jobs_that_record_the_whole_node_at_the_same_time_get_nothing() -> None:
    """Accounting must be wrong of one of them (a runaway job), and does not say of which."""
    found = attribute([job(1, 0, 100, 4), job(2, 50, 150, 4)], nodes(), {}, [])
    assert found.failed == {0: UNBOUND, 1: UNBOUND}


def test_a_host_without_telemetry_is_taken_to_be_as_large_as_the_others() -> None:
    assert shared_jobs([job(1, 0, 100, 8, "n1", "dark")], nodes()) == []
    assert shared_jobs([job(1, 0, 100, 4, "n1", "dark")], nodes()) == [0]


def test_a_host_whose_exporter_misses_gpus_is_not_taken_for_a_smaller_one() -> None:
    seen = Inventory({("n1", 0): frozenset({(3, "")})})
    assert shared_jobs([job(1, 0, 100, 1)], seen) == [0]
    one = Inventory({("n1", 0): frozenset({(0, "")})})
    assert shared_jobs([job(1, 0, 100, 1), job(2, 200, 300, 4)], one) == [0]


def test_labels_come_before_the_prolog_and_the_prolog_before_squeue() -> None:
    jobs = [job(7, 0, 100, 1)]
    label = {0: {("n1", 1, "")}}
    prolog, squeue = Binding(7, "n1", 2, "prolog", 1), Binding(7, "n1", 3, "squeue", 1)
    found = attribute(jobs, nodes(), label, [prolog, squeue])
    assert (owned(found.allocations, 0), found.origin[0]) == ({("n1", 1)}, "label")
    found = attribute(jobs, nodes(), {}, [squeue, prolog])
    assert (owned(found.allocations, 0), found.origin[0]) == ({("n1", 2)}, "prolog")
    found = attribute(jobs, nodes(), {}, [squeue])
    assert (owned(found.allocations, 0), found.origin[0]) == ({("n1", 3)}, "squeue")


def test_a_label_on_more_gpus_than_the_job_has_is_not_believed() -> None:
    label = {0: {("n1", 0, ""), ("n1", 1, "")}}
    found = attribute([job(7, 0, 100, 1)], nodes(), label, [Binding(7, "n1", 2, "prolog", 1)])
    assert (owned(found.allocations, 0), found.origin[0]) == ({("n1", 2)}, "prolog")


def test_a_record_of_a_foreign_node_or_an_unseen_gpu_binds_nothing() -> None:
    records = [Binding(7, "n2", 0, "prolog", 1), Binding(7, "n1", 9, "prolog", 1)]
    assert attribute([job(7, 0, 100, 1)], nodes(), {}, records).failed == {0: UNBOUND}


def test_a_whole_node_needs_no_label_and_does_not_believe_one() -> None:
    found = attribute([job(7, 0, 100, 4)], nodes(), {0: {("n2", 0, "")}}, [])
    assert owned(found.allocations, 0) == {("n1", gpu) for gpu in range(4)}


def test_a_gpu_bound_to_two_jobs_at_once_belongs_to_neither() -> None:
    records = [Binding(1, "n1", 0, "prolog", 0), Binding(2, "n1", 0, "prolog", 50), Binding(3, "n1", 1, "prolog", 50)]
    jobs = [job(1, 0, 100, 1), job(2, 50, 150, 1), job(3, 50, 150, 1)]
    found = attribute(jobs, nodes(), {}, records)
    assert found.failed == {0: DOUBLY_BOUND, 1: DOUBLY_BOUND}
    assert owned(found.allocations, 2) == {("n1", 1)}


def test_each_run_of_a_requeued_job_has_its_own_gpus() -> None:
    runs = [job(5, 0, 1000, 1), job(5, 1100, 2000, 1)]
    records = [Binding(5, "n1", 0, "squeue", 900), Binding(5, "n1", 3, "squeue", 1500)]
    found = attribute(runs, nodes(), {}, records)
    assert (owned(found.allocations, 0), owned(found.allocations, 1)) == ({("n1", 0)}, {("n1", 3)})


def test_a_prolog_record_may_be_a_little_older_than_the_start() -> None:
    def bound(seen_s: int) -> set[tuple[str, int]]:
        return owned(
            attribute([job(5, 1000, 2000, 1)], nodes(), {}, [Binding(5, "n1", 2, "prolog", seen_s)]).allocations, 0
        )

    assert bound(990) == {("n1", 2)}
    assert bound(600) == set()
    assert bound(2000) == set()


def test_a_gpu_split_into_mig_instances_counts_as_its_instances() -> None:
    split = Inventory({("n1", 0): frozenset({(0, ""), (0, "1"), (0, "2"), (1, "")})})
    assert shared_jobs([job(1, 0, 100, 2)], split) == [0]
    found = attribute([job(1, 0, 100, 3)], split, {}, [])
    rows = {(row["gpu"], row["mig"]) for row in found.allocations.to_pylist()}
    assert rows == {(0, "1"), (0, "2"), (1, "")}
    found = attribute([job(2, 0, 100, 1)], split, {0: {("n1", 0, "2")}}, [])
    assert [(row["gpu"], row["mig"]) for row in found.allocations.to_pylist()] == [(0, "2")]


SPLIT = frozenset({(0, "1"), (0, "2"), (1, "5"), (2, "")})
PARENTS = {0: "GPU-a", 1: "GPU-b", 2: "GPU-c"}


def mixed(names: frozenset[tuple[str, Unit]] | None = None) -> Inventory:
    """A node with GPU 0 in two MIG instances, GPU 1 in one, and GPU 2 whole; the exporter gives the GPU's UUID."""
    if names is None:
        names = frozenset((PARENTS[gpu], (gpu, mig)) for gpu, mig in SPLIT)
    return Inventory({("n1", 0): SPLIT}, {("n1", 0): names})


def units_of(found: object, number: int) -> set[tuple[int, str]]:
    rows = found.allocations.to_pylist()  # type: ignore[attr-defined]
    return {(row["gpu"], row["mig"]) for row in rows if row["job"] == number}


def test_two_jobs_on_two_instances_of_one_gpu_get_one_each() -> None:
    """Slurm counts the instances 0 and 1, which are no GPU indices."""
    jobs = [job(1, 0, 100, 1), job(2, 50, 150, 1)]
    records = [
        Binding(1, "n1", 0, "prolog", 0, uuid="GPU-a", mig="2"),
        Binding(2, "n1", 1, "prolog", 50, uuid="GPU-a", mig="1"),
    ]
    found = attribute(jobs, mixed(), {}, records)
    assert (units_of(found, 0), units_of(found, 1)) == ({(0, "2")}, {(0, "1")})
    assert found.origin == {0: "prolog", 1: "prolog"}


def test_a_job_may_have_instances_of_several_gpus_and_a_whole_one() -> None:
    records = [
        Binding(1, "n1", 0, "prolog", 0, uuid="GPU-a", mig="1"),
        Binding(1, "n1", 2, "prolog", 0, uuid="GPU-b", mig="5"),
        Binding(1, "n1", 3, "prolog", 0, uuid="GPU-c"),
    ]
    assert units_of(attribute([job(1, 0, 100, 3)], mixed(), {}, records), 0) == {(0, "1"), (1, "5"), (2, "")}


def test_an_exporter_that_names_instances_by_their_own_uuid_binds_them() -> None:
    names = frozenset({("MIG-x", (0, "1")), ("MIG-y", (0, "2"))})
    records = [Binding(1, "n1", 0, "prolog", 0, uuid="MIG-y")]
    assert units_of(attribute([job(1, 0, 100, 1)], mixed(names), {}, records), 0) == {(0, "2")}


def test_an_index_is_no_gpu_on_a_node_with_mig() -> None:
    """Index 2 of Slurm is an instance there; GPU 2 may be another job's."""
    for record in (
        Binding(1, "n1", 2, "squeue", 0),
        Binding(1, "n1", 2, "prolog", 0),
        Binding(1, "n1", 2, "prolog", 0, uuid="GPU-a"),
        Binding(1, "n1", 2, "prolog", 0, uuid="GPU-a", mig="9"),
        Binding(1, "n1", 2, "prolog", 0, uuid="MIG-unknown"),
    ):
        found = attribute([job(1, 0, 100, 1)], mixed(), {}, [record])
        assert (found.failed, found.allocations.num_rows) == ({0: UNBOUND_MIG}, 0), record


def test_two_jobs_that_share_an_instance_get_nothing() -> None:
    """Two compute instances of one GPU instance: the exporter's counters are of both."""
    records = [Binding(n, "n1", n, "prolog", 0, uuid="GPU-a", mig="1") for n in (1, 2)]
    found = attribute([job(1, 0, 100, 1), job(2, 0, 100, 1)], mixed(), {}, records)
    assert found.failed == {0: DOUBLY_BOUND, 1: DOUBLY_BOUND}


WHOLE = Inventory(
    {("n1", 0): frozenset((gpu, "") for gpu in range(4))},
    {("n1", 0): frozenset((f"GPU-{gpu}", (gpu, "")) for gpu in range(3))},
)


def test_an_index_and_a_uuid_of_the_same_gpu_are_believed() -> None:
    found = attribute([job(1, 0, 100, 1)], WHOLE, {}, [Binding(1, "n1", 1, "prolog", 0, uuid="GPU-1")])
    assert units_of(found, 0) == {(1, "")}


def test_a_uuid_wins_over_an_index_of_another_gpu() -> None:
    """Slurm and the exporter may count GPUs in different orders. squeue has the index only, and would repeat it."""
    squeue = Binding(1, "n1", 1, "squeue", 0)
    found = attribute([job(1, 0, 100, 1)], WHOLE, {}, [Binding(1, "n1", 1, "prolog", 0, uuid="GPU-2"), squeue])
    assert (units_of(found, 0), found.origin) == ({(2, "")}, {0: "prolog"})


def test_two_jobs_whose_indices_are_swapped_get_the_gpus_of_their_uuids() -> None:
    jobs = [job(1, 0, 100, 1), job(2, 0, 100, 1)]
    records = [Binding(1, "n1", 0, "prolog", 0, uuid="GPU-1"), Binding(2, "n1", 1, "prolog", 0, uuid="GPU-0")]
    found = attribute(jobs, WHOLE, {}, records)
    assert (units_of(found, 0), units_of(found, 1)) == ({(1, "")}, {(0, "")})


def test_a_uuid_that_telemetry_does_not_show_makes_an_index_of_another_uuid_unusable() -> None:
    squeue = Binding(1, "n1", 1, "squeue", 0)
    gone = Binding(1, "n1", 1, "prolog", 0, uuid="GPU-gone")
    found = attribute([job(1, 0, 100, 1)], WHOLE, {}, [gone, squeue])
    assert (found.failed, found.allocations.num_rows) == ({0: CONTRADICTED}, 0)
    labeled = attribute([job(1, 0, 100, 1)], WHOLE, {0: {("n1", 3, "")}}, [gone])
    assert units_of(labeled, 0) == {(3, "")}


def test_a_uuid_at_several_indices_is_believed_only_with_its_index() -> None:
    """The node started again during the job, and the driver counted its GPUs in another order."""
    names = frozenset({("GPU-a", (0, "")), ("GPU-a", (1, "")), ("GPU-b", (0, "")), ("GPU-b", (1, ""))})
    moved = Inventory({("n1", 0): frozenset({(0, ""), (1, ""), (2, "")})}, {("n1", 0): names})
    found = attribute([job(1, 0, 100, 1)], moved, {}, [Binding(1, "n1", 1, "prolog", 0, uuid="GPU-a")])
    assert units_of(found, 0) == {(1, "")}
    found = attribute([job(1, 0, 100, 1)], moved, {}, [Binding(1, "n1", 2, "prolog", 0, uuid="GPU-a")])
    assert found.failed == {0: CONTRADICTED}


def test_where_telemetry_has_no_uuid_the_index_is_taken() -> None:
    found = attribute([job(1, 0, 100, 1)], WHOLE, {}, [Binding(1, "n1", 3, "prolog", 0, uuid="GPU-3")])
    assert units_of(found, 0) == {(3, "")}


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
