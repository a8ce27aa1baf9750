"""The configuration file: one TOML file, found, read and checked; unknown keys are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfoNotFoundError

import msgspec

from almanac.config import (
    MOST_LINKS,
    PLACEHOLDER,
    PLACEHOLDERS,
    REMOVED,
    Config,
    GpuModel,
    GpuType,
    Link,
    NodeSet,
    Prometheus,
    Tier,
)
from almanac.errors import ConfigError
from almanac.files import read_trusted
from almanac.hardware import compute_slices, use_models
from almanac.names import is_address, is_pattern
from almanac.submit_config import keys_of
from almanac.tiers import real_capacities
from almanac.units import printable

INSTEAD = {key: text for removed in REMOVED.values() for key, text in removed.items()}
_SECTIONS = {key.partition(".")[0] for key in INSTEAD}


def without_removed(data: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return parsed TOML without its removed keys, and their names. A section that lost all its keys is left out."""
    kept: dict[str, Any] = {}
    found: list[str] = []
    for section, content in data.items():
        if isinstance(content, dict):
            gone = [key for key in content if f"{section}.{key}" in INSTEAD]
            found += [f"{section}.{key}" for key in gone]
            content = {key: value for key, value in content.items() if key not in gone} | _moved(section, content)
        if content != {} or section not in _SECTIONS:
            kept[section] = content
    return kept, tuple(found)


