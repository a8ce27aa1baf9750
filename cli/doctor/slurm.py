"""`almanac doctor` on Slurm: accounting, the backend, MIG slices, shared GPUs, and placement."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from advisor.artefacts import load_speeds
from almanac.errors import AlmanacError
from almanac.hardware import compute_slices
from almanac.tiers import is_known_slice
from almanac.tres import parse_gpus
from almanac.units import format_count, listed
from cli.app import App
from cli.doctor import Check, CheckStatus, found_or_ok
from slurm.accounting import check_cluster, count_users, probe_accounting
from slurm.backend import CommandBackend
from slurm.commands import Settings
from slurm.nodes import one_user_partitions, partition_gpus
from slurm_hooks.types.decide import node_type
from slurm_hooks.types.run import names_of, nodes_of, require_placement, type_faults

if TYPE_CHECKING:
    from almanac.actions_config import PlacementSection
    from almanac.config import Tier
    from slurm.nodes import PartitionGpus, SlurmNode

BACKEND, SLICES, SHARING, PLACEMENT = "Slurm backend", "MIG slices", "GPU sharing", "placement"
PACK = "for runs of one user, use almanac-pack (docs/almanac-pack.md)"
_KINDS = ("mps", "shard")


def check_slurm(app: App) -> Iterator[Check]:
    status = probe_accounting(app.commands)
    yield Check("Slurm", "ok", f"version {status.version}, cluster {status.cluster}")
    if status.tracks_gpus is False:
        todo = "add gres/gpu to AccountingStorageTRES in slurm.conf"
        yield Check("accounting", "fail", "GPUs are not recorded", todo)
    if not status.has_json:
        said = "sacct answers, but sacct --json does not: job names and families are unknown"
        yield Check("accounting", "warn", said, "install Slurm's JSON serializer plugin")
    else:
        yield Check("accounting", "ok", f"sacct answers, {status.jobs_last_day} jobs in the last day")
    named = app.cluster_name or app.config.site.cluster
    if named:
        check_cluster(app.commands, named)


def check_backend(app: App) -> Iterator[Check]:
    """A fault is only a warning until something depends on the backend. The queue is not read, because squeue's JSON of
    10,000 pending jobs takes 15 s and 1.9 GiB.
    """
    named = app.config.slurm.backend
    bad: CheckStatus = "fail" if named != "commands" or app.config.priority.mode == "apply" else "warn"
    try:
        backend = app.backend
        program, release = backend.program(), backend.release()
        cluster, nodes = backend.cluster(), len(backend.nodes())
    except AlmanacError as error:
        yield Check(BACKEND, bad, f"{named}: {error}", error.hint)
        return
    count = "1 node" if nodes == 1 else f"{format_count(nodes)} nodes"
    said = f"{named}: {program} reaches slurmctld {release} of {cluster}, {count}"
    details = {"backend": named, "program": program, "slurmctld": release, "cluster": cluster, "nodes": nodes}
    if nodes:
        yield Check(BACKEND, "ok", said, "", details)
    else:
        yield Check(BACKEND, bad, said, "run `scontrol show nodes` to see why Slurm shows no node", details)


def check_slices(app: App) -> Iterator[Check]:
    """Yields nothing where neither Slurm nor the configuration has slices, and where Slurm does not answer."""
    try:
        found = [gpus for gpus in partition_gpus(app.commands) if gpus.is_in_service]
    except AlmanacError:
        return  # the check of Slurm reports it
    types = {kind for gpus in found for kind in gpus.types}
    slices = sorted(kind for kind in types if compute_slices(kind))
    tiers = [tier for tier in app.config.tiers if tier.is_slice]
    if not slices and not tiers:
        return
    checks = [*_slice_tiers(tiers, types), *_slice_types(slices, app.config.tiers), *_mixed(found)]
    yield from found_or_ok(checks, SLICES, f"advised: {', '.join(tier.name for tier in tiers)}")


def _slice_tiers(tiers: Sequence[Tier], types: set[str]) -> Iterator[Check]:
    for tier in tiers:
        if not is_known_slice(tier):
            said = f"{tier.name}: {tier.gpu_model} has no MIG profile {tier.gres}"
            yield Check(SLICES, "warn", said, "correct gpu_model or gres of this [[tiers]] table")
    absent = [tier.name for tier in tiers if tier.gres and tier.gres not in types]
    if absent:
        said = f"no node in service has the GRES type of {listed(absent, 'tier')}, so almanac does not advise it"
        yield Check(SLICES, "warn", said, "resume its nodes, or remove the [[tiers]] table", {"tiers": absent})


def _slice_types(slices: Sequence[str], tiers: Sequence[Tier]) -> Iterator[Check]:
    known = {tier.gres for tier in tiers} | {tier.partition for tier in tiers if tier.partition}
    strange = [kind for kind in slices if kind not in known]
    if strange and not any(tier.is_slice and not tier.gres for tier in tiers):
        said = f"no tier names {listed(strange, 'GRES type')} of MIG slices, so almanac does not advise it"
        yield Check(SLICES, "warn", said, "describe each one in a [[tiers]] table", {"types": strange})


def _mixed(found: Sequence[PartitionGpus]) -> Iterator[Check]:
    """Slurm gives an untyped request whichever GPU it finds first: a slice, even if whole GPUs are idle."""
    types: defaultdict[str, set[str]] = defaultdict(set)
    for gpus in found:
        types[gpus.partition].update(gpus.types)
    mixed = [name for name, kinds in sorted(types.items()) if len({bool(compute_slices(kind)) for kind in kinds}) > 1]
    if mixed:
        has = "has" if len(mixed) == 1 else "have"
        said = f"{listed(mixed, 'partition')} {has} whole GPUs and MIG slices: untyped requests land on slices"
        todo = (
            "give requests without a GPU type the type of whole GPUs in job_submit.lua (docs/mig.md), "
            "or move nodes with slices to a partition of their own"
        )
        yield Check(SLICES, "warn", said, todo, {"partitions": mixed})


def check_sharing(app: App) -> Iterator[Check]:
    """Yields nothing if no node has gres/mps or gres/shard, and if Slurm does not answer."""
    try:
        nodes = [node for node in app.backend.nodes() if _shared_by(node.gres)]
        alone = one_user_partitions(app.commands) if nodes else frozenset()
        settings = app.backend.settings() if nodes else Settings()
    except AlmanacError:
        return  # the check of Slurm reports it
    if not nodes:
        return
    exposed = [node for node in nodes if not set(node.partitions) or not alone.issuperset(node.partitions)]
    users = _users(app, exposed)
    is_shared = users is None or users > 1
    found = [*_mps(nodes, exposed if is_shared else [], users), *_shard(nodes, exposed if is_shared else [], users)]
    how = "no second user in the last day" if exposed else "one user at a time"
    yield from found_or_ok(found, SHARING, f"{listed([node.name for node in nodes], 'node')}: {how}, one GPU each")
    yield from _not_recorded(nodes, settings)


def _mps(nodes: Sequence[SlurmNode], exposed: Sequence[SlurmNode], users: int | None) -> Iterator[Check]:
    """NVIDIA's MPS serves one user at a time; Slurm gives shares of one GPU a node."""
    strangers = [node.name for node in exposed if "mps" in _shared_by(node.gres)]
    if strangers:
        said = (
            f"{listed(strangers, 'node')} with gres/mps {_has(strangers)} {_several(users)}: an MPS server takes one "
            "user at a time, and a fault of one job ends all jobs on its GPU"
        )
        yield _warn_sharing(said, "set ExclusiveUser=YES on their partitions", strangers)
    several = [node.name for node in nodes if "mps" in _shared_by(node.gres) and parse_gpus(node.gres).count > 1]
    if several:
        said = (
            f"{listed(several, 'node')} with gres/mps {_has(several)} several GPUs: Slurm gives out mps on one GPU of "
            "a node at a time, so the others stay idle while jobs wait"
        )
        yield _warn_sharing(said, f"remove mps from their Gres; {PACK}", several)


