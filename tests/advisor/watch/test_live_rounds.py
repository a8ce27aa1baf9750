"""Rounds of a site with servers of our own: whose GPUs are whose, and what Slurm or a silent server makes unknown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "slurm"))

from squeue_text import squeue_record

from advisor.watch.live import LiveWatch
from advisor.watch.round import Round
from almanac.config import Config
from almanac.errors import ServerError
from telemetry.site import Site
from telemetry.sources.live import MORE
from telemetry.store.schema import BINDINGS, TELEMETRY
from telemetry.store.store import Store

NOW_S = 1_795_880_000
START_S = NOW_S - 8000
NODES = "n[1-2] 8 1000 1 gpu:2 (null)\nn3 8 1000 1 gpu:4 (null)\n"
Unit = tuple[str, int, int]
"""Host, GPU, and the job that the exporter's label names; 0: none."""


class Server:
    """A Prometheus that shows units. serves: hosts with an inference server; None: it does not answer that query."""

    config, samples = SimpleNamespace(delay_s=0), 4.0

    def __init__(self, units: Iterable[Unit] | None, serves: set[str] | None = frozenset()) -> None:  # type: ignore[assignment]
        self.units, self.serves = units, serves

    def live_counters(self, at_s: int, span_s: int) -> pa.Table:
        if self.units is None:
            raise ServerError("no connection", "start it")
        rows = [
            {"host": host, "gpu": gpu, "mig": "", "time_ms": at_s * 1000, "job_label": label or None,
             "gpu_util_pct": 0.0, "power_w": 60.0}
            for host, gpu, label in self.units
        ]  # fmt: skip
        table = pa.Table.from_pylist([{name: row.get(name) for name in TELEMETRY.names} for row in rows], TELEMETRY)
        for name in MORE:
            table = table.append_column(name, pa.array([self.samples] * len(rows), pa.float64()))
        return table

    def serving_hosts(self, at_s: int, span_s: int) -> set[str]:
        if self.serves is None:
            raise ServerError("no connection", "start it")
        return self.serves

    def host_memory(self, at_s: int, span_s: int) -> dict[int, tuple[float, float]]:
        return {}


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that reads a round of servers, with jobs as (number, node, GPUs) and records of a prolog."""

    def read(
        servers: list[Server], jobs: Iterable[tuple[int, str, int]], records: Iterable[Unit] = (), nodes: str = NODES
    ) -> tuple[Round, list[str]]:
        text = b"".join(
            squeue_record(JobID=str(number), NodeList=node, StartTime=str(START_S), SubmitTime=str(START_S),
                          tres_alloc=f"gres/gpu={gpus}", ArrayTaskID="N/A")
            for number, node, gpus in jobs
        )  # fmt: skip
        store = Store.create(tmp_path / "store").of("c")
        rows = [
            {"job_id": number, "host": host, "gpu": gpu, "origin": "prolog", "seen_s": START_S}
            for host, gpu, number in records
        ]
        if rows:
            full = [{name: row.get(name) for name in BINDINGS.names} for row in rows]
            store.write("bindings", pa.Table.from_pylist(full, BINDINGS))
        monkeypatch.setattr("advisor.watch.live.live_sources", lambda config, cluster: servers)
        site = Site.of(store, Config(), NOW_S).but(run=lambda argv: text if argv[0] == "squeue" else nodes.encode())
        watch = LiveWatch(site)
        return watch.look()[0], watch.notes

    return read


def test_a_gpu_that_only_an_older_change_shows_is_not_seen_now(seen: Any) -> None:
    silent = Server(WHOLE)
    silent.samples = 0.0
    round_, _ = seen([silent], [(1, "n1", 2)])
    assert (len(round_.gpus), round_.seen_jobs) == (2, 0)
    assert seen([Server(WHOLE)], [(1, "n1", 2)])[0].seen_jobs == 1


def owned(round_: Round) -> list[tuple[int, str]]:
    """Job and GPU of each row."""
    ids = round_.jobs["job_id"].to_pylist()
    return [(ids[row["job"]], f"{row['host']}:{row['gpu']}") for row in round_.gpus.to_pylist()]


WHOLE = [("n1", 0, 0), ("n1", 1, 0)]


def test_a_job_with_all_gpus_of_its_node_owns_them(seen: Any) -> None:
    round_, notes = seen([Server(WHOLE)], [(1, "n1", 2)])
    assert (owned(round_), notes) == ([(1, "n1:0"), (1, "n1:1")], [])


@pytest.mark.parametrize("nodes", [NODES, "n1 8 1000 1 gpu:2 (null)\n", "n3 8 1000 1 gpu:a:2,gpu:b:2 (null)\n"])
def test_a_node_with_a_gpu_without_series_is_not_owned_by_what_is_seen(seen: Any, nodes: str) -> None:
    """Two of n3's four GPUs have series: they may be those that the job does not have."""
    round_, _ = seen([Server([("n3", 0, 0), ("n3", 1, 0)])], [(1, "n3", 2)], nodes=nodes)
    assert owned(round_) == []
    round_, _ = seen([Server([("n3", 0, 0), ("n3", 1, 0)])], [(1, "n3", 2)], [("n3", 1, 1)], nodes=nodes)
    assert owned(round_) == [(1, "n3:1")]


