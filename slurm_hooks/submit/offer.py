"""Look in sinfo's listing for nodes that meet a rewritten submission as a whole.

Slurm refuses a submission whose constraint no node meets, so a change is offered only if the answer is a sure yes. The
answer is no for some requests that Slurm would spread over nodes (`-n 128` without `-N`). Not checked: generic
resources other than GPUs, temporary disk, sockets and cores, and a partition's accounts and QOS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from almanac.records import JobRequest
from almanac.submit_config import Tier
from almanac.tiers import Rewrite
from almanac.tres import parse_gpus
from almanac.units import parse_time_limit

FORMAT = "%P|%D|%c|%m|%f|%G|%l|%a|%g"
"""Format of sinfo -o: partition, nodes, CPUs, memory (MiB), features, GRES, time limit, availability, groups."""
MAX_BYTES = 262_144
MAX_AGE_S = 300
"""Age up to which a saved listing is used, so that a loop of submissions asks slurmctld once."""
SLICE_AGE_S = 30
"""Age limit before a change to a MIG slice: a layout can change, and Slurm refuses a type that no node has."""
_NAMES_GPUS = ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task")
NO_COUNT = 65_534
"""Slurm's NO_VAL16; larger numbers are its NO_VAL and INFINITE."""
_NO_TIME_S = 0xFFFFFFFE * 60
_COUNT = re.compile(r"[0-9]{1,9}")
_NODES = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?(?:[,:].*)?")
_MEMORY = re.compile(r"([0-9]{1,12})([KMGTkmgt]?)[Bb]?\??")
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
_PLAIN = re.compile(r"[A-Za-z0-9_.:+&,-]*")
_GPU = re.compile(r"gpu:(?:([^:]+):)?([0-9]{1,9})")


@dataclass(frozen=True)
class Needs:
    """The least that a submission asks of its nodes. gpus: of the whole job; time_limit_s: None without one;
    the rest per node.
    """

    nodes: int
    gpus: int
    gpus_per_node: int
    cpus: int
    memory_mib: int
    time_limit_s: int | None


@dataclass(frozen=True)
class NodeRequest:
    """partition "": the default one. features: None where the constraint is more than a list joined by "&".
    is_moved: whether the submission itself named another partition.
    """

    partition: str
    features: tuple[str, ...] | None
    gpu_type: str
    is_moved: bool = False


@dataclass(frozen=True)
class _Nodes:
    """Nodes of one partition that are alike."""

    partition: str
    nodes: int
    cpus: int
    memory_mib: int
    features: frozenset[str]
    gres: str
    limit_s: int | None
    is_open: bool

    def gpus(self, kind: str) -> int:
        """Of each node, "gpu:a100:4(S:0-1),nvme:1"; of one type where one is named."""
        terms = map(_GPU.fullmatch, re.sub(r"\([^()]*\)", "", self.gres).split(","))
        return sum(int(term[2]) for term in terms if term and kind in ("", term[1]))


def needs_of(options: Mapping[str, str], gpus: int) -> Needs | None:
    """The needs; None where an option cannot be read. options: texts by long name; gpus: of the whole job."""
    tasks, tasks_per_node = _number(options, "ntasks"), _number(options, "ntasks-per-node")
    memory = [_memory(options.get(name, "0")) for name in ("mem", "mem-per-cpu", "mem-per-gpu")]
    span = _nodes(options.get("nodes", ""))
    if any(mib is None for mib in memory) or span is None:
        return None
    nodes, most_nodes = span
    if not nodes:
        nodes = math.ceil(tasks / tasks_per_node) if tasks and tasks_per_node else 1
    gpus_per_node = _gpus_per_node(options, tasks_per_node or 1)
    if most_nodes:
        gpus_per_node = max(gpus_per_node, math.ceil(gpus / most_nodes))
    here = tasks_per_node or math.ceil((tasks or nodes) / nodes)
    cpus = max(
        here * (_number(options, "cpus-per-task") or 1),
        _number(options, "mincpus") or 1,
        gpus_per_node * (_number(options, "cpus-per-gpu") or 1),
    )
    mem, per_cpu, per_gpu = (mib or 0 for mib in memory)
    memory_mib = max(mem, per_cpu * cpus, per_gpu * gpus_per_node)
    return Needs(nodes, gpus, gpus_per_node, cpus, memory_mib, seconds(options.get("time", "")))


def _nodes(text: str) -> tuple[int, int] | None:
    """The least and the greatest number of nodes, 0 if it is not given; None if the text cannot be read.

    "1-0" is what cli_filter gets where the user names none.
    """
    if text in ("", "1-0"):
        return 0, 0
    match = _NODES.fullmatch(text)
    if match is None or not 1 <= int(match[1]) < NO_COUNT:
        return None
    return int(match[1]), int(match[2] or (match[1] if match[0] == match[1] else 0))


def _number(options: Mapping[str, str], name: str) -> int | None:
    """The count that an option asks for, or None."""
    text = options.get(name, "")
    count = int(text) if _COUNT.fullmatch(text) else 0
    return count if 1 <= count < NO_COUNT else None


