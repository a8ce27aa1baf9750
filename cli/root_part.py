"""Commands that publish: their work on the store as its owner, and root's part after it."""

from __future__ import annotations

import os
import pwd
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import click

from almanac.config import Config
from almanac.errors import AlmanacError, ConfigError
from almanac.units import printable
from cli.distribute import below_store, sched_gid, summary
from slurm_hooks.distribute import distribute


def leave_root(store: Path, after: Callable[[], object]) -> bool:
    """Go on as the store's owner in a child process, if root runs this for another account's store.

    The parent waits, calls `after`, and exits as the child did: root parses nothing of the store. Return True in the
    child, which leaves `after` to it.
    """
    try:
        owner = store.stat()
    except FileNotFoundError:
        return False
    if os.geteuid() != 0 or owner.st_uid == 0:
        return False
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()  # so that it cannot type into root's terminal
        _become(owner.st_uid, owner.st_gid)
        return True
    code = _wait(child)
    try:
        after()  # what is whole by now does not wait for the rest
    except AlmanacError:
        if code == 0:
            raise
    sys.exit(code if code >= 0 else 128 - code)


def _wait(child: int) -> int:
    """The exit code of a child, which is ended if this process is interrupted."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise


def _become(uid: int, gid: int) -> None:
    try:
        account = pwd.getpwuid(uid)
        os.environ["HOME"] = account.pw_dir
        os.initgroups(account.pw_name, gid)
    except KeyError:
        os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def hand_out(config: Config, store: Path, cluster: str | None, target: Path, is_quiet: bool) -> None:
    """Copy what was published to its readers, if this user can; else a run of `almanac-distribute` as root does it.

    is_quiet: leave out the summary. Raises StoreError; ConfigError, also where only the environment that sudo may keep
    names the store, and it is not root's.
    """
    is_named = store != Path(config.store.path) and str(store) == os.environ.get("ALMANAC_STORE")
    if os.geteuid() == 0 and is_named and store.stat().st_uid != 0:
        todo = "unset ALMANAC_STORE; if you trust that store, name it with --store"
        raise ConfigError(f"root gives users no files of {store}, which only $ALMANAC_STORE names", todo)
    nearest = next(path for path in (target, *target.parents) if path.exists())
    if os.geteuid() not in (0, nearest.stat().st_uid):
        if not is_quiet:
            click.echo("their readers get them at the next run of almanac-distribute, as root")
        return
    done = distribute(store, target, sched_gid(config, target), below_store(store, cluster or config.site.cluster))
    for warning in done.warnings():
        click.echo(f"warning: {printable(warning, 1000)}", err=True)
    if not is_quiet:
        click.echo(summary(done))
