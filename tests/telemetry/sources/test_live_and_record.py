"""A request as it is typed, and the record of the same job by a real Slurm of each release, are one submission."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from almanac.records import Counts
from telemetry.slurm.sbatch import parse_submission
from telemetry.sources.sacct_text import columns, parse_text

FIXTURES = Path(__file__).parents[1] / "fixtures" / "slurm"
RELEASES = ("22.05.8", "24.11.5", "26.05.5")
NOTE = re.compile(r'^note (?P<case>\w+) "\$\(sub (?P<options>-[^"]*) --wrap .*\)"$', re.M)
SUBMITTED = {
    match["case"]: shlex.split(match["options"]) for match in NOTE.finditer((FIXTURES / "record.sh").read_text())
}


def rows_of(release: str) -> dict[int, dict[str, Any]]:
    """By job id, the last run of each."""
    folder = FIXTURES / release
    names = columns((folder / "helpformat.txt").read_text())
    data = (folder / "sacct.txt").read_bytes()
    rows = parse_text(data, "|~0123456789abcdef~|", names, "lab", 2**40, Counts())
    return {row["job_id"]: row for row in rows}


@pytest.mark.parametrize("release", RELEASES)
def test_counts_of_a_request_are_those_of_its_record(release: str) -> None:
    cases = dict(line.split("\t") for line in (FIXTURES / release / "cases.tsv").read_text().splitlines())
    rows, differences, compared = rows_of(release), {}, 0
    for case, options in SUBMITTED.items():
        row = rows.get(int(cases.get(case) or 0))
        if row is None:
            continue
        request = parse_submission([*options, "--wrap", "true"], {}, str).request("alice", 0)
        asked = (request.node_count, request.cpu_count, request.gpu_count)
        known = (row["node_count_req"], row["cpu_count_req"], row["gpu_count_req"])
        compared += 1
        if asked != known:
            differences[case] = (asked, known)
    assert compared >= 15
    # Slurm raises the CPUs of --gpus-per-socket to the sockets.
    assert differences == {"per_socket": ((1, 1, 2), (1, 2, 2))}
