"""The GPU types that nodes offer now. Slurm refuses a submission whose type no node has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from almanac.errors import AlmanacError
from almanac.submit_config import Tier
from telemetry.slurm.commands import Runner

_OUT = frozenset({"down", "drain", "drng", "fail", "failg", "futr", "inval", "unk", "err", "error"})
"""Compact states (sinfo's %t) of nodes that take no job until somebody acts."""
_MARKS = "*~#!%$@^-+"


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
    """What sinfo says of all nodes with GPUs. Raises CommandError."""
    lines = commands(["sinfo", "-a", "-e", "-h", "-o", "%P|%t|%G"]).decode("utf-8", "replace").splitlines()
    rows = [fields for line in lines if len(fields := line.split("|")) == 3]
    return [
        PartitionGpus(name.rstrip("*"), state.rstrip(_MARKS).lower() not in _OUT, types)
        for name, state, gres in rows
        if (types := _types(gres))
    ]


def _types(gres: str) -> tuple[str, ...]:
    """Of "gpu:a100:2(S:0-1),gpu:1g.10gb:7,nvme:1": a100, 1g.10gb."""
    terms = [term.partition("(")[0].split(":") for term in gres.split(",")]
    gpus = [term for term in terms if term[0] == "gpu" and term[-1] != "0"]
    return tuple(dict.fromkeys(term[1] if len(term) == 3 else "" for term in gpus))


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
