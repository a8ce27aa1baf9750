"""A submission at a terminal: read the user's advice and earlier answers; then ask."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from almanac.errors import RequestError
from almanac.published.files import usable
from almanac.records import JobRequest
from almanac.submit_config import SITE, Hooks, SubmitMode
from almanac.tiers import Rewrite
from slurm.options import SHORT, long_name, parse_options
from slurm.sbatch import SbatchRequest, parse_submission
from slurm_hooks.advice.file import ADVICE, AdviceFile
from slurm_hooks.submit import choices, offer
from slurm_hooks.submit.choices import Choice
from slurm_hooks.submit.pilot import MAX_JOBS, PilotCount
from slurm_hooks.submit.proposal import (
    COLUMNS,
    HEAD,
    PLACING,
    Answer,
    PromptAction,
    Proposal,
    action,
    always_said,
    answer,
    checked,
    message,
    new_choice,
    propose,
    question,
    unchanged,
    wait_said,
    wrapped,
)

if TYPE_CHECKING:
    from slurm_hooks.advice.kinds import PackingRow

SILENT = ("help", "usage", "version", "test-only", "clusters", "cluster", "uid", "gid")
"""Options without advice: nothing is submitted, or not to this cluster, or not as this user."""
SILENT_VARIABLES = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
QUIET = ("parsable", "quiet")
SINFO_S = 1
SINFO_VARIABLES = ("SINFO_ALL", "SINFO_PARTITION", "SINFO_FORMAT", "SINFO_SORT")
"""Variables of a user that change what sinfo lists."""
MAX_SCRIPT_BYTES = 1 << 18


@dataclass(frozen=True)
class Terminal:
    """The user's terminal: write() to standard error, read_line() from standard input ("" at its end)."""

    write: Callable[[str], None]
    read_line: Callable[[], str]
    columns: int = COLUMNS


@dataclass(frozen=True)
class PromptSubmission:
    """A submission at the prompt, before it is sent.

    options: texts of the options given, by long name. command: returns the text of what would run; raises OSError.
    can_change: returns False if an option cannot surely be added. is_quiet: print nothing.
    """

    request: JobRequest
    options: Mapping[str, str]
    command: Callable[[], str]
    can_change: Callable[[Rewrite], bool] = bool
    is_quiet: bool = False


def advise(
    argv: Sequence[str], environ: Mapping[str, str], terminal: Terminal | None, advice_dir: Callable[[], str]
) -> tuple[Sequence[str], bool]:
    """The arguments to submit with, and whether the user saw a message.

    terminal: None without one. advice_dir: reads hooks.advice_dir from the configuration; "" is the default
    folder. It is called only for a submission that advice may change. May raise any error: the caller then submits what
    was typed.
    """
    read = _read(argv, environ)
    if read is None:
        return argv, False
    options = {name: option.value or "" for name, option in read.options.items()}

    def command() -> str:
        return options.get("wrap") or (script_text(read.script, options.get("chdir", "")) if read.script else "")

    submission = PromptSubmission(
        request=read.request("", int(time.time())),
        options=options,
        command=command,
        can_change=lambda change: with_option(argv, read, change) is not None,
        is_quiet=any(name in options for name in QUIET),
    )
    change, was_told = consult(submission, environ, terminal, advice_dir() or Hooks().advice_dir)
    return (change and with_option(argv, read, change)) or argv, was_told


def consult(
    submission: PromptSubmission, environ: Mapping[str, str], terminal: Terminal | None, root: str
) -> tuple[Rewrite | None, bool]:
    """The change of a submission, None for none, and whether the user saw a message. root: of the advice files."""
    request, now_s = submission.request, int(time.time())
    advice = usable(ADVICE, root, str(os.getuid()), now_s)
    if advice is None or request.gpu_count <= 0:
        return None, False
    mode = _mode(environ, advice)
    if mode != "apply" and (terminal is None or submission.is_quiet):
        return None, False
    is_placed = any(name in submission.options for name in PLACING)
    path, is_proposed = choices.choices_path(environ), False
    for proposal in _proposals(request, advice, root, now_s, is_placed):
        is_proposed = True
        shown = proposal if submission.can_change(proposal.change) else replace(proposal, change=Rewrite())

        def is_offered(found: Proposal = shown) -> bool | None:
            wanted = offer.wanted(request, found.check or found.change, found.tier)
            max_age_s = offer.SLICE_AGE_S if found.tier.is_slice else offer.MAX_AGE_S
            listing = _nodes(path, environ, now_s, max_age_s)
            return offer.is_offered(listing, wanted, offer.needs_of(submission.options, found.gpus))

        count = PilotCount(path, shown.key, shown.gpus, advice.written_s, now_s)
        is_changed, was_told = _settle(mode, shown, is_offered, path, now_s, terminal, count)
        if is_changed and shown.pilot is not None and not count.add(_jobs(submission)):
            is_changed = False
            if terminal and was_told:
                terminal.write(wrapped(f"No change: {UNCOUNTED}.", HEAD, terminal.columns))
        if is_changed or was_told:
            return (shown.change if is_changed else None), was_told
    # Beside another tier or type, silent or not, packing would be a second advice on the same GPU.
    if terminal is None or mode not in ("show", "ask"):
        return None, False
    is_noted = not is_proposed and request.is_array and _note_packing(submission, advice, root, path, now_s, terminal)
    row = None if is_noted else advice.find(request.name_key, request.gpu_count)
    if row and row.checkpoint:
        from slurm_hooks.advice.kinds import PackingRow  # late: for large jobs only

        note = PackingRow(row.key, request.gpu_count, 0, row.checkpoint)
        is_noted = _note_once(note, CHECKPOINTS, path, now_s, terminal)
    return None, is_noted


