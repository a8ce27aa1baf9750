"""The sources that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from almanac.config import Config
from almanac.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

    from telemetry.slurm.commands import SlurmCommands
    from telemetry.sources.base import Source

SourceName = Literal["sacct", "prometheus", "prolog", "squeue"]


def configured_sources(config: Config) -> tuple[SourceName, ...]:
    """Names of the sources that a plain `almanac ingest` reads; bindings first, because they are gone soonest."""
    wanted: dict[SourceName, bool] = {
        "squeue": True,
        "prolog": bool(config.bindings.prolog_dir),
        "sacct": True,
        "prometheus": bool(config.prometheus.url),
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def source_of(
    name: SourceName,
    config: Config,
    cluster: str,
    commands: SlurmCommands,
    clock: Callable[[], int],
    open_jobs: Callable[[], Mapping[int, int]],
    with_steps: Callable[[pa.Table], pa.Table],
) -> Source:
    """The source of this name. clock: seconds since 1970. open_jobs: ids that sacct is asked for again, and when
    each was submitted.

    with_steps: chooses the jobs whose steps are read.

    Raises ConfigError where a setting that it needs is missing.
    """
    if name == "sacct":
        from telemetry.sources.sacct import SacctSource

        return SacctSource(
            commands, cluster, config.tiers, config.slurm, clock, open_jobs=open_jobs, with_steps=with_steps
        )
    if name == "prometheus":
        if not config.prometheus.url:
            raise ConfigError("no Prometheus is configured", "set prometheus.url")
        from telemetry.sources.prometheus import PrometheusSource

        return PrometheusSource(config.prometheus)
    from telemetry.sources.bindings import PrologSource, SqueueSource

    if name == "squeue":
        return SqueueSource(commands, clock=clock, cluster=cluster)
    if not config.bindings.prolog_dir:
        raise ConfigError("no folder of prolog records is configured", "set bindings.prolog_dir")
    return PrologSource(Path(config.bindings.prolog_dir), cluster)
