"""Facts and words of a job that a GPU error or a node ended, and of the checkpoints that a long job should save."""

from __future__ import annotations

from advisor.health.checkpoints import chance_text
from almanac.units import format_duration, printable
from reports.job.evidence import JobContext
from reports.job.rules import Fact
from slurm.states import NODE_FAILED
from telemetry.health.errors import JobError, failed_node, fatal_error


def health_facts(context: JobContext) -> dict[str, Fact]:
    """gpu_error_cause: of the error that the job died of; None if it did not, or died of none."""
    error, advice = _error(context), context.checkpoints
    return {
        "gpu_error_cause": error.known.cause if error else None,
        "is_node_failure": context.job["state"] in NODE_FAILED or bool(error and error.known.is_of_node),
        "has_failed_node": bool(_node(context)),
        "failure_chance": advice.chance if advice else None,
    }


def health_words(context: JobContext) -> dict[str, str]:
    """Words on the error, its node, and checkpoints; "" if not known."""
    error, advice, node = _error(context), context.checkpoints, printable(_node(context), 80)
    return {
        "gpu_error": error.code if error else "",
        "gpu_error_about": error.known.about if error else "",
        "gpu_error_place": printable(f"GPU {error.gpu} of {error.host}", 80) if error else "",
        "failed_node": node,
        "exclude": f"--exclude={node}" if node else "",
        "failure_chance": chance_text(advice.chance) if advice else "",
        "checkpoint_every": format_duration(advice.every_s) if advice else "",
        "checkpoint_cost": format_duration(advice.cost_s) if advice else "",
    }


def _error(context: JobContext) -> JobError | None:
    job = context.job
    return fatal_error(job["state"], job["end_s"], context.metrics.get("gpu_errors"), job.get("failed_node"))


def _node(context: JobContext) -> str:
    job = context.job
    return failed_node(job["state"], job["node_list"], job.get("failed_node"), _error(context))