UNCOUNTED = "almanac could not count the jobs that try it"


def _jobs(submission: PromptSubmission) -> int:
    """Jobs of a submission: of an array its tasks."""
    if not submission.request.is_array:
        return 1
    from slurm.queued_job import task_count  # late: for arrays only

    return task_count(submission.options.get("array", ""), MAX_JOBS)


def _note_packing(
    submission: PromptSubmission, advice: AdviceFile, root: str, path: str | None, now_s: int, terminal: Terminal
) -> bool:
    """Tell of an array whose tasks can share a GPU, once a day for each job family. Returns whether it said it."""
    from slurm_hooks.advice.kinds import PACKING  # late: for arrays only

    file = usable(PACKING, root, str(os.getuid()), now_s)
    if file is None:
        return False
    from slurm_hooks.submit.late_proposals import find_note

    command = ""
    with suppress(OSError):
        command = submission.command()
    row = find_note(submission.request, submission.options.get("array", ""), command, advice.tiers, file)
    return row is not None and _note_once(row, PACKING.name, path, now_s, terminal)


CHECKPOINTS = "checkpoints"
"""The file of notes on checkpoints, in the folder of answers."""


def _note_once(row: PackingRow, name: str, path: str | None, now_s: int, terminal: Terminal) -> bool:
    """Show a note once a day for each job family. name: of the file of notes. Returns whether it was shown."""
    from slurm_hooks.submit import late_proposals as notes

    kept = f"{os.path.dirname(path)}/{name}" if path else None  # noqa: PTH120
    seen = choices.read(kept)
    if notes.was_noted(choices.find(seen, row.key, row.gpus), now_s):
        return False
    terminal.write(notes.note(row, terminal.columns))
    with suppress(OSError):
        if kept:
            choices.write(kept, choices.replaced(seen, notes.noted(row, now_s), notes.AGAIN_S))
    return True


def _proposals(request: JobRequest, advice: AdviceFile, root: str, now_s: int, is_placed: bool) -> Iterator[Proposal]:
    """Of another memory tier, then of another GPU type. Only the first one that is not silent counts."""
    if memory := propose(request, advice, is_placed):
        yield memory
    if gpu_type := _type_proposal(request, root, now_s, is_placed):
        yield gpu_type


def _type_proposal(request: JobRequest, root: str, now_s: int, is_placed: bool) -> Proposal | None:
    """Another GPU type; None if no waits are published. A second question on one submission would be too many."""
    if not os.path.exists(f"{root}/user/{SITE}/waits"):  # noqa: PTH110
        return None
    from slurm_hooks.advice.kinds import TIMES, WAITS  # late: most sites publish no waits
    from slurm_hooks.submit.late_proposals import propose_type

    waits, times = usable(WAITS, root, SITE, now_s), usable(TIMES, root, str(os.getuid()), now_s)
    if waits is None:
        return None
    family = request.name_key, request.gpu_count
    return propose_type(request, times.of_family(family) if times else (), waits, now_s, is_placed)


def _mode(environ: Mapping[str, str], advice: AdviceFile) -> SubmitMode:
    """The user's own mode, else the site's."""
    return next((mode for mode in get_args(SubmitMode) if mode == environ.get("ALMANAC_ADVICE")), advice.prompt)


def _settle(
    mode: SubmitMode,
    proposal: Proposal,
    is_offered: Callable[[], bool | None],
    path: str | None,
    now_s: int,
    terminal: Terminal | None,
    count: PilotCount,
) -> tuple[bool, bool]:
    """Show the message and ask where needed. Returns whether to change the submission, and whether it said anything."""
    known = choices.read(path)
    earlier = choices.find(known, proposal.choice_key, proposal.gpus)
    what = action(mode, proposal, earlier, now_s)
    limit = proposal.pilot
    if what is not PromptAction.NOTHING and limit is not None:
        taken = count.taken()
        if taken is None:
            proposal = unchanged(proposal, UNCOUNTED)
            what = action(mode, proposal, earlier, now_s)
        elif taken >= limit:
            if what is not PromptAction.CHANGE_AND_SAY or terminal is None:
                return False, False
            terminal.write(wait_said(proposal, taken, terminal.columns))
            return False, True
    if what is not PromptAction.NOTHING and proposal.change.value:
        proposal = checked(proposal, is_offered())
        what = action(mode, proposal, earlier, now_s)
    if what in (PromptAction.CHANGE, PromptAction.NOTHING) or terminal is None:
        return what is PromptAction.CHANGE, False
    if what is PromptAction.CHANGE_AND_SAY:
        terminal.write(always_said(proposal, terminal.columns))
        return True, True
    terminal.write(message(proposal, terminal.columns))
    word = _ask(terminal, proposal) if what is PromptAction.ASK else None
    _remember(path, known, new_choice(proposal, earlier, word, now_s), terminal)
    return word in ("yes", "always"), True


