"""almanac-prompt: cli_filter's options as sbatch's request, and what it answers without a terminal."""

from __future__ import annotations

import pytest

from almanac.errors import RequestError
from slurm.sbatch import parse_submission
from slurm_hooks.submit.offer import needs_of
from slurm_hooks.submit.prompt import submission_of

UNSET = {
    "nodes": "1-0", "ntasks": "1", "ntasks-per-node": "-2", "sockets-per-node": "-2", "cpus-per-task": "65534",
    "mincpus": "4294967294", "gpus": "", "exclusive": "no", "time": "2982616-04:14:00", "mem": "0", "nodelist": "",
}  # fmt: skip
HEAD = {"type": "sbatch", "offset": "0", "command": "/home/ann/x.sh", "comment": "", "advice_dir": "/a"}
ONE: list[dict[str, str]] = [
    {"gpus": "1"}, {"gpus": "gpu:1"}, {"gpus": "a100:1", "ntasks": "4"}, {"gres": "gpu:1"}, {"gpus-per-task": "1"},
    {"gpus-per-node": "1", "nodes": "1-1", "ntasks": "8"}, {"gres": "gpu:1", "nodes": "1"},
    {"gres": "gpu:1", "exclusive": "user"},
]  # fmt: skip
MORE: list[dict[str, str]] = [
    {"gpus": "2"}, {"gres": "gpu:1", "nodes": "2"}, {"gres": "gpu:1", "nodes": "1-2"}, {"gres": "gpu:1", "ntasks": "2"},
    {"gpus-per-node": "1", "ntasks": "2"}, {"gpus-per-task": "1", "ntasks": "2"}, {"gpus": "1", "nodes": "1-4"},
    {"gpus": "1", "nodes": "2"}, {"gres": "gpu:1", "exclusive": "exclusive"}, {"gres": "gpu:1", "nodes": "1,2"},
    {"gpus": "a100:2"}, {"gpus": "a100:2,v100:1"}, {"gpus-per-node": "2", "nodes": "3"}, {"gpus": "8", "time": "1-0"},
    {"gres": "gpu:a100:2,nvme:1", "nodes": "2-4"}, {"gpus-per-task": "1", "ntasks": "5"}, {"nodes": "4"}, {},
    {"gpus-per-task": "1", "nodes": "2", "ntasks-per-node": "4"}, {"gpus-per-socket": "2", "sockets-per-node": "2"},
    {"gpus": "8", "gpus-per-node": "4"}, {"gres": "gpu:2", "ntasks": "8", "ntasks-per-node": "4"}, {"gres": "gpu:0"},
    {"tres-per-task": "cpu:4,gres/gpu:2", "ntasks": "3"}, {"gres": "nvme:1"}, {"gpus-per-node": "2", "nodes": "1k"},
    {"gpus-per-node": "2", "nodelist": "n[1-2]"}, {"nodelist": "n[1-2]"}, {"gpus": "1", "array": "1-9"},
    {"gpus": "1", "comment": "rule_train", "job-name": "snakejob"},
    {"gpus": "1", "constraint": "a&b", "partition": "p"},
]  # fmt: skip


@pytest.mark.parametrize("options", [*ONE, *MORE], ids=str)
def test_the_request_is_that_of_the_command_line(options: dict[str, str]) -> None:
    argv = [f"--{name}={value}" for name, value in options.items()]
    expected = parse_submission([*argv, "/home/ann/x.sh"], {}, lambda name: "").request("", 0)
    prefixed = {**options, "gres": f"gres:{options['gres']}"} if "gres" in options else options
    for told in ({**HEAD, **options}, {**HEAD, **UNSET, **prefixed}):
        assert submission_of(told, 0).request == expected
        assert needs_of(submission_of(told, 0).options, 1) == needs_of(options, 1)
    assert expected.is_one_gpu == (options in ONE or set(options) & {"array", "comment", "constraint"} != set())


def test_a_later_component_of_a_het_job_may_use_more() -> None:
    assert submission_of({**HEAD, "gpus": "1", "offset": "1"}, 0).request.may_use_more


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"job-name": 'a"b'}, "a`b"),
        ({"wrap": "wrap"}, "wrap"),
        ({}, "x.sh"),
        ({"type": "srun", "command": "python"}, "python"),
        ({"type": "salloc", "command": ""}, "interactive"),
        ({"type": "srun", "command": ""}, ""),
    ],
)
def test_the_name_is_the_one_that_slurm_gives(told: dict[str, str], name: str) -> None:
    assert submission_of({**HEAD, **told}, 0).request.job_name == name


@pytest.mark.parametrize("options", [{"gpus": "a:b:c"}, {"gpus": "x"}, {"nodes": "n1"}, {"nodelist": "n["}])
def test_what_cannot_be_read_gets_no_advice(options: dict[str, str]) -> None:
    with pytest.raises(RequestError):
        submission_of({**HEAD, "gres": "gpu:1", **options}, 0)
