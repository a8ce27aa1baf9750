"""Changes of a site's scripts next to slurm.conf: its Lua scripts, and our almanac-ended.sh.

`plan_install`, `plan_remove`, and their twins for almanac-ended.sh read and decide; only `apply` writes.
almanac-ended.sh is a copy, because slurmctld 24.11 and 26.05 do not start if slurm.conf names a script that is
missing, and the package may be removed.
"""

from __future__ import annotations

import datetime as dt
import difflib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from almanac.atomic import replacing
from almanac.errors import ConfigError
from almanac.units import printable
from slurm_hooks.install.guarded_line import Hook, Places, adapted, by_hand, insert, remove

SyntaxCheck = Callable[[bytes], str | None]
"""Return the fault of a Lua script; None without one."""

_UNKNOWN = "no slurm.conf in {}: first make sure that {} does not name lua, or submissions will fail"
_STAMP = re.compile(rb"-- almanac: stand-alone script, sha256 ([0-9a-f]{64})\r?\n")


@dataclass(frozen=True)
class FileChange:
    """The change of one file: its content before and after, None without a file. mode: that of a new file."""

    path: Path
    before: bytes | None
    after: bytes | None
    notes: tuple[str, ...] = ()
    mode: int = 0o644

    @property
    def is_needed(self) -> bool:
        return self.before != self.after


def plan_install(
    hook: Hook, prefix: Path, places: Places, standalone_dir: Path, syntax_fault: SyntaxCheck
) -> FileChange:
    """Our line in the site's script; where there is none, the stand-alone script.

    Raises ConfigError where the modules are missing, the line finds no place, or the outcome would not parse.
    """
    for folder in filter(None, (places.lua_dir, places.advice_dir)):
        if not re.fullmatch(r"/[\w./+@:-]+", folder, re.ASCII):
            raise ConfigError(f"{printable(folder)!r} cannot be written into a script", "use a plain absolute path")
    if not (module := Path(places.lua_dir, hook.script)).is_file():
        raise ConfigError(
            f"{module} does not exist", "install the package, or give the folder of the modules with --lua-dir"
        )
    path = (prefix / hook.script).resolve()
    before = _content(prefix, path)
    if before is None or _is_untouched_standalone(before):
        after = stamped(adapted(_packaged(standalone_dir / hook.script), hook, places))
    else:
        after = insert(before, hook, places)
    if after != before and (fault := syntax_fault(after)):
        raise ConfigError(f"{path} would not parse as Lua: {fault}", by_hand(hook, places))
    return FileChange(path, before, after)


def plan_remove(hook: Hook, prefix: Path, syntax_fault: SyntaxCheck) -> FileChange:
    """The site's script without our lines; a stand-alone script that nobody edited goes as a whole.

    Raises ConfigError where slurm.conf still asks for a script that would go: Slurm would refuse submissions, or to
    start.
    """
    path = (prefix / hook.script).resolve()
    before = _content(prefix, path)
    if before is None:
        return FileChange(path, None, None)
    if _is_untouched_standalone(before):
        if "lua" in slurm_conf_plugins(prefix, hook):
            raise ConfigError(
                f"slurm.conf still has lua in {hook.slurm_conf_key}, which needs {path}",
                f"remove lua from {hook.slurm_conf_key}, run scontrol reconfigure or restart slurmctld, then try again",
            )
        is_told = (prefix / "slurm.conf").is_file()
        return FileChange(path, before, None, () if is_told else (_UNKNOWN.format(prefix, hook.slurm_conf_key),))
    after = remove(before, hook)
    if after != before and (fault := syntax_fault(after)) and not syntax_fault(before):
        raise ConfigError(f"{path} would not parse as Lua: {fault}", "remove almanac's line by hand")
    left = after.decode("latin-1").splitlines()
    lines = [number for number, line in enumerate(left, 1) if re.search(rf"almanac.*{re.escape(hook.script)}", line)]
    notes = (
        (f"{path} still names almanac in line {', '.join(map(str, lines))}, which almanac did not write",)
        if lines
        else ()
    )
    return FileChange(path, before, after, notes)


def _content(prefix: Path, path: Path) -> bytes | None:
    """Return the content of a file of the folder of slurm.conf; None without the file."""
    if not prefix.is_dir():
        raise ConfigError(f"{prefix} is not a folder", "give the folder of slurm.conf with --prefix")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", "run this as root") from error