def _moved(section: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that took over the values of removed keys. A value of a wrong type is left out."""
    values = [(name, content.get(name)) for name in ("account", "partition", "qos")] if section == "dask" else []
    if section == "prometheus" and content.get("exporter") in ("dcgm", "jobstats") and "names" not in content:
        return {"names": content["exporter"]}
    options = [f"--{name}={value}" for name, value in values if isinstance(value, str) and value]
    present = content.get("directives", [])
    return {"directives": [*options, *present]} if options and isinstance(present, list) else {}


def said_of(removed: Iterable[str]) -> str:
    """Removed keys of a file, each with what stands in its place."""
    return "; ".join(f"{key} ({INSTEAD[key]})" for key in removed)


_MOST_BYTES = 4 << 20
_MOST = 2**53
"""Above this a float does not hold every integer."""
_SET_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_URL = r"https?://[A-Za-z0-9.:\[\]-]+(?:[/?#][!#-;=?-\[\]_a-z{}~]*)?"
"""A host, and then no character that would need quoting in HTML or a mail. No placeholder in the host."""
_MOST_URL = 1000
SYSTEM_FILE = Path("/etc/almanac/almanac.toml")


def find_config(explicit: str | None = None) -> Path | None:
    """--config, then $ALMANAC_CONFIG, then /etc, then ~/.config; None where there is none.

    Raises ConfigError where a named file is not there, or where the one of ~/.config is another user's: the
    configuration names programs to run. `cli.main` ignores a HOME of another user; this also covers /tmp as HOME.
    """
    for origin, named in (("--config", explicit), ("$ALMANAC_CONFIG", os.environ.get("ALMANAC_CONFIG"))):
        if named:
            if not os.path.isfile(named):  # noqa: PTH113 - False in a folder that may not be looked into
                raise ConfigError(f"{origin} names {named}, which is not a file", "correct the path, or leave it out")
            return Path(named)
    files = [SYSTEM_FILE]
    with contextlib.suppress(RuntimeError):  # no HOME, and no such user
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        files.append(home / "almanac" / "config.toml")
    found = next((path for path in files if os.path.isfile(path)), None)  # noqa: PTH113
    if found and found != SYSTEM_FILE and found.stat().st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{found} belongs to uid {found.stat().st_uid}, and you are uid {os.geteuid()}",
            "give it with --config if you trust its owner; `sudo -i` sets HOME to your own",
        )
    return found


def load_config(path: Path | None) -> Config:
    """The configuration of a file, or the defaults. Raises ConfigError naming file, key and remedy.

    Root refuses a file that others can change: it names programs to run.
    """
    if path is None:
        use_models(())
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
    config = parse_config(data, str(path))
    if config.removed:
        _warn(f"warning: {path}: removed keys: {said_of(config.removed)}; remove these keys")
    use_models(config.gpu_models)
    return dataclasses.replace(config, source=str(path))


@functools.cache
def _warn(text: str) -> None:
    """Warn once in a process, on stderr unless the caller of the Python API has set up logging."""
    import logging  # late: seldom needed

    logging.getLogger("almanac").warning("%s", text)


def parse_config(data: dict[str, Any], where: str = "configuration") -> Config:
    """A Config of parsed TOML. Raises ConfigError."""
    data, removed = without_removed(data)
    sections = {each.name: type(each.default) for each in keys_of(Config)}
    refuse_unknown(data, [*sections, "prometheus_names"], f"{where}: unknown section")
    own_names = data.pop("prometheus_names", {})
    if not isinstance(own_names, dict):
        raise ConfigError(f"{where}: prometheus_names is {_shown(own_names)}", "write [prometheus_names.NAME] tables")
    values: dict[str, Any] = {}
    for name, content in data.items():
        if name in _TABLES:
            values[name] = _parse_tables(name, content, where)
        elif name == "prometheus" and isinstance(content, dict):
            values[name] = _parse_prometheus(content, own_names, where)
        elif isinstance(content, dict):
            values[name] = _parse_section(sections[name], content, f"{where}: {name}.")
        else:
            said = f"{where}: {name} is {_shown(content)}, expected a section [{name}]"
            raise ConfigError(said, "write it as a table")
    config = Config(**{**values, "tiers": real_capacities(values.get("tiers", ())), "removed": removed})
    _check_together(config, where)
    return config


_INHERITED = ("timeout_s", "lookback_days", "delay_s", "host_suffix", "ca_file")


def _parse_prometheus(content: dict[str, Any], own_names: dict[str, Any], where: str) -> Prometheus:
    """The section, with its further servers. They inherit no login: it is for one server."""
    tables, main = content.get("server", []), {key: value for key, value in content.items() if key != "server"}
    if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
        raise ConfigError(f"{where}: prometheus.server must be an array of tables", "write [[prometheus.server]]")
    inherited = {key: value for key, value in main.items() if key in _INHERITED}
    more = [_parse_section(Prometheus, {**inherited, **item}, f"{where}: [[prometheus.server]] number {number}.")
            for number, item in enumerate(tables, 1)]  # fmt: skip
    section: Prometheus = dataclasses.replace(
        _parse_section(Prometheus, main, f"{where}: prometheus."),
        own_names=own_names,
        more=tuple(dataclasses.replace(each, own_names=own_names) for each in more),
    )
    for number, each in enumerate(more, 1):
        if not _SET_NAME.fullmatch(each.name) or [other.name for other in more].count(each.name) > 1 or not each.url:
            said = f"{where}: [[prometheus.server]] number {number} has the name {_shown(each.name)} and "
            said += "an address" if each.url else "no url"
            raise ConfigError(said, "give each a url, and a name of its own: letters, digits, ., _ and -")
    return section


def refuse_unknown(data: Mapping[str, Any], valid: Sequence[str], what: str) -> None:
    """Raise ConfigError for a key that is not valid; it names the nearest valid one."""
    for key in data:
        if key not in valid:
            import difflib  # late: seldom needed

            near = difflib.get_close_matches(key[:80], valid, n=1, cutoff=0.0)
            raise ConfigError(f"{what} {_shown(key)}", f"did you mean {near[0]!r}? valid: {', '.join(valid)}")


def _parse_section(cls: type[Any], data: dict[str, Any], place: str) -> Any:
    """An instance of a section's class. place: what a message puts before the name of a key."""
    keys = {each.name: each.metadata for each in keys_of(cls)}
    refuse_unknown(data, list(keys), f"{place[:-1]}: unknown key")
    kinds = typing.get_type_hints(cls)
    return cls(**{key: _converted(value, kinds[key], keys[key], place + key) for key, value in data.items()})


def _converted(value: Any, kind: Any, limits: Mapping[str, Any], place: str) -> Any:
    """The value as the type of its key. Raises ConfigError if it has another type, or is outside the limits."""
    low, high = limits["low"], limits["high"]
    bounds = msgspec.Meta(ge=-_MOST if low is None else low, le=_MOST if high is None else high)
    try:
        return msgspec.convert(value, Annotated[kind, bounds] if kind in (int, float) else kind)
    except msgspec.ValidationError as error:
        expected, hint = _expected(kind, low, high)
        raise ConfigError(f"{place} is {_shown(value)}, expected {expected}", hint) from error


def _expected(kind: Any, low: float | None, high: float | None) -> tuple[str, str]:
    """The type and the limits of a key in words, and how to write it."""
    if typing.get_origin(kind) is typing.Literal:
        words = ", ".join(typing.get_args(kind))
        return f"one of: {words}", f"use one of: {words}"
    if typing.get_origin(kind) is tuple:
        chosen = typing.get_args(typing.get_args(kind)[0])
        return f"a list of {', '.join(chosen) or 'strings'}", f"write {json.dumps(chosen[:1] or ['a', 'b'])}"
    if kind == float | None:
        return "a number above 0", "leave out what you do not know"
    if kind not in (int, float):
        return kind.__name__, "correct the value's type"
    limits = f"{low} to {high}" if high is not None else f"up to {_MOST}" if low is None else f"at least {low}"
    return f"{kind.__name__}, {limits}", "correct the value and its type"


def _shown(value: Any) -> str:
    """A value of the file for a message."""
    try:
        return printable(repr(value), 80)
    except (ValueError, RecursionError):  # an integer of thousands of digits has no repr
        return f"a value of type {type(value).__name__} that is too large to show"


def _parse_tables(key: str, content: Any, where: str) -> tuple[Any, ...]:
    """An array of tables, each with a name of its own."""
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ConfigError(f"{where}: {key} must be an array of tables", f"write each one under its own [[{key}]]")
    cls, check = _TABLES[key]
    found = []
    for number, item in enumerate(content, 1):
        place = f"{where}: [[{key}]] number {number}"
        found.append(_parse_section(cls, item, f"{place}."))
        check(found[-1], place)
    names = [one.name for one in found]
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}: two {key} have the same name: {names}", "give each its own name")
    if key == "links" and len(found) > MOST_LINKS:
        raise ConfigError(f"{where}: {len(found)} [[links]], expected at most {MOST_LINKS}", "remove some of them")
    return tuple(found)


