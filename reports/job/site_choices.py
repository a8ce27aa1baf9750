"""What a site adds to its reports: rules of its own, links of each job, and a page for help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

from almanac.config import Config, Link
from almanac.errors import ConfigError
from almanac.units import format_job_id
from reports.job.rows import JobRow
from reports.job.rules import RuleSet, packaged
from reports.job.site_rules import rules_of


class ReportLink(NamedTuple):
    name: str
    url: str


@dataclass(frozen=True)
class SiteChoices:
    """help_url: "" if the site has none. rules_fault: why the site's rules.toml is not used; None if it is, or if there
    is none.
    """

    rules: RuleSet = field(default_factory=packaged)
    links: tuple[Link, ...] = ()
    help_url: str = ""
    rules_fault: ConfigError | None = None

    def links_of(self, job: JobRow, cluster: str) -> tuple[ReportLink, ...]:
        """The links of a job, without those that need what is not known of it."""
        values = _values(job, cluster)
        filled = [(link.name, link.filled(values)) for link in self.links]
        return tuple(ReportLink(name, url) for name, url in filled if url is not None)


def choices_of(config: Config) -> SiteChoices:
    """A faulty rules.toml stops no report: then the packaged rules hold, and rules_fault says why."""
    try:
        rules, fault = rules_of(config), None
    except ConfigError as error:
        rules, fault = packaged(), error
    return SiteChoices(rules, config.links, config.site.help_url, fault)


def _values(job: JobRow, cluster: str) -> Mapping[str, str]:
    """The placeholders of almanac.config that are known of a job, URL-encoded: a user chooses some of them."""
    known = {
        "job_id": job["job_id"],
        "shown_id": format_job_id(job),
        "user": job["user"],
        "account": job["account"],
        "partition": job["partition"],
        "cluster": cluster,
    }
    for name in ("start", "end"):
        time_s = job["start_s"] if name == "start" else job["end_s"]
        known |= {f"{name}_s": time_s, f"{name}_ms": None if time_s is None else time_s * 1000}
    return {name: quote(str(value), safe="") for name, value in known.items() if value not in (None, "")}
