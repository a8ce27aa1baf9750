"""Times that a person types on the command line, or reads there."""

from __future__ import annotations

import datetime as dt

import click

from almanac.units import parse_moment


def time_option(text: str | None, now_s: int) -> int | None:
    """The value of -S, -E, or --since in seconds since 1970. Raises click.BadParameter."""
    try:
        return None if text is None else parse_moment(text, now_s)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def local_time(time_s: float) -> str:
    """Seconds since 1970 as "YYYY-MM-DD HH:MM" of the local time zone."""
    return dt.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")


def check_span(since_s: int | None, until_s: int | None) -> None:
    """Raises click.UsageError if -E is not after -S, because no job can lie between them."""
    if since_s is not None and until_s is not None and until_s <= since_s:
        raise click.UsageError(
            f"-E {local_time(until_s)} is not after -S {local_time(since_s)}: exchange them, or leave one out"
        )
