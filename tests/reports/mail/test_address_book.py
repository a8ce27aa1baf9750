"""Where a user's mail goes: the site's map and command decide, and no user does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from almanac.config import Mail
from reports.mail.address_book import MOST_FAILURES, AddressBook, AddressError


def program(folder: Path, script: str) -> tuple[str, ...]:
    path = folder / "mail-of"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return (str(path),)


def mapped(folder: Path, text: str, mode: int = 0o640) -> str:
    path = folder / "addresses"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_map_comes_before_the_command_and_that_before_the_pattern(tmp_path: Path) -> None:
    config = Mail(
        recipient="{user}@example.org",
        address_map=mapped(tmp_path, "# people\n\nann  ann.lee@example.org # moved\na,b ab@example.org\n"),
    )
    book = AddressBook(config)
    assert [book.address(user) for user in ("ann", "bob", "a,b", "c,d")] == [
        "ann.lee@example.org", "bob@example.org", "ab@example.org", None,
    ]  # fmt: skip
    asked = program(tmp_path, 'case "$2" in bob) echo b.ob@example.org;; esac')
    book = AddressBook(Mail(address_map=config.address_map, address_command=(*asked, "--mail")))
    assert [book.address(user) for user in ("ann", "bob", "eve")] == ["ann.lee@example.org", "b.ob@example.org", None]
    assert not book.faults


def test_each_user_is_asked_for_once(tmp_path: Path) -> None:
    book = AddressBook(Mail(address_command=program(tmp_path, f'echo x >> {tmp_path}/asked; echo "$1@example.org"')))
    assert [book.address("ann") for _ in range(3)] == ["ann@example.org"] * 3
    assert (tmp_path / "asked").read_text() == "x\n"


@pytest.mark.parametrize("user", ["-x", "a,b", "*)(uid=*", "a b", "a@evil.example", "$(id)", "a\nb", "", "u" * 65])
def test_a_strange_name_is_never_given_to_the_command(tmp_path: Path, user: str) -> None:
    book = AddressBook(Mail(address_command=program(tmp_path, f"touch {tmp_path}/asked; echo eve@evil.example")))
    assert book.address(user) is None
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 2", "failed with exit code 2"),
        ("kill -9 $$", "was ended by signal 9"),
        ("sleep 60", "timed out after 2 s"),
        ("exec >&-; sleep 60", "timed out after 2 s"),
        ("exec head -c 1000000000 /dev/zero", "printed more than 4096 bytes"),
        ("head -c 200 /dev/urandom", "printed"),
        ("echo ann@example.org; echo eve@evil.example", "printed"),
        ("echo 'ann@example.org, eve@evil.example'", "printed"),
        (r"printf 'ann@example.org\r\nBcc: eve@evil.example'", "printed"),
        ("echo 'Ann <ann@example.org>'", "printed"),
        ("echo 'mail: ann@example.org'", "printed"),
    ],
)
def test_a_faulty_command_makes_mail_wait(tmp_path: Path, script: str, said: str) -> None:
    book = AddressBook(Mail(address_command=program(tmp_path, script)), timeout_s=2)
    with pytest.raises(AddressError, match=said):
        book.address("ann")
    [fault] = book.faults
    assert said in fault and fault.isprintable() and len(fault) < 600


def test_a_command_that_hangs_does_not_hold_up_a_run_for_each_user(tmp_path: Path) -> None:
    book = AddressBook(Mail(address_command=program(tmp_path, "sleep 60")), timeout_s=0.1)
    for number in range(100):
        with pytest.raises(AddressError, match="timed out" if number < MOST_FAILURES else "no answer 3 times"):
            book.address(f"u{number}")
    assert len(book.faults) <= MOST_FAILURES


def test_users_whom_the_command_does_not_know_hold_up_no_others(tmp_path: Path) -> None:
    script = 'case "$1" in u*) exit 2;; esac; echo "$1@example.org"'
    book = AddressBook(Mail(address_command=program(tmp_path, script)))
    for number in range(2 * MOST_FAILURES):
        with pytest.raises(AddressError, match="exit code 2"):
            book.address(f"u{number}")
    assert book.address("ann") == "ann@example.org"


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(AddressError, match="No such file"):
        AddressBook(Mail(address_command=("/nowhere/mail-of",))).address("ann")


def test_children_of_the_command_end_with_it(tmp_path: Path) -> None:
    script = f"(while :; do echo x >> {tmp_path}/alive; sleep 0.1; done) >/dev/null & echo ann@example.org"
    assert AddressBook(Mail(address_command=program(tmp_path, script))).address("ann") == "ann@example.org"
    time.sleep(0.3)  # what was being written
    size = (tmp_path / "alive").stat().st_size if (tmp_path / "alive").exists() else 0
    time.sleep(0.5)
    assert size == ((tmp_path / "alive").stat().st_size if (tmp_path / "alive").exists() else 0)


@pytest.mark.parametrize("mode", [0o660, 0o646])
def test_a_map_that_others_can_write_is_not_believed(tmp_path: Path, mode: int) -> None:
    book = AddressBook(Mail(address_map=mapped(tmp_path, "ann eve@evil.example\n", mode)))
    with pytest.raises(AddressError, match=r"expected owner root.*, and no write permission for group or others"):
        book.address("ann")
    with pytest.raises(AddressError, match=r"expected owner root.*, and no write permission for group or others"):
        book.address("bob")
    assert len(book.faults) == 1


def test_a_map_that_cannot_be_read_makes_all_mail_wait(tmp_path: Path) -> None:
    path = tmp_path / "addresses"
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("addresses", "folder", "fifo", "binary"):
        with pytest.raises(AddressError, match=r"^mail\.address_map"):
            AddressBook(Mail(address_map=str(tmp_path / name))).address("ann")
    path.write_text("ann ann@example.org\n")
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 60001, 60001)
        with pytest.raises(AddressError, match="belongs to uid 60001"):
            AddressBook(Mail(address_map=str(path))).address("ann")


def test_a_faulty_line_of_the_map_holds_up_its_user_alone(tmp_path: Path) -> None:
    text = "ann ann@example.org, eve@evil.example\nbob bob@example.org\nbob eve@evil.example\ncal\ndan d@example.org\n"
    book = AddressBook(Mail(recipient="{user}@example.org", address_map=mapped(tmp_path, text)))
    assert book.address("dan") == "d@example.org"
    for user, line in (("ann", "line 1"), ("bob", "line 3"), ("cal", "line 4")):
        with pytest.raises(AddressError, match=line):
            book.address(user)