def _check_one(one: NodeSet | Tier | GpuType, names: Sequence[str], where: str) -> None:
    """Raise ConfigError unless exactly one of the keys that select nodes or GPUs is set."""
    count = sum(bool(getattr(one, name)) for name in names)
    if count != 1:
        listed = f"{', '.join(names[:-1])}, and {names[-1]}"
        raise ConfigError(f"{where} ({one.name}): {count} of {listed} are set", "set exactly one of them")


def _check_node_set(one: NodeSet, where: str) -> None:
    if not _SET_NAME.fullmatch(one.name):
        raise ConfigError(f"{where}: name is {_shown(one.name)}", 'use letters, digits, ., _ and -, such as "a100"')
    _check_one(one, ("nodes", "feature", "partition"), where)


def _check_tier(tier: Tier, where: str) -> None:
    if not tier.name or tier.capacity_mib <= 0:
        raise ConfigError(
            f"{where}: needs a name and a capacity_mib above 0", 'write name = "hbm80g", capacity_mib = 81920'
        )
    _check_one(tier, ("constraint", "gres", "partition"), where)
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
    _check_one(one, ("constraint", "gres", "partition"), where)


def _check_gpu_model(one: GpuModel, where: str) -> None:
    for name in (one.name, *one.labels):
        if not name.strip() or printable(name, 80) != name:
            said = f"{where}: a name or label is {_shown(name)}, expected 1 to 80 printable characters"
            raise ConfigError(said, 'write it as the exporter shows it, such as "NVIDIA H100 80GB HBM3"')
    if not one.name or not one.labels or one.hbm_mib <= 0:
        said = f"{where} ({_shown(one.name)}): needs a name, labels, and hbm_mib above 0"
        raise ConfigError(said, "copy the entry that almanac doctor shows")
    for each in keys_of(GpuModel):
        value = getattr(one, each.name)
        if isinstance(value, float) and not 0 < value < _MOST**2:
            said = f"{where} ({one.name}): {each.name} is {_shown(value)}, expected a number above 0"
            raise ConfigError(said, "leave out what you do not know")


