"""What a request allows, and the same request for one type; what a comment and the options of a job consent to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.tres import parse_gpus
from slurm_hooks.placement.consent import accepts_any, checkpoint_signal, is_movable, requeue_terms
from slurm_hooks.placement.log import is_sendable
from slurm_hooks.placement.request import names_one, type_request
from telemetry.slurm.placement_queue import gpu_counts

TYPES = ("a100", "h100", "v100")


@pytest.mark.parametrize(
    ("text", "allowed", "new"),
    [
        ("", {*TYPES}, "h100"),
        ("[a100|h100]", {"a100", "h100"}, "h100"),
        ("(a100|h100)", {"a100", "h100"}, "h100"),
        ("a100|h100", {"a100", "h100"}, "h100"),
        ("a100", {*TYPES}, "h100"),
        ("ib&[a100|h100]&ssd", {"a100", "h100"}, "ib&h100&ssd"),
        ("ib", {*TYPES}, "ib&h100"),
        ("ib|ssd", {*TYPES}, "(ib|ssd)&h100"),
        ("(ib|ssd)&a100", {*TYPES}, "(ib|ssd)&h100"),
    ],
)
def test_a_constraint_names_its_types(text: str, allowed: set[str], new: str) -> None:
    request = type_request(text, {}, TYPES, "constraint")
    assert request is not None
    assert (request.text, request.allowed, request.of("h100")) == (text, allowed, new)


@pytest.mark.parametrize(
    "text",
    ["a100*2", "[a100*1&h100*1]", "[a100|ssd]", "a100&h100", "[a100|[h100|v100]]", "a100|h100&ib", "[a100", "a100]",
     "!a100", "a 100", "a100;x", "a100\nh100", "&a100", "a100&", "a" * 1025],
)  # fmt: skip
def test_other_constraints_are_left_alone(text: str) -> None:
    assert type_request(text, {}, TYPES, "constraint") is None


@pytest.mark.parametrize(
    ("requests", "new"),
    [
        ({"TresPerNode": "gres/gpu:a100:2"}, "gres/gpu:h100:2"),
        ({"TresPerNode": "gres/gpu:2"}, "gres/gpu:h100:2"),
        ({"TresPerJob": "gres/gpu:a100:2"}, "gres/gpu:h100:2"),
        ({"TresPerTask": "cpu=4,gres/gpu:a100=1"}, "cpu=4,gres/gpu:h100=1"),
        ({"TresPerTask": "gres/gpu=1"}, "gres/gpu:h100=1"),
        ({"TresPerNode": "gres/gpu"}, "gres/gpu:h100"),
    ],
)
def test_a_gres_request_is_changed_in_place(requests: dict[str, str], new: str) -> None:
    request = type_request("", requests, TYPES, "gres")  # type: ignore[arg-type]
    assert request is not None
    assert request.of("h100") == new
    assert request.text in requests.values()


@pytest.mark.parametrize(
    "requests",
    [{}, {"TresPerNode": "gres/gpu:k80:1"}, {"TresPerNode": "gres/gpu:a100:1,gres/gpu:h100:1"},
     {"TresPerNode": "gres/gpu:a100:1,gres/nvme:1"}, {"TresPerSocket": "gres/gpu:a100:1"},
     {"TresPerNode": "gres/gpu:a100:1", "TresPerJob": "gres/gpu:a100:1"}, {"TresPerNode": "gres/gpu:a100:1 x=1"}],
)  # fmt: skip
def test_other_gres_requests_are_left_alone(requests: dict[str, str]) -> None:
    assert type_request("", requests, TYPES, "gres") is None  # type: ignore[arg-type]


@given(st.text(alphabet="ah10v&|[]()!*, \n;='\"", max_size=24))
def test_any_constraint_gives_one_word_or_nothing(text: str) -> None:
    request = type_request(text, {}, TYPES, "constraint")
    if request is not None:
        assert is_sendable(request.of("h100"))
        again = type_request(request.of("h100"), {}, TYPES, "constraint")
        assert again is not None
        assert names_one(again) == "h100"


@pytest.mark.parametrize(
    ("comment", "any_gpu", "movable"),
    [
        ("almanac:any-gpu", True, False),
        ("run 7, almanac:any-gpu,almanac:movable please", True, True),
        ("almanac:movable", False, False),
        ("almanac:any-gpus", False, False),
        ("xalmanac:any-gpu", False, False),
        ("ALMANAC:ANY-GPU", False, False),
        ("not;almanac:any-gpu", False, False),
        ("almanac:any-gpu\nalmanac:movable", True, True),
        ("almanac:any-gpu " * 5000, False, False),
        ("", False, False),
    ],
)
def test_only_whole_words_of_a_comment_consent(comment: str, any_gpu: bool, movable: bool) -> None:
    assert (accepts_any(comment), is_movable(comment)) == (any_gpu, movable)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("B:USR1@120", ("USR1", True, 120)), ("USR2", ("USR2", False, 60)), ("SIGTERM@5", ("TERM", False, 5)),
     ("10@30", ("USR1", False, 30)), ("RB:usr1@9", ("USR1", True, 9)), ("KILL", None), ("9@10", None), ("STOP", None),
     ("USR1;x", None), ("", None), ("NOPE", None), ("USR1@999999", None)],
)  # fmt: skip
def test_the_checkpoint_signal(text: str, shown: tuple[str, bool, int] | None) -> None:
    found = checkpoint_signal(text)
    assert (found and (found.name, found.is_batch, found.before_s)) == shown


APPEND = "#!/bin/sh\n#SBATCH --open-mode=append\n#SBATCH --signal=B:USR1@30\n"


@pytest.mark.parametrize(
    ("script", "line", "default", "why_not"),
    [
        (APPEND, "sbatch run.sh", False, ""),
        (APPEND, "", False, "submit line"),
        (APPEND, "sbatch --comment=x, y --open-mode=truncate run.sh", False, "empty its output"),
        (APPEND, "sbatch --open-mode t run.sh", True, "empty its output"),
        ("#!/bin/sh\n#SBATCH --signal=USR1\n", "sbatch run.sh", False, "empty its output"),
        ("#!/bin/sh\n#SBATCH --signal=USR1\n", "sbatch run.sh", True, ""),
        ("#!/bin/sh\n", "sbatch --open-mode=append --signal=USR1@30 run.sh", False, ""),
        ("#!/bin/sh\n", "sbatch --open-mode=append run.sh", False, "no --signal"),
        ("#!/bin/sh\n", "sbatch --open-mode=append --signal=KILL run.sh", False, "none that leaves it running"),
        ("#!/bin/sh\n#SBATCH --comment='x\n", "sbatch run.sh", True, "cannot be read"),
    ],
)
def test_the_terms_of_a_requeue(script: str, line: str, default: bool, why_not: str) -> None:
    found = requeue_terms(script, line, default).why_not
    assert (why_not in found) if why_not else not found


@pytest.mark.parametrize("script", ["#SBATCH " + "a " * 2_000_000, "#SBATCH -J a\n" * 300_000, "#\n" * 2_000_000])
def test_a_script_with_megabytes_of_options_allows_nothing(script: str) -> None:
    assert requeue_terms(script, "sbatch run.sh", False).why_not == "its script's options cannot be read"


def test_a_long_script_below_its_options_is_read() -> None:
    assert requeue_terms(f"{APPEND}sleep 1\n{'x' * 4_000_000}", "sbatch run.sh", False).why_not == ""


@pytest.mark.parametrize("text", ["(" * 1_000_000, "gpu:1(IDX:" * 100_000, "gpu:a," * 200_000])
def test_a_long_request_of_gpus_is_read_in_linear_time(text: str) -> None:
    """Seconds for each became hours: the square of a million."""
    gpu_counts(text)
    parse_gpus(text)
    assert type_request("", {"TresPerJob": text}, ("a",), "gres") is None
