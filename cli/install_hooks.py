"""`almanac install-hooks`: add almanac's line to the site's Lua scripts, or remove it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.config import Hooks
from almanac.units import printable
from cli.app import App
from slurm_hooks.install.guarded_line import HOOKS, Places, is_checked, syntax_fault
from slurm_hooks.install.scripts import (
    SCRIPT,
    apply,
    diff_text,
    ended_conf_lines,
    plan_ended,
    plan_install,
    plan_remove,
    plan_remove_ended,
    slurm_conf_line,
)

if TYPE_CHECKING:
    from slurm_hooks.install.guarded_line import Hook
    from slurm_hooks.install.scripts import FileChange

PACKAGED = Path("/usr/share/almanac")
FILTER_EVERYWHERE = """\
Install cli_filter.lua beside slurm.conf on EVERY host that runs srun, sbatch, or
salloc: login and compute nodes. Only then set CliFilterPlugins=lua. On a host
without the file, these commands fail, and so does every job step.
`almanac doctor` lists the hosts that were not checked, and how to check them."""


@click.command("install-hooks")
@click.argument("named", nargs=-1, type=click.Choice(["job-submit", "cli-filter", "ended"]), metavar="[HOOK]...")
@click.option("--prefix", default="/etc/slurm", show_default=True, type=click.Path(path_type=Path),
              help="Folder of slurm.conf.")  # fmt: skip
@click.option("--lua-dir", hidden=True)  # for containers, where the modules lie elsewhere than here
@click.option("--remove", "is_removal", is_flag=True, help="Remove almanac's lines.")
@click.option("--yes", "is_agreed", is_flag=True, help="Write the changes that are shown.")
@click.pass_obj
def command(
    app: App,
    named: tuple[str, ...],
    prefix: Path,
    lua_dir: str | None,
    is_removal: bool,
    is_agreed: bool,
) -> None:
    """Add almanac's one line to Slurm's job_submit.lua and cli_filter.lua, or install these scripts if there are none.

    HOOK is job-submit (job_submit.lua, on the controller), cli-filter (cli_filter.lua, on every host that runs srun,
    sbatch, or salloc), or ended (almanac-ended.sh, on the controller: mail within minutes of a job's end). Without one,
    it does the first two.

    Shows the difference, and writes it only with --yes. Backs up each changed file in its folder. Never edits
    slurm.conf, but prints the lines that it needs. The line in the scripts names hooks.advice_dir if you changed it.
    almanac-ended.sh is installed next to slurm.conf.

    Install cli_filter.lua on all login and compute nodes before you set CliFilterPlugins=lua. On a host without it,
    every srun, sbatch, and salloc fails, and so does every job step.
    """
    ended = "ended" in named
    hooks = [hook for name, hook in HOOKS.items() if not named or name.replace("_", "-") in named]
    changes = [_plan(app, hook, prefix, lua_dir, is_removal) for hook in hooks]
    if ended:
        changes.append(_plan_ended(prefix, is_removal))
    for change in changes:
        click.echo(diff_text(change) if change.is_needed else f"{change.path}: nothing to change")
        for note in change.notes:
            click.echo(printable(note, 1000))
    needed = [change for change in changes if change.is_needed]
    if needed and not is_agreed:
        click.echo("\nNothing was written. Use --yes to write this.")
    for change in needed if is_agreed else []:
        backup = apply(change, app.now_s())
        done = "removed" if change.after is None else "written"
        click.echo(f"{change.path}: {done}" + (f"; backup: {backup}" if backup else ""))
    _say_what_else(prefix, hooks, needed, is_removal, ended)


def _plan(app: App, hook: Hook, prefix: Path, lua_dir: str | None, is_removal: bool) -> FileChange:
    if is_removal:
        return plan_remove(hook, prefix, syntax_fault)
    modules, scripts = _installed()
    advice_dir = app.config.hooks.advice_dir
    places = Places(lua_dir or str(modules), "" if advice_dir == Hooks().advice_dir else advice_dir)
    return plan_install(hook, prefix, places, scripts, syntax_fault)


def _plan_ended(prefix: Path, is_removal: bool) -> FileChange:
    import slurm_hooks

    packaged = Path("/usr/libexec/almanac")
    is_packaged = (packaged / SCRIPT).is_file()
    scripts_dir = packaged if is_packaged else Path(slurm_hooks.__file__).parent / "spool"
    return plan_remove_ended(prefix) if is_removal else plan_ended(prefix, scripts_dir)


def _installed() -> tuple[Path, Path]:
    """The folders of the Lua modules and of the stand-alone scripts: the package's, or this environment's own."""
    import slurm_hooks

    ours = Path(slurm_hooks.__file__).parent
    if (PACKAGED / "lua").is_dir():
        return PACKAGED / "lua", PACKAGED / "slurm"
    return ours / "lua", ours / "standalone"


def _say_what_else(prefix: Path, hooks: list[Hook], needed: list[FileChange], is_removal: bool, ended: bool) -> None:
    if hooks and needed and not is_checked():
        click.echo("The syntax of the scripts was not checked: no Lua library or luac was found.")
    lines = [] if is_removal else list(filter(None, (slurm_conf_line(prefix, hook) for hook in hooks)))
    if ended and not is_removal:
        lines += ended_conf_lines(prefix)
    if not is_removal and any(hook.kind == "cli_filter" for hook in hooks):
        click.echo(f"\n{FILTER_EVERYWHERE}")
    if lines:
        click.echo(f"\nAdd to {prefix / 'slurm.conf'} on every host, then restart slurmctld:")
        for line in lines:
            click.echo(f"  {printable(line, 1000)}")
    if needed and any(hook.kind == "job_submit" for hook in hooks):
        click.echo("slurmctld loads a changed job_submit.lua at the next submission. If it does not,")
        click.echo("touch the file or run `scontrol reconfigure`; slurmctld's log says why.")
