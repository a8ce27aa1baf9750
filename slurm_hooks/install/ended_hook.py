"""Putting almanac-ended.sh beside slurm.conf, which names it there, and taking it away again.

It is a copy: slurmctld 24.11 and 26.05 do not start where a script is missing that slurm.conf names, and the package
may be removed.
"""

from __future__ import annotations

from pathlib import Path

from almanac.errors import ConfigError
from slurm_hooks.install.scripts import FileChange, slurm_conf_lines

SCRIPT = "almanac-ended.sh"


def plan_ended(prefix: Path, scripts_dir: Path) -> FileChange:
    """Raises ConfigError."""
    try:
        after = (scripts_dir / SCRIPT).read_bytes()
    except OSError as error:
        raise ConfigError(f"{scripts_dir / SCRIPT} cannot be read: {error.strerror}", "install the package") from error
    return FileChange(prefix / SCRIPT, _read(prefix), after, _notes(prefix), mode=0o755)


def plan_remove_ended(prefix: Path) -> FileChange:
    """Raises ConfigError where slurm.conf names the script, or cannot be asked: slurmctld would not start."""
    path, before = prefix / SCRIPT, _read(prefix)
    if before is None:
        return FileChange(path, None, None)
    if not (prefix / "slurm.conf").is_file():
        raise ConfigError(f"no slurm.conf in {prefix}: it may still name {path}", f"check slurm.conf, then: rm {path}")
    for key, value in _settings(prefix):
        if Path(value).name == SCRIPT:
            todo = "remove that, run scontrol reconfigure or restart slurmctld, then run this again"
            raise ConfigError(f"slurm.conf still has {key}={value}: without it slurmctld does not start", todo)
    return FileChange(path, before, None)


def ended_conf_lines(prefix: Path) -> list[str]:
    """What slurm.conf needs for the script to be called; [] where it is, or where a program of the site's has to."""
    path, (epilogs, job_comp, is_called) = prefix / SCRIPT, _programs(prefix)
    if is_called or (epilogs and job_comp != "jobcomp/none"):
        return []
    return ["JobCompType=jobcomp/script", f"JobCompLoc={path}"] if epilogs else [f"EpilogSlurmctld={path}"]


def _notes(prefix: Path) -> tuple[str, ...]:
    path, (epilogs, job_comp, is_called) = prefix / SCRIPT, _programs(prefix)
    if is_called or not epilogs or job_comp == "jobcomp/none":
        return ()
    return (f"if {epilogs[-1]} does not call it yet, add this line to it: [ ! -x {path} ] || {path}",)


def _programs(prefix: Path) -> tuple[list[str], str, bool]:
    """EpilogSlurmctld's programs, JobCompType, and whether one of the two calls the script by itself."""
    values: dict[str, list[str]] = {}
    for key, value in _settings(prefix):
        values.setdefault(key.lower(), []).append(value)
    epilogs, job_comp = values.get("epilogslurmctld", []), values.get("jobcomptype", ["jobcomp/none"])[-1]
    called = [*epilogs, *(values.get("jobcomploc", []) if job_comp == "jobcomp/script" else [])]
    return epilogs, job_comp, SCRIPT in (Path(program).name for program in called)


def _read(prefix: Path) -> bytes | None:
    if not prefix.is_dir():
        raise ConfigError(f"{prefix} is not a folder", "give the folder of slurm.conf with --prefix")
    try:
        return (prefix / SCRIPT).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{prefix / SCRIPT}: cannot be read: {error.strerror}", "run this as root") from error


def _settings(prefix: Path) -> list[tuple[str, str]]:
    """Key and value of each line of slurm.conf, in order."""
    pairs = (line.partition("=") for line in slurm_conf_lines(prefix))
    return [(key.strip(), value.strip()) for key, equals, value in pairs if equals]
