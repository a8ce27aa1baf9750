"""`almanac doctor` on GPUs that Slurm shares between jobs: gres/mps and gres/shard."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from almanac.errors import AlmanacError
from almanac.tres import parse_gpus
from almanac.units import listed
from cli.app import App
from cli.doctor.findings import Check

if TYPE_CHECKING:
    from telemetry.slurm.backend import Node

NAME = "GPU sharing"
PACK = "for runs of one user, use almanac-pack (docs/almanac-pack.md)"
_KINDS = ("mps", "shard")


def check_sharing(app: App) -> Iterator[Check]:
    """Yields nothing where no node has gres/mps or gres/shard, and where Slurm does not answer."""
    try:
        nodes = [node for node in app.backend.nodes() if _kinds(node.gres)]
        alone = _one_user_partitions(app) if nodes else frozenset()
        settings = app.backend.configuration() if nodes else ""
    except AlmanacError:
        return  # the check of Slurm reports it
    if not nodes:
        return
    exposed = [node for node in nodes if not set(node.partitions) or not alone.issuperset(node.partitions)]
    users = _users(app, exposed)
    is_shared = users is None or users > 1
    found = [*_mps(nodes, exposed if is_shared else [], users), *_shard(nodes, exposed if is_shared else [], users)]
    yield from found
    yield from _not_recorded(nodes, settings)
    if not found:
        how = "no second user in the last day" if exposed else "one user at a time"
        yield Check(NAME, "ok", f"{listed([node.name for node in nodes], 'node')}: {how}, one GPU each")


def _mps(nodes: Sequence[Node], exposed: Sequence[Node], users: int | None) -> Iterator[Check]:
    """NVIDIA's MPS serves one user at a time; Slurm gives shares of one GPU a node."""
    strangers = [node.name for node in exposed if "mps" in _kinds(node.gres)]
    if strangers:
        said = (
            f"{listed(strangers, 'node')} with gres/mps {_has(strangers)} {_several(users)}: an MPS server takes one "
            "user at a time, and a fault of one job ends all jobs on its GPU"
        )
        yield _warn(said, "set ExclusiveUser=YES on their partitions", strangers)
    several = [node.name for node in nodes if "mps" in _kinds(node.gres) and parse_gpus(node.gres).count > 1]
    if several:
        said = (
            f"{listed(several, 'node')} with gres/mps {_has(several)} several GPUs: Slurm gives out mps on one GPU of "
            "a node at a time, so the others stay idle while jobs wait"
        )
        yield _warn(said, f"remove mps from their Gres; {PACK}", several)


def _shard(nodes: Sequence[Node], exposed: Sequence[Node], users: int | None) -> Iterator[Check]:
    """Nothing in Slurm limits a shard's GPU memory: ConstrainDevices gives its job the whole GPU."""
    strangers = {node.name for node in exposed if "shard" in _kinds(node.gres)}
    names = [node.name for node in nodes if "shard" in _kinds(node.gres)]
    if not names:
        return
    whose = f"other jobs, and {_several(users)} run there" if strangers else "the same user's other jobs"
    said = f"{listed(names, 'node')}: gres/shard has no limit of GPU memory: one job can take the memory of {whose}"
    todo = f"offer MIG slices instead, or {PACK}"
    if strangers:
        todo = f"set ExclusiveUser=YES on their partitions, or {todo}"
    yield _warn(said, todo, names)


def _not_recorded(nodes: Sequence[Node], settings: str) -> Iterator[Check]:
    """Slurm records a GRES of a job only if AccountingStorageTRES names it."""
    tracked = re.search(r"(?m)^AccountingStorageTRES\s*=\s*(.*)$", settings)
    for kind in _KINDS if tracked else ():
        names = [node.name for node in nodes if kind in _kinds(node.gres)]
        if names and tracked and not parse_gpus(tracked[1], kind).count:
            said = f"{listed(names, 'node')} with gres/{kind}: accounting does not record it, so reports miss such jobs"
            yield _warn(said, f"add gres/{kind} to AccountingStorageTRES in slurm.conf", names)


def _kinds(gres: str) -> set[str]:
    """Of "gpu:a100:4(S:0-1),mps:400": {"mps"}."""
    names = {re.split("[:=]", term.strip())[0] for term in re.sub(r"\([^()]*\)", "", gres).split(",")}
    return names & set(_KINDS)


def _one_user_partitions(app: App) -> frozenset[str]:
    """Partitions whose nodes serve one user, or one job, at a time. Raises AlmanacError."""
    found = set()
    for line in app.commands(["scontrol", "-o", "show", "partition"]).decode("utf-8", "replace").splitlines():
        name = re.match(r"PartitionName=(\S+)", line)
        if name and re.search(r"\s(?:ExclusiveUser=YES|OverSubscribe=EXCLUSIVE)(?:\s|$)", line):
            found.add(name[1])
    return frozenset(found)


def _users(app: App, nodes: Sequence[Node]) -> int | None:
    """Users whose jobs ran on these nodes in the last day; None if accounting does not say."""
    if not nodes:
        return 0
    names = ",".join(node.name for node in nodes)
    try:
        text = app.commands(["sacct", "-anXP", "-S", "now-1days", "-o", "User", "-N", names]).decode("utf-8", "replace")
    except AlmanacError:
        return None
    return len(set(text.split()))


def _several(users: int | None) -> str:
    return "several users" if users is None else f"{users} users a day"


def _has(names: Collection[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _warn(said: str, todo: str, names: Sequence[str]) -> Check:
    return Check(NAME, "warn", said, todo, {"nodes": list(names)})
