"""A job's metrics do not depend on the jobs that are looked at with it: any split of time gives one result."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from itertools import product

import pyarrow as pa
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from made_site import T0_S, Rows, Site, is_same, job, prolog, samples
from profiles import examples

from telemetry.attribution.runs import ended_jobs, load_runs

QUICK = (Phase.explicit, Phase.generate)
"""No shrinking: an example takes seconds."""


def forget(site: Site) -> None:
    """As if nothing had been summarised."""
    for table in ("job_metrics", "gpu_metrics"):
        shutil.rmtree(site.store.root / table, ignore_errors=True)


def assert_alone(site: Site, expected: tuple[pa.Table, ...], span: tuple[int, int]) -> None:
    """A summary of a span alone gives the rows of its jobs as `expected` has them, and no others."""
    keys = {(run.job_id, run.submit_s) for run in ended_jobs(load_runs(site.store.of("c")), *span)}
    forget(site)
    site.summarize(*span)
    for some, whole in zip(site.tables(), expected, strict=True):
        chosen = [key in keys for key in zip(whole["job_id"].to_pylist(), whole["submit_s"].to_pylist(), strict=True)]
        assert is_same((some,), (whole.filter(pa.array(chosen, pa.bool_())),))


def test_the_jobs_of_a_span_ran_in_it_and_have_ended(site: Site) -> None:
    site.jobs(job(1, 1, 2, "n1", 1), job(2, 3, 24, "n1", 1), job(3, 3, 25, "n1", 1))
    site.jobs(job(4, 5, None, "n1", 1), job(5, 24, 25, "n1", 1))
    found = ended_jobs(load_runs(site.store.of("c")), T0_S, T0_S + 24 * 3600)
    assert [run.job_id for run in found] == [1, 2, 3]


@dataclass(frozen=True)
class Made:
    """A job of one or two GPUs of two nodes. first_h, hours: when it ran. ended: else it still runs.

    labelled_h: hours after its start from which on its GPU carries its label. bound: GPU of its prolog record.
    """

    host: str
    gpus: int
    first_h: int
    hours: int
    ended: bool
    labelled_h: int | None
    gpu: int
    bound: int | None


MADE = st.builds(
    Made, host=st.sampled_from(["n1", "n1", "n2", "n[1-2]"]), gpus=st.integers(1, 2),
    first_h=st.sampled_from([0, 5, 20, 30, 50]), hours=st.sampled_from([3, 22, 30, 50]),
    ended=st.sampled_from([True, True, True, False]), labelled_h=st.sampled_from([None, 0, 25]), gpu=st.integers(0, 1),
    bound=st.sampled_from([None, 0, 1]),
)  # fmt: skip


SCRAPED_H = (0, 9, 24, 33, 48, 57)
"""Hours of which there are samples."""


def fill(site: Site, made: list[Made]) -> None:
    """Two nodes of two GPUs; of the labels that a GPU has at a time, the last job's counts."""
    rows = {(row["host"], row["gpu"], row["time_ms"]): row for day in range(3) for row in day_of_samples(day)}
    jobs, bindings = [], []
    for number, one in enumerate(made, 1):
        host, until_h = one.host.replace("n[1-2]", "n1"), one.first_h + one.hours
        jobs.append(job(number, one.first_h, until_h if one.ended else None, one.host, one.gpus))
        if one.bound is not None:
            bindings.append(prolog(number, host, one.bound, one.first_h))
        if one.labelled_h is not None:
            for row in samples(host, one.gpu, one.first_h + one.labelled_h, until_h, label=number):
                key = (row["host"], row["gpu"], row["time_ms"])
                rows |= {key: row} if key in rows else {}
    site.jobs(*jobs)
    site.bindings(*bindings)
    site.telemetry(list(rows.values()))


@examples(0.12, phases=QUICK)
@given(st.lists(MADE, min_size=3, max_size=6), st.integers(1, 71))
def test_a_span_alone_gives_the_rows_of_its_jobs_and_no_others_however_they_are_bound(
    tmp_path_factory: pytest.TempPathFactory, made: list[Made], cut_h: int
) -> None:
    """Spans are whole days, and two that part a day."""
    site = Site(tmp_path_factory.mktemp("made") / "store")
    fill(site, made)
    site.summarize()
    assert site.open_days == []
    expected = site.tables()
    for first_h, last_h in ((0, 24), (24, 48), (48, 72), (0, cut_h), (cut_h, 72)):
        assert_alone(site, expected, (T0_S + first_h * 3600, T0_S + last_h * 3600))


@examples(0.12, phases=QUICK)
@given(st.data())
def test_summaries_of_what_is_new_give_what_one_of_everything_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Records, bindings and days of samples come in any order, some jobs are seen running first, and now and then what
    is new is summarised."""
    site = Site(tmp_path_factory.mktemp("made") / "store")
    made = data.draw(st.lists(MADE, min_size=3, max_size=5))
    events = [partial(site.telemetry, day_of_samples(day)) for day in range(3)]
    for number, one in enumerate(made, 1):
        events.append(partial(site.jobs, job(number, one.first_h, None, one.host, one.gpus)))
        if one.ended:
            events.append(partial(site.jobs, job(number, one.first_h, one.first_h + one.hours, one.host, one.gpus)))
        if one.bound is not None:
            host = one.host.replace("n[1-2]", "n1")
            events.append(partial(site.bindings, prolog(number, host, one.bound, one.first_h)))
    order = data.draw(st.permutations(events))
    summarised = data.draw(st.sets(st.integers(1, len(events) - 1), min_size=1, max_size=4))
    for number, event in enumerate(order):
        if number in summarised:
            site.summarize()
        event()
    site.summarize()
    found = site.tables()
    forget(site)
    site.summarize(0)
    assert is_same(found, site.tables())


def day_of_samples(day: int) -> Rows:
    hours = [hour for hour in SCRAPED_H if hour // 24 == day]
    units = product(("n1", "n2"), (0, 1), hours)
    return [row for host, gpu, hour in units for row in samples(host, gpu, hour, hour + 1)]