@pytest.mark.parametrize(
    ("labels", "records", "left"),
    [
        ((1, 2), (), [(1, "n1:0"), (2, "n1:1")]),
        ((1, 2), (1, 2), [(1, "n1:0"), (2, "n1:1")]),
        ((1, 2), (2, 1), []),
        ((0, 1), (1, 2), []),
        ((2, 0), (1, 0), []),
        ((1, 9), (0, 2), [(1, "n1:0")]),
    ],
)
def test_a_label_that_slurm_contradicts_makes_the_sample_unknown(
    seen: Any, labels: tuple[int, int], records: tuple[int, ...], left: list[tuple[int, str]]
) -> None:
    units = [("n1", gpu, label) for gpu, label in enumerate(labels)]
    bound = [("n1", gpu, number) for gpu, number in enumerate(records) if number]
    assert owned(seen([Server(units)], [(1, "n1", 1), (2, "n1", 1)], bound)[0]) == left


def test_a_label_of_a_job_elsewhere_makes_the_sample_of_a_whole_node_unknown(seen: Any) -> None:
    round_, _ = seen([Server([("n1", 0, 1), ("n1", 1, 2), ("n2", 0, 2), ("n2", 1, 0)])], [(1, "n1", 2), (2, "n2", 2)])
    assert owned(round_) == [(1, "n1:0"), (2, "n2:0"), (2, "n2:1")]


def test_a_host_under_two_names_is_unknown_and_not_counted_twice(seen: Any) -> None:
    twice = [("n1.cluster.example", 0, 0), ("n1.cluster.example", 1, 0)]
    assert owned(seen([Server(twice)], [(1, "n1", 2)])[0]) == [(1, "n1:0"), (1, "n1:1")]
    round_, notes = seen([Server(WHOLE), Server(twice)], [(1, "n1", 2)])
    assert owned(round_) == [] and "several names, which are not judged: n1" in notes[0]


@pytest.mark.parametrize(
    ("servers", "serving"),
    [
        ([Server(WHOLE), Server([])], [False, False]),
        ([Server(WHOLE), Server([], {"n2"})], [False, True]),
        ([Server(WHOLE, {"n2"}), Server(None)], [None, True]),
        ([Server(WHOLE, None)], [None, None]),
    ],
)
def test_a_server_that_does_not_answer_leaves_serving_unknown(
    seen: Any, servers: list[Server], serving: list[bool | None]
) -> None:
    round_, notes = seen(servers, [(1, "n1", 2), (2, "n2", 2)])
    assert (round_.jobs["is_serving"].to_pylist(), round_.unknown) == (serving, "")
    assert owned(round_) == [(1, "n1:0"), (1, "n1:1")] and bool(notes) == (None in serving)


def test_counters_of_a_server_that_does_not_answer_are_unknown(seen: Any) -> None:
    round_, _ = seen([Server(None), Server(WHOLE)], [(1, "n1", 2), (2, "n2", 2)])
    assert owned(round_) == [(1, "n1:0"), (1, "n1:1")] and not round_.unknown
    round_, _ = seen([Server(None)], [(1, "n1", 2)])
    assert owned(round_) == [] and round_.unknown == "no connection"
