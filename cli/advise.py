"""`almanac advise`: memory, GPU type, and packing to ask for, for one submission."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.explain import explain, to_json, wrapped
from advisor.health.checkpoints import checkpoint_text
from advisor.packing.text import packing_lines, packing_sentence, packing_table, why_silent
from almanac.errors import AlmanacError, RequestError, StoreError
from almanac.published.files import usable
from almanac.submit_config import SITE
from almanac.units import printable
from cli.app import App
from cli.output import json_text
from slurm.commands import within
from slurm.options import option_length
from slurm.sbatch import parse_submission
from slurm_hooks.advice.kinds import PACKING, TIMES, WAITS, WaitsFile
from slurm_hooks.submit.late_proposals import PROGRAM, find_note, find_type, is_sweep
from slurm_hooks.submit.proposal import typed

if TYPE_CHECKING:
    from advisor.health.checkpoints import CheckpointAdvice
    from advisor.packing.evidence import PackingFinding
    from advisor.types.decide import TypeRunTime
    from almanac.records import Advice, JobRequest
    from slurm.sbatch import SbatchRequest
    from slurm_hooks.advice.shown import Shown
    from slurm_hooks.submit.late_proposals import TypeFinding


def published_finding(app: App, request: JobRequest) -> TypeFinding | None:
    """GPU type by the caller's own published run times."""
    own = usable(TIMES, app.config.hooks.advice_dir, str(os.getuid()), app.now_s())
    return _finding(app, request, own.of_family((request.name_key, request.gpu_count)) if own else ())


def stored_finding(app: App, advice: Advice) -> TypeFinding | None:
    """GPU type by the runs in the store. None without a trained model or published waits."""
    request = advice.request
    if request.gpu_count <= 0 or _waits(app) is None:
        return None
    from advisor.artefacts import load_speeds
    from advisor.types.times import stored_times

    times: Sequence[TypeRunTime] = ()
    with contextlib.suppress(AlmanacError):
        table = load_speeds(app.store.models_dir)
        if table is not None:
            times = stored_times(app, request, table, advice.bound)
    return _finding(app, request, times)


def _finding(app: App, request: JobRequest, times: Sequence[TypeRunTime]) -> TypeFinding | None:
    waits = _waits(app)
    return None if waits is None else find_type(request, times, waits, app.now_s())


def _waits(app: App) -> WaitsFile | None:
    return usable(WAITS, app.config.hooks.advice_dir, SITE, app.now_s())


def finding_text(found: TypeFinding) -> str:
    """Lines of at most 80 columns, without a newline at the end."""
    how = f"ask for it with {typed(found.change)}" if found.change.value else f"not rewritten: {found.change.why_not}"
    return wrapped([f"  GPU type: {found.text}", f"    {how}"])


def finding_table(found: TypeFinding | None) -> dict[str, Any] | None:
    """Return the advice on the type for JSON; None without any."""
    if found is None:
        return None
    return {"type": found.target.name, "text": found.text, "rewrite": dataclasses.asdict(found.change)}


def may_pack(typed: SbatchRequest, scripts: Sequence[str]) -> bool:
    """Return True if almanac-pack can take the job: it does not run it already, and an array is one range of tasks.

    scripts: texts of the job's scripts.
    """
    return PROGRAM not in _command(typed, scripts) and (
        "array" not in typed.options or is_sweep(_option(typed, "array"))
    )


def published_packing(app: App, shown: Shown, typed: SbatchRequest, scripts: Sequence[str]) -> str:
    """The note in the caller's own published file, as a terminal shows it for an array; "" without one."""
    file = usable(PACKING, app.config.hooks.advice_dir, str(os.getuid()), app.now_s())
    if file is None or shown.found is None:
        return ""
    tiers = shown.found.file.tiers
    row = find_note(shown.request, _option(typed, "array"), _command(typed, scripts), tiers, file)
    return row.text if row else ""


def _command(typed: SbatchRequest, scripts: Sequence[str]) -> str:
    return "\n".join([_option(typed, "wrap"), *scripts])


