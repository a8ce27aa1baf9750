"""Folders of advice files: `almanac publish` makes them, and `almanac-distribute` gives them to their readers.

<advice_dir>/sched/<uid>        0640  of root and SlurmUser's group, in a folder 0750: what job_submit believes
<advice_dir>/user/<uid>/advice  0440  of root, readable by that user, in a folder 0711: for showing only
<advice_dir>/.../_site          for everybody else; the user's copy is 0444
"""

from __future__ import annotations

from pathlib import Path

from telemetry.store.user_files import user_folder

SHOWN = "advice"


def shown_path(root: Path, name: str) -> Path:
    """The copy that a user reads. root: hooks.advice_dir. name: uid, or `_site`."""
    return user_folder(root, name) / SHOWN
