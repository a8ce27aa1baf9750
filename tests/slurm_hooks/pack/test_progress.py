"""The one-line progress file of a packed task, whatever is in it, and the throughput from it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_hooks.pack.progress import Progress, ProgressMeter, parse_progress, read_progress


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"1234", Progress(1234)),
        (b"1234\n", Progress(1234)),
        (b"step 1234\n", Progress(1234)),
        (b"step: 12.5", Progress(12.5)),
        (b"step=7 / 100\n", Progress(7, 100)),
        (b"flop 3.5e15\n", Progress(3.5e15)),
        (b"flop 3.6e21/7.2e24\n", Progress(3.6e21, 7.2e24)),  # one GPU after hours, and the end of the run
        (b"7200000000000000000000000\n", Progress(7.2e24)),
        (b"step 3\r\nloss 0.1\n", Progress(3)),
        (b"0", Progress(0)),
    ],
)
def test_lines_that_are_understood(content, expected):
    assert parse_progress(content) == expected


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n5\n",
        b"step",
        b"-5",
        b"step -5",
        b"nan",
        b"inf",
        b"step 1234 of 5000",
        b"9" * 31,
        b"1e99",
        b"5/4",
        b"5/0",
        b"5/",
        b"\x00\x00\x00\x00",
        b"\xff\xfe5\x00",
        "５".encode(),
        b"\x1b[31m5",
        b"$(reboot) 5",
        b"step " * 60 + b"5",
        b"1" * 4096,
    ],
)
def test_anything_else_is_not_known(content):
    assert parse_progress(content) is None


@given(st.binary(max_size=300))
def test_any_content_is_a_count_or_nothing(content):
    found = parse_progress(content)
    assert found is None or 0 <= found.done <= 1e30


def test_files_that_are_none(tmp_path):
    assert read_progress(str(tmp_path / "absent")) is None
    assert read_progress(str(tmp_path)) is None
    assert read_progress("bad\0name") is None
    os.mkfifo(tmp_path / "fifo")
    assert read_progress(str(tmp_path / "fifo")) is None
    assert read_progress("/dev/zero") is None
    (tmp_path / "step").write_text("step 5\n")
    assert read_progress(str(tmp_path / "step")) == Progress(5)


def observed(*counts, gap_s=10.0) -> tuple[ProgressMeter, float]:
    meter = ProgressMeter()
    for number, count in enumerate(counts):
        meter.observe(gap_s * number, None if count is None else Progress(count))
    return meter, gap_s * (len(counts) - 1)


def test_the_rate_begins_with_the_first_change():
    """0 for 20 s while the program starts, then 100 at 30 s, 130 at 40 s, 160 at 50 s: 60 steps in 20 s."""
    meter, now_s = observed(0, 0, 0, 100, 130, 160)
    assert meter.rate(now_s) == 3.0


def test_too_little_is_not_zero():
    assert observed()[0].rate(100) is None
    assert observed(None, None)[0].rate(1000) is None
    assert observed(5)[0].rate(1000) is None
    assert observed(5, 6)[0].rate(1000) is None
    assert observed(5, 6, 8)[0].rate(20) is None  # 2 steps in 10 s


def test_few_slow_steps_count_after_a_minute():
    meter, now_s = observed(0, 1, 2, 3, gap_s=30)
    assert meter.rate(now_s) == 2 / 60


def test_an_absent_file_in_between_is_passed_over():
    meter, now_s = observed(0, 10, None, None, 40)
    assert meter.rate(now_s) == 1.0


def test_a_count_that_falls_begins_again():
    meter, now_s = observed(0, 1000, 2000, 0, 10, 20, 30)
    assert meter.rate(now_s) == 1.0


def test_a_standstill_lowers_the_rate():
    meter, now_s = observed(0, 10, 20, 30)
    assert meter.rate(now_s + 100) == 1.0
    assert meter.rate(now_s + 180) == 20 / 200


def test_restart_forgets_the_rate_but_not_the_count():
    meter, now_s = observed(0, 10, 20, 30)
    meter.restart()
    assert meter.rate(now_s) is None
    assert meter.last == Progress(30)
