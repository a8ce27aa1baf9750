"""`almanac doctor` on Slurm's priority weights."""

from __future__ import annotations

from collections.abc import Iterator

from almanac.errors import AlmanacError
from cli.app import App
from cli.doctor.findings import Check, CheckStatus


def check_priority(app: App) -> Iterator[Check]:
    """A fault is only a warning until priority.mode is "apply": before that, nothing in Slurm depends on it."""
    from advisor.decisions.priority import check_ageing
    from telemetry.slurm.commands import controller_config

    priority = app.config.priority
    bad: CheckStatus = "fail" if priority.mode == "apply" else "warn"
    try:
        check = check_ageing(controller_config(app.commands), priority)
    except AlmanacError as error:
        yield Check("priority", bad, f"mode {priority.mode}; {error}", error.hint)
        return
    tau = "no tau (age does not count)" if check.tau_s is None else f"a tau of {check.tau_s / 3600:.1f} h"
    details = {"tau_s": check.tau_s, "goal_s": priority.tau_hours * 3600, "lines": check.lines, "faults": check.faults}
    said = f"mode {priority.mode}; Slurm's weights give {tau}, the goal is {priority.tau_hours:g} h"
    if check.fits:
        yield Check("priority", "ok", f"{said}: fits", "", details)
        return
    todo = f"in slurm.conf: {', '.join(check.lines)}"
    if priority.mode == "observe":
        todo = f'before priority.mode = "apply", {todo}'
    yield Check("priority", bad, f"{said}: {'; '.join(check.faults)}", todo, details)