def _check_together(config: Config, where: str) -> None:
    """Raise ConfigError for what a key alone does not show."""
    if config.site.help_url:
        _check_page(config.site.help_url, f"{where}: site.help_url")
    try:
        _ = config.site.zone
    except (ZoneInfoNotFoundError, ValueError, OSError):
        said = f"{where}: site.timezone is {_shown(config.site.timezone)}, which is no time zone"
        raise ConfigError(said, "write, for example, Europe/Berlin, or leave it empty") from None
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
    mail, watch = config.mail, config.watch
    addresses = {"mail.reply_to": mail.reply_to, "mail.unsubscribe": mail.unsubscribe}
    for name, address in {**addresses, "watch.operators_mail": watch.operators_mail}.items():
        if name == "mail.unsubscribe" and "://" in address:
            _check_page(address, f"{where}: {name}")
        elif address and not is_address(address):
            said = f"{where}: {name} is {_shown(address)}, expected one address"
            raise ConfigError(said, "write, for example, gpu-help@example.org, without a name or a comma")
    if watch.operators and not watch.operators_mail:
        raise ConfigError(f"{where}: watch.operators is set, and watch.operators_mail is empty", "name their address")
    if config.mail.address_command and not config.mail.address_command[0].startswith("/"):
        said = f"{where}: mail.address_command starts with {_shown(config.mail.address_command[0])}"
        raise ConfigError(said, 'write the full path of the program, such as "/usr/local/bin/mail-of"')
    if not is_pattern(config.mail.recipient):
        said = f"{where}: mail.recipient is {config.mail.recipient!r}, which does not give each user an address"
        raise ConfigError(said, 'write, for example, "{user}@example.org"; {user} stands for the user name')


def _check_link(link: Link, where: str) -> None:
    """Raises ConfigError."""
    if not link.name.strip() or printable(link.name, 60) != link.name:
        raise ConfigError(f"{where}: name is {link.name[:80]!r}", "write a text of 1 to 60 printable characters")
    _check_url(re.sub(PLACEHOLDER, "0", link.url), f"{where} ({link.name}): url")
    _check_url(link.url, f"{where} ({link.name}): url")
    unknown = [name for name in re.findall(PLACEHOLDER, link.url) if name not in PLACEHOLDERS]
    if unknown:
        valid = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        said = f"{where} ({link.name}): url has an unknown placeholder {{{printable(unknown[0], 40)}}}"
        raise ConfigError(said, f"use {valid}")
    if set("{}") & set(re.sub(PLACEHOLDER, "", link.url)):
        raise ConfigError(f"{where} ({link.name}): url has a single brace", "write %7B for { and %7D for }")


def _check_page(url: str, where: str) -> None:
    """Raises ConfigError unless it is the address of one page, without placeholders."""
    _check_url(url, where)
    if set("{}") & set(url):
        raise ConfigError(f"{where} is {url!r}, which has a brace", "only [[links]] have placeholders")


def _check_url(url: str, where: str) -> None:
    """Raises ConfigError unless it is an http or https address that can stand in a mail as it is."""
    if not re.fullmatch(_URL, url) or len(url) > _MOST_URL:
        said = f"{where} is {printable(repr(url), 120)}, expected an http or https address"
        raise ConfigError(said, "write such as https://help.example.org/gpus; %20 for a blank, and no login in it")


_TABLES: dict[str, tuple[type[Any], Callable[[Any, str], None]]] = {
    "tiers": (Tier, _check_tier),
    "gpu_types": (GpuType, _check_gpu_type),
    "gpu_models": (GpuModel, _check_gpu_model),
    "node_sets": (NodeSet, _check_node_set),
    "links": (Link, _check_link),
}
