"""Old spellings of commands and options: what they became, and that today's commands take it."""

from __future__ import annotations

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from almanac.config import Config
from cli.main import cli
from cli.old_spellings import OLD, renewed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("power apply --json", "power plan --apply --json"),
        ("--config a.toml -M c power apply", "--config a.toml -M c power plan --apply"),
        ("--store=x mig apply", "--store=x mig plan --apply"),
        ("power history -n 5 --days 3", "power status --days 3"),
        ("place undo --apply", "place --clear --apply"),
        ("report --since now-1day -u bob", "jobs --ended-since now-1day -u bob"),
        ("report --due --dry-run --json", "mail run --dry-run --json"),
        ("report 12 --mail --to a@example.org", "mail send 12 --to a@example.org"),
        ("jobs -a --verdict=ok --tier a,b --tier c", "jobs --where verdict=ok --where tier=a,b --where tier=c -a"),
        ("jobs --verdict preallocated", "jobs --where hbm_evidence=preallocated"),
        ("backtest priority --from .4 --jobs 3 --nodes 2", "trial priority --nodes 2"),
        ("install-hooks --ended --job-submit --yes", "install-hooks job-submit ended --yes"),
        ("summarize --engine dask --scheduler tls://h:1", "summarize --engine tls://h:1"),
    ],
)
def test_an_old_spelling_becomes_the_new_one_and_warns(old: str, new: str) -> None:
    found, warnings = renewed(shlex.split(old))
    assert found == shlex.split(new)
    assert warnings
    assert all("ends with the next release: use `almanac " in each for each in warnings)


@pytest.mark.parametrize(
    "argv",
    [
        ["jobs", "-o", "tier"],
        ["jobs", "--", "--tier", "x"],
        ["advise", "--tier", "x", "power", "apply"],
        ["--config", "power", "apply"],
        ["jobs", "--tier"],
        ["--version"],
        [],
    ],
)
def test_nothing_else_changes(argv: list[str]) -> None:
    assert renewed(argv) == (argv, [])


@pytest.mark.parametrize("old", [old for old, new in OLD.items() if new.startswith("!")])
def test_an_option_that_is_gone_names_the_key_that_says_the_same(old: str) -> None:
    with pytest.raises(click.UsageError, match=f"{old[:-3]}` is gone: set [a-z]+.[a-z0-9_]+") as caught:
        renewed(shlex.split(old.replace("{}", "X")))
    for key in re.findall(r"(\w+)\.(\w+) ?(?:and|in)", str(caught.value)):
        assert getattr(getattr(Config(), key[0]), key[1]) is not None


@pytest.mark.parametrize("old", [old for old, new in OLD.items() if not new.startswith("!")])
def test_the_new_spelling_exists_and_the_old_one_does_not(old: str) -> None:
    new = renewed(shlex.split(old.replace("{}", "X")))[0]
    assert cli.get_command(click.Context(cli), new[0]) is not None
    command, words = cli.get_command(click.Context(cli), new[0]), new[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command = command.get_command(click.Context(command), words.pop(0))
    assert command is not None
    known = {spelling for each in command.params for spelling in each.opts}
    assert {word for word in words if word.startswith("-")} <= known
    assert renewed(new) == (new, [])


def test_the_command_line_warns_on_stderr_alone() -> None:
    done = CliRunner().invoke(cli, ["power", "apply", "--help"])
    assert done.exit_code == 0
    assert done.stderr == (
        "warning: `almanac power apply` ends with the next release: use `almanac power plan --apply`\n"
    )
    assert done.stdout.startswith("Usage: cli power plan")
