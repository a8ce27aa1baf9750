"""Choices of users, of which only their own file counts, and addresses, of which only the site decides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from almanac.config import Config, Hooks, Mail
from almanac.errors import StoreError
from reports.mail.recipients import (
    FOLDER_MODE,
    LAST_READ,
    MOST_FAILURES,
    OLD_NAMES,
    UNKNOWN,
    AddressBook,
    AddressError,
    LastRead,
    Preference,
    last_read,
    mark_read,
    read,
    write,
)


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
    book = AddressBook(Mail(address_command=program(tmp_path, script)), timeout_s=60)
    with pytest.raises(AddressError, match=said):
        book.address("ann")
    [fault] = book.faults
    assert said in fault and fault.isprintable() and len(fault) < 600


@pytest.mark.parametrize("script", ["sleep 60", "exec >&-; sleep 60"])
def test_a_command_that_hangs_makes_mail_wait(tmp_path: Path, script: str) -> None:
    book = AddressBook(Mail(address_command=program(tmp_path, script)), timeout_s=0.2)
    with pytest.raises(AddressError, match=r"timed out after 0\.2 s"):
        book.address("ann")


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


Others = Callable[..., str]
ANN, MALLORY = 65534, 1
SERVICE, SERVICE_GID = 2, 60009
UIDS = {"ann": ANN, "mallory": MALLORY}
DEFAULT = Preference("digest", False)

# Runs as another user; what it needs is imported before that, as the folders of this test run may be closed to them.
AS_USER = """
import os, sys
from pathlib import Path
from almanac.config import Config, Hooks, Mail
from almanac.errors import StoreError
from reports.mail.recipients import last_read, mark_read
from reports.mail.recipients import read, write
import encodings.idna
os.setgroups(list(map(int, sys.argv[4:]))); os.setgid(65534); os.setuid(int(sys.argv[1])); os.umask(0o077)
config, folder = Config(hooks=Hooks(advice_dir=sys.argv[2]), mail=Mail(frequency="digest")), Path(sys.argv[2]) / "mail"
exec(sys.argv[3])
"""


@pytest.fixture
def config() -> Iterator[Config]:
    """Of a drop folder as the packages make it, where other users can reach it."""
    root = Path(tempfile.mkdtemp(prefix="almanac-mail-"))
    root.chmod(0o711)
    (root / "mail").mkdir()
    if os.getuid() == 0:
        os.chown(root / "mail", 0, SERVICE_GID)
    (root / "mail").chmod(FOLDER_MODE)
    yield Config(hooks=Hooks(advice_dir=str(root)), mail=Mail(frequency="digest"))
    shutil.rmtree(root)


@pytest.fixture
def others(config: Config) -> Others:
    if os.getuid() != 0:
        pytest.skip("only root can act as other users: what they can do to each other is not tried")

    def run(uid: int, code: str, *gids: int) -> str:
        argv = [sys.executable, "-c", AS_USER, str(uid), config.hooks.advice_dir, code, *map(str, gids)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def folder_of(config: Config) -> Path:
    return Path(config.hooks.advice_dir) / "mail"


def preference(config: Config, user: str = "ann") -> Preference:
    return read(user, config, UIDS.get)


def drop(config: Config, name: str, content: bytes, uid: int = ANN) -> Path:
    path = folder_of(config) / name
    path.write_bytes(content)
    os.chown(path, uid, uid)
    return path


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to other users")


def test_a_user_says_it_and_takes_it_back(config: Config) -> None:
    uids = {"me": os.getuid()}.get
    assert read("me", config, uids) == DEFAULT
    for frequency in ("off", "every", "digest"):
        write(frequency, config)
        assert read("me", config, uids) == Preference(frequency, True)
        assert len(list(folder_of(config).iterdir())) == 1
    write(None, config)
    assert read("me", config, uids) == DEFAULT
    assert list(folder_of(config).iterdir()) == []


@needs_root
def test_of_who_is_not_known_nothing_is_known(config: Config) -> None:
    """Not the site's default: who said "off" must not get mail because the directory service is away."""
    drop(config, str(ANN), b"off\n")
    assert preference(config) == Preference("off", True)
    assert read("ann", config, lambda user: None) == Preference(UNKNOWN, False)
    assert read("no-such-user-here", config) == Preference(UNKNOWN, False)
    assert read("\0", config) == Preference(UNKNOWN, False)


def test_without_the_folder_there_is_the_default_and_no_choice(config: Config) -> None:
    folder_of(config).rmdir()
    assert preference(config) == DEFAULT
    with pytest.raises(StoreError, match="does not exist on this host"):
        write("off", config)


@needs_root
@pytest.mark.parametrize("content", [b"", b"never\n", b"off" + b" " * 5000, b"off\nevery\n", b"\xff\xfe", b"OFF\n"])
def test_what_is_no_frequency_is_none(config: Config, content: bytes) -> None:
    drop(config, str(ANN), content)
    assert preference(config) == DEFAULT


@needs_root
def test_another_s_file_under_my_name_says_nothing(config: Config) -> None:
    drop(config, str(ANN), b"off\n", uid=MALLORY)
    drop(config, f"{ANN}.1", b"off\n", uid=MALLORY)
    assert preference(config) == DEFAULT
    drop(config, f"{ANN}.2", b"every\n")
    assert preference(config) == Preference("every", True)
    assert preference(config, "mallory") == DEFAULT


