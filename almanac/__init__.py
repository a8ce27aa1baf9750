"""Shared by all packages: configuration, errors, units, records, tiers, and the name mask."""

from importlib import import_module
from typing import Any

__all__ = (
    "actions_config", "api", "atomic", "bounded", "config", "config_file", "errors", "exposition", "files", "hardware",
    "names", "records", "scrub", "submit_config", "tiers", "tres", "units",
)  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return `open_site` of `almanac.api`, which is loaded here so that no other import of almanac is slower."""
    if name == "open_site":
        return import_module("almanac.api").open_site
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
