"""`almanac doctor` on files and programs that say what almanac does: only root and SlurmUser may change them.

Root refuses them when it reads or starts them; other users only get this warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

from almanac.trusted_file import trust_fault
from cli.app import App
from cli.doctor.findings import Check

SLURM_PROGRAMS = ("sacct", "squeue", "scontrol", "sinfo")


def check_trust(app: App) -> Iterator[Check]:
    """Yield a warning for each file, program, and folder above them that others can change; nothing without one."""
    found: dict[str, Check] = {}
    for what, path in _named(app):
        with contextlib.suppress(OSError):  # the check of its subject reports a file that is missing
            if fault := trust_fault(path):
                found.setdefault(str(fault), Check("configuration", "warn", f"{what}: {fault}", fault.hint))
    yield from found.values()


def _named(app: App) -> Iterator[tuple[str, str]]:
    """Name and path of the configuration, and of each file and program that it names."""
    config = app.config
    if config.source:
        yield "the configuration file", config.source
        yield "rules.toml", str(Path(config.source).with_name("rules.toml"))
    programs = {f"slurm.bin_dir ({name})": (name, config.slurm.bin_dir or None) for name in SLURM_PROGRAMS}
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for key in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            value, name = getattr(part, key.name), f"{section.name}.{key.name}"
            if key.name.endswith("_command") and value:
                programs[name] = (value[0], None)
            elif key.name in ("password_file", "token_file", "ca_file", "bmc_file", "address_map") and value:
                yield name, value
    for name, (program, folder) in programs.items():
        if path := shutil.which(program, path=folder):
            yield name, path
