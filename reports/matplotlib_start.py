"""Loads matplotlib with its own settings alone. Import it before matplotlib.

By itself it reads `matplotlibrc` of the current folder, which may be another user's: a FIFO of that name would stop
root for good.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """With / as the current folder; one that may not be searched stays, as nothing in it can be found."""
    try:
        here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(here)
        os.close(here)


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """With $MATPLOTLIBRC naming the file that matplotlib brings along."""
    found = importlib.util.find_spec("matplotlib")
    before = os.environ.get("MATPLOTLIBRC")
    if found and found.origin:
        os.environ["MATPLOTLIBRC"] = str(Path(found.origin).parent / "mpl-data" / "matplotlibrc")
    try:
        yield
    finally:
        os.environ.pop("MATPLOTLIBRC", None)
        if before is not None:
            os.environ["MATPLOTLIBRC"] = before


with _own_settings(), _elsewhere():
    importlib.import_module("matplotlib")
