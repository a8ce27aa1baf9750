"""Names of jobs and users: the family key of a job, and the mail address of a user.

The family key is one ASCII mask that Python and Lua compute alike. The rule, on the first 255 bytes of the name
(UTF-8), in this order; test vectors are in `name_mask_vectors.json`:

1. every run of bytes that are "?", "_" or outside 0x21..0x7e becomes one "_"; A-Z become a-z;
2. a UUID (8-4-4-4-12 hex digits) becomes "#";
3. a run of 6 or more of [0-9a-z] that reads like an identifier (`_is_identifier`) becomes "#";
4. every run of digits becomes "#";
5. the first 64 bytes are kept;
6. a key whose words identify no work (`_identifies`) becomes "-", as an empty name does: it is no family.

A name that Nextflow made, "nf-PROCESS_(tag)", counts without its tag. A job whose own name identifies nothing is called
by the workflow's rule in its comment, if there is one: Snakemake writes "rule_NAME_wildcards_...".

Runs, and "?", because slurmdbd keeps another name than slurmctld was given: its database writes one "?" for each byte
that is not UTF-8 and, with a 3-byte character set, one for a character of four bytes. Both names need the same key.
255 bytes, because slurmdbd keeps no more of a name.

Addresses have fewer characters than RFC 5321 allows, as mail systems give some of the others ("|", "/", "%", "!") a
meaning.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise

MAX_NAME_BYTES = 255
MAX_BYTES = 64
SCRIPT_PREFIX = "="
"""A nameless job of a known script has this and its script key as family key. It is never published."""
_UNSURE = re.compile(rb"[^\x21-\x3e\x40-\x5e\x60-\x7e]+")
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_WORD = re.compile(rb"[0-9a-z]{6,}")
_DIGITS = re.compile(rb"[0-9]+")
_LETTERS = re.compile(rb"[a-z]+")
_PARTS = re.compile(rb"[0-9]+|[a-z]+")
_TOKEN = re.compile("[a-z#]+")
_RUNS = re.compile("[a-z]+")
_NEXTFLOW = re.compile(rb"^nf-([^(]+)_\(")
_MORE = re.compile(rb"[, \t\r\n].*", re.DOTALL)
_PROCESS = re.compile(rb"(?=[A-Z0-9_]+:[A-Z])[A-Z][A-Z0-9_:]*")
_FOLLOWERS = {
    "a": "abcdefghijklmnoprstuvwxyz", "b": "abcdeilmoprstuy", "c": "acdefhiklmoprstuy", "d": "abcdefgijklmnoprstuy",
    "e": "abcdefghiklmnopqrstuvwxyz", "f": "acefilmorstuy", "g": "abcdeghilmnoprstuy", "h": "acdeilmoprstuy",
    "i": "abcdefgiklmnopqrstuvxz", "j": "aeiosu", "k": "acdegilmoprstuy", "l": "abcdefgiklmoprstuvy",
    "m": "abcdefgilmnoprstuy", "n": "abcdefghijklmnoprstuvy", "o": "abcdefghijklmnoprstuvwxy",
    "p": "acdefghiklmoprstuy", "q": "lu", "r": "abcdefgiklmnoprstuvy", "s": "abcdefghiklmnopqrstuvwy",
    "t": "abcdefghiklmnoprstuvwxy", "u": "abcdefgiklmnprstx", "v": "aeios", "w": "aehilnors", "x": "aceilmpsty",
    "y": "abcdefghilmnoprstuvw", "z": "aeioyz",
}  # fmt: skip
"""By letter those that follow it in 97% of the letter pairs of 570,000 words in names of npm and PyPI packages."""


def name_key(name: str, comment: str = "") -> str:
    """Return the family key: "train-BERT-0042" and "train-bert-7" both give "train-bert-#"; "-" is no family."""
    key = _key(name.encode("utf-8", "surrogateescape")[:MAX_NAME_BYTES])
    return rule_key(comment) if key == "-" and comment else key


def rule_key(comment: str) -> str:
    """Return the family key of the workflow's rule that a job's comment names; "-" without one."""
    return _key(_rule(comment.encode("utf-8", "surrogateescape")[:MAX_NAME_BYTES]))


def is_family(key: str) -> bool:
    """Return True if a key names the jobs of one kind of work. Older releases recorded keys such as "#" as well."""
    return _RUNS.search(key) is not None or key.startswith(SCRIPT_PREFIX)


def mask(text: bytes) -> str:
    """The text by rules 1 to 4, whatever its length."""
    raw = _UNSURE.sub(b"_", text).lower()
    raw = _UUID.sub(b"#", raw)
    raw = _WORD.sub(lambda word: b"#" if _is_identifier(word[0]) else word[0], raw)
    return _DIGITS.sub(b"#", raw).decode("ascii")


def _key(name: bytes) -> str:
    tagged = _NEXTFLOW.match(name)
    key = mask(tagged[1] if tagged else name)[:MAX_BYTES]
    return key if _identifies(key) else "-"


def _rule(comment: bytes) -> bytes:
    """The rule or process that the first word of a workflow manager's comment is; b"" in any other comment."""
    word = _MORE.sub(b"", comment)
    if word.startswith(b"rule_"):
        return word[5:].partition(b"_wildcards_")[0]
    return word if word.startswith(b"nf-") or _PROCESS.fullmatch(word) else b""


