"""Weekly digests are sent once a week, to those who want them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from mails import NOW_S

import reports.mail.batch
from almanac.config import Config, Mail
from almanac.config_file import parse_config
from almanac.errors import ConfigError, StoreError
from reports.mail.batch import LATEST_S, MailBatch
from reports.mail.due import MailOutcome
from reports.mail.handover import MailAgent, MailRefusedError
from reports.mail.recipients import AddressError
from reports.mail.record import RETRY_S, WEEK, MailRecord, Message, record_path
from reports.mail.week import last_week
from telemetry.store.schema import JOBS
from telemetry.store.store import ClusterStore, Store

WEEK_S = 7 * 86_400
MONDAY_S = last_week(NOW_S).end_s
CONFIG = parse_config({"mail": {"sender": "almanac@example.org", "recipient": "{user}@example.org"}})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def record(store: Store) -> Iterator[MailRecord]:
    with MailRecord(record_path(store.root)) as opened:
        yield opened


def read_up_to(store: Store, time_s: int) -> None:
    """By accounting, with all metrics computed."""
    store.of("test").set_watermark("sacct", time_s)
    store.of("test").close(store.of("test").stale())


def ran(store: Store, job_id: int, user: str, end_s: int, account: str = "ml") -> None:
    row: dict[str, Any] = {
        "job_id": job_id, "submit_s": end_s - 4000, "start_s": end_s - 3600, "end_s": end_s, "elapsed_s": 3600,
        "user": user, "account": account, "gpu_count": 1, "state": "COMPLETED", "name": "x", "name_key": "x",
    }  # fmt: skip
    store.of("test").write("jobs", pa.Table.from_pylist([{name: row.get(name) for name in JOBS.names}], schema=JOBS))


@dataclass
class Taker(MailAgent):
    """Takes every mail but those to the refused users."""

    config: Mail = field(default_factory=Mail)
    refused: set[str] = field(default_factory=set)
    taken: list[Message] = field(default_factory=list)

    def open(self) -> None:
        pass

    def hand_over(self, message: Message) -> None:
        if message.user in self.refused:
            raise MailRefusedError("550 no such user", is_final=True)
        self.taken.append(message)


WANTS = {"ann": "digest", "bob": "every", "eve": "digest", "off": "off", "gone": "unknown", "dan": "digest"}


@dataclass
class Weekly:
    """Runs of the timer, one after the other. send: returns the users who get a digest in the run."""

    store: Store
    record: MailRecord
    agent: Taker = field(default_factory=Taker)
    config: Config = CONFIG
    wants: dict[str, str] = field(default_factory=WANTS.copy)
    recipient: Callable[[str], str] = "{}@example.org".format
    left: int = 300
    outcome: MailOutcome = field(default_factory=MailOutcome)

    def send(self, now_s: int) -> list[str]:
        before, self.outcome = len(self.agent.taken), MailOutcome()
        given = self.record, self.agent, self.outcome, self.left
        batch = MailBatch(self.store.of("test"), self.config, lambda: now_s, self.recipient, *given)
        batch.send_weekly(self.wants.__getitem__)
        return [message.user for message in self.agent.taken[before:]]

    @property
    def is_told(self) -> bool:
        return (self.record.mark(WEEK, "test") or 0) >= MONDAY_S + WEEK_S


@pytest.fixture
def weekly(store: Store, record: MailRecord) -> Weekly:
    """Mail was switched on in the week before the digests."""
    made = Weekly(store, record)
    assert made.send(MONDAY_S + 50) == []
    return made


def test_who_wants_one_and_ran_something_gets_one_a_week(store: Store, weekly: Weekly) -> None:
    for number, user in enumerate(("ann", "bob", "off")):
        ran(store, number + 1, user, MONDAY_S + 86_400)
    assert weekly.send(MONDAY_S + WEEK_S - 1) == []
    ran(store, 9, "eve", MONDAY_S + WEEK_S + 3600)
    monday = MONDAY_S + WEEK_S + 7200
    read_up_to(store, monday)
    assert weekly.send(monday) == ["ann"] and weekly.send(monday + 60) == []
    [message] = weekly.agent.taken
    assert (message.kind, message.recipient) == ("weekly", "ann@example.org")
    read_up_to(store, monday + WEEK_S)
    assert weekly.send(monday + WEEK_S) == ["eve"]


def test_the_past_of_who_switches_mail_on_is_no_digest(store: Store, record: MailRecord) -> None:
    ran(store, 1, "ann", MONDAY_S - 86_400)
    made = Weekly(store, record)
    assert made.send(MONDAY_S + 50) == made.send(MONDAY_S + 90) == []


def ran_by(store: Store, *users: str) -> int:
    """The time at which the digests of these users are due."""
    for number, user in enumerate(users):
        ran(store, number + 1, user, MONDAY_S + 86_400)
    read_up_to(store, MONDAY_S + WEEK_S + 600)
    return MONDAY_S + WEEK_S


def test_what_the_rate_limit_leaves_comes_with_the_next_run(store: Store, weekly: Weekly) -> None:
    at_s = ran_by(store, "ann", "eve")
    weekly.left = 1
    assert weekly.send(at_s) == ["ann"] and weekly.outcome.left == 1
    assert weekly.send(at_s + 60) == ["eve"] and weekly.is_told


def test_a_refused_digest_is_tried_for_days_and_then_given_up(store: Store, weekly: Weekly) -> None:
    at_s = ran_by(store, "ann", "eve")
    weekly.agent.refused = {"ann"}
    assert weekly.send(at_s) == ["eve"] and weekly.outcome.refused == ["ann@example.org: 550 no such user"]
    assert weekly.send(at_s + RETRY_S) == [] and not weekly.is_told and weekly.outcome.refused
    assert weekly.send(at_s + LATEST_S) == [] and weekly.is_told
    assert weekly.outcome.faults == [
        "weekly digests that will never be sent: 1, the last one to ann@example.org: 550 no such user"
    ]
    assert weekly.record.counts().given_up == 1


def test_a_digest_that_cannot_be_made_keeps_no_other_user_waiting(
    store: Store, weekly: Weekly, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_s = ran_by(store, "ann", "eve")
    real = reports.mail.batch.render_weekly

    def faulty(store: ClusterStore, user: str, *more: Any) -> Any:
        if user == "ann":
            raise StoreError("a damaged file")
        return real(store, user, *more)

    monkeypatch.setattr(reports.mail.batch, "render_weekly", faulty)
    assert weekly.send(at_s) == ["eve"]
    assert weekly.outcome.faults == ["weekly digest of ann: StoreError: a damaged file"]
    monkeypatch.undo()
    assert weekly.send(at_s) == []
    assert weekly.send(at_s + RETRY_S) == ["ann"] and weekly.is_told


def test_who_is_not_known_for_a_moment_gets_a_digest_later(store: Store, weekly: Weekly) -> None:
    at_s = ran_by(store, "ann", "gone")
    assert weekly.send(at_s) == ["ann"] and not weekly.is_told
    weekly.wants["gone"] = "digest"
    assert weekly.send(at_s + RETRY_S - 1) == [] and weekly.send(at_s + RETRY_S) == ["gone"]
    weekly.wants["gone"] = "unknown"
    assert weekly.send(at_s + WEEK_S - 1) == []


def test_a_pilot_gets_digests_by_user_and_by_account(store: Store, weekly: Weekly) -> None:
    """An account of the week counts, not one of another week."""
    for number, (user, account, end_s) in enumerate(
        [("ann", "ml", 86_400), ("bob", "lab", 86_400), ("eve", "ml", 86_400), ("dan", "lab", -86_400),
         ("dan", "ml", 86_400)]
    ):  # fmt: skip
        ran(store, number + 1, user, MONDAY_S + end_s, account=account)
    weekly.config = parse_config({"mail": {"sender": "a@example.org", "users": ["ann"], "accounts": ["lab"]}})
    weekly.wants["bob"] = "digest"
    assert weekly.send(MONDAY_S + WEEK_S + 86_400) == ["ann", "bob"]


def test_a_digest_waits_for_an_address_that_cannot_be_looked_up(store: Store, weekly: Weekly) -> None:
    def broken(user: str) -> str:
        if user == "ann":
            raise AddressError("the directory is down")
        return f"{user}@example.org"

    at_s, weekly.recipient = ran_by(store, "ann", "eve"), broken
    assert weekly.send(at_s) == ["eve"]
    weekly.recipient = "{}@example.org".format
    assert weekly.send(at_s + RETRY_S) == ["ann"]


def test_who_is_never_known_is_not_waited_for_all_week(store: Store, weekly: Weekly) -> None:
    ran_by(store, "gone")
    assert weekly.send(MONDAY_S + WEEK_S + LATEST_S) == [] and weekly.is_told


def test_a_sender_that_is_none_loses_no_digest(store: Store, weekly: Weekly) -> None:
    at_s = ran_by(store, "ann")
    weekly.config = parse_config({"mail": {"sender": "almanac", "recipient": "{user}@example.org"}})
    with pytest.raises(ConfigError):
        weekly.send(at_s)
    weekly.config = CONFIG
    assert weekly.send(at_s + 60) == ["ann"]


def test_a_week_is_told_when_all_of_it_is_known(store: Store, weekly: Weekly) -> None:
    monday = MONDAY_S + WEEK_S
    ran(store, 1, "ann", monday - 86_400)
    read_up_to(store, monday + 599)
    assert weekly.send(monday + 900) == []
    read_up_to(store, monday + 600)
    row = store.of("test").read("jobs", JOBS.names).set_column(0, "job_id", pa.array([2], pa.int64()))
    store.of("test").write("jobs", row, lambda *changed: {monday // 86_400 - 1})
    assert weekly.send(monday + 900) == []
    store.of("test").close(store.of("test").stale())
    assert weekly.send(monday + 900) == ["ann"]


@pytest.mark.parametrize(("telemetry_s", "told"), [(-1, []), (0, ["ann"])])
def test_a_week_waits_for_its_telemetry(store: Store, weekly: Weekly, telemetry_s: int, told: list[str]) -> None:
    monday = MONDAY_S + WEEK_S
    ran(store, 1, "ann", monday - 86_400)
    read_up_to(store, monday + 900)
    store.of("test").set_watermark("prometheus", monday + telemetry_s)
    weekly.config = parse_config({"mail": {"sender": "a@example.org"}, "prometheus": {"url": "http://127.0.0.1:9"}})
    assert weekly.send(monday + 900) == told


def test_who_waits_for_a_day_is_told_what_there_is(store: Store, weekly: Weekly) -> None:
    ran(store, 1, "ann", MONDAY_S + 86_400)
    assert weekly.send(MONDAY_S + WEEK_S + 86_399) == [] and weekly.send(MONDAY_S + WEEK_S + 86_400) == ["ann"]
