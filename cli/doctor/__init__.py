"""`almanac doctor`: `main` runs the checks; each other module holds the checks of one subject."""

from cli.doctor.main import command

__all__ = ["command"]
