"""The inventory of telemetry, and jobs on MIG instances whose layout changes within a day."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from made_site import HOUR_S, T0_S, Rows, Site, job, prolog

from advisor.memory.runs import runs_of
from almanac.config import AdviceSection
from telemetry.history import load_history
from telemetry.metrics.inventory import Survey, survey
from telemetry.metrics.partials import split_files
from telemetry.store.partitions import write_sealed
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

MODEL = "NVIDIA A100-SXM4-80GB"
WHOLE_MIB, ONE_MIB, DOUBLE_MIB, THREE_MIB = 81_000.0, 9_728.0, 19_968.0, 40_192.0
STEP_S = 60


def shown(
    first_h: float, last_h: float, mig: str = "", profile: str | None = None, total: float | None = WHOLE_MIB, *,
    host: str = "n1", hbm: float = 1000.0, label: int | None = None,
) -> Rows:  # fmt: skip
    """A sample a minute of GPU 0, or of an instance of it."""
    times = range(round(T0_S + first_h * HOUR_S), round(T0_S + last_h * HOUR_S), STEP_S)
    return [
        {
            "host": host, "gpu": 0, "mig": mig, "mig_profile": profile, "time_ms": time_s * 1000, "model": MODEL,
            "uuid": "GPU-a", "job_label": label, "gpu_util_pct": None if mig else 50.0, "gr_engine_active_frac": 0.5,
            "hbm_used_mib": hbm, "hbm_total_mib": total,
        }
        for time_s in times
    ]  # fmt: skip


def layouts(host: str = "n1", *, has_profile: bool = True) -> list[Rows]:
    """Whole until 3 h, 7 x 1g.10gb until 6 h, 1g.20gb (id 7 again) and 3g.40gb until 9 h, whole until 12 h."""

    def name(text: str) -> str | None:
        return text if has_profile else None

    return [
        shown(0, 3, host=host),
        *(shown(3.1, 6, str(mig), name("1g.10gb"), ONE_MIB, host=host) for mig in range(7, 14)),
        shown(6.1, 9, "7", name("1g.20gb"), DOUBLE_MIB, host=host),
        shown(6.1, 9, "1", name("3g.40gb"), THREE_MIB, host=host),
        shown(9.1, 12, host=host),
    ]


def units(site: Site, job_id: int) -> list[tuple[str, str | None, float | None, int]]:
    """Instance, profile, capacity, and samples of each GPU of a job."""
    rows = site.store.of("c").read("gpu_metrics").to_pylist()
    names = ("mig", "mig_profile", "hbm_capacity_mib", "samples")
    return sorted(tuple(row[name] for name in names) for row in rows if row["job_id"] == job_id)


@pytest.mark.parametrize("has_profile", [True, False], ids=["profile", "capacity alone"])
def test_jobs_on_one_day_get_what_the_gpu_was_in_their_own_time(site: Site, has_profile: bool) -> None:
    def name(text: str) -> str | None:
        return text if has_profile else None

    site.telemetry(*layouts(has_profile=has_profile))
    site.jobs(job(1, 1, 2, "n1", 1), job(2, 4, 5, "n1", 7), job(3, 7, 8, "n1", 2), job(4, 10, 11, "n1", 1))
    site.summarize()
    assert {row["attributed_by"] for row in site.found().values()} == {"whole node"}
    assert units(site, 1) == units(site, 4) == [("", None, WHOLE_MIB, 60)]
    assert units(site, 2) == sorted((str(mig), name("1g.10gb"), ONE_MIB, 60) for mig in range(7, 14))
    assert units(site, 3) == [("1", name("3g.40gb"), THREE_MIB, 60), ("7", name("1g.20gb"), DOUBLE_MIB, 60)]
    assert {row["gpu_model"] for row in site.found().values()} == {"A100-80"}


def test_a_job_that_ends_at_the_change_has_nothing_of_what_comes_after(site: Site) -> None:
    """Neither do records that are a few seconds off: the job before ends after the first sample of the new layout."""
    late = shown(3.1, 6, "7", "1g.10gb", ONE_MIB)
    again = shown(6, 9, "7", "1g.20gb", DOUBLE_MIB, hbm=15_000.0)
    site.telemetry(shown(0, 3.1), late, again)
    site.jobs(job(1, 0, 3.101, "n1", 1), job(2, 3.5, 6, "n1", 1), job(3, 6, 8, "n1", 1))
    site.summarize()
    assert units(site, 1) == [("", None, WHOLE_MIB, 186)]
    assert units(site, 2) == [("7", "1g.10gb", ONE_MIB, 150)]
    assert units(site, 3) == [("7", "1g.20gb", DOUBLE_MIB, 120)]
    peaks = {key[0]: (row["hbm_peak_mib"], row["hbm_peak_frac"]) for key, row in site.found().items()}
    assert peaks[2] == (1000.0, 1000 / ONE_MIB) and peaks[3] == (15_000.0, 15_000 / DOUBLE_MIB)


def test_bound_jobs_of_one_id_are_not_mixed(site: Site) -> None:
    site.telemetry(*layouts())
    site.jobs(job(1, 4, 5, "n1", 1), job(2, 4, 5, "n1", 1), job(3, 7, 8, "n1", 1), job(4, 1, 2, "n1", 1))
    records = [(1, "7", 4), (2, "8", 4), (3, "7", 7)]
    site.bindings(*({**prolog(job_id, "n1", 0, at), "uuid": "GPU-a", "mig": mig} for job_id, mig, at in records))
    site.summarize()
    assert [units(site, job_id)[0][:3] for job_id in (1, 2, 3, 4)] == [
        ("7", "1g.10gb", ONE_MIB), ("8", "1g.10gb", ONE_MIB), ("7", "1g.20gb", DOUBLE_MIB), ("", None, WHOLE_MIB),
    ]  # fmt: skip


def test_energy_is_that_of_a_card_whose_every_instance_the_job_had_in_its_time(site: Site) -> None:
    """The instances of another layout of the day are no part of it. 1,000 J a minute."""
    rows = [row for part in layouts() for row in part]
    site.telemetry([{**row, "energy_mj": (row["time_ms"] - T0_S * 1000) / 60 * 1000} for row in rows])
    site.jobs(job(1, 4, 5, "n1", 7), job(2, 7, 8, "n1", 2), job(3, 10, 11, "n1", 1))
    site.summarize()
    energies = [row["energy_j"] for row in site.found().values()]
    assert energies == pytest.approx([60_000.0] * 3)


def test_a_uuid_wins_over_an_index_also_before_the_gpu_is_split(site: Site) -> None:
    """The record says index 1; telemetry shows its UUID at index 0, whole and, later that day, on instances."""
    other = [{**row, "gpu": 1, "uuid": "GPU-b"} for row in shown(0, 12)]
    site.telemetry(*layouts(), other)
    site.jobs(job(1, 1, 2, "n1", 1))
    site.bindings({**prolog(1, "n1", 1, 1), "uuid": "GPU-a"})
    site.summarize()
    assert site.gpus(1) == [("n1", 0, "")]


def test_counters_of_the_card_beside_those_of_its_instances_are_no_gpu(site: Site) -> None:
    """dcgm-exporter can show both; before the change the same counters are those of the whole GPU."""
    site.telemetry(shown(0, 6), shown(3.1, 6, "1", "3g.40gb", THREE_MIB), shown(3.1, 6, "2", "3g.40gb", THREE_MIB))
    site.jobs(job(1, 1, 2, "n1", 1), job(2, 4, 5, "n1", 2))
    site.summarize()
    assert site.gpus(1) == [("n1", 0, "")]
    assert site.gpus(2) == [("n1", 0, "1"), ("n1", 0, "2")]


def test_many_changes_within_an_hour_are_followed(site: Site) -> None:
    """Six minutes each of 7 x 1g and of 7g, ids 7 to 13 and 0."""
    parts = []
    for turn in range(10):
        first_h, last_h = 1 + turn / 10, 1 + turn / 10 + 0.08
        many = [shown(first_h, last_h, str(mig), "1g.10gb", ONE_MIB) for mig in range(7, 14)]
        parts += [shown(first_h, last_h, "0", "7g.80gb", 80_896.0)] if turn % 2 else many
    site.telemetry(*parts)
    site.jobs(*(job(1 + turn, 1 + turn / 10, 1 + turn / 10 + 0.08, "n1", 1 if turn % 2 else 7) for turn in range(10)))
    site.summarize()
    assert [len(site.gpus(1 + turn)) for turn in range(10)] == [7, 1] * 5
    assert {units(site, 2 * turn)[0][:3] for turn in (1, 2, 3, 4, 5)} == {("0", "7g.80gb", 80_896.0)}


def test_a_silent_exporter_does_not_take_gpus_away(site: Site) -> None:
    """The job runs while nothing is scraped: the layout before and after says how many GPUs its node had."""
    sevenths = [str(mig) for mig in range(7, 14)]
    rows = [shown(*hours, mig, "1g.10gb", ONE_MIB) for mig in sevenths for hours in ((0, 2), (4, 6))]
    site.telemetry(*rows)
    site.jobs(job(1, 2.5, 3.5, "n1", 7), job(2, 2.5, 3.5, "n2", 1))
    site.summarize()
    assert (site.found()[1, 2]["attributed_by"], site.verdicts()[1]) == ("whole node", "no telemetry")


def test_a_capacity_that_is_not_measured_is_not_made_up(site: Site) -> None:
    site.telemetry(shown(0, 2, "7", "1g.10gb", None))
    site.jobs(job(1, 0, 2, "n1", 1))
    site.summarize()
    row = site.found()[1, 0]
    assert (row["mig_profile"], row["hbm_capacity_mib"], row["hbm_peak_frac"]) == ("1g.10gb", None, None)
    assert row["is_preallocated"] is None and row["gpu_model"] == "A100-80"
    assert "hbm_peak_frac: used and free memory of the MIG instance not measured together" in row["reasons"]


def test_one_torn_reading_of_memory_does_not_change_the_capacity(site: Site) -> None:
    rows = shown(0, 2, "7", "1g.10gb", ONE_MIB)
    rows[30]["hbm_total_mib"], rows[40]["hbm_total_mib"] = 2 * ONE_MIB, None
    site.telemetry(rows)
    site.jobs(job(1, 0, 2, "n1", 1))
    site.summarize()
    assert units(site, 1) == [("7", "1g.10gb", ONE_MIB, 120)]


def test_a_roofline_of_the_card_is_not_said_of_a_slice(site: Site) -> None:
    rows = shown(0, 2, "7", "1g.10gb", ONE_MIB)
    site.telemetry([{**row, "fp64_active_frac": 0.5, "dram_active_frac": 0.25} for row in rows])
    site.jobs(job(1, 0, 2, "n1", 1))
    site.summarize()
    row = site.found()[1, 0]
    assert (row["class_fp64"], row["flops_fp64"], row["hbm_bytes_s"]) == ("compute", None, None)


@pytest.mark.parametrize(
    ("use_mib", "is_reserved"),
    [
        (0.75 * ONE_MIB + 480, True),  # JAX: its pool, and the context beside it
        (0.9 * ONE_MIB, True),
        (0.98 * ONE_MIB, True),
        (0.5 * ONE_MIB, False),
        (0.85 * ONE_MIB, False),
    ],
)
def test_a_reservation_is_seen_by_the_memory_of_the_slice(site: Site, use_mib: float, is_reserved: bool) -> None:
    site.telemetry(shown(0, 4, "7", "1g.10gb", ONE_MIB, hbm=use_mib))
    site.jobs(job(1, 0, 4, "n1", 1))
    site.summarize()
    assert site.found()[1, 0]["is_preallocated"] is is_reserved


@pytest.mark.parametrize(
    ("peaks", "is_oom"),
    [([3000.0, 9_700.0], True), ([3000.0, 5_000.0], False)],
    ids=["at the slice's capacity", "far below it"],
)
def test_a_slice_that_ran_out_of_memory_is_evidence_of_at_least_its_capacity(
    site: Site, peaks: Sequence[float], is_oom: bool
) -> None:
    first, last = (shown(h, h + 1, "7", "1g.10gb", ONE_MIB, hbm=peak) for h, peak in enumerate(peaks))
    site.telemetry(first, last)
    site.jobs(job(1, 0, 2, "n1", 1, state="FAILED", user="u", name_key="k"))
    site.summarize()
    (run,) = runs_of(load_history(site.store.of("c")), AdviceSection())
    assert run is not None and run.capacity_mib == ONE_MIB
    assert (run.is_oom, run.is_known) == (is_oom, is_oom)
    assert run.need_mib >= ONE_MIB if is_oom else run.need_mib < ONE_MIB


def test_files_without_the_column_are_read_and_a_profile_that_comes_later_counts(site: Site) -> None:
    rows = shown(0, 2, "7", "1g.10gb", ONE_MIB)
    older = [{**row, "mig_profile": None} for row in rows]
    site.telemetry(older)
    site.jobs(job(1, 0, 2, "n1", 1))
    drop_column(site, "telemetry", "mig_profile")
    site.summarize()
    assert units(site, 1) == [("7", None, ONE_MIB, 120)]
    for table in ("job_metrics", "gpu_metrics"):
        drop_column(site, table, "mig_profile")
    assert site.found()[1, 0]["mig_profile"] is None
    assert site.telemetry(older) == []
    assert site.telemetry(rows) == [0]
    assert site.telemetry(older) == []  # what is not known erases nothing
    site.summarize()
    assert units(site, 1) == [("7", "1g.10gb", ONE_MIB, 120)]


def drop_column(site: Site, table: str, column: str) -> None:
    """Files of an older release."""
    store: Any = site.store.of("c")
    paths: list[Path] = store.files(table)
    assert paths and column in TABLES[table].schema.names
    for path in paths:
        rows = pq.ParquetFile(path).read()
        with path.open("w+b") as out:
            write_sealed(rows.drop_columns([column]).replace_schema_metadata(), out)


START_S = 1_741_046_400  # midnight UTC
DAY = START_S // 86_400
COUNTED_MS = (-(2**60), 2**60)


def gpu(number: int, step_s: int, length_s: int, start_s: int = START_S, mig: str = "") -> pd.DataFrame:
    times = np.arange(start_s, start_s + length_s, step_s) * 1000
    return pd.DataFrame({"host": "n1", "gpu": number, "mig": mig, "time_ms": times})


def look(root: Path, *frames: pd.DataFrame, counted_ms: tuple[int, int] = COUNTED_MS) -> Survey:
    from small_sites import telemetry

    store = Store.create(root)
    store.of("c").write("telemetry", telemetry(pd.concat(frames, ignore_index=True)))
    with store.connect() as db:
        return survey(db, split_files(store.of("c").files("telemetry")), counted_ms)


def test_units_are_seen_by_the_day_with_what_their_samples_name(tmp_path: Path) -> None:
    whole, instance = gpu(0, 10, 40), gpu(1, 10, 40, mig="3")
    whole["model"] = [None, "A", "B", None]
    whole["hbm_total_mib"] = [np.nan, 40_960.0, 40_960.0, 70_000.0]
    instance["model"] = None
    found = look(tmp_path, whole, instance, gpu(0, 10, 20, START_S + 86_400))
    rows = [(row["gpu"], row["mig"], row["day"], row["model"], row["total_mib"]) for row in found.units.to_pylist()]
    assert rows == [(0, "", DAY, "B", 40_960.0), (0, "", DAY + 1, None, None), (1, "3", DAY, None, None)]
    assert found.inventory().units["n1", DAY] == {(0, ""), (1, "3")}
