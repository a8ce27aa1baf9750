"""A request as it is typed, and the record of the same job by a real Slurm of each release, are one submission."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from almanac.config import Slurm, Tier
from almanac.names import name_key
from almanac.tiers import requested_tier
from telemetry.slurm.defaults import with_defaults
from telemetry.slurm.sbatch import parse_submission
from telemetry.sources.sacct import SacctSource

FIXTURES = Path(__file__).parents[1] / "fixtures" / "slurm"
RELEASES = ("22.05.8", "24.11.5", "26.05.5")
NOTE = re.compile(r'^note (?P<case>\w+) "\$\(sub (?P<options>-[^"]*) --wrap .*\)"$', re.M)
SUBMITTED = {
    match["case"]: shlex.split(match["options"]) for match in NOTE.finditer((FIXTURES / "record.sh").read_text())
}
TIERS = (Tier("hbm40g", 40960, constraint="hbm40g"), Tier("hbm80g", 81920, constraint="hbm80g"))
PARTITIONS = b"PartitionName=all Default=YES DefaultTime=01:00:00 MaxTime=2-00:00:00\n"


def rows_of(release: str) -> dict[int, dict[str, Any]]:
    """By job id, the last run of each, as ingest stores it."""
    folder = FIXTURES / release
    now_s = int((folder / "now_s.txt").read_text())

    def answer(argv: Sequence[str]) -> bytes:
        if argv[0] == "sacctmgr":
            return b"lab\n"
        name = "helpformat.txt" if "--helpformat" in argv else "sacct.json" if "--json" in argv else "sacct.txt"
        return (folder / name).read_bytes()

    config = Slurm(overlap_hours=0, read_steps=False)
    source = SacctSource(answer, "lab", TIERS, config, lambda: now_s, delimiter=lambda: "|~0123456789abcdef~|")
    return {row["job_id"]: row for batch in source.read(now_s - 3600, now_s) for row in batch.rows.to_pylist()}


def defaults(argv: Sequence[str]) -> bytes:
    """What scontrol and sacctmgr say on the cluster of the recordings."""
    return PARTITIONS if argv[0] == "scontrol" else b"ml|ml|\n"


@pytest.mark.parametrize("release", RELEASES)
def test_a_request_and_its_record_say_the_same(release: str) -> None:
    cases = dict(line.split("\t") for line in (FIXTURES / release / "cases.tsv").read_text().splitlines())
    rows, differences, compared = rows_of(release), {}, 0
    for case, options in SUBMITTED.items():
        row = rows.get(int(cases.get(case) or 0))
        if row is None:
            continue
        submission = parse_submission([*options, "--wrap", "true"], {}, str)
        request = with_defaults(submission.request("alice", 0), submission.options, TIERS, "lab", defaults)
        tier = requested_tier(request, TIERS)
        asked = {
            "name_key": name_key(request.job_name), "account": request.account, "partition": request.partition,
            "qos": request.qos, "tier": tier.name if tier else None, "time_limit_s": request.time_limit_s,
            "gpu_count_req": request.gpu_count, "gpu_type_req": request.gpu_type, "is_array": request.is_array,
            "node_count_req": request.node_count, "cpu_count_req": request.cpu_count,
        }  # fmt: skip
        row["is_array"] = row["array_job_id"] is not None
        compared += 1
        if wrong := {key: (value, row[key]) for key, value in asked.items() if value != row[key]}:
            differences[case] = wrong
    assert compared >= 15
    # Slurm raises the CPUs of --gpus-per-socket to the sockets.
    assert differences == {"per_socket": {"cpu_count_req": (1, 2)}}
