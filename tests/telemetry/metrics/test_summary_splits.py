"""What is found of a job does not depend on which others are looked at with it: any split of time gives one result."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from made_site import DAY, T0_S, Rows, Site, is_same, job, prolog, samples
from profiles import examples

from demo import GeneratedSource, SiteShape, jobs_table
from telemetry.attribution.runs import ended_jobs, load_runs
from telemetry.ingest import IngestResult, ingest
from telemetry.sources.base import RowBatch

QUICK = (Phase.explicit, Phase.generate)
"""No shrinking: an example takes seconds."""
DAYS = 4
DAY_S = 86_400
SHAPE = SiteShape(
    seed=5, start_s=T0_S, days=DAYS + 1, nodes_40=6, nodes_80=1, users=8, jobs_per_day=30, max_nodes=2,
    interval_s=600, duration_scale=4.0,
)  # fmt: skip
SHARED = {"nid001001": "nid000001", "nid001002": "nid000001", "nid001003": "nid000002", "nid001004": "nid000002"}
"""The shared node on which jobs of one of these nodes have two GPUs instead."""
SECOND_HALF = ("nid001002", "nid001004")


@dataclass(frozen=True)
class Sharing:
    """The generated site, where jobs of some nodes share others by two. Half of the GPUs that they had are nobody's."""

    source: GeneratedSource
    name = "generated"

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        held = jobs_table(self.source.plan).to_pandas()
        held = held[held["node_list"].isin(SHARED)].astype({"start_s": "int64"}).sort_values("start_s")
        for batch in self.source.read(since_s, until_s):
            rows = batch.rows.to_pandas(integer_object_nulls=True)
            if batch.table == "jobs":
                is_shared = rows["node_list"].isin(SHARED)
                rows.loc[is_shared, ["gpu_count", "gpu_count_req"]] = 2
                rows["node_list"] = rows["node_list"].replace(SHARED)
            else:
                rows["time_s"] = rows["time_ms"] // 1000
                rows = pd.merge_asof(
                    rows.sort_values("time_s"), held[["node_list", "start_s", "elapsed_s", "job_id"]],
                    left_on="time_s", right_on="start_s", left_by="host", right_by="node_list",
                )  # fmt: skip
                is_label = (rows["gpu"] < 2) & (rows["time_s"] < rows["start_s"] + rows["elapsed_s"])
                rows["job_label"] = rows["job_id"].where(is_label)
                rows["gpu"] += (2 * (is_label & rows["host"].isin(SECOND_HALF))).astype("int16")
                rows["host"] = rows["host"].mask(is_label, rows["host"].map(SHARED))
            made = pa.Table.from_pandas(rows, schema=batch.rows.schema, preserve_index=False)
            yield dataclasses.replace(batch, rows=made)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Four days of a site with shared nodes, several jobs of several days, and some that still run."""
    site = Site(tmp_path_factory.mktemp("splits") / "store")
    end_s = T0_S + DAYS * DAY_S
    ingest(
        Sharing(GeneratedSource(SHAPE)),
        site.store.of("c"),
        T0_S,
        end_s,
        IngestResult("g", T0_S, end_s),
        lambda *_: None,
    )
    site.summarize()
    return site


def forget(site: Site) -> None:
    """As if nothing had been summarised."""
    for table in ("job_metrics", "gpu_metrics"):
        shutil.rmtree(site.store.root / table, ignore_errors=True)


def test_the_site_has_what_the_splits_are_about(generated: Site) -> None:
    runs = load_runs(generated.store.of("c")).to_pylist()
    days = [(run["until_s"] - 1) // DAY_S - run["start_s"] // DAY_S for run in runs if run["end_s"] is not None]
    assert sum(number > 0 for number in days) >= 10
    assert max(days) >= 2
    assert sum(run["end_s"] is None for run in runs) >= 3
    origins = [row["attributed_by"] for row in generated.found().values()]
    assert origins.count("label") >= 25
    assert origins.count("whole node") >= 25


@examples(0.03, phases=QUICK)
@given(st.permutations(range(DAYS)), st.sets(st.integers(1, DAYS * 24 - 1), max_size=3))
def test_days_and_parts_of_days_one_after_another_give_the_rows_of_all_at_once(
    generated: Site, order: list[int], cuts: set[int]
) -> None:
    """order: of the days that are computed each on its own; then spans between `cuts`, hours from the first day on."""
    expected = generated.tables()
    forget(generated)
    for day in order:
        generated.summarize(T0_S + day * DAY_S, T0_S + (day + 1) * DAY_S)
    assert is_same(generated.tables(), expected)
    forget(generated)
    bounds = [0, *sorted(cuts), DAYS * 24]
    for first_h, last_h in pairwise(bounds):
        generated.summarize(T0_S + first_h * 3600, T0_S + last_h * 3600)
    assert is_same(generated.tables(), expected)


def assert_alone(site: Site, expected: tuple[pa.Table, ...], span: tuple[int, int]) -> None:
    """A summary of a span alone gives the rows of its jobs as `expected` has them, and no others."""
    keys = {(run.job_id, run.submit_s) for run in ended_jobs(load_runs(site.store.of("c")), *span)}
    forget(site)
    site.summarize(*span)
    for some, whole in zip(site.tables(), expected, strict=True):
        chosen = [key in keys for key in zip(whole["job_id"].to_pylist(), whole["submit_s"].to_pylist(), strict=True)]
        assert is_same((some,), (whole.filter(pa.array(chosen, pa.bool_())),))


@examples(0.06, phases=QUICK)
@given(st.integers(0, DAYS * 24 - 1), st.integers(1, 24))
def test_a_span_alone_gives_the_rows_of_its_jobs_and_no_others(generated: Site, first_h: int, hours: int) -> None:
    generated.summarize(T0_S, T0_S + DAYS * DAY_S)
    assert_alone(generated, generated.tables(), (T0_S + first_h * 3600, T0_S + (first_h + hours) * 3600))
    generated.summarize(T0_S, T0_S + DAYS * DAY_S)


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
    Made,
    host=st.sampled_from(["n1", "n1", "n2", "n[1-2]"]),
    gpus=st.integers(1, 2),
    first_h=st.sampled_from([0, 5, 20, 30, 50]),
    hours=st.sampled_from([3, 22, 30, 50]),
    ended=st.sampled_from([True, True, True, False]),
    labelled_h=st.sampled_from([None, 0, 25]),
    gpu=st.integers(0, 1),
    bound=st.sampled_from([None, 0, 1]),
)


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
@given(st.lists(MADE, min_size=3, max_size=6))
def test_it_holds_on_shared_nodes_however_jobs_are_bound(
    tmp_path_factory: pytest.TempPathFactory, made: list[Made]
) -> None:
    site = Site(tmp_path_factory.mktemp("made") / "store")
    fill(site, made)
    site.summarize()
    assert site.open_days == []
    expected = site.tables()
    for day in range(3):
        assert_alone(site, expected, ((DAY + day) * DAY_S, (DAY + day + 1) * DAY_S))


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
    return [
        row
        for host in ("n1", "n2")
        for gpu in (0, 1)
        for hour in SCRAPED_H
        if hour // 24 == day
        for row in samples(host, gpu, hour, hour + 1)
    ]
