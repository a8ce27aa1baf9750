"""The configuration file: one TOML file, found, read and checked; unknown keys are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from almanac.addresses import is_address, is_pattern
from almanac.config import Config, Link, NodeSet, Tier
from almanac.errors import ConfigError
from almanac.gpu_type_config import GpuType
from almanac.link_config import MOST_LINKS, check_link, check_page
from almanac.mig import compute_slices
from almanac.slices import real_capacities
from almanac.submit_config import MAX_COMPUTE_SLICES
from almanac.trusted_file import read_trusted
from almanac.units import printable

_MOST_BYTES = 4 << 20
_MOST = 2**53
"""Above this a float does not hold every integer; NaN and infinity are no numbers either."""
_SET_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SYSTEM_FILE = Path("/etc/almanac/almanac.toml")


def find_config(explicit: str | None = None) -> Path | None:
    """--config, then $ALMANAC_CONFIG, then /etc, then ~/.config; None where there is none.

    Raises ConfigError where a named file is not there, or where the one of ~/.config is another user's: the
    configuration names programs to run. `cli.main` ignores a HOME of another user; this also covers /tmp as HOME.
    """
    for origin, named in (("--config", explicit), ("$ALMANAC_CONFIG", os.environ.get("ALMANAC_CONFIG"))):
        if named:
            if not _is_file(Path(named)):
                raise ConfigError(f"{origin} names {named}, which is not a file", "correct the path, or leave it out")
            return Path(named)
    files = [SYSTEM_FILE]
    with contextlib.suppress(RuntimeError):  # no HOME, and no such user
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        files.append(home / "almanac" / "config.toml")
    found = next((path for path in files if _is_file(path)), None)
    if found and found != SYSTEM_FILE and found.stat().st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{found} belongs to uid {found.stat().st_uid}, and you are uid {os.geteuid()}",
            "give it with --config if you trust its owner; `sudo -i` sets HOME to your own",
        )
    return found


def _is_file(path: Path) -> bool:
    """Whether a file is there; a folder that may not be looked into holds none."""
    try:
        return path.is_file()
    except OSError:
        return False


def load_config(path: Path | None) -> Config:
    """The configuration of a file, or the defaults. Raises ConfigError naming file, key and remedy.

    Root refuses a file that others can change: it names programs to run.
    """
    if path is None:
        return Config()
    try:
        text = read_trusted(path, (), _MOST_BYTES, is_strict=False)
        data = tomllib.loads(text.removeprefix("\ufeff"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", "make the file readable, in UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not valid TOML: nested too deeply", "write it as sections and keys") from error
    except ValueError as error:  # a number of thousands of digits is one that tomllib does not make its own
        raise ConfigError(f"{path}: not valid TOML: {error}", "correct that line") from error
    return dataclasses.replace(parse_config(data, str(path)), source=str(path))


def parse_config(data: dict[str, Any], where: str = "configuration") -> Config:
    """A Config of parsed TOML. Raises ConfigError."""
    sections = {f.name: f for f in dataclasses.fields(Config) if f.name != "source"}
    _refuse_unknown(data, list(sections), where, "section")
    values: dict[str, Any] = {}
    for name, content in data.items():
        if name == "tiers":
            values[name] = _parse_tiers(content, where)
        elif name == "gpu_types":
            values[name] = tuple(_parse_tables(GpuType, content, where, "gpu_types", _check_gpu_type))
        elif name == "node_sets":
            values[name] = _parse_node_sets(content, where)
        elif name == "links":
            values[name] = _parse_links(content, where)
        elif isinstance(content, dict):
            values[name] = _parse_section(type(sections[name].default), content, f"{where}: [{name}]")
        else:
            said = f"{where}: {name} is {_shown(content)}, expected a section [{name}]"
            raise ConfigError(said, "write it as a table")
    config = Config(**values)
    _check_ranges(config, where)
    return config


def _refuse_unknown(data: dict[str, Any], valid: list[str], where: str, what: str) -> None:
    for key in data:
        if key not in valid:
            near = difflib.get_close_matches(key[:80], valid, n=1, cutoff=0.0)
            raise ConfigError(
                f"{where}: unknown {what} {_shown(key)}", f"did you mean {near[0]!r}? valid: {', '.join(valid)}"
            )


def _parse_section(cls: type[Any], data: dict[str, Any], where: str) -> Any:
    _refuse_unknown(data, [f.name for f in dataclasses.fields(cls)], where, "key")
    kinds = typing.get_type_hints(cls)
    return cls(**{key: _typed(value, kinds[key], f"{where} {key}") for key, value in data.items()})


def _typed(value: Any, kind: Any, where: str) -> Any:
    kind = str if _words(kind) else kind
    if isinstance(kind, types.GenericAlias):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{where} is {_shown(value)}, expected a list of strings", 'write ["a", "b"]')
    if type(value) in (int, float) and not abs(value) <= _MOST:
        raise ConfigError(f"{where} is {_shown(value)}, expected a number up to {_MOST}", "correct the value")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} is {_shown(value)}, expected {kind.__name__}", "correct the value's type")
    return value


def _shown(value: Any) -> str:
    """A value of the file for a message."""
    try:
        return printable(repr(value), 80)
    except (ValueError, RecursionError):  # an integer of thousands of digits has no repr
        return f"a value of type {type(value).__name__} that is too large to show"


def _parse_tiers(content: Any, where: str) -> tuple[Tier, ...]:
    tiers: list[Tier] = _parse_tables(Tier, content, where, "tiers", _check_tier)
    return real_capacities(tiers)


def _parse_node_sets(content: Any, where: str) -> tuple[NodeSet, ...]:
    return tuple(_parse_tables(NodeSet, content, where, "node_sets", _check_node_set))


def _parse_links(content: Any, where: str) -> tuple[Link, ...]:
    links: list[Link] = _parse_tables(Link, content, where, "links", check_link)
    if len(links) > MOST_LINKS:
        raise ConfigError(f"{where}: {len(links)} [[links]], expected at most {MOST_LINKS}", "remove some of them")
    return tuple(links)


def _parse_tables(cls: type[Any], content: Any, where: str, key: str, check: Callable[[Any, str], None]) -> list[Any]:
    """An array of tables, each with a name of its own."""
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ConfigError(f"{where}: {key} must be an array of tables", f"write each one under its own [[{key}]]")
    found = []
    for number, item in enumerate(content, 1):
        found.append(_parse_section(cls, item, f"{where}: [[{key}]] number {number}"))
        check(found[-1], f"{where}: [[{key}]] number {number}")
    names = [one.name for one in found]
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}: two {key} have the same name: {names}", "give each its own name")
    return found


def _check_node_set(one: NodeSet, where: str) -> None:
    if not _SET_NAME.fullmatch(one.name):
        raise ConfigError(f"{where}: name is {_shown(one.name)}", 'use letters, digits, ., _ and -, such as "a100"')
    selectors = [one.nodes, one.feature, one.partition]
    if sum(map(bool, selectors)) != 1:
        raise ConfigError(
            f"{where} ({one.name}): {sum(map(bool, selectors))} of nodes, feature, and partition are set",
            "set exactly one of them",
        )
    if one.warm_minimum < 0:
        raise ConfigError(f"{where} ({one.name}): warm_minimum is {one.warm_minimum}", "use 0 or more")


def _check_tier(tier: Tier, where: str) -> None:
    if not tier.name or tier.capacity_mib <= 0:
        raise ConfigError(
            f"{where}: needs a name and a capacity_mib above 0", 'write name = "hbm80g", capacity_mib = 81920'
        )
    selectors = [tier.constraint, tier.gres, tier.partition]
    if sum(map(bool, selectors)) != 1:
        raise ConfigError(
            f"{where} ({tier.name}): {sum(map(bool, selectors))} of constraint, gres, and partition are set",
            "set exactly one of them",
        )
    if not 0 <= tier.compute_slices <= MAX_COMPUTE_SLICES:
        raise ConfigError(
            f"{where} ({tier.name}): compute_slices is {tier.compute_slices}, expected 0 to {MAX_COMPUTE_SLICES}",
            "write the compute slices of the MIG profile, such as 1 for 1g.10gb, or leave the key out",
        )
    named = compute_slices(tier.gres) if tier.gres else None
    if named is not None and named != tier.compute_slices:
        raise ConfigError(
            f"{where} ({tier.name}): compute_slices is {tier.compute_slices}, but {tier.gres} has {named}",
            "leave compute_slices out: the GRES type says it",
        )


def _check_gpu_type(one: GpuType, where: str) -> None:
    for name in (one.name, one.selector):
        if not _SET_NAME.fullmatch(name):
            said = f"{where}: a name or selector is {_shown(name)}"
            raise ConfigError(said, 'use letters, digits, ., _ and -, such as "a100"')
    selectors = [one.constraint, one.gres, one.partition]
    if sum(map(bool, selectors)) != 1:
        raise ConfigError(
            f"{where} ({one.name}): {sum(map(bool, selectors))} of constraint, gres, and partition are set",
            "set exactly one of them",
        )


def _check_ranges(config: Config, where: str) -> None:
    for section in (f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default)):
        _check_words(section, getattr(config, section), where)
        for key in dataclasses.fields(getattr(config, section)):
            value = getattr(getattr(config, section), key.name)
            low, high = key.metadata["low"], key.metadata["high"]
            if not (low is None or low <= value) or not (high is None or value <= high):
                expected = f"at least {low}" if high is None else f"{low} to {high}"
                raise ConfigError(f"{where}: {section}.{key.name} is {value}, expected {expected}", "correct the value")
    if 3600 % config.metrics.window_s:
        raise ConfigError(
            f"{where}: metrics.window_s is {config.metrics.window_s}, which does not divide 3600", "use 60 or 300"
        )
    if config.priority.min_gpu_time_s >= config.priority.max_gpu_time_s:
        raise ConfigError(
            f"{where}: priority.min_gpu_time_s is not below max_gpu_time_s", "use, for example, 60 and 8640000"
        )
    if config.site.help_url:
        check_page(config.site.help_url, f"{where}: site.help_url")
    _check_addresses(config, where)
    _check_retention(config, where)


def _check_retention(config: Config, where: str) -> None:
    """`almanac forget` finds a person's rows in the other tables by their jobs."""
    jobs_days = config.retention.jobs_days
    for table in ("telemetry", "bindings", "steps", "job_metrics", "gpu_metrics", "step_metrics"):
        days = getattr(config.retention, f"{table}_days")
        if jobs_days and not 0 < days <= jobs_days:
            raise ConfigError(
                f"{where}: retention.{table}_days is {days}, and jobs_days is {jobs_days}",
                f"keep jobs as long as {table}: set {table}_days to 1 to {jobs_days}, or raise jobs_days",
            )


