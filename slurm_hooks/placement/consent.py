"""What the owner of a job allows: words of --comment, and for a requeue the options of the job. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from almanac.errors import RequestError
from almanac.units import MOST_USER_TEXT
from telemetry.slurm.options import parse_script

ANY_GPU, MOVABLE = "almanac:any-gpu", "almanac:movable"
_SIGNAL = re.compile(r"(?:(?P<flags>[BR]{1,2}):)?(?P<name>[A-Za-z0-9]{1,12})(?:@(?P<before>[0-9]{1,5}))?", re.ASCII)
_DEFAULT_BEFORE_S = 60
"""Slurm's, where --signal names no time."""
_ENDS_JOB = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT}


def consent_words(comment: str) -> frozenset[str]:
    """The words of almanac in a comment, lower-case as documented; other text stands around them, by blank or comma."""
    if len(comment) > MOST_USER_TEXT:
        return frozenset()
    return frozenset(re.split(r"[\s,]+", comment)) & {ANY_GPU, MOVABLE}


def accepts_any(comment: str) -> bool:
    """Whether the owner lets almanac choose the GPU type while the job waits."""
    return ANY_GPU in consent_words(comment)


def is_movable(comment: str) -> bool:
    """Whether the owner lets almanac requeue the running job; that needs both words."""
    return consent_words(comment) == {ANY_GPU, MOVABLE}


@dataclass(frozen=True)
class CheckpointSignal:
    """What --signal asks for. is_batch: to the batch shell alone. before_s: time for the checkpoint."""

    name: str
    is_batch: bool
    before_s: int

    def command(self, job_id: int) -> list[str]:
        """As Slurm itself would send it near the time limit."""
        return ["scancel", f"--signal={self.name}", *(["--batch"] if self.is_batch else []), str(job_id)]


def checkpoint_signal(text: str) -> CheckpointSignal | None:
    """None where --signal cannot be read, or where its signal would end the job."""
    match = _SIGNAL.fullmatch(text)
    if match is None:
        return None
    word = match["name"].upper().removeprefix("SIG")
    known = {each.name.removeprefix("SIG"): each for each in signal.Signals}
    found = known.get(word) or next((each for each in signal.Signals if word == str(each.value)), None)
    if found is None or found in _ENDS_JOB:
        return None
    before_s = int(match["before"]) if match["before"] else _DEFAULT_BEFORE_S
    return CheckpointSignal(found.name.removeprefix("SIG"), "B" in (match["flags"] or ""), before_s)


@dataclass(frozen=True)
class RequeueTerms:
    """What a running job's options say of a requeue. why_not: "" where it may be requeued."""

    signal: CheckpointSignal | None = None
    why_not: str = ""


def requeue_terms(script: str, submit_line: str, appends_by_default: bool) -> RequeueTerms:
    """Of a job's script and its submit line, which wins.

    The line is Slurm's: words joined by blanks, so that a comment in it looks like options. So any word of it that
    asks to empty the output counts. appends_by_default: JobFileAppend of slurm.conf. Options of the environment
    (SBATCH_OPEN_MODE) are not seen.
    """
    if not submit_line or len(submit_line) > MOST_USER_TEXT:
        return RequeueTerms(why_not="its submit line is not in Slurm's accounting, or too long")
    try:
        found = {option.name: str(option.value) for option in parse_script(script)}
    except RequestError:
        return RequeueTerms(why_not="its script's options cannot be read")
    typed = _typed(submit_line)
    modes = typed.get("open-mode") or [found.get("open-mode") or ("append" if appends_by_default else "truncate")]
    signals = typed.get("signal") or [found.get("signal", "")]
    if not signals[-1]:
        return RequeueTerms(why_not="has no --signal for a checkpoint")
    wanted = checkpoint_signal(signals[-1])
    if wanted is None:
        return RequeueTerms(why_not="its --signal is none that leaves it running")
    if not all(mode and "append".startswith(mode) for mode in modes):
        return RequeueTerms(wanted, "a restart would empty its output (no --open-mode=append)")
    return RequeueTerms(wanted)


def _typed(line: str) -> dict[str, list[str]]:
    """The values of two options wherever they stand in a submit line."""
    found: dict[str, list[str]] = {}
    for match in re.finditer(r"(?:^|\s)--(open-mode|signal)(?:=|\s+)(\S*)", line):
        found.setdefault(match[1], []).append(match[2])
    return found
