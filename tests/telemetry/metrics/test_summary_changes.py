"""A changed record of a job costs its neighbors only; a summary that is killed leaves its days open."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from made_site import DAY, T0_S, Site, is_same, job, prolog, samples
from profiles import examples

from telemetry.store.progress import MOST_RUNS
from telemetry.store.store import ClusterStore

QUICK = (Phase.explicit, Phase.generate)
HOURS = (1, 9, 25, 33, 49)
"""Hours that have samples, so that a site is made in little time."""


def fill(site: Site, hosts: range) -> None:
    for number, gpu in product(hosts, (0, 1)):
        site.telemetry(*(samples(f"n{number}", gpu, hour, hour + 1, util=10.0 * number + gpu) for hour in HOURS))


def assert_as_whole(site: Site) -> None:
    """A summary of everything changes no row."""
    found = site.tables()
    site.summarize(0)
    assert is_same(found, site.tables())


@pytest.fixture
def six(site: Site) -> Site:
    """A job on each of six nodes on the first day, and one on each on the second."""
    fill(site, range(1, 7))
    site.jobs(*(job(10 * day + n, 24 * day + 1, 24 * day + 10, f"n{n}", 2) for day in (0, 1) for n in range(1, 7)))
    site.summarize()
    assert site.store.of("c").stale().all_days() == {}
    return site


def test_a_changed_job_costs_its_neighbors_only(six: Site) -> None:
    assert six.jobs({**job(2, 1, 10, "n2", 2), "end_s": T0_S + 9 * 3600}) == [0]
    counts = six.summarize()
    assert (counts.jobs, counts.days, counts.changed_jobs) == (1, [], 1)
    assert (counts.samples, counts.samples_without_job) == (0, 0)
    assert counts.lines()[-1] == "  jobs that had changed: 1"
    assert six.open_days == []
    assert_as_whole(six)


def test_the_jobs_of_its_old_and_its_new_nodes_are_computed_again(six: Site) -> None:
    six.jobs({**job(2, 1, 10, "n2", 2), "node_list": "n[3-4]"}, job(20, 2, 3, "n2", 1))
    six.summarize()
    assert six.jobs({**job(2, 1, 10, "n2", 2), "node_list": "n5"}) == [0]
    counts = six.summarize()
    assert counts.jobs == 4, "2 itself, 3 and 4 on its old nodes, 5 on its new one"
    assert_as_whole(six)


def test_a_changed_account_costs_its_own_job_only(six: Site) -> None:
    six.jobs(job(20, 2, 3, "n2", 1))
    six.summarize()
    six.jobs({**job(2, 1, 10, "n2", 2), "account": "other"})
    assert six.summarize().jobs == 1


def test_nodes_that_differ_in_case_or_domain_are_neighbors(six: Site) -> None:
    six.jobs(job(20, 2, 3, "N2.cluster.example", 1))
    assert six.summarize().jobs == 2
    assert_as_whole(six)


def test_a_job_on_a_stale_day_is_computed_once(six: Site) -> None:
    six.telemetry(samples("n1", 0, 9, 10, util=90.0))
    six.jobs({**job(2, 1, 10, "n2", 2), "end_s": T0_S + 9 * 3600})
    counts = six.summarize()
    assert (counts.jobs, counts.changed_jobs, len(counts.days)) == (6, 1, 1)
    assert_as_whole(six)


def test_many_changed_jobs_make_their_days_stale(six: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.store.progress.MOST_RUNS", 1)
    six.jobs(*({**job(n, 1, 10, f"n{n}", 2), "end_s": T0_S + 9 * 3600} for n in (2, 3)))
    stale = six.store.of("c").stale()
    assert (stale.runs, list(stale.days)) == ({}, [DAY])
    assert six.summarize().jobs == 6 < MOST_RUNS
    assert_as_whole(six)


@dataclasses.dataclass(frozen=True)
class Record:
    """Accounting's record of a job at some time. hours: None while it runs."""

    hosts: str
    gpus: int
    first_h: int
    hours: int | None
    state: str = "COMPLETED"
    account: str = "a"
    bound: int | None = None


RECORD = st.builds(
    Record, hosts=st.sampled_from(["n1", "n1", "n2", "N2.x", "n3", "n[1-2]", "n[2-3]", "n[3", "n9"]),
    gpus=st.sampled_from([0, 1, 2, 2, 4]), first_h=st.sampled_from([0, 1, 8, 20, 24, 30]),
    hours=st.sampled_from([None, 1, 3, 9, 26]), state=st.sampled_from(["COMPLETED", "CANCELLED", "REQUEUED"]),
    account=st.sampled_from(["a", "b"]), bound=st.sampled_from([None, None, 0, 1]),
)  # fmt: skip


def stored(site: Site, job_id: int, record: Record, submitted_h: int) -> None:
    last_h = None if record.hours is None else record.first_h + record.hours
    row: dict[str, Any] = job(job_id, record.first_h, last_h, record.hosts, record.gpus)
    site.jobs({**row, "submit_s": T0_S + submitted_h * 3600, "state": record.state, "account": record.account})
    if record.bound is not None:
        site.bindings(prolog(job_id, record.hosts.split("[")[0][:2].ljust(2, "1"), record.bound, record.first_h))


@examples(0.12, phases=QUICK)
@given(st.data())
def test_any_changes_give_what_a_summary_of_everything_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Jobs change their nodes, times, GPUs, state, and account; some are new, and some share their id."""
    site = Site(tmp_path_factory.mktemp("changes") / "store")
    fill(site, range(1, 4))
    jobs = [(1 + place // 2 if place > 5 else 10 + place, place % 3) for place in range(9)]
    for job_id, submitted_h in jobs[:7]:
        stored(site, job_id, data.draw(RECORD), submitted_h)
    site.summarize()
    for _ in range(data.draw(st.integers(1, 2))):
        for job_id, submitted_h in data.draw(st.lists(st.sampled_from(jobs), min_size=1, max_size=2)):
            stored(site, job_id, data.draw(RECORD), submitted_h)
        site.summarize()
    assert site.open_days == []
    assert_as_whole(site)


@pytest.mark.parametrize("table", ["gpu_metrics", "job_metrics"])
def test_a_summary_that_stops_at_either_table_is_ended_by_the_next(
    site: Site, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.telemetry(samples("n1", 0, 0, 24))
    site.jobs(job(1, 1, 2, "n1", 1))
    replace = ClusterStore.replace

    def stopping(store: ClusterStore, name: str, *rest: object) -> int:
        if name == table:
            raise KeyboardInterrupt
        return replace(store, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ClusterStore, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        site.summarize()
    monkeypatch.undo()
    assert site.open_days == [0]
    site.summarize()
    assert site.open_days == []
    assert site.verdicts() == {1: "ok"}
    assert site.gpus(1) == [("n1", 0, "")]
