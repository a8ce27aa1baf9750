"""`almanac advise`: what to ask for, for one submission."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.errors import RequestError, StoreError
from almanac.units import printable
from cli.advise_packing import may_pack, packing_json, packing_text, published_packing, stored_packing_finding
from cli.advise_type import finding_table, finding_text, published_finding, stored_finding
from cli.app import App
from cli.output import json_text

if TYPE_CHECKING:
    from almanac.records import Advice, Request
    from telemetry.slurm.sbatch import SbatchRequest

NO_EVIDENCE = 10
DEFAULTS_S = 5.0
"""How long Slurm may take to tell its defaults; without them the advice is almost the same."""
MAX_SCRIPT_BYTES = 4 << 20
OWN = ("--user", "--why", "--json", "--help")


class OwnOptionsFirst(click.Command):
    """Takes almanac's own options wherever they stand before the script; what follows the script is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, own_first(args))


def own_first(argv: Sequence[str]) -> list[str]:
    """The same words with almanac's own options before sbatch's. Raises RequestError where a value is missing."""
    from telemetry.slurm.options import option_length

    own: list[str] = []
    theirs: list[str] = []
    at = 0
    while at < len(argv):
        is_own = argv[at].partition("=")[0] in OWN
        length = (2 if argv[at] == "--user" else 1) if is_own else int(argv[at] == ":") or option_length(argv[at:])
        if not length:
            break
        (own if is_own else theirs).extend(argv[at : at + length])
        at += length
    return [*own, *theirs, *argv[at:]]


@click.command(
    "advise",
    cls=OwnOptionsFirst,
    # No short option of ours: click would find an "h" in the middle of sbatch's "-Chbm80g".
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["--help"],
    },
    options_metavar="[--user USER] [--why] [--json]",
)
@click.option("--user", metavar="USER", help="Advise for another user (operators only).")
@click.option(
    "--why", is_flag=True, help="Also show how the time and the priority come about, and why no packing is advised."
)
@click.option("--json", "as_json", is_flag=True, help="Print the advice and its reasons as JSON.")
@click.argument("submission", nargs=-1, type=click.UNPROCESSED, metavar="[SBATCH-OPTIONS]... [SCRIPT [ARGS]...]")
@click.pass_obj
def command(app: App, user: str | None, why: bool, as_json: bool, submission: tuple[str, ...]) -> int:
    """Advise a memory tier and a GPU type, and predict the run time of a job, from your own past jobs.

    Type what you would type after `sbatch`: options, then a script. almanac reads the script's #SBATCH lines; `-` is
    standard input. As with sbatch, options win over SBATCH_* variables, and these win over the script. almanac's own
    options may stand anywhere before the script.

    Without access to the store, you see the advice last published for you. Advice on the GPU type needs waits that are
    at most 10 minutes old (see `almanac waits`).

    Exit code 10: almanac has no advice on memory yet.
    """
    if not submission:
        raise click.UsageError("no submission given: add sbatch options, a script, or `-`")
    who, scripts = app.visible_user(user), list[str]()
    typed = read_submission(list(submission), scripts)
    request = typed.request(who, app.now_s(), _work_dir())
    if not app.may_read_store:
        return _show_published(app, request, typed, scripts, as_json)
    advice = _advise(app, request, typed.options)
    found = stored_finding(app, advice)
    packing = stored_packing_finding(app, advice) if may_pack(typed, scripts) else None
    if as_json:
        from advisor.explain import to_json

        said = {**to_json(advice), "gpu_type": finding_table(found), "packing": packing_json(packing, request.is_array)}
        click.echo(json_text(said))
    else:
        from advisor.explain import explain

        click.echo(explain(advice, why))
        if found:
            click.echo(finding_text(found))
        if packing and (text := packing_text(packing, request.is_array, why)):
            click.echo(text)
        for name, service in advice.services.items():
            if service["error"]:
                click.echo(printable(f"service {name}: {service['error']}", 1000), err=True)
    is_silent = advice.bound is None and advice.tier.tier is None
    return NO_EVIDENCE if is_silent and request.gpu_count > 0 else 0


def _advise(app: App, request: Request, typed: Collection[str]) -> Advice:
    """typed: the options that the submission names; Slurm's defaults stand for others."""
    from advisor.from_store import advise_from_store

    store = app.cluster_store()
    commands = dataclasses.replace(app.commands, timeout_s=min(app.commands.timeout_s, DEFAULTS_S))
    return advise_from_store(store, request, app.config, app.now_s(), commands=commands, typed=typed)


def _show_published(app: App, request: Request, typed: SbatchRequest, scripts: Sequence[str], as_json: bool) -> int:
    """Print the advice in the caller's own file. Raises StoreError where neither it nor the site's file is there."""
    from advisor.explain import wrapped
    from slurm_hooks.advice.shown import explain, read_shown, to_json

    root = Path(app.config.hooks.advice_dir)
    shown = read_shown(request, root, os.getuid(), app.now_s())
    if shown is None:
        raise StoreError(
            f"{app.store_root}: no permission to read the store, and {root} holds no published advice",
            "ask an operator to run `almanac publish`",
        )
    found, packing = published_finding(app, request), published_packing(app, shown, typed, scripts)
    if as_json:
        packed = {"is_advised": True, "text": packing} if packing else None
        click.echo(json_text({**to_json(shown), "gpu_type": finding_table(found), "packing": packed}))
    else:
        click.echo(explain(shown))
        if found:
            click.echo(finding_text(found))
        if packing:
            click.echo(wrapped([f"  {packing}"]))
    return NO_EVIDENCE if shown.is_silent and request.gpu_count > 0 else 0


def read_submission(argv: list[str], scripts: list[str]) -> SbatchRequest:
    """An sbatch command line; appends the text of its script to `scripts`. Raises RequestError."""
    from telemetry.slurm.sbatch import parse_submission

    def read(name: str) -> str:
        scripts.append(_read_script(name))
        return scripts[-1]

    return parse_submission(argv, os.environ, read)


def _work_dir() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""


def _read_script(name: str) -> str:
    """Text of a script; `-` is standard input. Raises RequestError."""
    try:
        with contextlib.ExitStack() as stack:
            handle = sys.stdin.buffer if name == "-" else stack.enter_context(Path(name).open("rb"))
            return handle.read(MAX_SCRIPT_BYTES).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise RequestError(f"{name}: cannot be read: {error.strerror}", "name an sbatch script, or `-`") from error
