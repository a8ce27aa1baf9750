"""`almanac doctor` on slurm.backend, through which `almanac reprioritize` reaches slurmctld."""

from __future__ import annotations

from collections.abc import Iterator

from almanac.errors import AlmanacError
from almanac.units import format_count
from cli.app import App
from cli.doctor.findings import Check, CheckStatus

NAME = "Slurm backend"


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
        yield Check(NAME, bad, f"{named}: {error}", error.hint)
        return
    count = "1 node" if nodes == 1 else f"{format_count(nodes)} nodes"
    said = f"{named}: {program} reaches slurmctld {release} of {cluster}, {count}"
    details = {"backend": named, "program": program, "slurmctld": release, "cluster": cluster, "nodes": nodes}
    if nodes:
        yield Check(NAME, "ok", said, "", details)
    else:
        yield Check(NAME, bad, said, "run `scontrol show nodes` to see why Slurm shows no node", details)
