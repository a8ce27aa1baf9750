"""Runs and messages for the tests of mail, and a clock that only sleeping moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reports.mail.outbox import EndedRun, Message

NOW_S = 1_795_003_200


def run(job_id: int, **more: Any) -> EndedRun:
    given = {"cluster": "test", "submit_s": NOW_S - 900, "user": "ann", "end_s": NOW_S - 60, "gpu_count": 1}
    return EndedRun(job_id=job_id, **{**given, **more})


def message(number: int, *runs: EndedRun, **more: Any) -> Message:
    given = {"user": "ann", "recipient": "ann@example.org", "kind": "job"}
    raw = f"Message-ID: <m{number}@example.org>\r\nSubject: number {number}\r\n\r\n.begins with a dot\r\n".encode()
    return Message(f"<m{number}@example.org>", raw=raw, runs=runs, **{**given, **more})


@dataclass
class Clock:
    now_s: float = NOW_S
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
