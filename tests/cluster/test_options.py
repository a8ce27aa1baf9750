"""The table of sbatch's options against each release's own sbatch."""

from __future__ import annotations

import pytest
from sites import Site

from slurm.options import ALL, FLAGS, OPTIONAL_VALUE, WITH_VALUE

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

# Nothing is submitted: either --help counts, or it is an option's value and there is no script.
PROBE = """for name in "$@"; do
    printf '%s\\t%s\\t' "$name" "$(sbatch "--$name=1" --help 2>&1 </dev/null | head -1)"
    printf '%s\\n' "$(sbatch "--$name" --help 2>&1 </dev/null | head -1)"
done"""


def test_each_option_of_the_table_takes_what_the_release_says(site: Site) -> None:
    """Options that the release does not know are skipped; at least those that all releases have are known."""
    said = site.run("login", "alice", "sh", "-c", PROBE, "sh", *sorted(ALL)).stdout
    rows = [line.split("\t") for line in said.splitlines()]
    known = {name for name, message, _ in rows if "unrecognized option" not in message and "ambiguous" not in message}
    assert known >= {"gpus", "constraint", "context", "tasks-per-node", "ntasks-per-node", "wrap", "no-requeue"}
    without_value = {name for name, message, _ in rows if "doesn't allow an argument" in message}
    assert (known & FLAGS) - without_value == set()
    assert without_value & WITH_VALUE == set()
    takes_help = {name for name, _, message in rows if not message.startswith("Usage:")}
    assert (known & WITH_VALUE) - takes_help == set()
    assert known & OPTIONAL_VALUE & takes_help == set()
