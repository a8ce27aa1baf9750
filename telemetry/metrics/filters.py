"""Jobs that are excluded whatever their telemetry says (perlmutter-telemetry, II-C)."""

from __future__ import annotations

from collections.abc import Sequence

from almanac.config import Filters
from almanac.errors import ConfigError
from telemetry.attribution.allocations import JobRun
from telemetry.metrics.data_quality import LOGIN_NODE, PARTITION, SHORT, STAFF
from telemetry.slurm.hostlist import expand


def exclusion(job: JobRun, filters: Filters, login_nodes: frozenset[str]) -> str | None:
    """Why a job is excluded, whatever its telemetry says (perlmutter-telemetry, II-C); None if it is not."""
    if filters.partitions and job.partition not in filters.partitions:
        return PARTITION
    if job.account in filters.staff_accounts:
        return STAFF
    if login_nodes.intersection(job.hosts):
        return LOGIN_NODE
    return SHORT if job.elapsed_s < filters.min_elapsed_s else None


def host_filter(hostlists: Sequence[str]) -> frozenset[str]:
    """Every host of the configured hostlists. Raises ConfigError."""
    try:
        return frozenset(host for text in hostlists for host in expand(text))
    except ValueError as error:
        raise ConfigError(
            f"filters.login_nodes: {error}", "write hostlists such as login[01-04], each as one string"
        ) from error
