"""What the site knows of GPU types and of the job's family, as the wrapper's user sees it.

The user's own files may be believed here: they steer the user's own job alone.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

from advisor.memory.growth import RunTime
from almanac.names import name_key
from almanac.submit_config import SITE
from slurm_hooks.advice.file import FAMILY, usable

ADVICE_DIR = "/var/lib/almanac-advice"
PREDICTED_SPREAD = 0.5
"""Standard deviation of the logarithm of a run time around its published median."""


@dataclass(frozen=True)
class SiteFacts:
    """capacities_mib: by GPU type, of the site's tiers. predicted_s, peak_mib: of the job's family, None: unknown."""

    capacities_mib: Mapping[str, int] = field(default_factory=dict)
    predicted_s: float | None = None
    peak_mib: float | None = None

    def run_time(self, own_s: float | None, limit_s: float | None) -> RunTime:
        """own_s: the user's word, which counts as exact."""
        if own_s:
            return RunTime(own_s, 0.0, limit_s)
        return RunTime(self.predicted_s, PREDICTED_SPREAD, limit_s)


def read_site(environ: Mapping[str, str], uid: int, now_s: int) -> SiteFacts:
    """From the configuration file and the published advice; what is absent or malformed is left out."""
    settings = _settings(environ)
    hooks, tiers = settings.get("hooks"), settings.get("tiers")
    folder = hooks.get("advice_dir") if isinstance(hooks, dict) else None
    folder = folder if isinstance(folder, str) else ADVICE_DIR
    capacities = _capacities(tiers if isinstance(tiers, list) else [])
    own, site = (usable(f"{folder}/user/{name}/advice", now_s) for name in (str(uid), SITE))
    for file in (site, own):
        capacities |= {tier.gres: tier.capacity_mib for tier in (file.tiers if file else ()) if tier.gres}
    row = own.find(name_key(environ.get("SLURM_JOB_NAME", "")), 1) if own else None
    if row is None or row.kind != FAMILY:
        return SiteFacts(capacities)
    return SiteFacts(capacities, row.predicted_s or None, row.bound_mib)


def _settings(environ: Mapping[str, str]) -> dict[str, object]:
    """The tables of the first configuration file that is there; {} where it cannot be read."""
    home = environ.get("XDG_CONFIG_HOME") or environ.get("HOME", "") + "/.config"
    named = environ.get("ALMANAC_CONFIG")
    for path in [named] if named else ["/etc/almanac/almanac.toml", f"{home}/almanac/config.toml"]:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
                return tomllib.load(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return {}
    return {}


def _capacities(tiers: list[object]) -> dict[str, int]:
    found = {}
    for tier in tiers:
        if isinstance(tier, dict):
            gres, capacity = tier.get("gres"), tier.get("capacity_mib")
            if isinstance(gres, str) and gres and isinstance(capacity, int) and capacity > 0:
                found[gres] = capacity
    return found
