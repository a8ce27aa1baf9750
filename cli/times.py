"""Times that a person types on the command line."""

from __future__ import annotations

import click

from almanac.units import parse_moment


def time_option(text: str | None, now_s: int) -> int | None:
    """The value of -S, -E, or --since in seconds since 1970. Raises click.BadParameter."""
    try:
        return None if text is None else parse_moment(text, now_s)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
