"""What every command starts from: configuration, store, cluster, and the caller's permissions."""

from __future__ import annotations

import importlib.util
import os
import pwd
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.config import Config
from almanac.config_file import find_config, load_config
from almanac.errors import ConfigError, NotAllowedError
from almanac.trusted_file import trust_fault
from almanac.units import printable, valid_unicode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reports.published.caller import CallerJobs
    from reports.published.files import OwnFiles
    from telemetry.slurm.backend import SlurmBackend
    from telemetry.slurm.commands import SlurmCommands
    from telemetry.store.cluster_store import ClusterStore
    from telemetry.store.partitions import Stray
    from telemetry.store.store import Store

_STRAYS_NAMED = 5


def has_libraries() -> bool:
    """Whether more than slurm-almanac-client is installed on this host."""
    return importlib.util.find_spec("duckdb") is not None


def _owner_of(path: Path) -> int | None:
    """None if nothing is there, or the caller cannot look at it."""
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
    """Whether skipped files of the store are named on stderr. A command that lists them itself sets this to False."""
    damaged_files: set[Path] = field(default_factory=set)
    """Damaged files of the store that the command left out: `cli.main` then exits with 4."""

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

    def cluster_store(self, create: bool = False) -> ClusterStore:
        """The store, bound to the cluster that `cluster` chooses. create: make the store if there is none.

        Raises what `open_store` and `cluster` raise.
        """
        store = self.open_store(create)
        return store.of(self.cluster(store, is_new=create))

    def _name_strays(self, strays: Sequence[Stray]) -> None:
        strays = [stray for stray in strays if stray.path not in self.damaged_files]
        self.damaged_files |= {stray.path for stray in strays if stray.is_damaged}
        if not self.are_strays_named:
            return
        for stray in strays[:_STRAYS_NAMED]:
            said = printable(f"{stray.path}: {stray.reason}", 1000)
            click.echo(f"warning: {'left out' if stray.is_damaged else 'skipped in the store'}: {said}", err=True)
        if len(strays) > _STRAYS_NAMED:
            click.echo(
                f"warning: {len(strays) - _STRAYS_NAMED} more skipped; run `almanac doctor` to list them", err=True
            )

    def look_for_damage(self) -> None:
        """Compare the store's files with their checksums, and name the damaged ones that no command has met yet.

        `almanac train` calls it, because it runs each day.
        """
        from telemetry.store.check import check_files
        from telemetry.store.partitions import Stray

        store = self.open_store()
        store.report_strays([Stray(one.path, one.reason, is_damaged=True) for one in check_files(store).damaged])

    @cached_property
    def commands(self) -> SlurmCommands:
        from telemetry.slurm.commands import SlurmCommands

        return SlurmCommands(bin_dir=self.config.slurm.bin_dir, timeout_s=self.config.slurm.timeout_s)

    @property
    def backend(self) -> SlurmBackend:
        """The connection to slurmctld. Raises ConfigError if slurm.backend is not available, CommandError if Slurm does
        not answer.
        """
        from telemetry.slurm.command_backend import CommandBackend

        if self.config.slurm.backend == "commands":
            return CommandBackend(self.commands)
        from telemetry.slurm.pyslurm_open import open_pyslurm

        return open_pyslurm(self.commands)

    def cluster(self, store: Store | None = None, is_new: bool = False) -> str:
        """The cluster of --cluster, the configuration, the store (if it holds one only), or Slurm, in this order.

        Raises ConfigError if none of them names one, and StoreError if the store is empty. is_new: the store may be
        empty, because the caller is about to fill it.
        """
        known = store.clusters() if store else []  # which also names skipped files
        named = self.cluster_name or self.config.site.cluster
        if named:
            return named
        if store and (known or not is_new):
            from telemetry.store.clusters import cluster_of

            return cluster_of(store)
        from telemetry.sources.sacct import probe_accounting

        name = probe_accounting(self.commands).cluster
        if not name:
            raise ConfigError("Slurm reports no cluster name", "set site.cluster, or give --cluster")
        return name

    def now_s(self) -> int:
        return int(time.time())

    @property
    def caller(self) -> str:
        """The user who runs this process; the numeric id if it has no name."""
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
        if not group or not self.config.source or trust_fault(self.config.source, lambda uid: uid == 0):
            return False
        import grp

        try:
            return grp.getgrnam(group).gr_gid in os.getgroups()
        except KeyError:
            return False

    @property
    def may_read_store(self) -> bool:
        """Whether the caller can read the store; other users read what was published for them."""
        return self.is_operator or os.access(self.store_root / "store.json", os.R_OK)

    @cached_property
    def own_files(self) -> OwnFiles:
        """What was published for the caller about their own jobs.

        Raises StoreError if nothing was published, or if the caller names a store that they cannot read.
        """
        from reports.published.files import open_own

        if self.store_path or os.environ.get("ALMANAC_STORE"):
            self.open_store()
        return open_own(Path(self.config.hooks.advice_dir), os.getuid())

    @cached_property
    def caller_jobs(self) -> CallerJobs:
        """The jobs that the caller may see: in the store, or published for them. Raises ConfigError, StoreError."""
        if not self.may_read_store:
            return self.own_files
        from reports.published.caller import StoreJobs

        only = None if self.is_operator else self.caller
        return StoreJobs(self.cluster_store(), self.config, self.now_s(), only)

    def require_operator(self, why: str) -> None:
        """Raises NotAllowedError, which says why, if the caller is not an operator."""
        if not self.is_operator:
            raise NotAllowedError(f"{self.caller} is not an operator, and {why}", "ask an operator")

    def visible_user(self, asked: str | None) -> str:
        """The user whose jobs the command shows. Raises NotAllowedError if the caller may not see them."""
        if asked is None or asked == self.caller:
            return self.caller
        if not self.is_operator:
            raise NotAllowedError(f"{asked} is another user, and {self.caller} is not an operator", "leave out --user")
        return valid_unicode(asked)