def _packaged(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", "install the package again") from error


def stamped(script: bytes) -> bytes:
    """A stand-alone script under a first line by which it is known later whether somebody edited it."""
    return b"-- almanac: stand-alone script, sha256 %s\n%s" % (hashlib.sha256(script).hexdigest().encode(), script)


def _is_untouched_standalone(content: bytes) -> bool:
    stamp = _STAMP.match(content)
    return stamp is not None and hashlib.sha256(content[stamp.end() :]).hexdigest().encode() == stamp[1]


def diff_text(change: FileChange) -> str:
    """A unified diff of a change, safe for a terminal; empty where nothing changes."""
    before, after = (
        [printable(line, 10_000) for line in (content or b"").decode("utf-8", "replace").splitlines()]
        for content in (change.before, change.after)
    )
    old, new = ("/dev/null" if content is None else str(change.path) for content in (change.before, change.after))
    return "\n".join(difflib.unified_diff(before, after, old, new, lineterm=""))


def apply(change: FileChange, now_s: int) -> Path | None:
    """Write a change, whole or not at all, with the file's owner and mode; the backup next to it, None for a new file.

    The new file has a new time of change, by which slurmctld notices it. Raises ConfigError where the file is no
    longer what was planned from, or cannot be written.
    """
    try:
        now = change.path.read_bytes() if change.path.exists() else None
        if now != change.before:
            raise ConfigError(
                f"{change.path} has changed in the meantime", "run this again, and check the new difference"
            )
        backup = _backed_up(change.path, now_s) if now is not None else None
        if change.after is None:
            change.path.unlink()
        else:
            _replace(change.path, change.after, change.mode)
    except OSError as error:
        raise ConfigError(f"{change.path}: cannot be written: {error.strerror}", "run this as root") from error
    return backup


def _backed_up(path: Path, now_s: int) -> Path:
    """Make a copy next to the file, with its owner and mode, under a name that was free."""
    moment = dt.datetime.fromtimestamp(now_s, dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    for number in range(1000):
        backup = path.with_name(f"{path.name}.almanac-{moment}" + (f".{number}" if number else ""))
        try:
            handle = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(handle, "wb") as out:
            out.write(path.read_bytes())
            _take_over(path, out.fileno(), backup)
        return backup
    raise ConfigError(f"{path.parent} has a thousand backups of this second", "remove some")


def _replace(path: Path, content: bytes, mode: int) -> None:
    with replacing(path, stat.S_IMODE(path.stat().st_mode) if path.exists() else mode) as out:
        out.write(content)
        out.flush()
        if path.exists():
            _take_over(path, out.fileno(), Path(f"/proc/self/fd/{out.fileno()}"))
            os.utime(out.fileno())


def _take_over(path: Path, handle: int, copy: Path) -> None:
    """Owner first, since changing it clears bits of the mode; then mode and extended attributes (ACLs, SELinux)."""
    owner = path.stat()
    os.fchown(handle, owner.st_uid, owner.st_gid)
    shutil.copystat(path, copy)


def slurm_conf_plugins(prefix: Path, hook: Hook) -> list[str]:
    """The plugins that slurm.conf and the files it includes name for this hook; empty without such a line."""
    plugins: list[str] = []
    for line in slurm_conf_lines(prefix):
        key, _, value = line.partition("=")
        if key.strip().lower() == hook.slurm_conf_key.lower():
            plugins = [name.strip().removeprefix(f"{hook.kind}/") for name in value.split(",") if name.strip()]
    return plugins


def slurm_conf_lines(prefix: Path, path: Path | None = None, seen: frozenset[Path] = frozenset()) -> list[str]:
    """The lines of slurm.conf, or of path, and of the files it includes, without comments; none if unreadable."""
    path = path or prefix / "slurm.conf"
    if path in seen:
        return []
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = []
    for line in (line.partition("#")[0].strip() for line in content.splitlines()):
        words = line.split(maxsplit=1)
        if len(words) == 2 and words[0].lower() == "include":
            lines += slurm_conf_lines(prefix, path.parent / words[1], seen | {path})
        else:
            lines.append(line)
    return lines


def slurm_conf_line(prefix: Path, hook: Hook) -> str | None:
    """The line that slurm.conf needs for this hook; None if it has it."""
    plugins = slurm_conf_plugins(prefix, hook)
    return None if "lua" in plugins else f"{hook.slurm_conf_key}={','.join([*plugins, 'lua'])}"


SCRIPT = "almanac-ended.sh"


def plan_ended(prefix: Path, scripts_dir: Path) -> FileChange:
    """Plan to install the script that notes ended jobs, next to slurm.conf. Raises ConfigError."""
    before = _content(prefix, prefix / SCRIPT)
    return FileChange(prefix / SCRIPT, before, _packaged(scripts_dir / SCRIPT), _notes(prefix), mode=0o755)


def plan_remove_ended(prefix: Path) -> FileChange:
    """Plan to remove the script that notes ended jobs, if it is there.

    Raises ConfigError if slurm.conf names the script or is not there to ask: without the script, slurmctld would not
    start.
    """
    path = prefix / SCRIPT
    before = _content(prefix, path)
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
    """Return the lines that slurm.conf lacks to call the script; [] if it does, or if a site's program must."""
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


def _settings(prefix: Path) -> list[tuple[str, str]]:
    """Key and value of each line of slurm.conf, in order."""
    pairs = (line.partition("=") for line in slurm_conf_lines(prefix))
    return [(key.strip(), value.strip()) for key, equals, value in pairs if equals]
