"""almanac-distribute: root's part of publishing (docs/admin.md). Loads no library, and opens nothing of the store."""

from __future__ import annotations

import argparse
import grp
import itertools
import os
import pwd
import sys
from pathlib import Path
from typing import NoReturn

from almanac import bounded
from almanac.atomic import opened
from almanac.config import Config
from almanac.config_file import find_config, load_config
from almanac.errors import AlmanacError, ConfigError, StoreError
from almanac.published.outgoing import PUBLISHED
from almanac.units import printable
from slurm.commands import parse_settings
from slurm_hooks.distribute import SCHED, Distributed, distribute


def main() -> NoReturn:
    """Entry point of the launcher."""
    parser = argparse.ArgumentParser(
        prog="almanac-distribute",
        description="Give users and Slurm the files that `almanac publish` left in the store. Run it as root.",
    )
    parser.add_argument("--config", metavar="FILE", help="configuration file [/etc/almanac/almanac.toml]")
    parser.add_argument(
        "--from", dest="source", metavar="DIR", help="folder of the files [published/CLUSTER in the store]"
    )
    parser.add_argument("--to", dest="target", metavar="DIR", help="where they go [hooks.advice_dir]")
    parser.add_argument("--no-sched", action="store_true", help="leave out sched/, for hosts without a controller")
    given = parser.parse_args()
    try:
        done = _run(given)
    except AlmanacError as error:
        _say(f"error: {error}", f"try: {error.hint}" if error.hint else "")
        sys.exit(error.exit_code)
    _say(*(f"warning: {each}" for each in done.warnings()))
    if done.placed or done.removed:
        print(summary(done))
    sys.exit(0)


def _say(*lines: str) -> None:
    for line in filter(None, lines):
        print(printable(line, 1000), file=sys.stderr)


def _run(given: argparse.Namespace) -> Distributed:
    if given.source and given.target and given.no_sched:
        return distribute(Path(given.source), Path(given.target).absolute(), None)
    config = load_config(find_config(given.config))
    chosen = os.environ.get("ALMANAC_STORE") if os.geteuid() else None  # sudo may keep another user's variable
    store = Path(chosen or config.store.path)
    target = Path(given.target or config.hooks.advice_dir).absolute()
    group = None if given.no_sched else sched_gid(config, target)
    if given.source:
        return distribute(Path(given.source), target, group)
    return distribute(store, target, group, below_store(store, config.site.cluster))


def below_store(store: Path, cluster: str) -> tuple[str, str]:
    """Return the names of the folders with a cluster's files, by default of the only one.

    Raises ConfigError, StoreError.
    """
    folder = store / PUBLISHED
    if cluster:
        return PUBLISHED, cluster
    try:
        with opened(folder) as handle, os.scandir(handle) as entries:
            names = [entry.name for entry in itertools.islice(entries, 2)]
    except OSError as error:
        raise StoreError(f"{folder}: cannot be opened: {error.strerror}", "run `almanac publish`") from error
    if not names:
        raise StoreError(f"{folder}: nothing is published", "run `almanac publish`")
    if len(names) > 1:
        todo = f"set site.cluster, or run `almanac-distribute --from {folder}/CLUSTER`"
        raise ConfigError(f"{folder} has files of several clusters: nothing is distributed", todo)
    return PUBLISHED, names[0]


def summary(done: Distributed) -> str:
    return f"{done.placed} files placed, {done.removed} removed, {done.unchanged} unchanged"


def sched_gid(config: Config, target: Path) -> int:
    """The group that reads sched/: hooks.group, else the one it has, else that of SlurmUser. Raises ConfigError.

    Without root, the caller's own.
    """
    if os.geteuid() != 0:
        return os.getegid()
    try:
        if config.hooks.group:
            return grp.getgrnam(config.hooks.group).gr_gid
        has = (target / SCHED).stat().st_gid if (target / SCHED).exists() else 0
        return has or _slurm_gid(config)
    except (KeyError, OverflowError) as error:
        if config.hooks.group:
            raise ConfigError(f"there is no group {config.hooks.group!r}", "correct hooks.group") from error
        raise ConfigError("no group is known that has to read the advice", "set hooks.group") from error


def _slurm_gid(config: Config) -> int:
    """Raises KeyError, ConfigError."""
    program = str(Path(config.slurm.bin_dir) / "scontrol") if config.slurm.bin_dir else "scontrol"
    try:
        done = bounded.run([program, "show", "config"], timeout_s=60, most_bytes=1 << 20)
        if done.code:
            raise ValueError(done.said or f"exit code {done.code}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"scontrol does not say who SlurmUser is: {error}", "set hooks.group") from error
    _, uid = parse_settings(done.stdout.decode("utf-8", "replace")).user
    return pwd.getpwuid(-1 if uid is None else uid).pw_gid


if __name__ == "__main__":
    main()
