"""The family key of a job name: one ASCII mask that Python and Lua compute alike.

The rule, on the first 255 bytes of the name (UTF-8), in this order; test vectors are in `name_mask_vectors.json`:

1. every run of bytes that are "?", "_" or outside 0x21..0x7e becomes one "_"; A-Z become a-z;
2. a UUID (8-4-4-4-12 hex digits) becomes "#";
3. a run of 8 or more of [0-9a-z] that holds only hex digits, at least one digit and one letter, becomes "#";
4. every run of digits becomes "#";
5. the first 64 bytes are kept; an empty name becomes "-".

Runs, and "?", because slurmdbd keeps another name than slurmctld was given: its database writes one "?" for each byte
that is not UTF-8 and, with a 3-byte character set, one for a character of four bytes. Both names need the same key.
255 bytes, because slurmdbd keeps no more of a name.
"""

from __future__ import annotations

import re

MAX_NAME_BYTES = 255
MAX_BYTES = 64
_UNSURE = re.compile(rb"[^\x21-\x3e\x40-\x5e\x60-\x7e]+")
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_WORD = re.compile(rb"[0-9a-z]{8,}")
_HASH = re.compile(rb"(?=[a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]+")
_DIGITS = re.compile(rb"[0-9]+")


def name_key(name: str) -> str:
    """The family key of a job name: "train-BERT-0042" and "train-bert-7" both give "train-bert-#"."""
    return mask(name.encode("utf-8", "surrogateescape")[:MAX_NAME_BYTES])[:MAX_BYTES] or "-"


def mask(text: bytes) -> str:
    """The text by rules 1 to 4, whatever its length."""
    raw = _UNSURE.sub(b"_", text).lower()
    raw = _UUID.sub(b"#", raw)
    raw = _WORD.sub(lambda word: b"#" if _HASH.fullmatch(word[0]) else word[0], raw)
    return _DIGITS.sub(b"#", raw).decode("ascii")
