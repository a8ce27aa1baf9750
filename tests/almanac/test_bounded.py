"""Programs and servers that print for ever, never end, or leave something behind: none decides how long or how much."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from almanac import bounded
from almanac.bounded import run, watch, within
from almanac.errors import ConfigError


def shell(script: str, timeout_s: float = 30, most_bytes: int = 1 << 20, stdin: bytes = b"") -> bounded.Done:
    return run(["/bin/sh", "-c", script], timeout_s=timeout_s, most_bytes=most_bytes, stdin=stdin)


def is_running(pid_file: Path) -> bool:
    """True unless the process has ended; one that nobody has waited for yet has ended."""
    try:
        state = Path(f"/proc/{pid_file.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until_ended(pid_file: Path) -> None:
    while is_running(pid_file):
        time.sleep(0.01)


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_gives_its_code_and_both_outputs(code: int) -> None:
    done = shell(f"cat; echo why >&2; exit {code}", stdin=b"input")
    assert (done.code, done.stdout, done.stderr, done.said) == (code, b"input", b"why\n", "why")


def test_a_large_answer_and_a_large_input_are_whole() -> None:
    text = os.urandom(4 << 20)
    assert shell("cat", most_bytes=8 << 20, stdin=text).stdout == text
    assert shell("head -c 3000000 /dev/zero; exec cat >/dev/null", most_bytes=3_000_000).stdout == bytes(3_000_000)
    assert shell("true", stdin=text).code == 0, "input that nobody reads holds up nothing"


@pytest.mark.parametrize(
    "script", ["exec yes", "exec yes >&2", "yes & yes >&2", "yes & exit 0", "head -c 1048577 /dev/zero"]
)
def test_a_program_that_prints_too_much_is_ended(script: str) -> None:
    with pytest.raises(ValueError, match="printed more than 1048576 bytes"):
        shell(script)


@pytest.mark.parametrize(
    "script",
    ["exec sleep 600", "sleep 600 & wait", "exec >&- 2>&-; sleep 600",
     "trap '' TERM INT HUP; while :; do sleep 1; done", "while :; do echo .; sleep 0.02; done"],
)  # fmt: skip
def test_a_program_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path, script: str) -> None:
    with pytest.raises(TimeoutError, match=r"timed out after 0\.2 s"):
        shell(f"echo $$ >{tmp_path}/pid; {script}", timeout_s=0.2)
    wait_until_ended(tmp_path / "pid")


@pytest.mark.parametrize("prefix", ["", "setsid "])
def test_what_a_program_leaves_behind_does_not_hold_up_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """A process of another session is not ended: ssh's ControlPersist, or a daemon."""
    monkeypatch.setattr(bounded, "LINGER_S", 0.1)
    pid = tmp_path / "pid"
    done = shell(f"{prefix}sh -c 'echo $$ >{pid}; exec sleep 600' & while [ ! -s {pid} ]; do :; done; echo answer")
    assert (done.code, done.stdout) == (0, b"answer\n")
    if prefix:
        os.kill(int(pid.read_text()), 9)
    wait_until_ended(pid)


def test_output_of_a_child_that_ends_soon_after_is_kept() -> None:
    assert shell("(sleep 0.1; echo late) & exit 0").stdout == b"late\n"


def test_an_exception_ends_the_program(tmp_path: Path) -> None:
    def see(line: bytes) -> None:
        raise InterruptedError(line.decode())

    with pytest.raises(InterruptedError, match="first"):
        run(
            ["/bin/sh", "-c", f"echo $$ >{tmp_path}/pid; echo first >&2; sleep 600"],
            timeout_s=30, most_bytes=100, see_error=see,
        )  # fmt: skip
    wait_until_ended(tmp_path / "pid")


def test_each_line_of_the_errors_is_seen_once() -> None:
    seen: list[bytes] = []
    argv = ["/bin/sh", "-c", "printf 'a\\nb'  >&2; sleep 0.1; printf 'c\\n\\nd' >&2; echo lost"]
    done = run(argv, timeout_s=30, most_bytes=100, see_error=seen.append)
    assert seen == [b"a", b"bc", b"", b"d"]
    assert (done.stdout, done.stderr) == (b"", b"a\nbc\n\nd")


def test_warnings_do_not_count_as_the_answer() -> None:
    done = shell("head -c 100000 /dev/zero >&2; echo short", most_bytes=10)
    assert (done.stdout, len(done.stderr)) == (b"short\n", 100_000)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        run(["/no/such/program"], timeout_s=1, most_bytes=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_starts_no_program_that_others_can_change(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o777)
    for argv, env in (([str(program)], None), (["tool"], {"PATH": f"{tmp_path}:/bin"})):
        with pytest.raises(ConfigError, match="tool belongs to root and has mode 0777"):
            run(argv, timeout_s=5, most_bytes=100, env=env)
    assert not (tmp_path / "started").exists()


@contextlib.contextmanager
def peer(sent: bytes, pause_s: float) -> Iterator[socket.socket]:
    """A connection to a peer that sends for ever."""
    ours, theirs = socket.socketpair()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs.sendall(sent)
                time.sleep(pause_s)

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        theirs.close()
        thread.join()


def test_a_peer_that_drips_is_cut_off_though_each_read_gets_something() -> None:
    with peer(b".", 0.01) as ours:
        ours.settimeout(30)
        with pytest.raises(TimeoutError, match=r"no whole answer within 0\.1 s"), within(0.1):
            watch(ours)
            while ours.recv(10):
                pass


def test_a_socket_that_is_named_after_the_end_is_cut_off_at_once() -> None:
    with peer(b".", 0.01) as ours, pytest.raises(TimeoutError), within(0):
        time.sleep(0.05)
        watch(ours)
        while ours.recv(10):
            pass


def test_an_exchange_in_time_leaves_the_connection_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with peer(b".", 0.01) as ours:
        for _ in range(3):
            with within(30):
                watch(ours)
                assert ours.recv(1) == b"."
                assert len(list(Path("/proc/self/fd").iterdir())) == before + 3
        watch(ours)  # outside: nothing to do
    assert len(list(Path("/proc/self/fd").iterdir())) == before
