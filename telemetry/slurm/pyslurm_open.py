"""Opens the pyslurm backend, once it is sure that this pyslurm fits this Slurm."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from almanac.errors import ConfigError
from almanac.units import printable
from telemetry.slurm.command_backend import CommandBackend
from telemetry.slurm.commands import SlurmCommands
from telemetry.slurm.pyslurm_backend import PyslurmBackend

_PROBE = Path(__file__).with_name("pyslurm_probe.py")
_HINT = 'install the pyslurm of this Slurm release (docs/install.md), or set slurm.backend = "commands"'


def open_pyslurm(commands: SlurmCommands) -> PyslurmBackend:
    """The backend of the installed pyslurm.

    scontrol is asked first, then pyslurm is imported in a process of its own: where slurm.conf is missing, Slurm's
    library ends the process that imports it. Raises CommandError where scontrol gets no answer, ConfigError where
    pyslurm cannot be imported or is made for another release of Slurm.
    """
    backend = CommandBackend(commands)
    release = backend.release()
    require_fit(_probed(commands), release)
    return PyslurmBackend(_imported(), backend, commands.timeout_s)


def require_fit(found: Mapping[str, Any], release: str) -> None:
    """Raises ConfigError unless what the probe found is made for this release of slurmctld (25.11.7)."""
    version = str(found.get("version"))
    ours, slurms = _year_month(version), _year_month(release)
    if ours is None or ours != slurms:
        raise ConfigError(f"pyslurm {printable(version)} does not support Slurm {printable(release)}", _HINT)
    if not found.get("has_gpus"):
        raise ConfigError(f"pyslurm {printable(version)} has no Job.gpus", "install pyslurm 25.11.2 or later")


def _year_month(version: str) -> tuple[int, int] | None:
    """(25, 11) of 25.11.7; packages write 26.5, Slurm 26.05."""
    found = re.match(r"([0-9]{2})\.([0-9]{1,2})(?![0-9])", version)
    return (int(found[1]), int(found[2])) if found else None


def _probed(commands: SlurmCommands) -> Mapping[str, Any]:
    """What pyslurm_probe.py says. Raises ConfigError, CommandError where it takes too long."""
    done = commands.run([sys.executable, "-I", str(_PROBE)], json.dumps(sys.path).encode())
    try:
        found = json.loads(done.stdout.strip().rpartition(b"\n")[2])
    except ValueError as error:
        said = printable(done.said.rpartition("; ")[2]) or "nothing"
        raise ConfigError(f"pyslurm crashed with exit code {done.code}: {said}", _HINT) from error
    if "error" in found:
        raise ConfigError(f"pyslurm cannot be imported: {printable(str(found['error']))}", _HINT)
    return dict(found)


def _imported() -> ModuleType:
    """pyslurm. Its import sets flags for every library that is loaded later: they are set back."""
    flags = sys.getdlopenflags()
    try:
        return importlib.import_module("pyslurm")
    except Exception as error:
        raise ConfigError(f"pyslurm cannot be imported: {printable(str(error))}", _HINT) from error
    finally:
        sys.setdlopenflags(flags)
