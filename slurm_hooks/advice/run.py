"""One run of `almanac publish`: what it needs from the configuration, from Slurm, and from the store."""

from __future__ import annotations

import dataclasses
import grp
import os
import pwd
import re
from functools import cached_property
from pathlib import Path

from advisor.artefacts import load
from advisor.decisions.priority import require_ageing
from advisor.lifecycle import trusted
from almanac.config import Config
from almanac.errors import AlmanacError, ConfigError
from almanac.submit_config import PriorityMode
from slurm_hooks.advice.folder import AdviceDir
from slurm_hooks.advice.publish import Published, PublishRun, publish
from telemetry.slurm.commands import Runner, controller_config
from telemetry.slurm.gpu_types import tiers_now
from telemetry.store.cluster_store import ClusterStore

UNTRAINED = "nothing is trained: there is no advice for users who have run nothing (`almanac train`)"


def prepare(
    store: ClusterStore,
    config: Config,
    commands: Runner,
    now_s: int,
    advice_dir: str = "",
    is_dry: bool = False,
) -> tuple[PublishRun, list[str]]:
    """A run that writes below advice_dir, or hooks.advice_dir, and what is wrong with Slurm's weights and GPU types.

    As root it needs the group of SlurmUser. Raises ConfigError, CommandError, StoreError.
    """
    controller, warnings = _Controller(commands), list[str]()
    mode = _mode(config, controller, warnings)
    now = tiers_now(config.tiers, commands)
    if now.missing:
        warnings.append(f"not advised: {', '.join(tier.name for tier in now.missing)}: {now.why_not}")
    config = dataclasses.replace(config, tiers=now.tiers)
    root = Path(advice_dir or config.hooks.advice_dir).absolute()
    uid = os.geteuid()
    job = PublishRun(
        store=store,
        config=config,
        now_s=now_s,
        folder=AdviceDir(root, uid, _group(config, controller) if uid == 0 else None),
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


class _Controller:
    """The text of `scontrol show config`, read when it is first needed."""

    def __init__(self, commands: Runner) -> None:
        self._commands = commands

    @cached_property
    def text(self) -> str:
        """Raises CommandError."""
        return controller_config(self._commands)


def _mode(config: Config, controller: _Controller, warnings: list[str]) -> PriorityMode:
    """The configured mode, or observe where Slurm's weights do not fit or cannot be read."""
    mode = config.priority.mode
    if mode != "apply":
        return mode
    try:
        require_ageing(controller.text, config.priority)
    except AlmanacError as error:
        warnings.append(f'files say mode "observe": {error}; {error.hint}')
        return "observe"
    return mode


def _group(config: Config, controller: _Controller) -> int:
    """The group that may read sched/: hooks.group, else the group of SlurmUser. Raises ConfigError, CommandError."""
    named = config.hooks.group
    try:
        if named:
            return grp.getgrnam(named).gr_gid
        match = re.search(r"^SlurmUser\s*=\s*[^(\s]*\((\d+)\)", controller.text, re.MULTILINE)
        return pwd.getpwuid(int(match[1] if match else -1)).pw_gid
    except (KeyError, OverflowError) as error:
        seen = f"there is no group {named!r}" if named else "Slurm did not name its SlurmUser"
        raise ConfigError(f"{seen}, whose group has to read the advice", "set hooks.group") from error
