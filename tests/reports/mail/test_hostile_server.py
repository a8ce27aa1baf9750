"""A mail server that drips or floods: a run ends in time, and the mail waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from mails import NOW_S, Clock, message, run

from almanac.config import Mail
from reports.mail.delivery import deliver
from reports.mail.outbox import Outbox, outbox_path
from reports.mail.outcome import Outcome


@contextmanager
def hostile_server(after: int, part: bytes, pause_s: float) -> Iterator[int]:
    """A server that answers so many lines of the client as a real one would, and then sends `part` for ever."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                for _ in range(after):
                    connection.sendall(b"250 ok\r\n" if _ else b"220 here\r\n")
                    lines.readline()
                while True:
                    connection.sendall(part)
                    time.sleep(pause_s)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize(
    ("part", "pause_s", "said"),
    [
        (b"2", 0.02, "no whole answer within"),
        (b"250-x\r\n", 0.02, "no whole answer within"),
        (b"250-" + b"x" * 1000 + b"\r\n", 0.0, "a reply of more than 65536 bytes"),
    ],
    ids=["drips", "drips lines", "floods"],
)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_server_whose_reply_has_no_end_costs_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, part: bytes, pause_s: float, said: str
) -> None:
    """As the greeting, after EHLO, and to a recipient. The mail stays in the queue."""
    monkeypatch.setattr("reports.mail.delivery.TIMEOUT_S", 0.3 if pause_s else 5)
    with Outbox(outbox_path(tmp_path)) as outbox, hostile_server(after, part, pause_s) as port:
        outbox.notice([run(1)])
        outbox.put(message(1, run(1)), NOW_S)
        config = Mail(server="127.0.0.1", port=port, sender="almanac@example.org")
        outcome = Outcome()
        deliver(outbox, config, Clock(), time.sleep, lambda user: "every", outcome)
        assert len(outcome.faults) == 1 and said in outcome.faults[0]
        assert outbox.counts().queued == 1
