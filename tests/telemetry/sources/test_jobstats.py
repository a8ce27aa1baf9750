from __future__ import annotations

import base64
import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.sources.sacct import MAX_JSON_BYTES, GpuSummary, decode_jobstats, has_jobstats

GIB = 2**30


def comment(content: Any) -> str:
    return pack(json.dumps(content).encode())


def pack(data: bytes) -> str:
    return "JS1:" + base64.b64encode(gzip.compress(data, mtime=0)).decode()


def node(used: dict[str, Any], total: dict[str, Any], util: dict[str, Any] | None = None) -> dict[str, Any]:
    gpus = {"gpu_used_memory": used, "gpu_total_memory": total, "gpu_utilization": util or {}}
    return {"total_memory": 1, "cpus": 4, **gpus}


def test_the_peak_is_that_of_the_highest_gpu_of_all_nodes() -> None:
    nodes = {
        "h1": node({"0": 10 * GIB, "1": 43 * GIB}, {"0": 80 * GIB, "1": 80 * GIB}),
        "h2": node({"3": 42 * GIB}, {"3": 40 * GIB + 3 * GIB}),
    }
    summary = decode_jobstats(comment({"nodes": nodes, "total_time": 3600, "gpus": 3}))
    assert (summary.hbm_peak_mib, summary.hbm_total_mib) == (43 * 1024, 43 * 1024)
    assert summary.gpus[0] == GpuSummary("h1", "0", 10 * 1024, 80 * 1024)
    assert len(summary.gpus) == 3


def test_a_gpu_without_a_recorded_capacity() -> None:
    summary = decode_jobstats(comment({"nodes": {"h1": node({"0": GIB}, {})}}))
    assert (summary.hbm_peak_mib, summary.hbm_total_mib) == (1024, None)


def test_the_utilization_is_the_mean_over_the_gpus_that_have_one() -> None:
    """As jobstats prints it: the JSON of MIG instances has no utilization, and 0 is a utilization."""
    nodes = {
        "h1": node({"0": GIB, "1": GIB}, {}, {"0": 97.3, "1": 0}),
        "h2": {key: value for key, value in node({"3": GIB}, {}).items() if key != "gpu_utilization"},
    }
    summary = decode_jobstats(comment({"nodes": nodes}))
    assert [gpu.util_pct for gpu in summary.gpus] == [97.3, 0, None]
    assert summary.gpu_util_pct == pytest.approx(48.65)
    unknown = decode_jobstats(comment({"nodes": {"h1": node({"0": GIB}, {})}}))
    assert unknown is not None and unknown.gpu_util_pct is None


@pytest.mark.parametrize("text", ["", "JS1:None", "JS1:Short", "advisor: hbm80g", "js1:h4siaaaa", " JS1:x"])
def test_where_there_is_no_summary(text: str) -> None:
    assert decode_jobstats(text) is None and not has_jobstats(text)


def test_a_malformed_summary_is_none_and_known_to_be_one() -> None:
    for text in [
        "JS1:", "JS1:!!!", "JS1:AAAA", "JS1:\u0661", pack(b"not JSON"), pack(b"[" * 100_000),
        pack(b'{"nodes": {"h": {"gpu_used_memory": {"0": 1' + b"0" * 400 + b"}}}}"),
        pack(b'{"nodes": {"h": {"gpu_used_memory": {"0": NaN}}}}'),
        pack(b'{"nodes": {"h": {"gpu_used_memory": {"0": 1e999}}}}'), comment([]), comment({}), comment({"nodes": []}),
        comment({"nodes": {"h1": None}}), comment({"nodes": {"h1": {"gpu_used_memory": [1]}}}),
        comment({"nodes": {"h1": node({"0": "1"}, {})}}), comment({"nodes": {"h1": node({"0": True}, {})}}),
        comment({"nodes": {"h1": node({"0": -1}, {})}}),
        comment({"nodes": {"h1": node({"0": 81 * GIB}, {"0": 80 * GIB})}}),
        comment({"nodes": {"h1": node({"0": 1 * GIB}, {"0": 80 * GIB})}})[:-8],
    ]:  # fmt: skip
        assert decode_jobstats(text) is None and has_jobstats(text)