def _shard(nodes: Sequence[SlurmNode], exposed: Sequence[SlurmNode], users: int | None) -> Iterator[Check]:
    """Nothing in Slurm limits a shard's GPU memory: ConstrainDevices gives its job the whole GPU."""
    strangers = {node.name for node in exposed if "shard" in _shared_by(node.gres)}
    names = [node.name for node in nodes if "shard" in _shared_by(node.gres)]
    if not names:
        return
    whose = f"other jobs, and {_several(users)} run there" if strangers else "the same user's other jobs"
    said = f"{listed(names, 'node')}: gres/shard has no limit of GPU memory: one job can take the memory of {whose}"
    todo = f"offer MIG slices instead, or {PACK}"
    if strangers:
        todo = f"set ExclusiveUser=YES on their partitions, or {todo}"
    yield _warn_sharing(said, todo, names)


def _not_recorded(nodes: Sequence[SlurmNode], settings: Settings) -> Iterator[Check]:
    """Slurm records a GRES of a job only if AccountingStorageTRES names it."""
    tracked = settings.get("AccountingStorageTRES")
    for kind in _KINDS if tracked is not None else ():
        names = [node.name for node in nodes if kind in _shared_by(node.gres)]
        if names and not parse_gpus(tracked or "", kind).count:
            said = f"{listed(names, 'node')} with gres/{kind}: accounting does not record it, so reports miss such jobs"
            yield _warn_sharing(said, f"add gres/{kind} to AccountingStorageTRES in slurm.conf", names)


