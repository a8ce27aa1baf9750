"""Slurm's nodes and partitions: what nodes are and have, and what a partition gives to a submission and offers now.

Nodes come from `scontrol show nodes --json` and 22.05's `sinfo --json`. Reasons and comments are read from JSON only,
where they cannot forge a record. 22.05 writes plain numbers and texts, later releases {set, number} and lists.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from almanac.config import Tier
from almanac.errors import AlmanacError, CommandError
from almanac.records import JobRequest
from almanac.tres import free_gpus, gpu_types
from almanac.units import parse_time_limit, valid_unicode
from slurm.commands import Runner, SlurmCommands
from slurm.hostlist import expand, fold
from slurm.releases import number, records, words
from slurm.states import HOLDS_NODES, is_in_service, without_fulfilled

UNKNOWN = frozenset({"UNKNOWN"})
"""Slurm's own word, for a node whose state cannot be read."""
_SHOWN = re.compile(r"NodeName=(\S+) .*? State=(\S+)")
_MARKS = "*~#!%$@^-+"
_OFF = ("~", "#", "%")
"""Marks of sinfo at the end of a state: the node is powered down, or is powering up or down."""


@dataclass(frozen=True)
class SlurmNode:
    """A node as Slurm shows it.

    states: base state and flags, in capital letters without symbols: {"IDLE", "POWERED_DOWN"}. gres: as configured.
    cpu_count: 0 if unknown. last_busy_s, boot_s: unix seconds, None if Slurm shows none. last_busy_s of an idle node is
    when its last job ended or it came up; Slurm forgets it when the node powers down. reservation: the active one;
    Slurm 22.05 names none. gres_used: GRES that jobs hold, with every type that the node registered,
    "gpu:a100:0(IDX:N/A)"; "" if not shown. free_cpus, memory_mib, free_memory_mib: None if not known.
    """

    name: str
    states: frozenset[str]
    features: tuple[str, ...] = ()
    gres: str = ""
    partitions: tuple[str, ...] = ()
    reason: str = ""
    cpu_count: int = 0
    last_busy_s: int | None = None
    boot_s: int | None = None
    reservation: str = ""
    gres_used: str = ""
    free_cpus: int | None = None
    memory_mib: int | None = None
    free_memory_mib: int | None = None

    @cached_property
    def gpus(self) -> Mapping[str, int]:
        """Its GPUs by GRES type; "" is no type."""
        return gpu_types(self.gres)

    @cached_property
    def free_gpus(self) -> Mapping[str, int]:
        """GPUs that no job holds, by type; {} if Slurm does not tell what jobs hold."""
        return free_gpus(self.gres, self.gres_used)

    @property
    def takes_jobs(self) -> bool:
        """True if it can start a job now: up, powered, not drained, not in maintenance or an active reservation."""
        return is_in_service(self.states) and not self.reservation


def read_nodes(commands: Runner, names: Collection[str] = ()) -> list[SlurmNode]:
    """Every node, or at least those of some names, by name. Raises CommandError.

    sinfo of 22.05 lists nodes; that of later releases lists groups of them, but their scontrol has JSON.
    """
    show = ["scontrol", "show", "nodes"]
    for asked in ([fold(names)], []) if names else ([],):
        try:
            found = records(commands([*show, *asked, "--json"]), "nodes")
        except CommandError as error:
            if "unrecognized option" in str(error):  # 22.05
                break
            if not asked:
                raise
            continue  # a name may be gone
        if found or (found is not None and not asked):
            return nodes_of(found)
    found = records(commands(["sinfo", "--json"]), "nodes")
    if found is None:
        raise CommandError("neither scontrol nor sinfo gave a list of nodes", "run `scontrol show nodes --json`")
    return nodes_of(found)


def nodes_of(found: Sequence[Mapping[str, Any]]) -> list[SlurmNode]:
    """The nodes of JSON records of any release, by name."""
    return sorted(map(_node, found), key=lambda node: node.name)


def _node(record: Mapping[str, Any]) -> SlurmNode:
    state, flags = words(record.get("state")), words(record.get("state_flags"))
    is_known = state is not None and flags is not None
    memory_mib, used_mib = number(record.get("real_memory")), number(record.get("alloc_memory"))
    return SlurmNode(
        name=_text(record.get("name")),
        states=without_fulfilled({flag.upper() for flag in (*(state or ()), *(flags or ()))} if is_known else UNKNOWN),
        features=_words(record.get("features")),
        gres=_text(record.get("gres")),
        partitions=_words(record.get("partitions")),
        reason=_text(record.get("reason")),
        cpu_count=number(record.get("cpus")) or 0,
        last_busy_s=number(record.get("last_busy")) or None,
        boot_s=number(record.get("boot_time")) or None,
        reservation=_text(record.get("reservation")),
        gres_used=_text(record.get("gres_used")),
        free_cpus=left(number(record.get("effective_cpus")), number(record.get("alloc_cpus"))),
        memory_mib=memory_mib,
        free_memory_mib=left(memory_mib, used_mib),
    )


