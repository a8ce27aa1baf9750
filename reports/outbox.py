"""Which ended runs still need a decision, and which mails still have to be sent: SQLite, so that no kill loses one.

A run is noticed once and decided once: it becomes part of a message, or is skipped with a reason. A message is queued,
with the decision on its runs, in one transaction; it leaves the queue when the server has taken it or it is given up.
A process that is killed between the server's acceptance and our record of it sends the message again, with the same
Message-ID.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class EndedRun:
    """A run of a job that has ended. A requeued job's next run has another submit or end time, and is another one."""

    cluster: str
    job_id: int
    submit_s: int
    user: str
    end_s: int
    gpu_count: int
    array_job_id: int | None = None


@dataclass(frozen=True)
class Message:
    """A mail, as the bytes that the server gets. kind: "job", "digest" (a storm of jobs) or "weekly".

    runs: what it reports; () of a weekly one. attempts: failed tries. put_s: when it was queued.
    """

    message_id: str
    user: str
    recipient: str
    kind: str
    raw: bytes
    runs: tuple[EndedRun, ...] = ()
    attempts: int = 0
    next_try_s: int = 0
    put_s: int = 0


@dataclass(frozen=True)
class OutboxCounts:
    """sent, by kind, failed_tries, given_up, skipped, by reason: since the outbox was made; they never fall.

    waiting: runs without a decision now; oldest_end_s: end of the oldest of them. queued: messages to be sent;
    oldest_put_s: when the oldest of them was queued. None where there are none.
    """

    sent: Mapping[str, int]
    failed_tries: int
    given_up: int
    skipped: Mapping[str, int]
    waiting: int
    oldest_end_s: int | None
    queued: int
    oldest_put_s: int | None


def outbox_path(store_root: Path) -> Path:
    return store_root / "reports" / "outbox.sqlite"


def read_counts(path: Path) -> OutboxCounts | None:
    """Without a lock, for who only looks; None where there is no outbox yet. Raises StoreError."""
    raise NotImplementedError


class Outbox:
    """To be entered (`with Outbox(path) as outbox`), by one process at a time: BusyError. Raises StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Outbox:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    def notice(self, runs: Sequence[EndedRun], now_s: int) -> int:
        """Remember that these have ended, durably; those that are known already are left as they are. The new ones."""
        raise NotImplementedError

    def waiting(self, now_s: int, limit: int) -> list[EndedRun]:
        """Without a decision, and not delayed beyond now; the oldest end first."""
        raise NotImplementedError

    def delay(self, runs: Sequence[EndedRun], until_s: int, reason: str) -> None:
        """Leave these, which wait, alone until then: their telemetry is not there yet, say."""
        raise NotImplementedError

    def put(self, message: Message, now_s: int) -> bool:
        """Queue a message, and decide on its runs, in one transaction. False where the same one was queued before."""
        raise NotImplementedError

    def skip(self, runs: Sequence[EndedRun], reason: str, now_s: int) -> None:
        """Decide that there is no mail of these, which wait. reason: a few words, one of a small number of texts."""
        raise NotImplementedError

    def ready(self, now_s: int, limit: int) -> list[Message]:
        """To be sent now, oldest first; those too that a killed process left."""
        raise NotImplementedError

    def sent(self, message: Message, now_s: int) -> None:
        """The server has taken it; its bytes are forgotten."""
        raise NotImplementedError

    def failed(self, message: Message, error: str, next_try_s: int) -> None:
        raise NotImplementedError

    def give_up(self, message: Message, error: str, now_s: int) -> None:
        raise NotImplementedError

    def counts(self) -> OutboxCounts:
        raise NotImplementedError

    def forget(self, before_s: int) -> int:
        """Remove what was decided, sent or given up before then; how many rows. What waits or is queued stays."""
        raise NotImplementedError
