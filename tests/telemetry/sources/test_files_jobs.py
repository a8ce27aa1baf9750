"""Import of job traces: layouts, malformed rows, and the real traces of ../shared/data."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import FileFormatError
from almanac.names import name_key
from almanac.records import Counts
from slurm.states import JOB_STATES
from telemetry.sources.file_columns import _ANY_BYTES, Kind, layouts
from telemetry.sources.file_jobs import LOCAL, read_jobs
from telemetry.sources.files import FileSource
from telemetry.store.database import require_readable
from telemetry.store.schema import JOBS, TABLES, TELEMETRY
from telemetry.store.store import Store

EVER = (-(2**40), 2**40)
NOW_S = 1_790_002_800
JOB_A = 4644583331235001555
"""2**62 + the seven bytes of blake2b("job-a"), as an earlier run had it."""
SACCT = "JobIDRaw|JobID|Submit|Start|End|State|ExitCode|User|TimelimitRaw|AllocTRES|ElapsedRaw"


def read(path: Path, layout: str | None = None, span: tuple[int, int] = EVER) -> tuple[list[dict[str, Any]], Counts]:
    counts, rows = Counts(), []
    for batch in FileSource(path, "jobs", layout, clock=lambda: NOW_S).read(*span):
        assert batch.table == "jobs" and batch.rows.schema.equals(JOBS) and batch.watermark_s is None
        counts.add(batch.counts)
        rows += batch.rows.to_pylist()
    assert counts.seen == counts.kept + sum(counts.dropped.values())
    assert counts.kept == len(rows)
    return rows, counts


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_sacct_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "jobs.txt",
        SACCT,
        "101|101|2026-09-01T10:00:00|2026-09-01T10:05:00|2026-09-01T11:05:00|CANCELLED by 1000|0:15|alice|120|"
        "billing=4,gres/gpu:a100=4,gres/gpu=4|3600",
        "103|102_1|1788256800|1788256860|Unknown|RUNNING|0:0|bob|UNLIMITED|cpu=2|50",
        "103.batch|102_1.batch|1788256800|1788256860|1788256900|COMPLETED|0:0|||cpu=2|40",
    )
    (first, second), counts = read(path)
    wanted = {"job_id": 101, "state": "CANCELLED", "exit_code": 0, "exit_signal": 15, "gpu_count": 4}
    wanted["gpu_type"] = "a100"
    assert {key: first[key] for key in wanted} == wanted
    assert (first["submit_s"], first["start_s"] - first["submit_s"]) == (1788256800, 300)
    assert (first["elapsed_s"], first["time_limit_s"], first["name"], first["name_key"]) == (3600, 7200, None, None)
    assert (second["array_job_id"], second["array_task_id"]) == (102, 1)
    assert (second["end_s"], second["time_limit_s"], second["gpu_count"]) == (None, None, 0)
    assert counts.dropped == {"job step": 1}


def test_text_that_could_be_forged_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.txt", SACCT + "|JobName", "1|1|0|0|0|COMPLETED|0:0|a|1||0|x")
    with pytest.raises(FileFormatError, match="JobName") as caught:
        read(path)
    assert "quotes" in caught.value.hint


def test_names_in_quoted_csv_cannot_forge_rows(tmp_path: Path) -> None:
    """A newline, a quote and a delimiter in a name stay in the name."""
    name = 'train\n2,99,COMPLETED,"mallory"'
    cell = '"' + name.replace('"', '""') + '"'
    path = write(tmp_path / "jobs.csv", "job_id,submit_s,state,name,user", f"1,100,FAILED,{cell},alice")
    ((job,), _) = read(path)
    assert (job["job_id"], job["name"], job["user"], job["name_key"]) == (1, name, "alice", name_key(name))


def test_malformed_rows_are_counted_and_the_rest_kept(tmp_path: Path) -> None:
    path = write(
        tmp_path / "jobs.csv", "job_id,submit_s,start_s,end_s,time_limit_s,state,user",
        "1,100,110,200,3600,COMPLETED,alice", "2,yesterday,110,200,3600,COMPLETED,alice",
        ",100,110,200,3600,COMPLETED,alice", "4,100,300,200,3600,COMPLETED,alice",
        f"5,{NOW_S + 1000},,,3600,PENDING,alice", "6,100,110,200,soon,DONE,alice", "7,100",
        "8,100,110,200,-5,COMPLETED,alice,extra", "9,100,110,200,,COMPLETED,alice",
    )  # fmt: skip
    rows, counts = read(path)
    assert [row["job_id"] for row in rows] == [1, 6, 9]
    assert counts.dropped == {
        "submit_s not understood": 1, "no job_id": 1, "times contradict each other": 1, "time in the future": 1,
        "wrong number of fields": 2,
    }  # fmt: skip
    assert counts.notes == {"time_limit_s not understood": 1, "state not understood": 1}
    assert counts.examples["submit_s not understood"] == "yesterday"
    assert (rows[1]["time_limit_s"], rows[1]["state"], rows[2]["time_limit_s"]) == (None, None, None)


def test_a_job_id_that_is_no_number_is_always_the_same_one(tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.csv", "job_id,submit_s", "job-a,1", "job-b,1", "job-a,2", "17,1", "17.0,1", "1[3],4")
    rows, counts = read(path)
    ids = [row["job_id"] for row in rows]
    assert ids[0] == ids[2] and len(set(ids)) == 4
    assert ids[3] == 17
    assert all(2**62 <= one < 2**63 for one in (ids[0], ids[1], ids[4]))
    assert ids[0] == JOB_A
    assert counts.dropped == {"job step": 1}


def test_a_row_with_a_bad_byte_and_a_wrong_number_of_fields_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_bytes(b"job_id,submit_s,name\n1,100,caf\xe9\n2,100,caf\xe9,\xff\n3,100,\xf0\x9f\n\xff\n4,100,b\n")
    rows, counts = read(path)
    assert [(row["job_id"], row["name"]) for row in rows] == [(1, "caf\ufffd"), (3, "\ufffd"), (4, "b")]
    assert counts.dropped == {"wrong number of fields": 2}
    assert counts.examples == {"wrong number of fields": "2,100,caf\ufffd,\ufffd"}


@given(st.binary(max_size=3000), st.integers(1, 64))
def test_bytes_become_the_text_that_python_makes_of_them(data: bytes, size: int) -> None:
    """In reads of any size: what is cut in the middle of a character is put together again."""
    stream = pa.transcoding_input_stream(pa.PythonFile(io.BytesIO(data), "r"), _ANY_BYTES, "utf-8")
    text = b"".join(iter(lambda: stream.read(size), b""))
    assert text == data.decode("utf-8", "replace").encode()


@given(st.lists(st.sampled_from([b"1", b"2026", b",", b"\n", b"\r", b'"', b"\xff", b"\x00", b"\xef\xbb\xbf", b"|"])))
def test_no_bytes_raise_another_error(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("csv") / "jobs.csv"
    for head in (b"", b"job_id,submit_s,name\n1,100,a\n"):
        path.write_bytes(head + b"".join(pieces))
        with contextlib.suppress(FileFormatError):
            read(path)


def test_a_bare_carriage_return_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_bytes(b"job_id,submit_s,name\r1,100,a\r2,100,b\r")
    assert [row["name"] for row in read(path)[0]] == ["a", "b"]
    path.write_bytes(b"job_id,submit_s\rname\n1,100,a\n")
    assert read(path)[1].dropped == {"wrong number of fields": 2}
    path.write_bytes(b'job_id,submit_s,"' + b"x" * 200_000 + b'"\n')
    with pytest.raises(FileFormatError, match="neither Parquet nor CSV"):
        read(path)


@pytest.mark.parametrize("column", ["job_id", "submit_s", "elapsed_s", "name", "state"])
def test_a_column_of_any_plain_type_costs_only_itself(
    tmp_path: Path, column: str, odd_columns: dict[str, pa.Array[Any]]
) -> None:
    good = {"job_id": [1, 2], "submit_s": [100, 100], "elapsed_s": [1, 1]}
    for kind, odd in odd_columns.items():
        pq.write_table(pa.table({**good, column: odd}), tmp_path / f"{kind}.parquet")
        assert read(tmp_path / f"{kind}.parquet")[1].seen == 2, kind


def test_columns_of_every_plain_type_end_no_reader(tmp_path: Path, odd_columns: dict[str, pa.Array[Any]]) -> None:
    pq.write_table(pa.table(odd_columns), tmp_path / "jobs.parquet")
    require_readable(tmp_path / "jobs.parquet")


@pytest.mark.parametrize("values", [[[1], [2]], [{"a": 1}, {"a": 2}], [dt.timedelta(1), None], [dt.time(1), None]])
def test_a_column_of_another_type_is_named(tmp_path: Path, values: list[Any]) -> None:
    path = tmp_path / "jobs.parquet"
    pq.write_table(pa.table({"job_id": [1, 2], "submit_s": [100, 100], "name": pa.array(values)}), path)
    with pytest.raises(FileFormatError, match="column name has the type") as caught:
        read(path)
    assert caught.value.hint


def test_only_jobs_submitted_in_the_span_are_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.csv", "job_id,submit_s", *(f"{n},{n}" for n in range(10)))
    rows, counts = read(path, span=(3, 6))
    assert ([row["job_id"] for row in rows], counts.seen) == ([3, 4, 5], 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "neither Parquet nor CSV"), (b"\x00\x01\x02,\xff\xfe\n", "neither Parquet nor CSV"),
     (b"job_id\n1\n", "neither Parquet nor CSV"), (b"a,b,c\n1,2,3\n", "helios_jobs_15k"),
     (b"job_id,submit_s,submit_s\n1,2,3\n", "same name"), (b"PAR1 and no more", "cannot be read"),
     (b"job_id,submit_s\n", None), (b"job_id,submit_s", None)],
)  # fmt: skip
def test_files_that_are_none(tmp_path: Path, content: bytes, said: str | None) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    if said is None:
        assert read(path) == ([], Counts())
        return
    with pytest.raises(FileFormatError, match=said) as caught:
        read(path)
    assert caught.value.hint and str(path) in str(caught.value)


def test_the_message_names_what_was_seen_and_what_is_expected(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "Alpha,be\x1bta", "1,2")
    with pytest.raises(FileFormatError):
        read(path)
    path = write(tmp_path / "x.csv", "Alpha,beta", "1,2")
    with pytest.raises(FileFormatError, match=r"Alpha, beta.*almanac \(job_id, submit_s\).*clustercockpit_jobs"):
        read(path)
    with pytest.raises(FileFormatError, match="needs the columns JobIDRaw"):
        read(path, "sacct")
    with pytest.raises(FileFormatError, match="no layout") as caught:
        read(path, "nonsense")
    assert "sacct" in caught.value.hint


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.parquet", tmp_path):
        with pytest.raises(FileFormatError, match="cannot be read"):
            read(path)


def test_a_parquet_file_that_breaks_off_keeps_what_came_before(tmp_path: Path, tried: None) -> None:
    path = tmp_path / "jobs.parquet"
    table = pa.table({"job_id": list(range(100_000)), "submit_s": list(range(100_000))})
    pq.write_table(table, path, row_group_size=50_000, compression="none", use_dictionary=False)
    raw = bytearray(path.read_bytes())
    offset = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    raw[offset : offset + 64] = b"\xff" * 64
    path.write_bytes(raw)
    got = []
    with pytest.raises(FileFormatError):
        for batch in FileSource(path, "jobs", clock=lambda: NOW_S).read(*EVER):
            got.append(batch.rows.num_rows)
    assert got[:4] == [10_000] * 4


def full_row(schema: pa.Schema, **given: Any) -> dict[str, Any]:
    """A row with a value in each column; no two numbers are alike, and floats are exact in 32 bits."""
    of_type = {pa.string(): lambda n: f"text {n}", pa.bool_(): lambda _: True, pa.float32(): lambda n: n + 0.5}
    of_type |= {pa.float64(): of_type[pa.float32()], pa.list_(pa.string()): lambda n: [f"text {n}"]}
    row = {field.name: of_type.get(field.type, int)(n) for n, field in enumerate(schema, 1)}
    row |= {name: [row["job_id"]] for name in schema.names if pa.types.is_list(schema.field(name).type)
            and pa.types.is_integer(schema.field(name).type.value_type)}  # fmt: skip
    return row | given


def write_csv(path: Path, table: pa.Table) -> Path:
    pa.csv.write_csv(table, path)
    return path


def write_parquet(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path)
    return path


FULL = {
    "jobs": full_row(JOBS, submit_s=100, eligible_s=100, start_s=110, end_s=170, elapsed_s=60, state="OUT_OF_MEMORY")
    | {"name": "train-1", "name_key": "train-#"},
    "telemetry": full_row(
        TELEMETRY, host="n1", mig="7", mig_profile="1g.10gb", gpu=2, job_label=9, hbm_used_mib=10.5, hbm_total_mib=20.5
    )
    | {"hbm_total_mib": 20.5}
    | {name: 0.5 for name in TELEMETRY.names if name.endswith("_frac")},
}


@pytest.mark.parametrize("write", [write_csv, write_parquet])
@pytest.mark.parametrize("kind", ["jobs", "telemetry"])
def test_every_column_survives_an_import(tmp_path: Path, kind: Kind, write: Callable[[Path, pa.Table], Path]) -> None:
    schema = TABLES[kind].schema
    other = {name: not value for name, value in FULL[kind].items() if schema.field(name).type == pa.bool_()}
    wanted = pa.Table.from_pylist([FULL[kind], *([{**FULL[kind], **other}] if other else [])], schema=schema)
    batches = list(FileSource(write(tmp_path / kind, wanted), kind, clock=lambda: NOW_S).read(*EVER))
    found = pa.concat_tables([batch.rows for batch in batches if batch.rows.num_rows]).cast(schema)
    assert found.to_pylist() == wanted.to_pylist()
    notes = {note for batch in batches for note in batch.counts.notes}
    assert notes <= {"with a part of a GPU (shard, mps): measured only if alone on it"}
    assert not any(batch.counts.dropped for batch in batches)


@pytest.mark.parametrize("name", sorted(set(TABLES)))
def test_every_column_survives_the_store(tmp_path: Path, name: str) -> None:
    row = FULL.get(name) or full_row(TABLES[name].schema)
    store = Store.create(tmp_path / "store").of("c")
    store.write(name, pa.Table.from_pylist([row], schema=TABLES[name].schema))
    assert store.read(name).select(TABLES[name].schema.names).to_pylist() == [row]


@pytest.mark.parametrize("text", ["", "None", "nan", "N/A", "Unknown", " padded "])
def test_a_text_in_parquet_is_never_taken_for_missing(tmp_path: Path, text: str) -> None:
    table = pa.table({"job_id": [1], "submit_s": [100], "name": [text], "gpu_type_req": [text]})
    [row], _ = read(write_parquet(tmp_path / "jobs.parquet", table))
    assert (row["name"], row["gpu_type_req"]) == (text, text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("True", True), ("FALSE", False), ("1", True), ("0", False), ("no", False), ("y", True),
        ("N", False), ("On", True), ("off", False), ("", None), ("maybe", None),
    ],
)  # fmt: skip
def test_truth_values_as_people_write_them(tmp_path: Path, text: str, value: bool | None) -> None:
    [row], counts = read(write(tmp_path / "jobs.csv", "job_id,submit_s,refuses_mail", f"1,100,{text}"))
    assert row["refuses_mail"] is value
    assert counts.notes == ({"refuses_mail not understood": 1} if text == "maybe" else {})


CUT = {
    "OUT_OF_ME+": "OUT_OF_MEMORY", "CANCELLED+": "CANCELLED", "CANCELLED b+": "CANCELLED", "O+": "OUT_OF_MEMORY",
    "NODE_FA+": "NODE_FAIL", "OUT_OF_": "OUT_OF_MEMORY", "TIMEOU+": "TIMEOUT", "COMPLETED+": "COMPLETED",
    "COMPLE+": None, "RE+": None, "REQUEUE+": None, "OUT_OF_TIME": None, "+": None,
}  # fmt: skip


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_a_state_cut_short_is_read_where_only_one_begins_so(
    tmp_path: Path, write: Callable[[Path, pa.Table], Path]
) -> None:
    ids = [*range(len(CUT))]
    table = pa.table({"job_id": ids, "submit_s": [100] * len(CUT), "state": [*CUT]})
    rows, counts = read(write(tmp_path / "jobs", table))
    assert {cut: row["state"] for cut, row in zip(CUT, rows, strict=True)} == CUT
    assert counts.notes == {"state not understood": 5}


LONG = "with more elapsed time than end - start"
SHORT = "with much less elapsed time than end - start (suspended?)"
TIMES = "JobIDRaw,State,Submit,Start,End,Elapsed,Suspended,ReqTRES,AllocTRES,AllocGRES"


@pytest.mark.parametrize(
    ("times", "ran_s", "notes"),
    [("2026-07-25T02:30:00,2026-07-25T02:50:00,2026-07-25T02:10:00,00:20:00,", 1200, {LOCAL: 1}),
     ("2026-07-25T01:30:00,2026-07-25T01:50:00,2026-07-25T02:10:00,01:20:00,", 4800, {LOCAL: 1}),
     ("2026-07-25T01:30:00,2026-07-25T01:30:00,2026-07-25T03:10:00,00:40:00,", 2400, {LOCAL: 1}),
     ("2026-07-25T01:30:00,2026-07-25T01:30:00,2026-07-25T02:10:00,01:10:00,", 4200, {LOCAL: 1}),
     ("2026-07-25T01:30:00,2026-07-25T01:30:00,2026-07-25T03:10:00,00:40:00,01:00:00", 6000, {}),
     ("2026-07-25T01:30:00,2026-07-25T01:30:00,2026-07-25T03:10:00,00:50:00,", 6000, {}),
     ("2026-07-25T01:30:00Z,2026-07-25T01:30:00Z,2026-07-25T03:10:00Z,00:40:00,", 6000, {}),
     ("1784943000,1784943000,1784949000,00:40:00,", 6000, {}),
     ("1784943000,1784943000,1784949000,05:40:00,", 6000, {LONG: 1}),
     ("2026-07-25T01:30:00,2026-07-25T01:30:00,2026-07-25T06:30:00,00:00:00,", 18000, {SHORT: 1}),
     ("2026-07-25T01:30:00,2026-07-25T01:30:00,2026-07-25T02:30:00,00:00:00,", 3600, {}),
     ("2026-07-25T01:30:00,2026-07-25T01:30:00,2026-07-25T01:30:00,1-00:00:00,", 0, {LONG: 1}),
     ("2026-07-25T01:30:00,2026-07-25T01:30:00,2026-07-25T03:30:00,04:00:00,", 14400, {LOCAL: 1}),
     ("2026-07-25T01:30:00,2026-07-25T01:30:00,2026-07-25T03:30:00,04:30:00,", 7200, {LONG: 1})],
)  # fmt: skip
def test_a_change_of_the_clock_shows_that_times_are_local(
    tmp_path: Path, times: str, ran_s: int, notes: dict[str, int]
) -> None:
    [row], counts = read(write(tmp_path / "jobs.csv", TIMES, f"1,COMPLETED,{times},,,"))
    assert (row["end_s"] - row["start_s"], counts.notes) == (ran_s, notes)


@pytest.mark.parametrize(
    ("start", "end", "elapsed", "found"),
    [("T02:05:00", "T02:35:00", "00:30:00", (600, 1800)), ("None", "T02:10:00", "00:00:00", (None, 900))],
)
def test_a_clock_set_back_before_the_start_costs_no_row(
    tmp_path: Path, start: str, end: str, elapsed: str, found: tuple[int | None, int]
) -> None:
    """The end counts from the start, or, without one, from the submission."""
    day = "2025-10-26"
    times = f"{day}T02:55:00,{start if start == 'None' else day + start},{day}{end},{elapsed},"
    [row], counts = read(write(tmp_path / "jobs.csv", TIMES, f"1,CANCELLED,{times},,,"))
    start_s = row["start_s"]
    waited_s = None if start_s is None else start_s - row["submit_s"]
    assert (waited_s, row["end_s"] - (start_s or row["submit_s"])) == found
    assert counts.notes == {LOCAL: 1}


def test_a_contradiction_of_times_without_a_zone_says_what_to_do(tmp_path: Path) -> None:
    line = "1,COMPLETED,2026-07-25T02:59:00,2026-07-25T01:05:00,2026-07-25T01:20:00,00:15:00,,,,"
    rows, counts = read(write(tmp_path / "jobs.csv", TIMES, line))
    assert not rows and "TZ=UTC" in next(iter(counts.dropped))


def test_gpus_are_read_from_the_column_that_names_them(tmp_path: Path) -> None:
    """AllocTRES names none where AccountingStorageTRES lacks gres/gpu."""
    lines = [f"{n},COMPLETED,100,110,170,60,,cpu=8,{given}" for n, given in ((1, "cpu=8,gpu:4"), (2, "cpu=8,"))]
    rows, _ = read(write(tmp_path / "jobs.csv", TIMES, *lines))
    assert [row["gpu_count"] for row in rows] == [4, 0]
    shards = "3,COMPLETED,100,110,170,60,,cpu=8,cpu=8,shard:8"
    [row], counts = read(write(tmp_path / "jobs.csv", TIMES, shards))
    assert (row["gpu_count"], row["gpu_share_count"], len(counts.notes)) == (0, 8, 1)


CELL = st.one_of(
    st.none(), st.integers(-(2**70), 2**70).map(str), st.text(max_size=12), st.sampled_from(sorted(JOB_STATES))
)


@given(
    st.lists(st.fixed_dictionaries(dict.fromkeys(("job_id", "submit_s", "start_s", "end_s", "state", "name"), CELL)))
)
def test_no_text_stops_an_import_or_is_lost_without_a_count(rows: list[dict[str, str | None]]) -> None:
    block = pa.Table.from_pylist(rows, schema=pa.schema([(name, pa.string()) for name in
                                 ("job_id", "submit_s", "start_s", "end_s", "state", "name")]))  # fmt: skip
    own, counts = next(layout for layout in layouts() if layout.kind == "jobs"), Counts()
    found = read_jobs(block, own, -(2**62), 2**62, NOW_S, counts)
    assert (counts.seen, counts.kept) == (len(rows), found.num_rows)
    assert counts.seen == counts.kept + sum(counts.dropped.values())
    assert all(example.isprintable() for example in counts.examples.values())


@pytest.mark.data
def test_helios(trace: Callable[[str], Path]) -> None:
    rows, counts = read(trace("helios_jobs_15k.parquet"))
    assert (counts.kept, sum(row["gpu_count"] > 0 for row in rows)) == (15_000, 10_796)
    assert set(Counter(row["state"] for row in rows)) == {"COMPLETED", "FAILED", "CANCELLED"}
    first = rows[0]
    assert (first["submit_s"], first["start_s"], first["end_s"], first["elapsed_s"]) == (0, 0, 84, 84)


@pytest.mark.data
def test_mason(trace: Callable[[str], Path]) -> None:
    rows, counts = read(trace("mason_named_jobs_oct_nov.parquet"))
    assert counts.kept == 12_010
    assert {row["gpu_count"] for row in rows} == {0}
    second = rows[1]
    assert second["used_mem_mib"] == 585352 / 1024
    assert rows[0]["used_mem_mib"] is None
    assert second["name_key"] == "wz-nph-#-hapxbkruk"
    states = Counter(row["state"] for row in rows)
    assert set(states) <= {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"} and states["TIMEOUT"] > 0


@pytest.mark.data
def test_clustercockpit(trace: Callable[[str], Path]) -> None:
    rows, counts = read(trace("clustercockpit_jobs.parquet"))
    assert (counts.kept, sum(row["gpu_count"] > 0 for row in rows)) == (544, 303)
    first = rows[0]
    wanted = {"submit_s": 1675777167, "end_s": 1675777250, "time_limit_s": 86340, "partition": "a40"}
    wanted["array_job_id"] = None
    assert {key: first[key] for key in wanted} == wanted
    assert {row["jobstats_hbm_peak_mib"] for row in rows} == {None}, "a mean over time is no peak"
