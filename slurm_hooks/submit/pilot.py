"""Count the jobs that the prompt moves to a smaller tier, in the user's own file: one line per submission.

    key  gpus  jobs  time      separated by tabs; the time in s since 1970

A published row can limit its advice to a number of jobs (AdviceRow.pilot). The publisher has counted the jobs before
the file was written, and the prompt counts those since then. Submissions at the same moment may miss each other.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from slurm_hooks.submit import choices

NAME = "pilot"
"""The file's name, in the folder of answers."""
MAX_JOBS = 999_999
"""Most tasks of an array that are counted."""
_LINE = re.compile(r"([\x21-\x7e]{1,64})\t([1-9][0-9]{0,5})\t([1-9][0-9]{0,5})\t([0-9]{1,12})\n")


@dataclass(frozen=True)
class PilotCount:
    """The jobs of a family since its advice was written. path: of the user's answers; None without a state folder."""

    path: str | None
    key: str
    gpus: int
    written_s: int
    now_s: int

    def taken(self) -> int | None:
        """The number of jobs; None if it is not known."""
        lines = self._lines()
        if lines is None:
            return None
        family = [self.key, str(self.gpus)]
        return sum(int(line.split("\t")[2]) for line in lines if line.split("\t")[:2] == family)

    def add(self, jobs: int) -> bool:
        """Count a submission of so many jobs, and forget those before the advice. Returns False if this fails."""
        lines = self._lines()
        new = f"{self.key}\t{self.gpus}\t{jobs}\t{self.now_s}\n"
        text = "".join([*(lines or ()), new])
        if lines is None or self.path is None or not _LINE.fullmatch(new) or len(text) > choices.MAX_BYTES:
            return False
        try:
            choices.write_own(self._file(self.path), text)
        except OSError:
            return False
        return True

    def _lines(self) -> list[str] | None:
        """The lines since the advice was written; None if there may be some that cannot be read."""
        if self.path is None:
            return None
        file = self._file(self.path)
        found = [_LINE.fullmatch(line) for line in choices.read_own(file, choices.MAX_BYTES).splitlines(keepends=True)]
        if found and None not in found:
            return [match[0] for match in found if match and self.written_s <= int(match[4]) <= self.now_s]
        try:
            return [] if os.lstat(file).st_mtime < self.written_s else None
        except FileNotFoundError:
            return []
        except OSError:
            return None

    @staticmethod
    def _file(path: str) -> str:
        return f"{os.path.dirname(path)}/{NAME}"  # noqa: PTH120 - pathlib takes 3 ms
