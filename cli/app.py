"""What every command starts from: configuration, store, cluster, the caller and what the caller may see."""

from __future__ import annotations

import os
import pwd
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.config import Config
from almanac.config_file import find_config, load_config
from almanac.errors import ConfigError, NotAllowedError, StoreError
from almanac.units import printable, valid_unicode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reports.published.files import OwnFiles
    from telemetry.slurm.backend import SlurmBackend
    from telemetry.slurm.commands import SlurmCommands
    from telemetry.store.partitions import Stray
    from telemetry.store.store import Store

_STRAYS_NAMED = 5


def _owner_of(path: Path) -> int | None:
    """None where there is nothing, or nothing that may be looked at."""
    try:
        return path.stat().st_uid
    except OSError:
        return None


@dataclass
class App:
    """The options given before the command's name."""

    config_path: str | None = None
    store_path: str | None = None
    cluster_name: str | None = None
    are_strays_named: bool = True
    """On stderr; a command that looks for them itself says no."""

    @cached_property
    def config(self) -> Config:
        return load_config(find_config(self.config_path))

    @property
    def store_root(self) -> Path:
        return Path(self.store_path or os.environ.get("ALMANAC_STORE") or self.config.store.path)

    def open_store(self, create: bool = False) -> Store:
        from telemetry.store.store import Store

        section = self.config.store
        opener = Store.create if create else Store.open
        return opener(
            self.store_root,
            memory_limit_mib=section.memory_limit_mib,
            threads=section.threads,
            on_strays=self._name_strays,
        )

    def _name_strays(self, strays: Sequence[Stray]) -> None:
        if not self.are_strays_named:
            return
        for stray in strays[:_STRAYS_NAMED]:
            said = printable(f"{stray.path}: {stray.reason}", 1000)
            click.echo(f"almanac: passed over in the store: {said}", err=True)
        if len(strays) > _STRAYS_NAMED:
            click.echo(f"almanac: {len(strays) - _STRAYS_NAMED} more are passed over; see `almanac doctor`", err=True)

    @cached_property
    def commands(self) -> SlurmCommands:
        from telemetry.slurm.commands import SlurmCommands

        return SlurmCommands(bin_dir=self.config.slurm.bin_dir, timeout_s=self.config.slurm.timeout_s)

    @property
    def backend(self) -> SlurmBackend:
        """What slurmctld is asked and told by. Raises ConfigError where slurm.backend cannot be had, CommandError where
        Slurm does not answer.
        """
        from telemetry.slurm.command_backend import CommandBackend

        if self.config.slurm.backend == "commands":
            return CommandBackend(self.commands)
        from telemetry.slurm.pyslurm_open import open_pyslurm

        return open_pyslurm(self.commands)

    def cluster(self, store: Store | None = None, is_new: bool = False) -> str:
        """--cluster, the configuration, the store's only cluster, or what Slurm says; ConfigError otherwise.

        Of a store that holds nothing nothing can be read: StoreError, but for who is about to fill it (is_new).
        """
        known = store.clusters() if store else []
        named = self.cluster_name or self.config.site.cluster or (known[0] if len(known) == 1 else "")
        if named:
            return named
        if known:
            raise ConfigError(f"the store holds several clusters: {', '.join(known)}", "name one with --cluster")
        if store and not is_new:
            raise StoreError(f"{store.root}: holds no jobs yet", "run `almanac ingest` first, or name another --store")
        from telemetry.sources.sacct import probe_accounting

        name = probe_accounting(self.commands).cluster
        if not name:
            raise ConfigError("Slurm did not name its cluster", "set site.cluster, or give --cluster")
        return name

    def now_s(self) -> int:
        return int(time.time())

    @property
    def caller(self) -> str:
        """The user who runs this process; a numeric id where it has no name."""
        try:
            return pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            return str(os.getuid())

    @property
    def is_operator(self) -> bool:
        """Whether the caller may see other users' jobs: root, the store's owner, or the operators' group."""
        uid = os.getuid()
        if uid == 0 or _owner_of(self.store_root) == uid:
            return True
        group = self.config.site.operators_group
        # A configuration that its reader can write must not make the reader an operator.
        if not group or not self.config.source or Path(self.config.source).stat().st_uid != 0:
            return False
        import grp

        try:
            return grp.getgrnam(group).gr_gid in os.getgroups()
        except KeyError:
            return False

    @property
    def may_read_store(self) -> bool:
        """Whether the store itself is to be looked at: it is not where the caller, no operator, cannot read it."""
        return self.is_operator or os.access(self.store_root / "store.json", os.R_OK)

    @cached_property
    def own_files(self) -> OwnFiles:
        """What was published for the caller of their own jobs.

        Raises StoreError where nothing was, or where a store is named that the caller cannot read.
        """
        from reports.published.files import open_own

        if self.store_path or os.environ.get("ALMANAC_STORE"):
            self.open_store()
        return open_own(Path(self.config.hooks.advice_dir), os.getuid())

    def require_operator(self, why: str) -> None:
        """Raises NotAllowedError, which says why, where the caller is no operator."""
        if not self.is_operator:
            raise NotAllowedError(f"{self.caller} is no operator, and {why}", "ask an operator")

    def visible_user(self, asked: str | None) -> str:
        """The user whose jobs are looked at. Raises NotAllowedError where the caller may not."""
        if asked is None or asked == self.caller:
            return self.caller
        if not self.is_operator:
            raise NotAllowedError(f"{asked} is another user, and {self.caller} is no operator", "leave --user out")
        return valid_unicode(asked)
