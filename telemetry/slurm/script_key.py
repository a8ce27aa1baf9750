"""What a batch job runs, as a hash: its script, its work directory, and what its arguments are called.

A sweep has a name, a value, or a directory of its own for each job. So paths and arguments are masked as job names are
(almanac.names), and an option's value does not count: "run.sh --lr=0.1" and "run.sh --lr=0.2" have one key.

Slurm joins the words of a command by blanks, and the record of a job has no more. A live request goes the same way, so
that both get one key whatever the words hold. The user is part of the hash: equal keys of two users mean nothing.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence

from almanac.errors import RequestError
from almanac.names import is_family, mask, name_key
from telemetry.slurm.options import parse_options

KEY_LETTERS = 16
LONGEST_LINE = 8192
"""Characters of a submit line that gets a key: reading one of 64 kB takes 29 ms, and a user may submit thousands."""
_PROGRAM = "sbatch"
_SPOOLED = "slurm_script"
"""slurmd's own copy of a script, which a job submits again as $0: it may be any."""
_PASSING = ("/dev/", "/proc/")
"""A shell's <(...) and the like."""


def script_key(user: str, submit_line: str, work_dir: str) -> str:
    """16 hex digits; "" where nothing is known of a script.

    Such are standard input, --wrap, srun, salloc, het jobs, a line that sbatch would refuse, a line longer than
    LONGEST_LINE, and an unknown work directory. A relative path is resolved by the work directory, as sbatch does; no
    file is looked at.
    """
    if len(submit_line) > LONGEST_LINE:
        return ""
    words = submit_line.replace('"', "`").split()  # slurmdbd stores a backtick for a double quote
    if not work_dir.startswith("/") or not words or words[0].rpartition("/")[2] != _PROGRAM or ":" in words:
        return ""
    try:
        typed, command = parse_options(words[1:])
    except RequestError:
        return ""
    # A blank within a value before it, as in a job's name, hides --wrap behind what looks like a script.
    is_wrapped = any(word.partition("=")[0] == "--wrap" for word in words)
    if is_wrapped or any(option.name == "wrap" for option in typed) or command[:1] in ([], ["-"]):
        return ""
    folder = posixpath.normpath(work_dir)
    path = posixpath.normpath(posixpath.join(folder, command[0]))
    if path.startswith(_PASSING) or posixpath.basename(path) == _SPOOLED:
        return ""
    return _hash(user, _mask(path), _mask(folder), *sorted({*map(_mask, _arguments(command[1:]))}))


def command_key(user: str, submit_line: str, work_dir: str) -> str:
    """The script key; of a --wrap, 16 hex digits that stand for its work directory and all words of its command.

    "" if no word of that command identifies work as the words of a job name do: `--wrap bash` may be anything.
    """
    words = submit_line[: LONGEST_LINE + 1].replace('"', "`").split()
    at = next((number for number, word in enumerate(words) if word.partition("=")[0] == "--wrap"), None)
    if at is None or words[0].rpartition("/")[2] != _PROGRAM:
        return script_key(user, submit_line, work_dir)
    command = list(filter(None, [words[at].partition("=")[2], *words[at + 1 :]]))
    if len(submit_line) > LONGEST_LINE or not work_dir.startswith("/") or ":" in words[:at]:
        return ""
    is_known = any(is_family(name_key(word)) for word in command)
    return _hash(user, "--wrap", _mask(posixpath.normpath(work_dir)), *map(_mask, command)) if is_known else ""


def _hash(*parts: str) -> str:
    import hashlib  # late: sbatch-almanac needs none

    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:KEY_LETTERS]


def _arguments(words: Sequence[str]) -> Iterator[str]:
    """Names of options, and what is no option's value: whether "--fast" takes the next word is not known."""
    is_value = False
    for word in words:
        is_option = word.startswith("-")
        if is_option or not is_value:
            yield word.partition("=")[0]
        is_value = is_option and "=" not in word


def _mask(text: str) -> str:
    return mask(text.encode("utf-8", "replace"))
