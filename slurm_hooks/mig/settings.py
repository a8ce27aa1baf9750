"""The nodes of [mig] and how their GPUs are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from almanac.actions_config import Mig
from almanac.errors import ConfigError
from slurm_hooks.mig.layouts import GresNames, gres_names
from telemetry.slurm.hostlist import expand


@dataclass(frozen=True)
class MigSettings:
    """names: of each managed node that is not excluded, how its GPUs are named."""

    config: Mig
    names: Mapping[str, GresNames]


def mig_settings(config: Mig) -> MigSettings:
    """Raises ConfigError where [mig] does not name nodes and models that can be used."""
    if not config.nodes:
        raise ConfigError("mig.nodes is empty", 'name the nodes, for example ["gpu[01-08]=A100-80"] (docs/mig.md)')
    found: dict[str, GresNames] = {}
    for entry in config.nodes:
        hosts, equals, model = entry.partition("=")
        if not equals:
            raise ConfigError(f"mig.nodes: {entry!r} names no model", 'write "gpu[01-08]=A100-80"')
        names = gres_names(model, config.whole_types, config.slice_type)
        for host in _expand(hosts, "mig.nodes"):
            if host in found:
                raise ConfigError(f"mig.nodes names {host} twice", "name each node once")
            found[host] = names
    excluded = _expand(config.exclude, "mig.exclude")
    return MigSettings(config, {host: names for host, names in found.items() if host not in excluded})


def _expand(text: str, key: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", "give a host list, such as gpu[01-08]") from error
