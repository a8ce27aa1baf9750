"""The sacct source against the recorded outputs of three releases (tests/slurm/fixtures/README.md)."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from almanac.config import Slurm, Tier
from almanac.errors import CommandError, ServerError, SourceError
from slurm.accounting import probe_accounting, random_delimiter
from slurm.nodes import NodeShape
from slurm.sbatch import command_key, script_key
from telemetry.sources.sacct import SHAPE_COLUMNS, SacctSource, windows
from telemetry.sources.source import RowBatch
from telemetry.store.schema import JOBS

FIXTURES = Path(__file__).parents[2] / "slurm/fixtures"
RELEASES = ["22.05.8", "24.11.5", "26.05.5"]
DELIMITER = "|~0123456789abcdef~|"
TIERS = (Tier("hbm40g", 40960, constraint="hbm40g"), Tier("hbm80g", 81920, constraint="hbm80g"))


@dataclass
class Recorded:
    """A runner that answers as the recorded Slurm did and refuses every other command."""

    release: str
    json: bytes | CommandError | None = None
    clusters: str = "lab\n"
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> bytes:
        self.asked.append(list(argv))
        if argv[0] == "sacctmgr":
            return self.clusters.encode()
        if argv[0] == "scontrol":
            return self.file("config.txt")
        assert argv[0] == "sacct"
        if "--helpformat" in argv:
            return self.file("helpformat.txt")
        if "--version" in argv:
            return self.file("version.txt")
        if "--json" in argv:
            if isinstance(self.json, CommandError):
                raise self.json
            return self.file("sacct.json") if self.json is None else self.json
        if "JobIDRaw" in argv:
            return b"1\n2\n3\n"
        return self.file("sacct.txt")

    def file(self, name: str) -> bytes:
        return (FIXTURES / self.release / name).read_bytes()

    @property
    def now_s(self) -> int:
        return int(self.file("now_s.txt"))


def read(runner: Recorded, since_s: int | None = None, **given: Any) -> list[RowBatch]:
    config = given.pop("config", Slurm(overlap_hours=0, read_steps=False))
    source = SacctSource(
        runner, given.pop("cluster", "lab"), TIERS, config, lambda: runner.now_s, delimiter=lambda: DELIMITER, **given
    )
    return list(source.read(runner.now_s - 3600 if since_s is None else since_s, runner.now_s))


def records(runner: Recorded, **given: Any) -> tuple[dict[str, list[dict[str, Any]]], RowBatch]:
    """Rows of each case of cases.tsv, by its name; several where a job has several records."""
    [batch] = read(runner, **given)
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in batch.rows.to_pylist():
        rows.setdefault(row["job_id"], []).append(row)
    cases = (line.split("\t") for line in runner.file("cases.tsv").decode().splitlines())
    return {name: rows.get(int(job_id), []) for name, job_id in cases if job_id}, batch


@pytest.fixture(params=RELEASES)
def runner(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


def test_every_recorded_line_becomes_a_row(runner: Recorded) -> None:
    _, batch = records(runner)
    assert batch.rows.schema == JOBS
    assert batch.counts.seen == batch.counts.kept == batch.rows.num_rows == runner.file("sacct.txt").count(b"\n")
    assert not batch.counts.dropped and not batch.counts.notes
    assert batch.watermark_s == runner.now_s


def test_a_plain_job(runner: Recorded) -> None:
    [job] = records(runner)[0]["first"]
    assert job["end_s"] - job["start_s"] == job["elapsed_s"] > 0
    assert job["submit_s"] <= job["start_s"]
    expected = {
        "job_id": 1, "user": "alice", "account": "ml", "partition": "all", "qos": "normal", "name": "plain",
        "name_key": "plain", "state": "COMPLETED", "time_limit_s": 1800, "node_count": 1, "cpu_count": 1,
        "gpu_count": 2, "gpu_count_req": 2, "gpu_type": "a100", "constraints": "gpu&hbm80g", "tier": "hbm80g",
        "exit_code": 0, "exit_signal": 0, "array_job_id": None, "array_task_id": None, "het_job_id": None,
        "het_offset": None, "jobstats_hbm_peak_mib": None,
    }  # fmt: skip
    assert {key: job[key] for key in expected} == expected
    assert job["node_list"] in ("n3", "n4")


def test_a_choice_of_partitions_names_no_tier(runner: Recorded) -> None:
    """sacct says where a job ran; its submit line, which 22.05 does not give as JSON, what it asked for."""
    found = json.loads(runner.file("sacct.json"))
    for job in found["jobs"]:
        job["submit_line"] = "sbatch -p hbm80,all " + ("-G 2 x.sh" if job["name"] == "plain" else ": x.sh")
    runner.json = json.dumps(found).encode()
    tiers = (Tier("small", 40960, partition="all"), Tier("large", 81920, partition="hbm80"))
    config = Slurm(overlap_hours=0, read_steps=False)
    source = SacctSource(runner, "lab", tiers, config, lambda: runner.now_s, delimiter=lambda: DELIMITER)
    [batch] = source.read(runner.now_s - 3600, runner.now_s)
    said = {row["name"]: (row["partition"], row["partition_req"], row["tier"]) for row in batch.rows.to_pylist()}
    assert said["plain"] == ("all", "hbm80,all", None)
    assert said["fails"] == ("all", None, "small")


def test_only_a_hash_of_the_script_and_its_framework_are_stored(runner: Recorded) -> None:
    found = json.loads(runner.file("sacct.json"))
    for job in found["jobs"]:
        job["submit_line"] = "sbatch secret.sh" if job["name"] == "plain" else "sbatch --wrap secret.sh --vllm"
        job["working_directory"] = "/secret"
    runner.json = json.dumps(found).encode()
    [batch] = read(runner)
    keys = {row["name"]: row["script_key"] for row in batch.rows.to_pylist()}
    assert keys["plain"] == script_key("alice", "sbatch secret.sh", "/secret")
    assert keys["fails"] == command_key("alice", "sbatch --wrap secret.sh --vllm", "/secret")
    frameworks = {row["name"]: row["framework"] for row in batch.rows.to_pylist()}
    assert (frameworks["plain"], frameworks["fails"]) == (None, "vllm")
    assert "secret" not in str(batch.rows.to_pylist())


def test_how_jobs_end(runner: Recorded) -> None:
    cases, _ = records(runner)

    def outcome(name: str) -> tuple[str, int, int]:
        [job] = cases[name]
        return job["state"], job["exit_code"], job["exit_signal"]

    # 22.05's JSON says 0 for the failed one: numbers are the text's.
    assert outcome("failed") == ("FAILED", 3, 0)
    assert outcome("signalled") == ("FAILED", 0, 9)
    assert outcome("timeout")[0] == "TIMEOUT"
    assert outcome("cancelled")[0] == "CANCELLED"
    assert cases["bob"][0]["user"] == "bob"


@pytest.mark.parametrize(
    ("case", "gpus", "nodes"),
    [
        ("cpu_only", 0, 1), ("gres", 2, 1), ("gres_bare", 1, 1), ("gres_two_nodes", 4, 2), ("gres_typed", 2, 1),
        ("gpus", 3, None), ("gpus_typed", 2, None), ("per_node", 4, 2), ("per_task", 3, None), ("per_socket", 2, 1),
    ],
)  # fmt: skip
def test_gpus_of_every_way_to_ask(runner: Recorded, case: str, gpus: int, nodes: int | None) -> None:
    [job] = records(runner)[0][case]
    assert job["gpu_count_req"] == gpus
    assert nodes is None or job["node_count"] == nodes
    assert job["gpu_type"] == ("a100" if gpus else None)
    # 22.05 allocates one GPU of the two asked for by socket where cores of one socket are enough.
    assert job["gpu_count"] == gpus or (case, job["gpu_count"]) == ("per_socket", 1)


def test_a_choice_of_tiers_is_no_tier(runner: Recorded) -> None:
    cases, _ = records(runner)
    assert [(job["constraints"], job["tier"]) for job in cases["either_tier"]] == [("[hbm40g|hbm80g]", None)]
    assert [(job["constraints"], job["tier"]) for job in cases["count_tier"]] == [("[hbm40g*1&hbm80g*1]", None)]


def test_array_tasks_and_parts_of_a_het_job_are_jobs_of_their_own(runner: Recorded) -> None:
    cases, batch = records(runner)
    array, het = cases["array"][0]["job_id"], cases["het"][0]["job_id"]
    rows = batch.rows.to_pylist()
    tasks = [row for row in rows if row["array_job_id"] == array]
    assert sorted(row["array_task_id"] for row in tasks) == [0, 3, 7]
    assert len({row["job_id"] for row in tasks}) == 3 and {row["name"] for row in tasks} == {"arr"}
    parts = sorted((row["het_offset"], row["tier"], row["gpu_count"]) for row in rows if row["het_job_id"] == het)
    assert parts == [(0, "hbm40g", 1), (1, "hbm80g", 2)]


def test_each_run_of_a_requeued_job_is_a_record(runner: Recorded) -> None:
    first, second = sorted(records(runner)[0]["requeued"], key=lambda row: row["submit_s"])
    assert (first["state"], second["state"]) == ("REQUEUED", "COMPLETED")
    assert first["end_s"] <= second["submit_s"] < second["start_s"]
    assert {first["name"], second["name"]} == {"requeued"}
    assert second["restarts"] == (None if runner.release == "22.05.8" else 1)


def test_the_sizes_of_a_resized_job_do_not_overlap(runner: Recorded) -> None:
    before, after = sorted(records(runner)[0]["resized"], key=lambda row: row["submit_s"])
    assert (before["state"], before["node_count"], after["node_count"]) == ("RESIZING", 2, 1)
    assert before["end_s"] == after["start_s"] and after["elapsed_s"] == after["end_s"] - after["start_s"]


def test_what_has_not_ended_or_started_has_no_such_time(runner: Recorded) -> None:
    cases, _ = records(runner)
    [job] = cases["running"]
    assert (job["state"], job["end_s"], job["gpu_count"], job["node_list"]) == ("RUNNING", None, 4, "n[1-2]")
    [job] = cases["pending"]
    expected = {"state": "PENDING", "start_s": None, "end_s": None, "elapsed_s": None, "node_list": None}
    assert {key: job[key] for key in expected} == expected
    assert (job["gpu_count"], job["gpu_count_req"], job["cpu_count"]) == (None, 16, 4)
    [job] = cases["no_limit"]
    assert job["time_limit_s"] is None


def test_a_name_forges_nothing_and_is_kept_as_it_is(runner: Recorded) -> None:
    cases, batch = records(runner)
    [job] = cases["forged_name"]
    assert job["name"].startswith(f"innocent\nlab{DELIMITER}999{DELIMITER}") and job["user"] == "alice"
    assert 999 not in batch.rows["job_id"].to_pylist() and "root" not in batch.rows["user"].to_pylist()
    [job] = cases["strange_name"]
    assert job["name"] == "tab\t`quote`\x1b[31mred | <b>&amp;</b> \\ ü"


def test_the_text_query_asks_for_no_field_that_a_user_writes(runner: Recorded) -> None:
    read(runner)
    [query] = [argv for argv in runner.asked if "-P" in argv and argv[0] == "sacct"]
    asked = query[query.index("-o") + 1].split(",")
    assert not {"JobName", "Comment", "AdminComment", "SubmitLine", "WorkDir", "Reason", "WCKey"} & set(asked)
    assert ("Restarts" in asked) == (runner.release != "22.05.8")
    assert asked[0] == "Cluster" and asked[-1] == "ExitCode"


def test_delimiters_cannot_be_foreseen() -> None:
    assert len({random_delimiter() for _ in range(100)}) == 100


def test_a_jobstats_comment_gives_the_peak(runner: Recorded) -> None:
    cases, _ = records(runner)
    [job] = cases["jobstats"]
    assert (job["jobstats_hbm_peak_mib"], job["jobstats_hbm_total_mib"]) == (43 * 1024, 80 * 1024)
    assert job["jobstats_gpu_util_pct"] is not None
    [job] = cases["jobstats_short"]
    assert job["jobstats_hbm_peak_mib"] is None


@pytest.mark.parametrize(
    "broken",
    [CommandError("sacct: fatal: Unable to find plugin: serializer/json"), b"not JSON", b"[" * 100_000,
     b'{"errors": [{"description": "Unable to parse time format"}]}', b'{"jobs": 3}', b"[]", b"null"],
)  # fmt: skip
def test_without_json_the_numbers_are_kept_and_it_is_said(broken: bytes | CommandError) -> None:
    runner = Recorded("22.05.8", json=broken)
    cases, batch = records(runner)
    [job] = cases["first"]
    assert (job["name"], job["name_key"], job["gpu_count"], job["state"]) == (None, None, 2, "COMPLETED")
    assert batch.counts.kept == batch.rows.num_rows > 0
    assert dict(batch.counts.notes) == {"without a name: sacct --json failed": batch.rows.num_rows}


def test_a_record_that_json_does_not_have_is_kept_and_said() -> None:
    content = json.loads(Recorded("26.05.5").file("sacct.json"))
    [first] = [job for job in content["jobs"] if job["job_id"] == 1]
    content["jobs"].remove(first)
    content["jobs"] += [{**first, "cluster": "other"}, None, {}, {"cluster": "lab"}]
    cases, batch = records(Recorded("26.05.5", json=json.dumps(content).encode()))
    assert cases["first"][0]["name"] is None and cases["failed"][0]["name"] == "fails"
    assert dict(batch.counts.notes) == {"without a name: not in sacct --json": 1}


def test_an_unreadable_jobstats_comment_is_said() -> None:
    content = Recorded("26.05.5").file("sacct.json").replace(b"JS1:H4sI", b"JS1:H4sJ")
    cases, batch = records(Recorded("26.05.5", json=content))
    assert cases["jobstats"][0]["jobstats_hbm_peak_mib"] is None
    assert sum(batch.counts.notes.values()) == 1


def test_windows_cover_the_span_once() -> None:
    assert windows(0, 10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert windows(5, 5, 4) == []


def test_each_record_comes_from_one_window_and_open_ones_from_the_last(runner: Recorded) -> None:
    since_s = runner.now_s - 3 * 3600
    batches = read(runner, since_s, config=Slurm(overlap_hours=0, window_hours=1, read_steps=False))
    assert [batch.watermark_s for batch in batches] == [since_s + 3600, since_s + 7200, runner.now_s]
    # The recorded answer is the same for each window: what ends later than a window is left to a later one.
    assert [batch.rows.num_rows for batch in batches[:2]] == [0, 0]
    assert batches[2].rows.num_rows == runner.file("sacct.txt").count(b"\n")
    assert all(batch.counts.seen == batch.counts.kept + batch.counts.dropped.total() for batch in batches)


def test_a_late_end_is_looked_for_before_the_span(runner: Recorded) -> None:
    read(runner, 1_795_219_200, config=Slurm(overlap_hours=6, window_hours=48, read_steps=False))
    [query] = [argv for argv in runner.asked if "-P" in argv and argv[0] == "sacct"]
    assert query[query.index("-S") + 1] == "2026-11-20T18:00:00"
    assert query[query.index("-M") + 1] == "lab" and "-D" in query and "-X" in query


def test_jobs_left_open_are_asked_for_by_id(runner: Recorded) -> None:
    batches = read(runner, open_jobs=lambda: {1: 0, 987_654: 0, 987_655: 0})
    [query] = [argv for argv in runner.asked if "-P" in argv and "-j" in argv]
    assert query[query.index("-j") + 1] == "987654,987655" and "-S" not in query
    assert len(batches) == 2 and batches[1].watermark_s is None


def test_a_job_of_the_same_number_from_before_is_another_job(runner: Recorded) -> None:
    """Slurm gives numbers again: the answer to a number holds whatever ever had it."""
    [first] = read(runner)
    submitted = dict(zip(first.rows["job_id"].to_pylist(), first.rows["submit_s"].to_pylist(), strict=True))
    at_s = sorted(set(submitted.values()))[1]
    none_in_span = {"since_s": runner.now_s, "config": Slurm(overlap_hours=0, read_steps=False)}
    [batch] = read(runner, **none_in_span, open_jobs=lambda: dict.fromkeys(submitted, at_s))
    assert 0 < batch.rows.num_rows < first.rows.num_rows
    assert min(batch.rows["submit_s"].to_pylist()) >= at_s
    assert batch.counts.seen == batch.counts.kept + batch.counts.dropped.total()


def test_many_records_get_their_names_by_parts(runner: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    [whole] = read(runner)
    runner.asked.clear()
    monkeypatch.setattr("telemetry.sources.sacct.JSON_RECORDS", 15)
    [batch] = read(runner)
    queries = [argv for argv in runner.asked if "--json" in argv]
    assert len(queries) == 3 and all("-S" not in argv for argv in queries)
    assert batch.rows.equals(whole.rows)


def test_an_unknown_cluster_does_not_look_like_an_idle_one(runner: Recorded) -> None:
    with pytest.raises(SourceError, match="has no cluster 'nosuch'; it has: lab"):
        read(runner, cluster="nosuch")


def test_a_slurm_command_that_fails_stops_the_source() -> None:
    def fails(argv: Sequence[str]) -> bytes:
        raise CommandError("Problem talking to the database: Connection refused")

    source = SacctSource(fails, "lab", TIERS, Slurm(), lambda: 0)
    with pytest.raises(CommandError, match="Connection refused"):
        list(source.read(0, 10))


def test_what_slurm_says_of_itself(runner: Recorded) -> None:
    status = probe_accounting(runner)
    assert (status.version, status.cluster) == (runner.release, "lab")
    assert (status.has_json, status.jobs_last_day, status.tracks_gpus) == (True, 3, True)


def test_without_slurmctld_the_only_cluster_of_accounting_is_taken() -> None:
    recorded = Recorded("24.11.5", json=CommandError("no plugin"))

    def runner(argv: Sequence[str]) -> bytes:
        if argv[0] == "scontrol":
            raise CommandError("Unable to contact slurm controller")
        return recorded(argv)

    status = probe_accounting(runner)
    assert (status.cluster, status.has_json, status.json_error) == ("lab", False, "no plugin")
    assert status.tracks_gpus is None
    recorded.clusters = "lab\nother\n"
    assert probe_accounting(runner).cluster == ""


def test_jobstats_own_database_stands_in_for_an_empty_comment() -> None:
    document = {"nodes": {"n1": {"gpu_used_memory": {"0": 1 << 30}, "gpu_total_memory": {"0": 1 << 35}}}}
    summary = "JS1:" + base64.b64encode(gzip.compress(json.dumps(document).encode())).decode()
    runner = Recorded("24.11.5")
    plain = {(row["job_id"], row["submit_s"]): row for row in read(runner)[0].rows.to_pylist()}
    of_gpus = sorted(key for key, row in plain.items() if row["gpu_count"])

    for row in read(runner, summaries=lambda rows: dict.fromkeys(of_gpus, summary))[0].rows.to_pylist():
        own = plain[row["job_id"], row["submit_s"]]["jobstats_hbm_peak_mib"]
        expected = own if own is not None else 1024.0 if row["gpu_count"] else None
        assert row["jobstats_hbm_peak_mib"] == expected, "a summary in AdminComment wins"

    def lost(rows: Any) -> Any:
        raise ServerError("jobstats' database: gone", "check it")

    [batch] = read(runner, summaries=lost)
    assert batch.rows.to_pylist() == list(plain.values())
    assert batch.counts.notes["without jobstats: its database failed"] == len(of_gpus)


def test_jobs_know_the_size_of_their_nodes() -> None:
    """Those that sinfo does not list, and all of them without an answer, are not known; the jobs are kept."""
    runner = Recorded("24.11.5")
    rows = read(runner)[0].rows.to_pylist()
    hosts = {row["node_list"] for row in rows if row["node_list"] and "[" not in row["node_list"]}
    known, size = min(hosts), NodeShape(64, 256_000, 2, 4, frozenset({"hbm80g"}))
    for row in read(runner, shapes=lambda: {known: size})[0].rows.to_pylist():
        found = tuple(row[name] for name in SHAPE_COLUMNS)
        assert found == ((64, 4, 256_000, 2, 81920) if row["node_list"] == known else (None,) * 5)

    def lost() -> Any:
        raise CommandError("Unable to contact slurm controller")

    [batch] = read(runner, shapes=lost)
    assert batch.rows.to_pylist() == rows
    assert batch.counts.notes["without the size of their nodes: sinfo failed"] == len(rows)
