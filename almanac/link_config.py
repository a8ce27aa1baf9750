"""Links to other pages of the site: [[links]] of each job, and site.help_url."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from almanac.errors import ConfigError
from almanac.submit_config import key
from almanac.units import printable

PLACEHOLDERS = (
    "job_id", "shown_id", "user", "account", "partition", "cluster", "start_s", "end_s", "start_ms", "end_ms",
)  # fmt: skip
"""What the address of a link can name. shown_id: as Slurm shows it, such as 1234_5 for a task of an array."""
MOST_LINKS = 8
_URL = r"https?://[A-Za-z0-9.:\[\]-]+(?:[/?#][!#-;=?-\[\]_a-z{}~]*)?"
"""A host, and then no character that would need quoting in HTML or a mail. No placeholder in the host. Compiled when
used: every command imports this module."""
_MOST_URL = 1000
_PLACEHOLDER = r"\{([^{}]*)\}"


@dataclass(frozen=True)
class Link:
    """A link from the report of each job to another page, such as a dashboard. A link without a known value, such as
    the start of a job that never started, is left out.
    """

    name: str = key("", "text of the link, such as Open in Grafana")
    url: str = key("", f"address, http or https, which can name {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}")

    def filled(self, values: Mapping[str, str]) -> str | None:
        """The address for a job. values: by placeholder, URL-encoded; None if one is missing."""
        names = re.findall(_PLACEHOLDER, self.url)
        if any(name not in values for name in names):
            return None
        return re.sub(_PLACEHOLDER, lambda found: values[found[1]], self.url)


def check_link(link: Link, where: str) -> None:
    """Raises ConfigError."""
    if not link.name.strip() or printable(link.name, 60) != link.name:
        raise ConfigError(f"{where}: name is {link.name[:80]!r}", "write a text of 1 to 60 printable characters")
    check_url(re.sub(_PLACEHOLDER, "0", link.url), f"{where} ({link.name}): url")
    check_url(link.url, f"{where} ({link.name}): url")
    unknown = [name for name in re.findall(_PLACEHOLDER, link.url) if name not in PLACEHOLDERS]
    if unknown:
        valid = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        said = f"{where} ({link.name}): url has an unknown placeholder {{{printable(unknown[0], 40)}}}"
        raise ConfigError(said, f"use {valid}")
    if set("{}") & set(re.sub(_PLACEHOLDER, "", link.url)):
        raise ConfigError(f"{where} ({link.name}): url has a single brace", "write %7B for { and %7D for }")


def check_page(url: str, where: str) -> None:
    """Raises ConfigError unless it is the address of one page, without placeholders."""
    check_url(url, where)
    if set("{}") & set(url):
        raise ConfigError(f"{where} is {url!r}, which has a brace", "only [[links]] have placeholders")


def check_url(url: str, where: str) -> None:
    """Raises ConfigError unless it is an http or https address that can stand in a mail as it is."""
    if not re.fullmatch(_URL, url) or len(url) > _MOST_URL:
        said = f"{where} is {printable(repr(url), 120)}, expected an http or https address"
        raise ConfigError(said, "write such as https://help.example.org/gpus; %20 for a blank, and no login in it")
