"""Runs and messages for the tests of mail."""

from __future__ import annotations

from typing import Any

from reports.mail.record import EndedRun, Message

NOW_S = 1_795_003_200


def run(job_id: int, **more: Any) -> EndedRun:
    given = {"cluster": "test", "submit_s": NOW_S - 900, "user": "ann", "end_s": NOW_S - 60, "gpu_count": 1}
    return EndedRun(job_id=job_id, **{**given, **more})


def message(number: int, *runs: EndedRun, **more: Any) -> Message:
    """The mail about these runs, or about the run of this number."""
    given = {"user": "ann", "recipient": f"{more.get('user', 'ann')}@example.org", "kind": "job"}
    raw = (
        f"Message-ID: <m{number}@example.org>\r\nTo: {given['recipient']}\r\nSubject: number {number}\r\n\r\n"
        ".begins with a dot\r\n"
    ).encode()
    about = runs or (run(number, user=more.get("user", "ann")),)
    return Message(f"<m{number}@example.org>", raw=raw, runs=about, **{**given, **more})
