"""Trace files of slice jobs, with holes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from almanac.errors import FileFormatError
from almanac.hardware import mig_models
from simulator.traces.mig import SliceRequest, parse_layouts, read_trace

MODEL = mig_models()["A100-40"]


def test_shapes_names_and_needs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(
        "submit_s,run_s,shape,memory_gib,compute\n"
        "130,60,1g.5gb,,\n100,60,a100_3g.20gb,,2.5\n110,60,,12,4.6\n120,60,7g.40gb,,\n140,60,,4,\n"
    )
    jobs, left_out = read_trace(path, MODEL)
    assert jobs == [
        SliceRequest(0, 60, "3g", 2.5),
        SliceRequest(10, 60, "4g", 4.6),
        SliceRequest(20, 60, "gpu", 7.0),
        SliceRequest(30, 60, "1g", 1.0),
        SliceRequest(40, 60, "1g", 1.0),
    ]
    assert left_out == {}


def test_bad_rows_are_counted_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    rows = [
        {"submit_s": 5, "run_s": 10, "shape": "2g"},
        {"submit_s": "nan", "run_s": 10, "shape": "2g"},
        {"submit_s": 5, "run_s": -1, "shape": "2g"},
        {"submit_s": 5, "run_s": 10, "shape": "\x1b[31m9g"},
        {"submit_s": 5, "run_s": 10, "memory_gib": 500},
        {"submit_s": 5, "run_s": 10, "shape": "2g", "compute": 99},
        "no row",
    ]
    path.write_text(json.dumps(rows))
    jobs, left_out = read_trace(path, MODEL)
    assert len(jobs) == 1
    assert sum(left_out.values()) == 5


@pytest.mark.parametrize("text", ["", "[]", "{", "submit_s,run_s\n1,2\n", "\x00\xff"])
def test_a_file_without_jobs_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(FileFormatError):
        read_trace(path, MODEL)


@pytest.mark.parametrize("text", ["4g+4g", "9:gpu", "1:1g+9g", "2:gpu,1:gpu,1:gpu"])
def test_layouts_that_the_model_cannot_have_are_refused(text: str) -> None:
    assert parse_layouts("1:1g+2g+4g,gpu", MODEL, 3) == (("1g", "2g", "4g"), ("gpu",), ("gpu",))
    with pytest.raises(ValueError, match=r"no layout|no number|the nodes have"):
        parse_layouts(text, MODEL, 3)