def _is_identifier(word: bytes) -> bool:
    """Return True for what looks like a hash or a random id: letters and digits mixed.

    Of hex digits, 8 or more, or 6 and 7 in at least three parts ("3f9a77c", not "cafe12"). Of any letters, 10 or more
    in at least three parts, if at least three pairs of letters, and a sixth of all, are rare in words.
    """
    parts = _PARTS.findall(word)
    if len(parts) < 2:
        return False
    if not word.strip(b"0123456789abcdef"):
        return len(word) >= 8 or len(parts) >= 3
    if len(word) < 10 or len(parts) < 3:
        return False
    pairs = rare = 0
    for run in _LETTERS.findall(word):
        text = run.decode()
        pairs += len(text) - 1
        rare += sum(after not in _FOLLOWERS[before] for before, after in pairwise(text))
    return rare >= 3 and 6 * rare >= pairs


def _identifies(key: str) -> bool:
    """Return True if a word of the key is more than a generic name, a part of a hash, or a single letter.

    Next to digits, two or three letters count only if they could not be hex digits.
    """
    words, beginnings = _generic()
    if key.startswith(beginnings):
        return False
    for token in _TOKEN.findall(key):
        least = 4 if "#" in token else 2
        for run in _RUNS.findall(token):
            if run not in words and len(run) >= 2 and (len(run) >= least or run.strip("abcdef")):
                return True
    return False


@cache
def _generic() -> tuple[frozenset[str], tuple[str, ...]]:
    """The words of generic_names.txt, and the beginnings, which end in "*" there."""
    # sbatch-almanac loads no pathlib.
    with open(f"{__file__.removesuffix('names.py')}generic_names.txt", encoding="utf-8") as file:  # noqa: PTH123
        text = file.read()
    words = " ".join(line for line in text.splitlines() if not line.startswith("#")).split()
    return frozenset(words), tuple(word[:-1] for word in words if word.endswith("*"))


_LOCAL = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL}){{0,20}}")
_USER = re.compile(_LOCAL)
_LONGEST_USER = "u" * 32  # of useradd


def is_domain(text: str) -> bool:
    return bool(_DOMAIN.fullmatch(text)) and len(text) <= 253


def is_address(text: str) -> bool:
    """Return True for an address to which mail may go: a local user's name, or name@domain, in ASCII."""
    local, at, domain = text.partition("@")
    is_local = bool(_USER.fullmatch(local)) and ".." not in local and not local.endswith(".")
    return is_local and (not at or is_domain(domain))


def address_of(user: str, pattern: str) -> str | None:
    """Return the address by mail.recipient, or None: "@" in a user's name must not say where mail goes."""
    address = pattern.replace("{user}", user)
    return address if _USER.fullmatch(user) and is_address(address) else None


def is_pattern(pattern: str) -> bool:
    """Return True if the pattern gives each user with a usual name an address of their own."""
    local, _, domain = pattern.partition("@")
    if "{user}" not in local or "{user}" in domain:  # not every user's name is that of a host
        return False
    return None not in (address_of(user, pattern) for user in ("u", _LONGEST_USER))


FRAMEWORKS = {
    "pytorch": {"torch", "pytorch", "torchrun", "ddp", "fsdp", "deepspeed", "lightning", "megatron"},
    "jax": {"jax", "flax", "maxtext"},
    "gromacs": {"gmx", "gromacs", "mdrun"},
    "tensorflow": {"tensorflow", "keras"},
    "vllm": {"vllm"},
}
"""Words of job names and commands that show a framework. Its advice is in reports/job/rules.toml."""


def framework_of(text: str) -> str | None:
    """The framework that a job's name or command shows; None without one, and for several."""
    words = set(re.findall("[a-z]+", text.lower()))
    found = [name for name, own in FRAMEWORKS.items() if not words.isdisjoint(own)]
    return found[0] if len(found) == 1 else None