def _check_addresses(config: Config, where: str) -> None:
    for name, address in (("reply_to", config.mail.reply_to), ("bcc", config.mail.bcc)):
        if address and not is_address(address):
            said = f"{where}: mail.{name} is {_shown(address)}, expected one address"
            raise ConfigError(said, "write, for example, gpu-help@example.org, without a name or a comma")
    if config.mail.address_command and not config.mail.address_command[0].startswith("/"):
        said = f"{where}: mail.address_command starts with {_shown(config.mail.address_command[0])}"
        raise ConfigError(said, 'write the full path of the program, such as "/usr/local/bin/mail-of"')
    if not is_pattern(config.mail.recipient):
        said = f"{where}: mail.recipient is {config.mail.recipient!r}, which does not give each user an address"
        raise ConfigError(said, 'write, for example, "{user}@example.org"; {user} stands for the user name')


def _check_words(section: str, part: Any, where: str) -> None:
    """Check the keys of a section that take one of a few words: those whose type is a Literal."""
    for name, kind in typing.get_type_hints(type(part)).items():
        value, words = getattr(part, name), _words(kind)
        if words and value not in words:
            raise ConfigError(f"{where}: {section}.{name} is {value!r}", f"use one of: {', '.join(words)}")


def _words(kind: Any) -> tuple[str, ...]:
    """The words of a Literal; () for another type."""
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