BAD: list[Any] = [None, "97", True, -1, 1e30, [], {"0": 1}, float("nan"), 10**400]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad!r:.12}")
@pytest.mark.parametrize("place", ["used", "total", "util", "node", "field"])
def test_one_bad_value_costs_no_other(bad: Any, place: str) -> None:
    used, total, util = ({"0": value, "1": value} for value in (40 * GIB, 80 * GIB, 90.0))
    {"used": used, "total": total, "util": util}.get(place, {})["0"] = bad
    nodes = {"h1": node(used, total, util), "h2": node({"0": GIB}, {"0": 80 * GIB}, {"0": 10.0})}
    if place == "node":
        nodes["h0"] = bad
    if place == "field":
        nodes["h0"] = {"gpu_used_memory": bad, "gpu_total_memory": bad, "gpu_utilization": {"0": 50.0}}
    summary = decode_jobstats(comment({"nodes": nodes}))
    found = {(gpu.host, gpu.gpu): (gpu.peak_mib, gpu.total_mib, gpu.util_pct) for gpu in summary.gpus}
    whole = (40 * 1024, 80 * 1024, 90.0)
    expected = {"used": (None, *whole[1:]), "total": (whole[0], None, 90.0), "util": (*whole[:2], None)}
    assert found["h1", "0"] == expected.get(place, whole)
    assert (found["h1", "1"], found["h2", "0"]) == (whole, (1024, 80 * 1024, 10.0))
    has_all_peaks = place in ("total", "util") or (place in ("node", "field") and isinstance(bad, dict))
    assert summary.hbm_peak_mib == (40 * 1024 if has_all_peaks else None)
    assert (summary.unreadable == 0) == (bad is None or (place in ("node", "field") and isinstance(bad, dict)))


def test_a_peak_above_the_memory_says_nothing_of_this_gpu_alone() -> None:
    used, total = {"0": 81 * GIB, "1": GIB}, {"0": 80 * GIB, "1": 80 * GIB}
    summary = decode_jobstats(comment({"nodes": {"h1": node(used, total, {"0": 7, "1": 9})}}))
    assert [(gpu.peak_mib, gpu.total_mib, gpu.util_pct) for gpu in summary.gpus] == [(None, None, 7), (1024, 81920, 9)]
    assert (summary.unreadable, summary.hbm_peak_mib, summary.gpu_util_pct) == (2, None, 8)


@pytest.mark.parametrize(
    ("used", "total"),
    [({"3": "x", "4": 20 * GIB}, {"3": 80 * GIB, "4": 80 * GIB}),
     ({"3": 40 * GIB, "4": 20 * GIB}, {"3": 0, "4": 80 * GIB}), ({"4": 20 * GIB}, {"3": 80 * GIB, "4": 80 * GIB}),
     ({"3": None, "4": 20 * GIB}, {})],
)  # fmt: skip
def test_the_peak_is_known_only_if_that_of_every_gpu_is(used: dict[str, Any], total: dict[str, Any]) -> None:
    summary = decode_jobstats(comment({"nodes": {"h1": node(used, total)}}))
    assert summary is not None and summary.hbm_peak_mib is None
    assert {gpu.gpu: gpu.peak_mib for gpu in summary.gpus} == {"3": None, "4": 20 * 1024}


def test_a_job_without_gpus_has_no_summary() -> None:
    assert decode_jobstats(comment({"nodes": {"h1": {"total_memory": 1, "cpus": 4}}})) is None


def test_decompression_is_bounded() -> None:
    data = json.dumps({"nodes": {"h1": node({"0": GIB}, {})}}).encode()
    assert decode_jobstats(pack(data + b" " * (MAX_JSON_BYTES - len(data) - 1))) is not None
    assert decode_jobstats(pack(data + b" " * MAX_JSON_BYTES)) is None


def test_text_that_is_too_long_is_not_decoded() -> None:
    raw = zlib.compressobj(level=0, wbits=31)
    data = json.dumps({"nodes": {"h1": node({"0": GIB}, {})}}).encode() + b" " * (1 << 20)
    assert decode_jobstats("JS1:" + base64.b64encode(raw.compress(data) + raw.flush()).decode()) is None


@given(st.text())
def test_no_text_breaks_the_decoder(text: str) -> None:
    assert decode_jobstats("JS1:" + text) is None


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.floats(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_content_breaks_the_decoder(content: Any) -> None:
    decode_jobstats(comment({"nodes": content}))
    decode_jobstats(comment({"nodes": {"h": content}}))
    decode_jobstats(comment({"nodes": {"h": {"gpu_used_memory": content, "gpu_total_memory": content}}}))
    decode_jobstats(comment({"nodes": {"h": node({"0": GIB}, {}, content)}}))
