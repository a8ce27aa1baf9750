"""`almanac advise`: which words are its own, which are sbatch's, and which the script's."""

from __future__ import annotations

import pytest

from almanac.errors import RequestError
from cli.advise import own_first


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("-J x --gpus=4 --json", "--json -J x --gpus=4"),
        ("-J x --why --gpus 4 --user bob job.sh", "--why --user bob -J x --gpus 4 job.sh"),
        ("--gpus=4 --user=bob --help", "--user=bob --help --gpus=4"),
        ("--gpus=4 job.sh --json --user eve", "--gpus=4 job.sh --json --user eve"),
        ("--gpus=4 - --json", "--gpus=4 - --json"),
        ("--gpus=4 -- --json", "--gpus=4 -- --json"),
        ("-J --json --gpus=4", "-J --json --gpus=4"),
        ("--comment --user -N 2", "--comment --user -N 2"),
        ("-N1 : -N2 --json job.sh", "--json -N1 : -N2 job.sh"),
        ("--wrap sleep --json", "--json --wrap sleep"),
        ("--gpus=4 --user", "--user --gpus=4"),
        ("", ""),
    ],
)
def test_almanacs_own_options_may_stand_anywhere_before_the_script(argv: str, expected: str) -> None:
    assert own_first(argv.split()) == expected.split()


def test_a_missing_value_is_said_as_sbatch_would() -> None:
    with pytest.raises(RequestError, match=r"--job-name .* has no value"):
        own_first(["--json", "-J"])
