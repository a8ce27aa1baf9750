"""A user's own word about mail: only their own file counts, whatever others put beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from almanac.config import Config, Hooks, Mail
from almanac.errors import StoreError
from reports.mail.last_read import NAME, LastRead, last_read, mark_read
from reports.mail.preferences import FOLDER_MODE, OLD_NAMES, UNKNOWN, Preference, read, write

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
from reports.mail.last_read import last_read, mark_read
from reports.mail.preferences import read, write
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
    (folder / NAME).unlink()
    others(MALLORY, mark.format(9100))
    others(service, mark.format(9200), SERVICE_GID)
    assert (folder / NAME).stat().st_uid == MALLORY and last_read(folder) is None
    assert list(folder.iterdir()) == [folder / NAME]
    mark_read(folder, 9300, "mailhost", service)
    assert last_read(folder) == LastRead(9300, "mailhost")
