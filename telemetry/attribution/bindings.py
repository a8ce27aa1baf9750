"""The GPUs of a job in one record of a prolog or of squeue.

Slurm's index names a GPU only on a node without MIG: with MIG it counts MIG instances and GPUs alike. There a record
needs the UUID that Slurm gives to a MIG instance. A UUID names one GPU at any index, so it wins over an index.
"""

from __future__ import annotations

from dataclasses import dataclass

UNBOUND_MIG = "shared node with MIG, GPU binding without a known UUID"
CONTRADICTED = "shared node, GPU index and UUID of the binding differ"

Unit = tuple[int, str]
"""GPU index on its host, and MIG instance id ("" for the whole GPU)."""


@dataclass(frozen=True)
class Binding:
    """One GPU of a job as a prolog record or squeue named it, at seen_s.

    gpu: Slurm's index. uuid: of the GPU, or of a MIG instance whose GPU is not known. mig: instance of that GPU.
    """

    job_id: int
    host: str
    gpu: int
    origin: str
    seen_s: int
    uuid: str | None = None
    mig: str | None = None


def units_of(record: Binding, seen: frozenset[Unit], names: frozenset[tuple[str, Unit]]) -> frozenset[Unit] | str:
    """The units that a record names on its host, or why it is not believed.

    seen: units of the host in telemetry. names: the UUIDs that telemetry gives them, where it does.
    """
    named = frozenset(unit for uuid, unit in names if uuid == record.uuid)
    if record.mig is not None or (record.uuid or "").startswith("MIG-"):
        return frozenset(unit for unit in named if record.mig in (None, unit[1])) or UNBOUND_MIG
    if any(mig for _, mig in seen):
        return frozenset(unit for unit in named & seen if not unit[1]) or UNBOUND_MIG
    # The GPU was whole then; telemetry can show its UUID on instances at another time of the day.
    own, named = (record.gpu, ""), frozenset(unit for unit in named if not unit[1])
    has_other_uuid = record.uuid is not None and any(unit == own for _, unit in names)
    if own in named or not (named or has_other_uuid):
        return frozenset({own})
    # The UUID wins if telemetry shows it at one other index. At no index, or at several, it identifies no GPU.
    return named if len(named) == 1 else CONTRADICTED
