"""Reading a user's own reports: what is damaged, another's, or planted is named and not used."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from publisher import CLUSTER, IS_ROOT, NOW_S, Publisher

from almanac.errors import FileFormatError, StoreError
from reports.published.format import MAX_FILE_BYTES, pack_report, unpack_index, unpack_report

only_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")


def test_who_has_nothing_is_told_so(publisher: Publisher) -> None:
    with pytest.raises(StoreError, match="no reports for you are published") as caught:
        publisher.of("alice")
    assert "by mail" in caught.value.hint


def replaced(publisher: Publisher, content: bytes) -> None:
    path = publisher.root / "user" / "60001" / "jobs"
    path.chmod(0o600)
    path.write_bytes(content)
    path.chmod(0o400)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        gzip.compress(b"no json\n", mtime=0),
        gzip.compress(b"[]\n", mtime=0),
        gzip.compress(b"[" * 100_000 + b"\n", mtime=0),
        gzip.compress(b'{"almanac": "report", "format": 2}\n', mtime=0),
        gzip.compress(b'{"almanac": "jobs", "format": 2}\n', mtime=0),
        gzip.compress(b'{"almanac": "jobs", "format": 2}\n', mtime=0),
        gzip.compress(
            b'{"almanac": "jobs", "format": 2, "cluster": "c", "user": "u", "written_s": 1, "runs": 3}\n', mtime=0
        ),
        gzip.compress(bytes(100 << 20), mtime=0),
        bytes(MAX_FILE_BYTES + 1),
    ],
    ids=["empty", "garbage", "no-json", "list", "nested", "kind", "keys", "format", "types", "bomb", "large"],
)
def test_a_damaged_file_is_named_and_not_used(published: Publisher, content: bytes) -> None:
    replaced(published, content)
    with pytest.raises(FileFormatError, match="user/60001/jobs"):
        published.of("alice")


@pytest.mark.parametrize("plant", ["link", "fifo", "folder", "writable"])
def test_what_others_could_have_made_is_not_read(published: Publisher, tmp_path: Path, plant: str) -> None:
    path = published.root / "user" / "60001" / "jobs"
    content = path.read_bytes()
    if plant == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
        (tmp_path / "other").write_bytes(content)
        {"link": lambda: path.symlink_to(tmp_path / "other"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[
            plant
        ]()
    with pytest.raises((StoreError, FileFormatError)):
        published.of("alice")


@only_root
def test_a_file_of_another_user_is_not_read(published: Publisher) -> None:
    os.chown(published.root / "user" / "60001" / "jobs", 60_002, 60_002)
    with pytest.raises(FileFormatError, match="other users can write"):
        published.of("alice")


@pytest.mark.parametrize("name", ["../../60002/jobs", "/etc/passwd", "..", "1-1-zz", ""])
def test_a_list_names_reports_of_its_own_folder_only(published: Publisher, name: str) -> None:
    own = published.of("alice")
    runs = tuple(dataclasses.replace(run, report=name) for run in own.index.runs)
    with pytest.raises(StoreError, match="not published"):
        dataclasses.replace(own, index=dataclasses.replace(own.index, runs=runs)).contexts([101])


@given(cut=st.floats(0, 1), flip=st.integers(0, 255))
def test_no_damage_to_a_report_is_more_than_an_error(reported: Any, cut: float, flip: int) -> None:
    content = bytearray(pack_report(reported.contexts["balanced"]))
    content[int(cut * (len(content) - 1))] ^= flip
    for damaged in (bytes(content), bytes(content[: int(cut * len(content))])):
        with contextlib.suppress(FileFormatError):
            assert unpack_report(damaged).job_id == 101


def test_the_format_is_what_it_was(reported: Any) -> None:
    """Other keys are another format: raise FORMAT in reports/published/format.py, and say so in docs/own-reports.md.

    "packing" is not: readers do without it.
    """
    line, _, samples = gzip.decompress(pack_report(reported.contexts["balanced"])).partition(b"\n")
    document = json.loads(line)
    assert list(document) == [
        "almanac", "format", "cluster", "now_s", "job", "metrics", "gpus", "earlier_runs", "ranks", "advice", "packing",
        "tiers", "series",
    ]  # fmt: skip
    advice = {name: sorted(part) for name, part in document["advice"].items() if isinstance(part, dict)}
    assert advice == {
        "request": ["account", "constraints", "cpu_count", "gpu_count", "gpu_type", "gres", "is_array", "job_name",
                    "node_count", "partition", "qos", "submit_s", "time_limit_s", "user"],
        "tier": ["holds_bound", "is_change", "note", "reason", "requested_tier", "rewrite", "tier"],
        "bound": ["bound_mib", "evidence_class", "highest_mib", "risk", "runs", "scope", "tier_mib"],
        "duration": ["case", "duration_s", "gpu_time_s", "high_s", "low_s", "model_s", "rolling_s", "runs"],
        "priority": ["extra", "gpu_time_s", "is_cautious", "share_longer", "term", "worth_wait_s"],
        "set_aside": [],
        "evidence": ["changes_above_mib", "newest_peaks_mib", "paused_until_s", "ran_out_mib", "ran_out_s", "runs",
                     "scope", "since_s", "until_s"],
        "services": [],
    }  # fmt: skip
    assert all(list(rank) == ["below", "above", "jobs"] for rank in document["ranks"].values()) and document["ranks"]
    series = document["series"]
    assert series["counters"] == ["gpu_util_pct", "hbm_used_mib", "tensor_active_frac", "dram_active_frac"]
    assert len(samples) == 2 * 4 * len(series["units"]) * series["bins"]
    assert document["format"] == 3


def test_a_list_of_another_user_is_not_shown(published: Publisher) -> None:
    index = unpack_index((published.root / "user" / "60001" / "jobs").read_bytes())
    assert (index.user, index.cluster, index.written_s) == ("alice", CLUSTER, NOW_S)
