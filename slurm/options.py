"""sbatch's options: their names, those that take a value, and the ways in which #SBATCH lines and argument lists spell
them.

The table joins 22.05, 24.11, 25.11 and 26.05. An option that is not in it (a SPANK plugin's) is skipped, and is never
an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from almanac.errors import RequestError
from almanac.units import MOST_USER_TEXT


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FLAGS = _names(
    """consolidate-segments contiguous external help hold ignore-pbs no-requeue no-shell overcommit oversubscribe
    parsable quiet reboot share spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version
    wait"""
)
OPTIONAL_VALUE = _names("exclusive get-user-env immediate nice no-kill oom-kill-step propagate requeue resv-ports x11")
WITH_VALUE = _names(
    """account acctg-freq array autocomplete batch bb bbf begin chdir cluster cluster-constraint clusters comment
    constraint container container-id container-type context core-spec cores-per-socket cpu-freq cpus-per-gpu
    cpus-per-task deadline delay-boot dependency distribution error exclude export export-file extra extra-node-info
    gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network
    nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres
    open-mode output partition power prefer priority profile qos reservation resources segment signal
    sockets-per-node switches tasks-per-node thread-spec threads-per-core time time-min tmp tres-bind tres-per-task
    uid wait-all-nodes wckey wrap"""
)
ALL = FLAGS | OPTIONAL_VALUE | WITH_VALUE
ALIASES = {"tasks-per-node": "ntasks-per-node"}
"""Another name of an option, and the name that counts."""
SHORT = {
    "a": "array", "A": "account", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "h": "help", "H": "hold", "i": "input",
    "I": "immediate", "J": "job-name", "k": "no-kill", "L": "licenses", "m": "distribution", "M": "clusters",
    "n": "ntasks", "N": "nodes", "o": "output", "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet",
    "s": "oversubscribe", "S": "core-spec", "t": "time", "v": "verbose", "V": "version", "w": "nodelist", "W": "wait",
    "x": "exclude",
}  # fmt: skip
ENVIRONMENT = {
    "SBATCH_ACCOUNT": "account", "SBATCH_ARRAY_INX": "array", "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu", "SBATCH_GPUS": "gpus", "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task", "SBATCH_GRES": "gres", "SBATCH_JOB_NAME": "job-name",
    "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos", "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time", "SBATCH_TRES_PER_TASK": "tres-per-task",
}  # fmt: skip
HET_WORDS = ("hetjob", "packjob")
MAGIC = ("#SBATCH", "#SLURM")
CUT = "\0"
BLANK = " \t\v\f\r"


@dataclass(frozen=True)
class Option:
    """One option by its long name without dashes; value is None for a flag. origin: the place that it came from."""

    name: str
    value: str | None = None
    origin: str = "command line"

    @property
    def spelling(self) -> str:
        return f"--{self.name} ({self.origin})"


def parse_script(text: str) -> list[Option]:
    """Options of a batch script's #SBATCH lines, up to its first command; of a het job, the first component's.

    The rules are sbatch's own: a line counts only where #SBATCH stands at its very beginning; words may be quoted or
    escaped; an unescaped # begins a comment; an option and its value may stand on two lines. Raises RequestError
    where a quote is not closed, as sbatch refuses it, and where these lines have more than MOST_USER_TEXT characters.
    """
    words: list[tuple[str, str]] = []
    lines = text[:MOST_USER_TEXT].split("\n")
    if len(text) > MOST_USER_TEXT:
        lines[-1] = CUT
    for number, line in enumerate(lines, 1):
        if line == CUT:
            raise RequestError(
                f"the #SBATCH lines have more than {MOST_USER_TEXT} characters", "put them first, and the rest below"
            )
        word = next((word for word in MAGIC if line.startswith(word)), None)
        if word:
            found = split_words(line[len(word) :], number)
            if found and found[0].lower() in HET_WORDS:
                break
            words += [(word, f"script line {number}") for word in found]
        elif line.strip(BLANK) and not line.lstrip(BLANK).startswith("#"):
            break
    options: list[Option] = []
    at = 0
    while at < len(words):
        at += _take(words, at, options) if _is_option(words[at][0]) else 1
    return options


def is_het_script(text: str) -> bool:
    """Return True if a batch script has several components ("#SBATCH hetjob")."""
    magic = (line.split(None, 2) for line in text.split("\n") if line.startswith(MAGIC))
    return any(len(words) > 1 and words[1].lower() in HET_WORDS for words in magic)


def split_words(line: str, number: int) -> list[str]:
    """The words after #SBATCH, by sbatch's quoting rules: a backslash escapes within quotes of both kinds, too."""
    words: list[str] = []
    word: list[str] | None = None
    quote = ""
    chars = iter(line)
    for char in chars:
        if char == "\\":
            (word := word if word is not None else []).append(next(chars, ""))
        elif quote:
            if char == quote:
                quote = ""
            else:
                (word := word if word is not None else []).append(char)
        elif char in "\"'":
            quote = char
            word = word if word is not None else []
        elif char == "#":
            break
        elif char in BLANK:
            if word is not None:
                words.append("".join(word))
            word = None
        else:
            (word := word if word is not None else []).append(char)
    if quote:
        raise RequestError(
            f"script line {number}: a quote ({quote}) is not closed", "close it; sbatch would refuse it too"
        )
    return words if word is None else [*words, "".join(word)]