def left(total: int | None, used: int | None) -> int | None:
    """The rest of what a node has; None if either number is unknown."""
    return None if total is None or used is None else total - used


def _text(value: Any) -> str:
    return valid_unicode(str(value or ""))


def _words(value: Any) -> tuple[str, ...]:
    """ "a,b" on 22.05, later ["a", "b"]; () for any other value."""
    listed = words(value.split(",") if isinstance(value, str) else value)
    return tuple(word for word in listed or () if word)


def nodes_with_jobs(commands: Runner) -> set[str]:
    """Nodes that jobs hold. A suspended job leaves its node idle, and keeps its GPUs. Raises CommandError."""
    text = commands(["squeue", "-h", "-a", "-t", ",".join(sorted(HOLDS_NODES)), "-o", "%N"]).decode("utf-8", "replace")
    found: set[str] = set()
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            found.update(expand(line))
        except ValueError as error:
            raise CommandError(f"squeue printed a list of nodes that cannot be read: {error}") from error
    return found


def shown_states(commands: SlurmCommands, hosts: str) -> tuple[dict[str, frozenset[str]], str]:
    """States of the nodes of a host list, by name, and Slurm's objections. Raises CommandError.

    scontrol fails for a node that it does not know, and shows the others all the same.
    """
    done = commands.run(["scontrol", "-o", "show", "node", hosts])
    return parse_states(done.stdout.decode(errors="replace")), done.said


def parse_states(text: str) -> dict[str, frozenset[str]]:
    """States by node, of `scontrol -o show node`. Other lines are skipped."""
    found = (_SHOWN.match(line) for line in text.splitlines())
    return {one[1]: without_fulfilled({part.rstrip(_MARKS) for part in one[2].split("+")}) for one in found if one}


@dataclass(frozen=True)
class NodeHost:
    """NodeName and NodeHostName of a node. is_up: it is neither down nor powered down."""

    name: str
    host: str
    has_gpus: bool
    is_up: bool


def node_hosts(commands: Runner) -> list[NodeHost]:
    """Every node, by name. Raises CommandError."""
    lines = commands(["sinfo", "-h", "-N", "-o", "%N %n %G %T"]).decode("utf-8", "replace").splitlines()
    rows = sorted({tuple(words) for line in lines if len(words := line.split()) == 4})
    return [
        NodeHost(name, host, "gpu" in gres, not (state.endswith(_OFF) or state.startswith("down")))
        for name, host, gres, state in rows
    ]


@dataclass(frozen=True)
class NodeShape:
    """The size of a node; None if not known. gpus: also None for a node with several types. threads: of a core.

    features: those that are active now. types: of its GPUs.
    """

    cpus: int | None
    memory_mib: int | None
    threads: int | None
    gpus: int | None
    features: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()


_WHOLE = re.compile(r"[0-9]{1,12}")


def partition_nodes(commands: Runner, partitions: Sequence[str]) -> frozenset[str]:
    """The nodes of these partitions. Raises CommandError."""
    text = commands(["sinfo", "-h", "-a", "-p", ",".join(partitions), "-o", "%N"]).decode("utf-8", "replace")
    return frozenset(node for line in text.split() for node in expand(line))


def node_shapes(commands: Runner) -> dict[str, NodeShape]:
    """The size of every node, by name. Raises CommandError. -e: else sinfo groups nodes, and prints "64+"."""
    text = commands(["sinfo", "-h", "-a", "-e", "-o", "%N %c %m %Z %G %b"]).decode("utf-8", "replace")
    found: dict[str, NodeShape] = {}
    for parts in map(str.split, text.splitlines()):
        if len(parts) != 6:
            continue
        cpus, memory_mib, threads = (int(word) if _WHOLE.fullmatch(word) else None for word in parts[1:4])
        types = gpu_types(parts[4])
        gpus = None if len(types) > 1 else sum(types.values())
        named = frozenset(parts[5].split(",")) - {"(null)"}
        shape = NodeShape(cpus, memory_mib, threads, gpus, named, frozenset(types))
        try:
            found |= dict.fromkeys(expand(parts[0]), shape)
        except ValueError:
            continue
    return found


