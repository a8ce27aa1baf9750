"""Table of the old spellings of commands and options: each works until the next release, with a warning."""

from __future__ import annotations

from collections.abc import Sequence

import click

OLD = {
    "backtest power --boot {}": "! set power.boot_min",
    "backtest power --co2 {}": "! set power.co2_kg_per_kwh",
    "backtest power --holidays {}": "! set power.holidays",
    "backtest power --idle-watts {}": "! set power.idle_watts and power.asleep_watts",
    "backtest power --price {}": "! set cost.per_kwh",
    "backtest power --pue {}": "! set power.pue",
    "backtest priority --cluster-file {}": "backtest priority",
    "backtest priority --from {}": "backtest priority",
    "backtest priority --jobs {}": "backtest priority",
    "backtest priority": "trial priority",
    "demo --seed {}": "demo",
    "doctor --node": "doctor --host filter",
    "ingest --layout {}": "ingest",
    "install-hooks --cli-filter": "install-hooks cli-filter",
    "install-hooks --ended": "install-hooks ended",
    "install-hooks --job-submit": "install-hooks job-submit",
    "jobs --class {}": "jobs --where job_class={}",
    "jobs --tier {}": "jobs --where tier={}",
    "jobs --verdict preallocated": "jobs --where hbm_evidence=preallocated",
    "jobs --verdict {}": "jobs --where verdict={}",
    "mig apply": "mig plan --apply",
    "models --rollback": "models --use previous",
    "place apply": "place --apply",
    "place plan": "place",
    "place status": "changes",
    "place undo": "place --clear",
    "power apply": "power plan --apply",
    "power history --rows {}": "power status",
    "power history -n {}": "power status",
    "power history": "power status",
    "publish --advice-dir {}": "! set hooks.advice_dir",
    "report --due": "mail run",
    "report --mail": "mail send",
    "report --since {}": "jobs --ended-since {}",
    "site-report --out {}": "site-report --csv {}",
    "summarize --engine dask": "summarize",
    "summarize --scheduler {}": "summarize --engine {}",
    "waits --advice-dir {}": "! set hooks.advice_dir",
}
"""Old to new. {} is a value. An old option may stand anywhere after its command. Rows apply from first to last.

"!": the option is gone, because a key of the configuration says the same.
"""

VALUED = ("--config", "--store", "--cluster", "-M")
"""Options before the command that take a value."""


def renewed(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments in the new spelling, and a warning for each old one.

    Raises click.UsageError for an option that is gone.
    """
    start = _command_at(argv)
    words, warnings = list(argv[start:]), []
    for old, new in OLD.items():
        if (found := _replaced(words, old.split(), new.split())) is not None:
            if new.startswith("!"):
                said = f"`almanac {old.replace(' {}', '')}` is gone: {new[2:]} in the configuration"
                raise click.UsageError(f"{said} (--config names one of your own)")
            words = found
            shown, instead = (text.replace("{}", "...") for text in (old, new))
            warnings.append(f"`almanac {shown}` ends with the next release: use `almanac {instead}`")
    return [*argv[:start], *words], warnings


def _command_at(argv: Sequence[str]) -> int:
    place = 0
    while place < len(argv) and argv[place].startswith("-"):
        place += 2 if argv[place] in VALUED else 1
    return place


def _replaced(words: Sequence[str], old: Sequence[str], new: Sequence[str]) -> list[str] | None:
    """Return the words with all that `old` matches replaced; None if it does not match."""
    size, kept = (next((i for i, word in enumerate(part) if word.startswith("-")), len(part)) for part in (old, new))
    if [*words[:size]] != [*old[:size]]:
        return None
    option, rest = old[size:], list(words[size:])
    if not option:
        return [*new, *rest]
    taken: list[str] = []
    end = rest.index("--") if "--" in rest else len(rest)
    place, is_found = 0, False
    while place < end:
        given = _value(rest[place:end], option)
        if given is None:
            place += 1
            continue
        count, value = given
        taken += [word.replace("{}", value) for word in new[kept:]]
        del rest[place : place + count]
        end, is_found = end - count, True
    return [*new[:kept], *taken, *rest] if is_found else None


def _value(words: Sequence[str], option: Sequence[str]) -> tuple[int, str] | None:
    """(number of words that spell the option, its value, "" if it takes none); None if they do not spell it."""
    name, wanted = option[0], option[1] if len(option) > 1 else None
    if wanted is None:
        return (1, "") if words[0] == name else None
    if words[0] == name and len(words) > 1:
        count, value = 2, words[1]
    elif name.startswith("--") and words[0].startswith(f"{name}="):
        count, value = 1, words[0].partition("=")[2]
    else:
        return None
    return (count, value) if wanted in ("{}", value) else None
