"""One site, bound once: its configuration, store, Slurm, and clock. Commands and the Python API start from it."""

from __future__ import annotations

import copy
import grp
import os
import pwd
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from almanac.config import Config
from almanac.config_file import find_config, load_config
from almanac.errors import ConfigError, NotAllowedError
from almanac.files import trust_fault

if TYPE_CHECKING:
    from slurm.backend import SlurmBackend
    from slurm.commands import SlurmCommands
    from telemetry.store.partitions import Stray
    from telemetry.store.store import ClusterStore, Store


@dataclass
class Site:
    """The configuration, store, and cluster that a command works on. Nothing is read before it is needed.

    config_path, store_path, cluster_name: as --config, --store, and --cluster. clock: gives unix seconds. run: runs
    Slurm's commands. Access to an attribute that is not available raises ConfigError, StoreError, or CommandError.
    """

    config_path: str | None = None
    store_path: str | None = None
    cluster_name: str | None = None
    clock: Callable[[], float] = lambda: time.time()
    sleep: Callable[[float], None] = time.sleep
    run: SlurmCommands | None = None

    @classmethod
    def of(cls, store: ClusterStore, config: Config, now_s: int) -> Self:
        """A site whose parts are open, at one time."""
        return cls().but(store=store, config=config).at(now_s)

    def but(self, **bound: Any) -> Self:
        """Return the same site with other attributes, such as config or store."""
        other = copy.copy(self)
        vars(other).update(bound)
        return other

    def at(self, now_s: int) -> Self:
        """Return the same site at one time, so that all parts of an answer agree."""
        return self.but(clock=lambda: now_s)

    def now_s(self) -> int:
        return int(self.clock())

    @cached_property
    def config(self) -> Config:
        return load_config(find_config(self.config_path))

    @property
    def store_root(self) -> Path:
        return Path(self.store_path or os.environ.get("ALMANAC_STORE") or self.config.store.path)

    def open_store(self, create: bool = False) -> Store:
        """The store of all clusters. create: make it if there is none."""
        # Loads DuckDB and Arrow.
        from telemetry.store.store import Store

        section = self.config.store
        return (Store.create if create else Store.open)(
            self.store_root,
            memory_limit_mib=section.memory_limit_mib,
            threads=section.threads,
            on_strays=self.name_strays,
        )

    def name_strays(self, strays: Sequence[Stray]) -> None:
        """Called with files of the store that were skipped."""

    @cached_property
    def store(self) -> ClusterStore:
        """The store, bound to the cluster that `choose_cluster` returns."""
        store = self.open_store()
        return store.of(self.choose_cluster(store))

    @property
    def cluster(self) -> str:
        return self.store.cluster

    def create_store(self) -> ClusterStore:
        """Open the store, or make it if there is none; Slurm names the cluster of an empty store."""
        store = self.open_store(create=True)
        self.store = store.of(self.choose_cluster(store, is_new=True))
        return self.store

    def choose_cluster(self, store: Store | None = None, is_new: bool = False) -> str:
        """The cluster of --cluster, the configuration, the store (if it holds one only), or Slurm, in this order.

        is_new: the store may be empty, because the caller is about to fill it.
        """
        known = store.clusters() if store else []  # which also names skipped files
        named = self.cluster_name or self.config.site.cluster
        if named:
            return named
        if store and (known or not is_new):
            return store.only_cluster()
        # Loads Arrow.
        from slurm.accounting import probe_accounting

        name = probe_accounting(self.commands).cluster
        if not name:
            raise ConfigError("Slurm reports no cluster name", "set site.cluster, or give --cluster")
        return name

    @cached_property
    def commands(self) -> SlurmCommands:
        from slurm.commands import SlurmCommands  # late: a published report does without it

        slurm = self.config.slurm
        return self.run or SlurmCommands(bin_dir=slurm.bin_dir, timeout_s=slurm.timeout_s)

    @property
    def backend(self) -> SlurmBackend:
        """The connection to slurmctld."""
        # `almanac --help` is slower by a third with them.
        from slurm.backend import CommandBackend
        from slurm.pyslurm_backend import open_pyslurm

        if self.config.slurm.backend == "commands":
            return CommandBackend(self.commands)
        return open_pyslurm(self.commands)

    @property
    def caller(self) -> str:
        """The user who runs this process; the numeric id if it has no name."""
        try:
            return pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            return str(os.getuid())

    @property
    def is_operator(self) -> bool:
        """True if the caller may see other users' jobs: root, the store's owner, or the operators' group."""
        uid = os.getuid()
        if uid == 0 or _owner_of(self.store_root) == uid:
            return True
        group = self.config.site.operators_group
        # A configuration that its reader can write must not make the reader an operator.
        if not group or not self.config.source or trust_fault(self.config.source, lambda uid: uid == 0):
            return False
        try:
            return grp.getgrnam(group).gr_gid in os.getgroups()
        except KeyError:
            return False

    @property
    def may_read_store(self) -> bool:
        """True if the caller can read the store; other users read what was published for them."""
        return self.is_operator or os.access(self.store_root / "store.json", os.R_OK)

    def require_operator(self, why: str) -> None:
        """Check that the caller is an operator. Raises NotAllowedError, with `why`, if not."""
        if not self.is_operator:
            raise NotAllowedError(f"{self.caller} is not an operator, and {why}", "ask an operator")

    def acting_store(self, backend: SlurmBackend, why: str) -> ClusterStore:
        """The store of the cluster that the backend changes. Raises NotAllowedError, which says why, if the caller is
        not an operator, and ConfigError if Slurm's cluster has another name.
        """
        self.require_operator(why)
        if (answers := backend.cluster()).lower() != self.cluster.lower():
            raise ConfigError(
                f"the store's cluster is {self.cluster}, Slurm's is {answers}", "correct --cluster or site.cluster"
            )
        return self.store


def _owner_of(path: Path) -> int | None:
    """None if nothing is there, or the caller cannot look at it."""
    try:
        return path.stat().st_uid
    except OSError:
        return None