def _memory(text: str) -> int | None:
    """MiB of "4G", "500", or "0"; None if it cannot be read."""
    match = _MEMORY.fullmatch(text)
    return math.ceil(int(match[1]) * _MIB[match[2].upper()]) if match else None


def _gpus_per_node(options: Mapping[str, str], tasks: int) -> int:
    """GPUs that one node needs for so many tasks, at least 1."""
    by_node, by_task = (_spelled(options, name) for name in ("gpus-per-node", "gpus-per-task"))
    per_node = [parse_gpus(text).count for text in (by_node, options.get("gres", ""))]
    per_task = [parse_gpus(text).count for text in (by_task, options.get("tres-per-task", ""))]
    return max(*per_node, *(count * tasks for count in per_task), 1)


def _spelled(options: Mapping[str, str], name: str) -> str:
    """An option that names GPUs alone, as GRES: "gpu:a100:4" of "a100:4"."""
    return re.sub("[^,]+", r"gpu:\g<0>", options.get(name, ""))


def seconds(text: str) -> int | None:
    """Parse a time limit into seconds; None for no limit: "", "infinite", NO_VAL minutes, or text that is not one."""
    try:
        found = parse_time_limit(text)
    except ValueError:
        return None
    return found if found and found < _NO_TIME_S else None


def wanted(request: JobRequest, change: Rewrite, tier: Tier) -> NodeRequest:
    """Nodes that the request asks for with the change."""
    constraint = change.value if change.option == "--constraint" else request.constraints
    features = tuple(re.findall(r"[^&,]+", constraint)) if _PLAIN.fullmatch(constraint) else None
    gpu_type = tier.gres if change.option in _NAMES_GPUS else request.gpu_type
    if change.option == "--partition":
        return NodeRequest(change.value, features, gpu_type, is_moved=True)
    return NodeRequest(request.partition, features, gpu_type)


def is_offered(listing: str, asked: NodeRequest, needs: Needs | None) -> bool | None:
    """True if nodes take the request; None if that is not known. Each of several partitions must hold the needs.

    listing: output of `sinfo -a -e -h -o FORMAT`.
    """
    rows = list(_rows(listing))
    if needs is None or asked.features is None or not rows:
        return None
    names = asked.partition.split(",")
    return all(_holds([row for row in rows if _is_of(row, name)], asked, needs) for name in names)


def _is_of(row: _Nodes, partition: str) -> bool:
    if not partition:
        return row.partition.endswith("*")
    return row.partition in (partition, f"{partition}*")


def _rows(listing: str) -> Iterable[_Nodes]:
    for line in listing.split("\n"):
        fields = line.split("|")
        if len(fields) == 9 and all(map(_COUNT.fullmatch, fields[1:4])):
            name, nodes, cpus, memory, features, gres, limit, state, groups = fields
            yield _Nodes(
                name, int(nodes), int(cpus), int(memory), frozenset(features.split(",")), gres, seconds(limit),
                state == "up" and groups == "all",
            )  # fmt: skip


def _holds(rows: Sequence[_Nodes], asked: NodeRequest, needs: Needs) -> bool:
    fitting = [row for row in rows if _fits(row, asked, needs)]
    gpus = sum(row.nodes * row.gpus(asked.gpu_type) for row in fitting)
    return sum(row.nodes for row in fitting) >= needs.nodes and gpus >= needs.gpus


def _fits(row: _Nodes, asked: NodeRequest, needs: Needs) -> bool:
    return (
        row.features.issuperset(asked.features or ())
        and row.cpus >= needs.cpus
        and row.memory_mib >= needs.memory_mib
        and row.gpus(asked.gpu_type) >= needs.gpus_per_node
        and (not asked.is_moved or _takes(row, needs))
    )


def _takes(row: _Nodes, needs: Needs) -> bool:
    """True if a partition that the submission did not name would take it."""
    is_too_long = row.limit_s is not None and needs.time_limit_s is not None and needs.time_limit_s > row.limit_s
    return row.is_open and not is_too_long


def kept(text: str, now_s: int, place: str, max_age_s: int = MAX_AGE_S) -> str | None:
    """The listing of a file that to_keep() wrote for this place less than max_age_s ago; else None."""
    first, _, listing = text.partition("\n")
    match = re.match(r"almanac-nodes\t1\t([0-9]{1,12})\t", first)
    is_fresh = match is not None and 0 <= now_s - int(match[1]) < max_age_s
    return listing if match and is_fresh and f"{first}\n" == _head(int(match[1]), place) else None


def to_keep(listing: str, now_s: int, place: str) -> str:
    """Text of the file to save. place: host and Slurm configuration, for clusters that share a home folder."""
    return _head(now_s, place) + listing


def _head(time_s: int, place: str) -> str:
    return f"almanac-nodes\t1\t{time_s}\t{re.sub('[^!-~]', '?', place)}\n"