def _shared_by(gres: str) -> set[str]:
    """Of "gpu:a100:4(S:0-1),mps:400": {"mps"}."""
    names = {re.split("[:=]", term.strip())[0] for term in re.sub(r"\([^()]*\)", "", gres).split(",")}
    return names & set(_KINDS)


def _users(app: App, nodes: Sequence[SlurmNode]) -> int | None:
    """Users whose jobs ran on these nodes in the last day; None if accounting does not say."""
    if not nodes:
        return 0
    try:
        return count_users(app.commands, (node.name for node in nodes))
    except AlmanacError:
        return None


def _several(users: int | None) -> str:
    return "several users" if users is None else f"{users} users a day"


def _has(names: Collection[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _warn_sharing(said: str, todo: str, names: Sequence[str]) -> Check:
    return Check(SHARING, "warn", said, todo, {"nodes": list(names)})


def check_placement(app: App) -> Iterator[Check]:
    """Yields nothing without placement.partitions and placement.types, and where Slurm does not answer."""
    settings = app.config.placement
    if not settings.partitions and not settings.types:
        return
    backend = CommandBackend(app.commands)
    try:
        release, nodes, told = backend.release(), backend.nodes(), backend.settings()
    except AlmanacError:
        return  # the check of Slurm reports it
    try:
        require_placement(settings, release)
    except AlmanacError as error:
        yield Check(PLACEMENT, "fail", str(error), error.hint)
        return
    faults = [*_partitions(settings, nodes), *_type_names(app, nodes), *_node_types(settings, nodes)]
    faults += _requeue(settings, told)
    said = f"{listed(settings.types, 'type')}, by {settings.select_by}; mode {settings.mode}"
    yield from found_or_ok(faults, PLACEMENT, said)


def _partitions(settings: PlacementSection, nodes: Sequence[SlurmNode]) -> Iterator[Check]:
    known = {name for each in nodes for name in each.partitions}
    unknown = [name for name in settings.partitions if name not in known]
    if unknown:
        yield Check(PLACEMENT, "fail", f"no node is in {listed(unknown, 'partition')}", "correct placement.partitions")


def _node_types(settings: PlacementSection, nodes: Sequence[SlurmNode]) -> Iterator[Check]:
    """Nodes that have none of the types, or several: at least one type must be right."""
    own = nodes_of(settings, nodes)
    if settings.select_by == "constraint":
        unclear = [each.name for each in own if not node_type(each, settings)]
    else:
        unclear = [each.name for each in own if not set(each.gpus) & set(settings.types)]
    if unclear and any(set(names_of(each, settings)) & set(settings.types) for each in own):
        what = "feature" if settings.select_by == "constraint" else "GRES type"
        said = f"{listed(unclear, 'node')} without exactly one of placement.types: almanac does not use their GPUs"
        todo = f"give each node one of the types as its {what}, or name its type"
        yield Check(PLACEMENT, "warn", said, todo, {"nodes": unclear})


def _type_names(app: App, nodes: Sequence[SlurmNode]) -> Iterator[Check]:
    """Slurm, [[gpu_types]], and the trained speeds must call the types by the same names."""
    learned: Collection[str] | None = app.config.placement.types
    try:
        models_dir = app.store.models_dir
    except AlmanacError:
        models_dir = None  # the check of the store reports it
    try:
        if models_dir is not None:
            learned = None if (table := load_speeds(models_dir)) is None else table.names
    except AlmanacError as error:
        yield Check(PLACEMENT, "warn", f"the speeds of the GPU types cannot be read: {error}", error.hint)
    for fault in type_faults(app.config.placement, nodes, app.config.gpu_types, learned):
        yield Check(PLACEMENT, "fail" if fault.is_fatal else "warn", fault.said, fault.todo)


def _requeue(settings: PlacementSection, told: Settings) -> Iterator[Check]:
    """A requeue needs the submit line, which only accounting has."""
    stored = told.get("AccountingStorageType")
    if settings.requeue and stored and not stored.endswith("slurmdbd"):
        said = f"placement.requeue is on, and AccountingStorageType is {stored}: no job will be requeued"
        yield Check(PLACEMENT, "warn", said, "use accounting_storage/slurmdbd, or set placement.requeue = false")
