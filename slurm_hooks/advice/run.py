"""One run of `almanac publish`: what it needs from the configuration, from Slurm, and from the store."""

from __future__ import annotations

import dataclasses
import os

from advisor.artefacts import load
from advisor.decisions.priority import require_ageing
from advisor.lifecycle import trusted
from almanac.config import Config
from almanac.errors import AlmanacError
from almanac.submit_config import PriorityMode
from slurm_hooks.advice.publish import Published, PublishRun, publish
from telemetry.slurm.commands import Runner, controller_config
from telemetry.slurm.gpu_types import tiers_now
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.outgoing import outgoing_of

UNTRAINED = "nothing is trained: there is no advice for users who have run nothing (`almanac train`)"


def prepare(
    store: ClusterStore,
    config: Config,
    commands: Runner,
    now_s: int,
    is_dry: bool = False,
) -> tuple[PublishRun, list[str]]:
    """A run, and what is wrong with Slurm's weights and GPU types. Raises ConfigError, CommandError, StoreError."""
    warnings = list[str]()
    mode = _mode(config, commands, warnings)
    now = tiers_now(config.tiers, commands)
    if now.missing:
        warnings.append(f"not advised: {', '.join(tier.name for tier in now.missing)}: {now.why_not}")
    config = dataclasses.replace(config, tiers=now.tiers)
    job = PublishRun(
        store=store,
        config=config,
        now_s=now_s,
        folder=outgoing_of(store),
        trained=trusted(load(store.models_dir), config, now_s),
        mode=mode,
        is_dry=is_dry,
        processes=len(os.sched_getaffinity(0)),
    )
    return job, warnings


def publish_site(job: PublishRun) -> Published:
    """Publish the advice of every user. Warns where no model was trained. Raises what `publish` raises."""
    done = publish(job)
    if job.trained is None:
        done.warnings.append(UNTRAINED)
    return done


def _mode(config: Config, commands: Runner, warnings: list[str]) -> PriorityMode:
    """The configured mode, or observe where Slurm's weights do not fit or cannot be read."""
    mode = config.priority.mode
    if mode != "apply":
        return mode
    try:
        require_ageing(controller_config(commands), config.priority)
    except AlmanacError as error:
        warnings.append(f'files say mode "observe": {error}; {error.hint}')
        return "observe"
    return mode
