"""The parameters with which a dynamic node (`slurmd -Z --conf`, Slurm 22.05 and later) registers again. Pure."""

from __future__ import annotations

import re

from slurm_hooks.mig.layouts import with_gpus
from slurm_hooks.mig.steps import NEW_REASON, NodeChange

NO_COMMAND = "it is a dynamic node, and mig.register_command is empty (docs/mig-layouts.md)"
_SOCKETS = re.compile(r"\([^()]*\)")


def with_new_gpus(change: NodeChange) -> str:
    """Gres= of the node with its new GPUs; other GRES stay, without the sockets that Slurm shows in parentheses."""
    return with_gpus(_SOCKETS.sub("", change.dynamic_gres), change.new_gpus)


def parameters(change: NodeChange, is_drained: bool = True) -> str:
    """What slurmd adds to its own `--conf`.

    is_drained: a node that Slurm does not know comes up drained, so no job can start before it is verified.
    """
    gres = f"Gres={with_new_gpus(change)}"
    return f"{gres} State=DRAIN Reason={NEW_REASON}" if is_drained else gres