def _option(typed: SbatchRequest, name: str) -> str:
    option = typed.options.get(name)
    return option.value or "" if option else ""


def stored_packing_finding(app: App, advice: Advice) -> PackingFinding | None:
    """Return the finding on packing by the runs in the store.

    None if the site does not want such advice, or if the store does not have the evidence.
    """
    if not app.config.packing.advise or advice.request.gpu_count <= 0:
        return None
    from advisor.packing.evidence import stored_packing

    with contextlib.suppress(AlmanacError):
        return stored_packing(app, advice)
    return None


def packing_text(found: PackingFinding, is_array: bool, why: bool) -> str:
    """Lines of at most 80 columns, without a newline at the end; "" where nothing is advised and `why` is False."""
    lines = packing_lines(found.best, 80, "  ", is_array)
    return "\n".join(lines) if lines else wrapped([f"  {why_silent(found.alone)}"]) if why else ""


def packing_json(found: PackingFinding | None, is_array: bool) -> dict[str, Any] | None:
    """Return the finding on packing for JSON; None without one."""
    if found is None:
        return None

    best = found.best
    return {**packing_table(best, is_array), "text": packing_sentence(best) or why_silent(best)}


NO_EVIDENCE = 10
DEFAULTS_S = 5.0
"""Seconds that Slurm may take to print its defaults; without them the advice is almost the same."""
MAX_SCRIPT_BYTES = 4 << 20
OWN = ("--user", "--why", "--json", "--help")


class OwnOptionsFirst(click.Command):
    """Takes almanac's own options wherever they stand before the script; what follows the script is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, own_first(args))


def own_first(argv: Sequence[str]) -> list[str]:
    """Return the words with almanac's own options before sbatch's. Raises RequestError if a value is missing."""
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
    checkpoints = _checkpoints(app, advice)
    if as_json:
        said = {**to_json(advice), "gpu_type": finding_table(found), "packing": packing_json(packing, request.is_array),
                "checkpoints": vars(checkpoints) if checkpoints else None}  # fmt: skip
        click.echo(json_text(said))
    else:
        click.echo(explain(advice, why))
        if found:
            click.echo(finding_text(found))
        if checkpoints:
            click.echo(wrapped([f"  failures: {checkpoint_text(checkpoints)}"]))
        if packing and (text := packing_text(packing, request.is_array, why)):
            click.echo(text)
        for name, service in advice.services.items():
            if service["error"]:
                click.echo(printable(f"service {name}: {service['error']}", 1000), err=True)
    is_silent = advice.bound is None and advice.tier.tier is None
    return NO_EVIDENCE if is_silent and request.gpu_count > 0 else 0


def _advise(app: App, request: JobRequest, typed: Collection[str]) -> Advice:
    """typed: the options that the submission names; Slurm's defaults stand for others."""
    from advisor.from_store import advise_from_store

    return advise_from_store(app.but(commands=within(app.commands, DEFAULTS_S)), request, typed)


def _checkpoints(app: App, advice: Advice) -> CheckpointAdvice | None:
    """Advice on checkpoints by the predicted run time; None without one, and for a job that seldom meets a failure."""
    from advisor.health.record import stored_checkpoints

    run_s = advice.duration.duration_s if advice.duration else 0.0
    sizes = {"": (advice.request.gpu_count, run_s)}
    return stored_checkpoints(app.store, app.now_s(), sizes, app.config.advice.checkpoint_s).get("")


def _show_published(app: App, request: JobRequest, typed: SbatchRequest, scripts: Sequence[str], as_json: bool) -> int:
    """Print the advice in the caller's own file. Raises StoreError where neither it nor the site's file is there."""
    from slurm_hooks.advice.shown import explain, read_shown, to_json

    root = Path(app.config.hooks.advice_dir)
    shown = read_shown(request, root, os.getuid(), app.now_s())
    if shown is None:
        raise StoreError(
            f"{app.store_root}: no permission to read the store, and {root} holds no published advice",
            "ask an operator to run `almanac publish`",
        )
    if shown.unknown:
        click.echo(f"note: published by a newer almanac; not shown: {', '.join(sorted({*shown.unknown}))}", err=True)
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