@needs_root
def test_links_fifos_and_folders_say_nothing_and_hold_nobody_up(config: Config) -> None:
    real = drop(config, "elsewhere", b"off\n")
    (folder_of(config) / str(ANN)).symlink_to(real)
    os.chown(folder_of(config) / str(ANN), ANN, ANN, follow_symlinks=False)
    os.link(real, folder_of(config) / f"{ANN}.1")
    os.mkfifo(folder_of(config) / f"{ANN}.2")
    (folder_of(config) / f"{ANN}.3").mkdir()
    for number in (2, 3):
        os.chown(folder_of(config) / f"{ANN}.{number}", ANN, ANN)
    assert preference(config) == DEFAULT
    real.unlink()  # then the hard link is the only one, and a file of the user's like any other
    assert preference(config) == Preference("off", True)


@needs_root
def test_choices_of_older_releases_are_read_until_the_user_chooses_again(config: Config, others: Others) -> None:
    """They could be under any of 64 names, because others could take the first ones."""
    drop(config, str(ANN), b"every\n", uid=MALLORY)
    drop(config, f"{ANN}.{OLD_NAMES - 1}", b"off\n")
    assert preference(config) == Preference("off", True)
    (folder_of(config) / str(ANN)).unlink()
    others(ANN, 'write("every", config)')
    assert preference(config) == Preference("every", True)
    assert [path.name for path in folder_of(config).iterdir()] == [str(ANN)]
    drop(config, f"{ANN}.7", b"off\n")
    others(ANN, "write(None, config)")
    assert list(folder_of(config).iterdir()) == []


@needs_root
def test_a_huge_file_is_not_read(config: Config) -> None:
    path = drop(config, str(ANN), b"off\n")
    os.truncate(path, 1 << 40)
    assert preference(config) == DEFAULT


def test_nobody_changes_the_choice_of_another(config: Config, others: Others) -> None:
    others(ANN, 'write("every", config)')
    attempts = """
for act in (lambda: (folder / "65534").unlink(), lambda: (folder / "x").rename(folder / "65534"),
            lambda: (folder / "65534").rename(folder / "y"), lambda: (folder / "65534").write_text("off"),
            lambda: os.listdir(folder)):
    (folder / "x").write_text("off")
    try:
        act()
        print("done")
    except PermissionError:
        pass
"""
    assert others(MALLORY, attempts) == ""
    assert preference(config) == Preference("every", True)


def test_who_finds_their_name_taken_is_told_and_keeps_the_default(config: Config, others: Others) -> None:
    """The files of the other say nothing, and one that almanac may not read does not hold up the user's mail."""
    choose = """
try:
    write("off", config)
except StoreError as error:
    print(error)
"""
    others(MALLORY, f'(folder / "{ANN}").write_text("off")')
    assert "65534 belongs to another user" in others(ANN, choose)
    assert [path.name for path in folder_of(config).iterdir()] == [str(ANN)]
    assert preference(config) == DEFAULT
    (folder_of(config) / str(ANN)).chmod(0)
    assert str(DEFAULT) in others(SERVICE, 'print(read("ann", config, lambda user: 65534))', SERVICE_GID)
    others(ANN, "write(None, config)")
    others(MALLORY, f'(folder / "{ANN}").unlink()')
    assert others(ANN, choose) == ""
    assert preference(config) == Preference("off", True)


def test_a_service_that_is_not_root_reads_it_too(config: Config, others: Others) -> None:
    asked = 'print(read("ann", config, lambda user: 65534))'
    others(ANN, 'write("off", config)')
    assert "'off'" in others(SERVICE, asked, SERVICE_GID)
    assert (folder_of(config) / str(ANN)).stat().st_mode & 0o7777 == 0o640
    # Who may not read a choice does not take the site's default for it: it may be the opposite.
    assert f"'{UNKNOWN}'" in others(SERVICE, asked)


def test_nobody_else_reads_a_choice_and_older_folders_go_on(config: Config, others: Others) -> None:
    look = f"""
try:
    print((folder / "{ANN}").read_text())
except PermissionError:
    print("closed")
"""
    others(ANN, 'write("off", config)')
    assert others(MALLORY, look) == "closed\n"
    folder_of(config).chmod(0o1733)
    others(ANN, 'write("every", config)')
    assert "'every'" in others(SERVICE, 'print(read("ann", config, lambda user: 65534))')


def test_only_the_service_can_say_that_it_reads_the_choices(config: Config, others: Others) -> None:
    """Root's mark becomes the service's, which could not replace it otherwise: the folder is sticky."""
    folder, service = folder_of(config), 60010  # without an account here, as on a host that only shares the folder
    mark = "mark_read(folder, {}, 'mailhost', 0)"
    mark_read(folder, 1000, "mailhost", service)
    others(ANN, mark.format(8000))
    assert others(ANN, "print(last_read(folder))") == "LastRead(time_s=1000, host='mailhost')\n"
    others(service, mark.format(9000), SERVICE_GID)
    assert last_read(folder) == LastRead(9000, "mailhost")
    (folder / LAST_READ).unlink()
    others(MALLORY, mark.format(9100))
    others(service, mark.format(9200), SERVICE_GID)
    assert (folder / LAST_READ).stat().st_uid == MALLORY and last_read(folder) is None
    assert list(folder.iterdir()) == [folder / LAST_READ]
    mark_read(folder, 9300, "mailhost", service)
    assert last_read(folder) == LastRead(9300, "mailhost")