def _nodes(path: str | None, environ: Mapping[str, str], now_s: int, max_age_s: int) -> str:
    """sinfo's listing of all nodes for offer.is_offered(); "" if sinfo fails or needs more than SINFO_S.

    The listing is saved with the choices and used for max_age_s.
    """
    place = f"{os.uname().nodename}:{environ.get('SLURM_CONF', '')}"
    file = path and f"{os.path.dirname(path)}/nodes"  # noqa: PTH120
    listing = offer.kept(choices.read_own(file, offer.MAX_BYTES), now_s, place, max_age_s) if file else None
    if listing is not None:
        return listing
    listing = _sinfo(environ)
    if len(listing) > offer.MAX_BYTES - 1024:
        return ""
    if file and listing:
        with suppress(OSError):
            choices.write_own(file, offer.to_keep(listing, now_s, place))
    return listing


def _sinfo(environ: Mapping[str, str]) -> str:
    from almanac import bounded, errors  # late: seldom needed

    argv = ["sinfo", "-a", "-e", "-h", "-o", offer.FORMAT]
    environ = {name: value for name, value in environ.items() if name not in SINFO_VARIABLES}
    try:
        done = bounded.run(argv, timeout_s=SINFO_S, most_bytes=offer.MAX_BYTES, env=environ)
    except (OSError, ValueError, errors.ConfigError):
        return ""
    return done.stdout.decode("latin-1")


def _ask(terminal: Terminal, proposal: Proposal) -> Answer:
    terminal.write(question(proposal, terminal.columns))
    line = terminal.read_line()
    if not line.endswith("\n"):
        terminal.write("\n")
    return answer(line)


def _remember(path: str | None, known: Iterable[Choice], new: Choice, terminal: Terminal) -> None:
    """Save the answer. A failure is reported only for a lasting answer: any other is asked again."""
    try:
        if path is None:
            raise OSError("HOME is not set")
        choices.write(path, choices.replaced(known, new))
    except OSError as error:
        if new.word != "asked":
            terminal.write(f"almanac: could not save your answer: {error.strerror or error}\n")


def _read(argv: Sequence[str], environ: Mapping[str, str]) -> SbatchRequest | None:
    """The submission; None if it gets no advice, or cannot be read with certainty."""
    typed, rest = parse_options(argv)
    words = argv[: len(argv) - len(rest)]
    if any(variable in environ for variable in SILENT_VARIABLES) or not all(map(_is_known, words)):
        return None
    is_wrapped = any(option.name == "wrap" for option in typed)
    if not rest and not is_wrapped:
        return None  # the script will come from standard input, which is sbatch's alone
    folder = next((option.value for option in reversed(typed) if option.name == "chdir"), None) or ""
    try:
        submission = parse_submission(argv, environ, lambda name: script_text(name, folder))
    except (RequestError, OSError):
        return None
    is_silent = submission.is_het or any(name in submission.options for name in SILENT)
    return None if is_silent else submission


def _is_known(word: str) -> bool:
    """False for an option of a plugin: it may take the next word, so the rest cannot be read with certainty."""
    if word.startswith("--"):
        return word == "--" or "=" in word or long_name(word[2:]) is not None
    return not (len(word) > 1 and word.startswith("-")) or word[1] in SHORT


def script_text(name: str, folder: str) -> str:
    """Text of the script where sbatch looks first. Raises OSError unless it is a regular file."""
    handle = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # noqa: PTH118
    with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_SCRIPT_BYTES:
            raise OSError("not a script")
        return file.read().decode("utf-8", "surrogateescape")


def with_option(argv: Sequence[str], submission: SbatchRequest, change: Rewrite) -> tuple[str, ...] | None:
    """The arguments with one more option, which wins over earlier ones; None unless it surely does only that."""
    if not change.value:
        return None
    at = len(argv) - len(submission.rest)
    if at and argv[at - 1] == "--":
        at -= 1
    new = (*argv[:at], f"{change.option}={change.value}", *argv[at:])
    typed, rest = parse_options(new)
    before, before_rest = parse_options(argv)
    name = change.option.removeprefix("--")
    is_sure = typed[:-1] == before and rest == before_rest and (typed[-1].name, typed[-1].value) == (name, change.value)
    return new if is_sure else None
