"""Loads matplotlib with only its built-in settings. Import it before matplotlib.

Otherwise matplotlib reads `matplotlibrc` from the current folder, which can belong to another user. A FIFO with that
name would block root forever.
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
    """Use / as the current folder. A folder that cannot be searched stays, because nothing in it can be found."""
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
    """Let $MATPLOTLIBRC name the file that comes with matplotlib."""
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