def smallest_shape(shapes: Iterable[NodeShape | None]) -> NodeShape:
    """The least of each size that all of these nodes have; None of what is not known for each. threads: the most."""
    known = list(shapes)

    def least(name: str) -> int | None:
        sizes = [getattr(shape, name, None) for shape in known]
        return min(sizes) if sizes and None not in sizes else None  # type: ignore[type-var]

    threads = [shape.threads for shape in known if shape is not None and shape.threads is not None]
    return NodeShape(
        cpus=least("cpus"),
        memory_mib=least("memory_mib"),
        threads=max(threads) if threads and len(threads) == len(known) else None,
        gpus=least("gpus"),
    )


NO_QOS = "normal"
"""slurmctld's QOS for an association that has no default."""
_UNSET = ("", "NONE", "N/A")
_OUT = frozenset({"down", "drain", "drng", "fail", "failg", "futr", "inval", "unk", "err", "error"})
"""Compact states (sinfo's %t) of nodes that take no job until somebody acts."""


def with_defaults(
    request: JobRequest, typed: Collection[str], tiers: Sequence[Tier], cluster: str, commands: Runner
) -> JobRequest:
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
    """scontrol's fields by partition; only administrators write them. {} if it does not answer for this cluster."""
    try:
        return _rows(commands(["scontrol", "-M", cluster, "-o", "show", "partition"]))
    except CommandError:
        return {}


def one_user_partitions(commands: Runner) -> frozenset[str]:
    """Partitions whose nodes serve one user, or one job, at a time. Raises CommandError."""
    rows = _rows(commands(["scontrol", "-o", "show", "partition"]))
    one = {name for name, row in rows.items() if row.get("ExclusiveUser") == "YES"}
    return frozenset(one | {name for name, row in rows.items() if row.get("OverSubscribe") == "EXCLUSIVE"})


def _rows(data: bytes) -> dict[str, Mapping[str, str]]:
    lines = data.decode("utf-8", "replace").splitlines()
    rows = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
    return {row["PartitionName"]: row for row in rows if "PartitionName" in row}


def _limit_s(partition: Mapping[str, str]) -> int | None:
    """The limit of a job that names none: DefaultTime, or MaxTime where there is no default; None: no limit."""
    default = partition.get("DefaultTime", "")
    try:
        return parse_time_limit(partition.get("MaxTime", "UNLIMITED") if default in _UNSET else default)
    except ValueError:
        return None


def _association(request: JobRequest, cluster: str, commands: Runner) -> tuple[str, str]:
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


@dataclass(frozen=True)
class PartitionGpus:
    """GPUs of nodes of one partition that are alike. types: "" for GPUs without a type."""

    partition: str
    is_in_service: bool
    types: tuple[str, ...]


@dataclass(frozen=True)
class TiersNow:
    """The tiers that can be advised now, and those that cannot. why_not: of all of the latter."""

    tiers: tuple[Tier, ...]
    missing: tuple[Tier, ...] = ()
    why_not: str = ""


def partition_gpus(commands: Runner) -> list[PartitionGpus]:
    """List sinfo's nodes with GPUs. Raises CommandError."""
    lines = commands(["sinfo", "-a", "-e", "-h", "-o", "%P|%t|%G"]).decode("utf-8", "replace").splitlines()
    rows = [fields for line in lines if len(fields := line.split("|")) == 3]
    return [
        PartitionGpus(name.rstrip("*"), state.rstrip(_MARKS).lower() not in _OUT, types)
        for name, state, gres in rows
        if (types := tuple(gpu_types(gres)))
    ]


def tiers_now(tiers: Sequence[Tier], commands: Runner) -> TiersNow:
    """The tiers whose GRES type some node in service has. Without MIG slices Slurm is not asked: types then stay.

    Where Slurm does not answer, no slice can be advised.
    """
    if not any(tier.is_slice for tier in tiers):
        return TiersNow(tuple(tiers))
    try:
        found = {kind for gpus in partition_gpus(commands) if gpus.is_in_service for kind in gpus.types}
    except AlmanacError as error:
        missing, why_not = [tier for tier in tiers if tier.is_slice], f"sinfo failed ({error})"
    else:
        missing = [tier for tier in tiers if tier.gres and tier.gres not in found]
        why_not = "no node in service has its GRES type"
    return TiersNow(tuple(tier for tier in tiers if tier not in missing), tuple(missing), why_not if missing else "")
