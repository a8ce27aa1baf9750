"""Name families by Levenshtein similarity (helios-qssf-ces, 4.2.2), one user's at a time."""

from __future__ import annotations

from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

MAX_FOUNDERS = 1000
"""Per user; further names are families of their own."""


class NameFamilies:
    """Clusters of names. Incremental and stable: a name keeps its family, whatever comes later.

    A family is called by the name that founded it. A new name joins the founder most like it, or founds its own
    family; what is only asked about changes nothing.
    """

    def __init__(self, similarity: float) -> None:
        """similarity: least normalized Levenshtein similarity, 0..1, of a name to its founder."""
        self._similarity = similarity
        self._founders: dict[str, list[str]] = {}
        self._known: dict[tuple[str, str], str] = {}

    def join(self, user: str, name: str) -> str:
        """The family of a name that has been seen now."""
        family = self._known.get((user, name))
        if family is None:
            family = self._known[user, name] = self.find(user, name)
            if family == name:
                self._founders.setdefault(user, []).append(name)
        return family

    def find(self, user: str, name: str) -> str:
        """The family that a name is, or would be, in; of equally similar founders the oldest."""
        founders = self._founders.get(user, [])
        if (user, name) in self._known or not founders:
            return self._known.get((user, name), name)
        best = process.extractOne(
            name,
            founders[:MAX_FOUNDERS],
            scorer=Levenshtein.normalized_similarity,
            processor=None,
            score_cutoff=self._similarity,
        )
        return str(best[0]) if best else name