def parse_options(argv: Sequence[str]) -> tuple[list[Option], list[str]]:
    """Options of an sbatch command line up to the first word that is none, and the words from there on.

    Raises RequestError where an option's value is missing.
    """
    options: list[Option] = []
    words = [(word, "command line") for word in argv]
    at = 0
    while at < len(words) and _is_option(words[at][0]):
        if words[at][0] == "--":
            at += 1
            break
        at += _take(words, at, options)
    return options, [word for word, _ in words[at:]]


def environment_options(environ: Mapping[str, str]) -> list[Option]:
    """Options that sbatch's input variables (SBATCH_PARTITION, ...) set."""
    return [Option(name, environ[variable], variable) for variable, name in ENVIRONMENT.items() if variable in environ]


def long_name(written: str) -> str | None:
    """The option that a long name or an unambiguous beginning of it means; None if unknown."""
    matches = [written] if written in ALL else [name for name in ALL if name.startswith(written)]
    return ALIASES.get(matches[0], matches[0]) if len(matches) == 1 else None


def option_length(argv: Sequence[str]) -> int:
    """Count the words of the option that argv begins with, its value included; 0 without an option.

    Raises RequestError if the option's value is missing.
    """
    if not argv or argv[0] == "--" or not _is_option(argv[0]):
        return 0
    return _take([(word, "command line") for word in argv[:2]], 0, [])


def _is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-")


def _take(words: Sequence[tuple[str, str]], at: int, options: list[Option]) -> int:
    """Add the option or the short options that stand at a place; how many words they are."""
    word, origin = words[at]
    after = words[at + 1][0] if at + 1 < len(words) else None
    if not word.startswith("--"):
        return _take_short(word, origin, after, options)
    written, equals, value = word[2:].partition("=")
    name = long_name(written)
    if name is None:
        return 1
    if equals or name not in WITH_VALUE:
        options.append(Option(name, value if equals else None, origin))
        return 1
    options.append(Option(name, _value(name, after, origin), origin))
    return 2


def _take_short(word: str, origin: str, after: str | None, options: list[Option]) -> int:
    """ "-Cgpu", "-C gpu" and flags in a row ("-HOn4"); a letter that is not known ends the word."""
    for place, letter in enumerate(word[1:], 2):
        name = SHORT.get(letter)
        if name is None:
            return 1
        rest = word[place:]
        if name in WITH_VALUE:
            options.append(Option(name, rest or _value(name, after, origin), origin))
            return 1 if rest else 2
        if name in OPTIONAL_VALUE:
            options.append(Option(name, rest or None, origin))
            return 1
        options.append(Option(name, None, origin))
    return 1


def _value(name: str, after: str | None, origin: str) -> str:
    if after is None:
        raise RequestError(f"--{name} ({origin}) has no value", "add a value; sbatch would refuse this too")
    return after
