"""Which GPU types a request allows, and the same request for one of them. Pure.

A site asks for types by node features (--constraint) or by GRES types; see `Placement.select_by`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from almanac.actions_config import TypeSelector
from telemetry.slurm.gres_queue import TYPE, RequestKey

MAX_TEXT = 1024
"""Characters of a request; Slurm refuses longer ones."""
Key = Literal["Features", "TresPerJob", "TresPerNode", "TresPerTask"]
"""How `scontrol update` names the part that is changed."""
_WORD = r"[A-Za-z_][\w.+:-]{0,63}"
_PLAIN = re.compile(_WORD, re.ASCII)
_CHOICE = re.compile(rf"\[({_WORD}(?:\|{_WORD})*)\]|\(({_WORD}(?:\|{_WORD})*)\)|({_WORD}(?:\|{_WORD})*)", re.ASCII)
_TERM = re.compile(rf"(?P<before>(?:gres[/:])?gpu)(?:[/:](?P<type>{TYPE}))?(?P<count>(?:[:=][0-9]{{1,6}})?)", re.ASCII)
_CPU_TERM = re.compile(r"cpu[:=][0-9]{1,9}", re.ASCII)


@dataclass(frozen=True)
class TypeRequest:
    """The part of a job's request that says the type. text: as Slurm shows it.

    allowed: the types of a choice such as [a|b]; all types where it names one or none, as the owner accepts any.
    """

    key: Key
    text: str
    allowed: frozenset[str]
    parts: tuple[str, str] = ("", "")

    def of(self, gpu_type: str) -> str:
        """The text that asks for this type alone; other terms stay."""
        before, after = self.parts
        return f"{before}{gpu_type}{after}"


def type_request(
    constraints: str, requests: Mapping[RequestKey, str], types: Collection[str], select_by: TypeSelector
) -> TypeRequest | None:
    """None where almanac does not know how to change the request, and keep all else that it asks for."""
    if sum(map(len, requests.values())) > MAX_TEXT:
        return None
    if select_by == "gres":
        return _gres_request(requests, types)
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


def _gres_request(requests: Mapping[RequestKey, str], types: Collection[str]) -> TypeRequest | None:
    """Exactly one GPU term in all, of a type to choose from or without one; beside it at most "cpu=4"."""
    found = None
    for key, text in requests.items():
        terms = text.split(",")
        places = [place for place, term in enumerate(terms) if _TERM.fullmatch(term)]
        others = [term for place, term in enumerate(terms) if place not in places]
        if len(places) + (found is not None) > 1 or not all(_CPU_TERM.fullmatch(term) for term in others):
            return None
        if places and key not in ("TresPerJob", "TresPerNode", "TresPerTask"):
            return None
        if places:
            found = _gres_term(key, text, terms, places[0], types)
            if found is None:
                return None
    return found


def _gres_term(key: str, text: str, terms: list[str], place: int, types: Collection[str]) -> TypeRequest | None:
    match = _TERM.fullmatch(terms[place])
    if match is None or (match["type"] is not None and match["type"] not in types):
        return None
    before = ",".join([*terms[:place], f"{match['before']}:"])
    after = ",".join([match["count"], *terms[place + 1 :]])
    return TypeRequest(key, text, frozenset(types), (before, after))  # type: ignore[arg-type]


def names_one(request: TypeRequest) -> str:
    """The type, where the request already asks for one alone; "" otherwise."""
    return next((each for each in sorted(request.allowed) if request.of(each) == request.text), "")
