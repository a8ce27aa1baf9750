"""The owner's side of a GPU type: the types that a request allows, and the words and options that allow a change. Pure.

A site asks for types by node features (--constraint) or by GRES types; see `Placement.select_by`. Owners agree by words
of --comment, and to a requeue by the options of the job, too.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from almanac.actions_config import TypeSelector
from almanac.errors import RequestError
from almanac.units import MOST_USER_TEXT
from slurm.options import parse_script
from slurm.queued_job import TYPE, RequestKey
from slurm_hooks.jobs.log import MAX_TEXT, Key

_WORD = r"[A-Za-z_][\w.+:-]{0,63}"
_PLAIN = re.compile(_WORD, re.ASCII)
_CHOICE = re.compile(rf"\[({_WORD}(?:\|{_WORD})*)\]|\(({_WORD}(?:\|{_WORD})*)\)|({_WORD}(?:\|{_WORD})*)", re.ASCII)
_TERM = re.compile(rf"(?P<before>(?:gres[/:])?gpu)(?:[/:](?P<type>{TYPE}))?(?P<count>(?:[:=][0-9]{{1,6}})?)", re.ASCII)
_CPU_TERM = re.compile(r"cpu[:=][0-9]{1,9}", re.ASCII)


@dataclass(frozen=True)
class TypeRequest:
    """The part of a job's request that says the type. text: as Slurm shows it.

    allowed: the types of a choice such as [a|b]; all types if it names one or none, as the owner accepts any.
    type, count: of a GRES type, "" for none: "a100" and ":2".
    """

    key: Key
    text: str
    allowed: frozenset[str]
    parts: tuple[str, str] = ("", "")
    type: str = ""
    count: str = ""

    def of(self, gpu_type: str) -> str:
        """The text that asks for this type alone; other terms stay."""
        before, after = self.parts
        return f"{before}{gpu_type}{after}"


def type_request(
    constraints: str, requests: Mapping[RequestKey, str], types: Collection[str], select_by: TypeSelector
) -> TypeRequest | None:
    """Parse the type in a request; None if almanac cannot change the type and keep the rest of the request."""
    if sum(map(len, requests.values())) > MAX_TEXT:
        return None
    if select_by == "gres":
        found = gres_request(requests)
        is_known = found is not None and (not found.type or found.type in types)
        return replace(found, allowed=frozenset(types)) if found and is_known else None
    return _constraint_request(constraints, types)


def _constraint_request(text: str, types: Collection[str]) -> TypeRequest | None:
    """ "ssd&[a100|h100]&ib": terms joined by &; at most one names types, and then only types."""
    if len(text) > MAX_TEXT:
        return None
    if not text:
        return TypeRequest("Features", "", frozenset(types))
    terms = _terms(text)
    if terms is None:
        return None
    named = []
    for place, term in enumerate(terms):
        match = _CHOICE.fullmatch(term)
        if match is None:
            return None
        words = next(group for group in match.groups() if group).split("|")
        found = [word for word in words if word in types]
        if found and len(found) < len(words):
            return None
        if len(words) > 1 and not term.startswith(("(", "[")) and len(terms) > 1:
            return None  # "a|b&c": Slurm reads it from left to right
        if found:
            named.append((place, frozenset(found)))
    if len(named) > 1:
        return None
    if not named:
        return TypeRequest("Features", text, frozenset(types), (f"{_grouped(text, terms)}&", ""))
    [(place, allowed)] = named
    if len(allowed) == 1:
        allowed = frozenset(types)
    before, after = "&".join(terms[:place]), "&".join(terms[place + 1 :])
    parts = (f"{before}&" if before else "", f"&{after}" if after else "")
    return TypeRequest("Features", text, allowed, parts)


def _grouped(text: str, terms: list[str]) -> str:
    return f"({text})" if len(terms) == 1 and "|" in text and text[0] not in "([" else text


def _terms(text: str) -> list[str] | None:
    """Split at & outside of brackets; None where brackets are nested or left open."""
    terms, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if depth not in (0, 1):
            return None
        if character == "&" and depth == 0:
            terms.append("")
        else:
            terms[-1] += character
    return terms if depth == 0 and all(terms) else None


def gres_request(requests: Mapping[RequestKey, str] | Mapping[Key, str]) -> TypeRequest | None:
    """The only GPU term of a job, with a type or without one, and with it at most "cpu=4"; None for another request.

    None too for --gpus-per-socket, which no update changes.
    """
    found = None
    for key, text in requests.items():
        terms = text.split(",")
        matches = [_TERM.fullmatch(term) for term in terms]
        others = [term for term, match in zip(terms, matches, strict=True) if not match]
        gpus = [(place, match) for place, match in enumerate(matches) if match]
        if len(gpus) + (found is not None) > 1 or not all(_CPU_TERM.fullmatch(term) for term in others):
            return None
        for place, match in gpus:
            if key == "TresPerSocket":
                return None
            before = ",".join([*terms[:place], f"{match['before']}:"])
            after = ",".join([match["count"], *terms[place + 1 :]])
            found = TypeRequest(key, text, frozenset(), (before, after), match["type"] or "", match["count"])
    return found


def names_one(request: TypeRequest) -> str:
    """The type, where the request already asks for one alone; "" otherwise."""
    return next((each for each in sorted(request.allowed) if request.of(each) == request.text), "")


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
    """Return True if the owner lets almanac choose the GPU type while the job waits."""
    return ANY_GPU in consent_words(comment)


def is_movable(comment: str) -> bool:
    """Return True if the owner lets almanac requeue the running job; that needs both words."""
    return consent_words(comment) == {ANY_GPU, MOVABLE}


@dataclass(frozen=True)
class CheckpointSignal:
    """The signal that --signal names. is_batch: to the batch shell alone. before_s: time for the checkpoint."""

    name: str
    is_batch: bool
    before_s: int

    def command(self, job_id: int) -> list[str]:
        """Return the scancel command that sends the signal as Slurm does near the time limit."""
        return ["scancel", f"--signal={self.name}", *(["--batch"] if self.is_batch else []), str(job_id)]


def checkpoint_signal(text: str) -> CheckpointSignal | None:
    """Parse --signal; None if it cannot be read, or its signal would end the job."""
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
    """The terms of a requeue in a running job's options. why_not: "" if it may be requeued."""

    signal: CheckpointSignal | None = None
    why_not: str = ""


def requeue_terms(script: str, submit_line: str, appends_by_default: bool) -> RequeueTerms:
    """Read the terms of a requeue from a job's script and its submit line, which wins.

    The line is Slurm's: words joined by blanks, so that a comment in it looks like options. So any word of it that asks
    to empty the output counts. appends_by_default: JobFileAppend of slurm.conf. Options of the environment
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
