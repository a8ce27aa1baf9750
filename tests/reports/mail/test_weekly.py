"""Weekly digests are queued once a week, for those who want them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from mails import NOW_S

import reports.mail.weekly
from almanac.config_file import parse_config
from almanac.errors import ConfigError, StoreError
from reports.mail.address_book import AddressError
from reports.mail.outbox import Outbox, outbox_path
from reports.mail.week import is_told, last_week
from reports.mail.weekly import LATEST_S, RETRY_S, put_weekly
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

WEEK_S = 7 * 86_400
MONDAY_S = last_week(NOW_S).end_s
CONFIG = parse_config({"mail": {"sender": "almanac@example.org", "recipient": "{user}@example.org"}})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def outbox(store: Store) -> Iterator[Outbox]:
    with Outbox(outbox_path(store.root)) as opened:
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


def put(store: Store, outbox: Outbox, now_s: int) -> list[str]:
    wants = {"ann": "digest", "bob": "every", "eve": "digest", "off": "off"}
    faults = list[str]()
    address = "{}@example.org".format
    told = list(put_weekly(store.of("test"), outbox, CONFIG, now_s, wants.__getitem__, address, faults))
    assert not faults
    return told


def test_who_wants_one_and_ran_something_gets_one_a_week(store: Store, outbox: Outbox) -> None:
    assert put(store, outbox, MONDAY_S + 50) == []
    for number, user in enumerate(("ann", "bob", "off")):
        ran(store, number + 1, user, MONDAY_S + 86_400)
    assert put(store, outbox, MONDAY_S + WEEK_S - 1) == []
    ran(store, 9, "eve", MONDAY_S + WEEK_S + 3600)
    monday = MONDAY_S + WEEK_S + 7200
    read_up_to(store, monday)
    assert put(store, outbox, monday) == ["ann"]
    assert put(store, outbox, monday + 60) == []
    [message] = outbox.ready(monday + 60, 10)
    assert (message.kind, message.recipient, message.runs) == ("weekly", "ann@example.org", ())
    read_up_to(store, monday + WEEK_S)
    assert put(store, outbox, monday + WEEK_S) == ["eve"]


def test_the_past_of_who_switches_mail_on_is_no_digest(store: Store, outbox: Outbox) -> None:
    ran(store, 1, "ann", MONDAY_S - 86_400)
    assert put(store, outbox, MONDAY_S + 50) == put(store, outbox, MONDAY_S + 90) == []


def test_a_killed_run_is_made_up_for_without_a_second_mail(store: Store, outbox: Outbox) -> None:
    put(store, outbox, MONDAY_S + 50)
    ran(store, 1, "ann", MONDAY_S + 86_400)
    ran(store, 2, "eve", MONDAY_S + 86_400)
    wants: dict[str, str] = {"ann": "digest", "eve": "digest"}
    monday = MONDAY_S + WEEK_S
    read_up_to(store, monday + 600)
    address = "{}@example.org".format
    begun = put_weekly(store.of("test"), outbox, CONFIG, monday, wants.__getitem__, address, [])
    assert next(iter(begun)) == "ann"
    assert put(store, outbox, monday + 60) == ["eve"]
    assert len(outbox.ready(monday + 60, 10)) == 2


def test_a_digest_that_cannot_be_made_keeps_no_other_user_waiting(
    store: Store, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, outbox, MONDAY_S + 50)
    for number, user in enumerate(("ann", "eve")):
        ran(store, number + 1, user, MONDAY_S + 86_400)
    real = reports.mail.weekly.render_weekly

    def faulty(store: ClusterStore, user: str, *more: Any) -> Any:
        if user == "ann":
            raise StoreError("a damaged file")
        return real(store, user, *more)

    monkeypatch.setattr(reports.mail.weekly, "render_weekly", faulty)
    faults = list[str]()
    read_up_to(store, MONDAY_S + WEEK_S + 600)
    given = (
        store.of("test"),
        outbox,
        CONFIG,
        MONDAY_S + WEEK_S,
        lambda user: "digest",
        "{}@example.org".format,
        faults,
    )
    assert list(put_weekly(*given)) == ["eve"]
    assert faults == ["weekly digest of ann: StoreError: a damaged file"]
    monkeypatch.undo()
    assert list(put_weekly(*given)) == []
    later_s = MONDAY_S + WEEK_S + RETRY_S
    assert list(put_weekly(*given[:3], later_s, *given[4:])) == ["ann"]
    assert is_told(outbox, "test", later_s)


def test_who_is_not_known_for_a_moment_gets_a_digest_later(store: Store, outbox: Outbox) -> None:
    put(store, outbox, MONDAY_S + 50)
    for number, user in enumerate(("ann", "gone")):
        ran(store, number + 1, user, MONDAY_S + 86_400)
    read_up_to(store, MONDAY_S + WEEK_S + 600)
    known = {"gone": "unknown"}
    at_s = MONDAY_S + WEEK_S

    def told(now_s: int) -> list[str]:
        given = (lambda user: known.get(user, "digest"), "{}@example.org".format, [])
        return list(put_weekly(store.of("test"), outbox, CONFIG, now_s, *given))

    assert told(at_s) == ["ann"]
    assert not is_told(outbox, "test", at_s)
    known.clear()
    assert told(at_s + RETRY_S - 1) == []
    assert told(at_s + RETRY_S) == ["gone"]
    known["gone"] = "unknown"
    assert told(at_s + WEEK_S - 1) == []


def test_a_pilot_gets_digests_by_user_and_by_account(store: Store, outbox: Outbox) -> None:
    """An account of the week counts, not one of another week."""
    put(store, outbox, MONDAY_S + 50)
    for number, (user, account, end_s) in enumerate(
        [("ann", "ml", 86_400), ("bob", "lab", 86_400), ("eve", "ml", 86_400), ("dan", "lab", -86_400),
         ("dan", "ml", 86_400)]
    ):  # fmt: skip
        ran(store, number + 1, user, MONDAY_S + end_s, account=account)
    at_s = MONDAY_S + WEEK_S + 86_400
    config = parse_config({"mail": {"sender": "a@example.org", "users": ["ann"], "accounts": ["lab"]}})
    given = (lambda user: "digest", "{}@example.org".format, [])
    assert list(put_weekly(store.of("test"), outbox, config, at_s, *given)) == ["ann", "bob"]


def test_a_digest_waits_for_an_address_that_cannot_be_looked_up(store: Store, outbox: Outbox) -> None:
    def broken(user: str) -> str:
        if user == "ann":
            raise AddressError("the directory is down")
        return f"{user}@example.org"

    put(store, outbox, MONDAY_S + 50)
    for number, user in enumerate(("ann", "eve")):
        ran(store, number + 1, user, MONDAY_S + 86_400)
    at_s = MONDAY_S + WEEK_S + 86_400
    given = (lambda user: "digest", broken, list[str]())
    assert list(put_weekly(store.of("test"), outbox, CONFIG, at_s, *given)) == ["eve"]
    assert put(store, outbox, at_s + RETRY_S) == ["ann"]


def test_who_is_never_known_is_not_waited_for_all_week(store: Store, outbox: Outbox) -> None:
    put(store, outbox, MONDAY_S + 50)
    ran(store, 1, "gone", MONDAY_S + 86_400)
    at_s = MONDAY_S + WEEK_S + LATEST_S
    assert list(put_weekly(store.of("test"), outbox, CONFIG, at_s, lambda user: "unknown", str, [])) == []
    assert is_told(outbox, "test", at_s)


def test_a_sender_that_is_none_loses_no_digest(store: Store, outbox: Outbox) -> None:
    put(store, outbox, MONDAY_S + 50)
    ran(store, 1, "ann", MONDAY_S + 86_400)
    at_s = MONDAY_S + WEEK_S + 7200
    read_up_to(store, at_s)
    wrong = parse_config({"mail": {"sender": "almanac", "recipient": "{user}@example.org"}})
    given = (lambda user: "digest", "{}@example.org".format, [])
    with pytest.raises(ConfigError):
        list(put_weekly(store.of("test"), outbox, wrong, at_s, *given))
    assert put(store, outbox, at_s + 60) == ["ann"]


def test_a_week_is_told_when_all_of_it_is_known(store: Store, outbox: Outbox) -> None:
    put(store, outbox, MONDAY_S + 50)
    monday = MONDAY_S + WEEK_S
    ran(store, 1, "ann", monday - 86_400)
    read_up_to(store, monday + 599)
    assert put(store, outbox, monday + 900) == []
    read_up_to(store, monday + 600)
    row = store.of("test").read("jobs", JOBS.names).set_column(0, "job_id", pa.array([2], pa.int64()))
    store.of("test").write("jobs", row, lambda *changed: {monday // 86_400 - 1})
    assert put(store, outbox, monday + 900) == []
    store.of("test").close(store.of("test").stale())
    assert put(store, outbox, monday + 900) == ["ann"]


@pytest.mark.parametrize(("telemetry_s", "told"), [(-1, []), (0, ["ann"])])
def test_a_week_waits_for_its_telemetry(store: Store, outbox: Outbox, telemetry_s: int, told: list[str]) -> None:
    put(store, outbox, MONDAY_S + 50)
    monday = MONDAY_S + WEEK_S
    ran(store, 1, "ann", monday - 86_400)
    read_up_to(store, monday + 900)
    store.of("test").set_watermark("prometheus", monday + telemetry_s)
    config = parse_config({"mail": {"sender": "a@example.org"}, "prometheus": {"url": "http://127.0.0.1:9"}})
    given = (lambda user: "digest", "{}@example.org".format, [])
    assert list(put_weekly(store.of("test"), outbox, config, monday + 900, *given)) == told


def test_who_waits_for_a_day_is_told_what_there_is(store: Store, outbox: Outbox) -> None:
    put(store, outbox, MONDAY_S + 50)
    ran(store, 1, "ann", MONDAY_S + 86_400)
    assert put(store, outbox, MONDAY_S + WEEK_S + 86_399) == []
    assert put(store, outbox, MONDAY_S + WEEK_S + 86_400) == ["ann"]
