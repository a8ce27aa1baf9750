"""What Slurm gives a submission that does not say it: its record cannot be told from one that does.

A job without a time limit is recorded with the default one of its partition, and so on. A request that is compared with
records needs the same values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from almanac.config import Tier
from almanac.errors import CommandError
from almanac.records import Request
from almanac.units import parse_time_limit
from telemetry.slurm.commands import Runner

NO_QOS = "normal"
"""slurmctld's QOS for an association that has no default."""
_UNSET = ("", "NONE", "N/A")


def with_defaults(
    request: Request, typed: Collection[str], tiers: Sequence[Tier], cluster: str, commands: Runner
) -> Request:
    """The request with the partition, time limit, account and QOS that this cluster's Slurm gives it.

    typed: the options that the submission names. What Slurm does not tell (it is out of reach, or knows no such cluster
    or user) stays as it is. A default partition that is no tier's stays open where partitions are tiers: the tier's
    would be asked for in its place.
    """
    partitions = _partitions(cluster, commands)
    default = next((name for name, fields in partitions.items() if fields.get("Default") == "YES"), "")
    named = request.partition or default
    limit_s = request.time_limit_s if "time" in typed else _limit_s(partitions.get(named.partition(",")[0], {}))
    of_tiers = {tier.partition for tier in tiers if tier.partition}
    account, qos = _association(request, cluster, commands)
    return dataclasses.replace(
        request,
        partition=named if not of_tiers or named in of_tiers else request.partition,
        time_limit_s=limit_s,
        account=account,
        qos=qos,
    )


def _partitions(cluster: str, commands: Runner) -> dict[str, Mapping[str, str]]:
    """scontrol's fields by partition; only administrators write them. {} where it does not answer for this cluster."""
    try:
        text = commands(["scontrol", "-M", cluster, "-o", "show", "partition"]).decode("utf-8", "replace")
    except CommandError:
        return {}
    rows = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines()]
    return {row["PartitionName"]: row for row in rows if "PartitionName" in row}


def _limit_s(partition: Mapping[str, str]) -> int | None:
    """The limit of a job that names none: DefaultTime, or MaxTime where there is no default; None: no limit."""
    default = partition.get("DefaultTime", "")
    try:
        return parse_time_limit(partition.get("MaxTime", "UNLIMITED") if default in _UNSET else default)
    except ValueError:
        return None


def _association(request: Request, cluster: str, commands: Runner) -> tuple[str, str]:
    """Account and QOS: those of the request, else the user's defaults on this cluster; "" where they are not known."""
    if request.account and request.qos:
        return request.account, request.qos
    query = ["sacctmgr", "-n", "-P", "show", "user", "where", f"name={request.user}", f"cluster={cluster}"]
    try:
        text = commands([*query, "withassoc", "format=DefaultAccount,Account,DefaultQOS"]).decode("utf-8", "replace")
    except CommandError:
        return request.account, request.qos
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    account = request.account or next((default for default, _, _ in rows), "")
    found = {qos or NO_QOS for _, own, qos in rows if own == account}
    return account, request.qos or (found.pop() if len(found) == 1 else "")
