"""The message and the question for a submission at a terminal, and when they are due. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from almanac.records import JobRequest
from almanac.submit_config import SubmitMode, Tier
from almanac.tiers import Rewrite, names_any_tier, requested_tier, rewrite
from almanac.units import printable
from slurm_hooks.advice import file as advice_file
from slurm_hooks.advice.file import AdviceFile, AdviceRow
from slurm_hooks.submit.choices import Choice, ChoiceWord

COLUMNS = 80
"""Most columns of a message; a narrower terminal has fewer."""
HEAD = "almanac: "
INDENT = " " * len(HEAD)
PLACING = ("nodelist", "nodefile", "exclude", "reservation")
"""Options with which nothing is changed: they may leave no nodes of the advised tier."""
SHORT = {"--constraint": "-C", "--partition": "-p"}
Answer = Literal["yes", "no", "always", "never"]
_SAFE = re.compile(r"[A-Za-z0-9_.:,+&|=-]*")


class PromptAction(Enum):
    """Outcome for a submission: nothing, a message, a question, a silent change, or a change with a message."""

    NOTHING = "nothing"
    TELL = "tell"
    ASK = "ask"
    CHANGE = "change"
    CHANGE_AND_SAY = "change and say"


@dataclass(frozen=True)
class Proposal:
    """Another tier for a submission. change: how to ask for it; its value is "" where that cannot be rewritten.

    asked: the tier that the request names, None: none. not_offered: "" unless no node is known to take the change.
    said: the whole message of a proposal of a GPU type, "" for a memory tier. check: the change whose nodes are looked
    for; None: change.
    """

    key: str
    gpus: int
    row: AdviceRow
    tier: Tier
    change: Rewrite
    asked: Tier | None = None
    not_offered: str = ""
    said: str = ""
    check: Rewrite | None = None

    @property
    def choice_key(self) -> str:
        """The key of answers. No name key has a "?", so that answers on types never stand for answers on memory."""
        return f"?{self.key}"[:64] if self.said else self.key

    @property
    def pilot(self) -> int | None:
        """Jobs that may take the tier; None: any number, as of a larger tier."""
        is_larger = self.asked is not None and self.asked.size < self.tier.size
        return None if is_larger else self.row.pilot


def propose(request: JobRequest, advice: AdviceFile, is_placed: bool = False) -> Proposal | None:
    """The other tier, or None: no row has a tier, the request names a tier of that size already, it leaves a choice
    between tiers, or the tier is a MIG slice and the job may use more than one GPU. is_placed: whether an option of
    PLACING is given.
    """
    key = request.name_key
    row = advice.find(key, request.gpu_count) if request.gpu_count > 0 else None
    if row is None or row.kind != advice_file.FAMILY or not row.text:
        return None
    tier = next((tier for tier in advice.tiers if tier.name == row.tier), None)
    if tier is None:
        return None
    asked = requested_tier(request, advice.tiers)
    if asked is None and names_any_tier(request, advice.tiers):
        return None
    if asked is not None and asked.size == tier.size:
        return None
    if tier.is_slice and not request.is_one_gpu:
        return None
    change = _change(request, advice.tiers, asked, tier)
    if is_placed:
        change = Rewrite(why_not="the request says which nodes it wants")
    return Proposal(key, request.gpu_count, row, tier, change, asked)


def _change(request: JobRequest, tiers: tuple[Tier, ...], asked: Tier | None, target: Tier) -> Rewrite:
    if asked is not None and asked.kind != target.kind:
        return Rewrite(why_not=f"{asked.name} is asked for by another option than {target.name}")
    return rewrite(request, tiers, target)


def action(mode: SubmitMode, proposal: Proposal, choice: Choice | None, now_s: int) -> PromptAction:
    """The action for a submission. All modes except apply assume a terminal."""
    word = choice.word if choice else None
    can_change = bool(proposal.change.value)
    is_recent = choice is not None and choice.is_recent(now_s)
    is_always = choice is not None and word == "always" and choice.tier == proposal.tier.name
    if mode == "off" or word == "never":
        return PromptAction.NOTHING
    if mode == "apply":
        return PromptAction.CHANGE if can_change else PromptAction.NOTHING
    if mode == "ask" and is_always:
        return PromptAction.CHANGE_AND_SAY if can_change else PromptAction.NOTHING
    if is_recent and (word == "asked" or is_always):
        return PromptAction.NOTHING
    return PromptAction.ASK if mode == "ask" and can_change else PromptAction.TELL


def checked(proposal: Proposal, is_offered: bool | None) -> Proposal:
    """The proposal, without its change unless nodes would take the changed request. is_offered: None: not known."""
    if not proposal.change.value or is_offered:
        return proposal
    nodes = "could not check for nodes" if is_offered is None else "found no nodes for this job"
    return unchanged(proposal, f"almanac {nodes} with {typed(proposal.change)}")


def unchanged(proposal: Proposal, why_not: str) -> Proposal:
    """The proposal without its change."""
    return replace(proposal, change=Rewrite(why_not=why_not), not_offered=why_not)


def answer(text: str) -> Answer:
    """The meaning of a line that the user typed at the question."""
    word = text.strip().lower()
    meanings: dict[str, Answer] = {"y": "yes", "yes": "yes", "a": "always", "always": "always"}
    return {**meanings, "v": "never", "never": "never"}.get(word, "no")


def new_choice(proposal: Proposal, earlier: Choice | None, word: Answer | None, now_s: int) -> Choice:
    """The choice to keep after an answer. word: from answer(); None where the user was not asked."""
    if word is None and earlier is not None and earlier.word == "always":
        return replace(earlier, time_s=now_s)
    lasting: ChoiceWord = word if word == "always" or word == "never" else "asked"
    return Choice(proposal.choice_key, proposal.gpus, lasting, proposal.tier.name, now_s)


def message(proposal: Proposal, columns: int = COLUMNS) -> str:
    """The tier, the evidence, the gain, and why the change is not offered; wrapped, each line ended."""
    row, asked, tier = proposal.row, proposal.asked, proposal.tier
    too_small = f"{asked.name} is too small, " if asked and asked.size < tier.size else ""
    said = wrapped(proposal.said or f"{too_small}{tier.name} is enough: {row.text}", HEAD, columns)
    if proposal.change.value and (gain := row.gain(asked, tier, proposal.gpus)):
        said += wrapped(f"With {tier.name}, {gain}.", INDENT, columns)
    if proposal.not_offered:
        said += wrapped(f"No change: {proposal.not_offered}.", INDENT, columns)
    return said


def question(proposal: Proposal, columns: int = COLUMNS) -> str:
    """The question in two lines; the cursor stays on the second."""
    submit = wrapped(f"Submit with {typed(proposal.change)} instead?", INDENT, columns)
    return f"{submit}{INDENT}[y]es, [N]o, [a]lways, or ne[v]er for this job: "


def always_said(proposal: Proposal, columns: int = COLUMNS) -> str:
    return wrapped(f'using {typed(proposal.change)}: you answered "always" for {proposal.key}.', HEAD, columns)


def wait_said(proposal: Proposal, taken: int, columns: int = COLUMNS) -> str:
    """The line in place of a change that enough jobs try already."""
    said = (
        f"wait: {taken} jobs of {proposal.key} already try {proposal.tier.name}. This job keeps the tier that it asks "
    )
    return wrapped(f"{said}for, until one of them has shown its memory.", HEAD, columns)


def typed(change: Rewrite) -> str:
    """The option as it can be typed in a shell: -C "gpu&hbm40g"."""
    value = printable(change.value, 1000)
    quoted = f'"{value}"' if _SAFE.fullmatch(value) else "'" + value.replace("'", "'\\''") + "'"
    name = SHORT.get(change.option)
    return f"{name} {quoted}" if name else f"{change.option}={quoted}"


def wrapped(text: str, head: str, columns: int = COLUMNS) -> str:
    """Lines of at most `columns`, unless a word is longer. A number stays with its unit, an option with its value.

    The file's reader lets only printable ASCII pass, so the text has no byte 1 of its own.
    """
    lines = [head]
    for word in re.sub("([0-9]) ([A-Za-z])|( -[A-Za-z]) ([\"'])", "\\1\\3\x01\\2\\4", text).split():
        gap = "" if lines[-1] in (head, INDENT) else " "
        if gap and len(lines[-1]) + 1 + len(word) > columns:
            lines.append(INDENT)
            gap = ""
        lines[-1] += gap + word
    return "".join(f"{line}\n" for line in lines).replace("\x01", " ")
