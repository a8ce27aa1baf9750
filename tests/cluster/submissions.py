"""Submissions of every kind, and how a site's user submits them all at once."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BODY = "#!/bin/sh\n"
FOLDER = "/tmp/almanac-live-and-record"
"""Folder of the scripts, in which submissions are typed."""


@dataclass(frozen=True)
class Submitted:
    """One sbatch command. options: its words before the script; "--wrap" comes among them.

    file: the script's name, "" where there is none; lines: what stands below its first line; arguments: the script's.
    since: the oldest release that takes it.
    """

    options: tuple[str, ...] = ()
    file: str = ""
    lines: str = ""
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    since: str = "22.05"

    @property
    def argv(self) -> tuple[str, ...]:
        """Words that follow sbatch; a script without a name comes from standard input."""
        return (*self.options, self.file, *self.arguments) if self.file else self.options

    @property
    def script(self) -> str:
        return f"{BODY}{self.lines}\ntrue\n"

    @property
    def is_wrapped(self) -> bool:
        return "--wrap" in self.options


def wrapped(*options: str, since: str = "22.05", **env: str) -> Submitted:
    return Submitted((*options, "--wrap", "true"), env=env, since=since)


def split(options: str, since: str = "22.05", **env: str) -> Submitted:
    """Of the family that has evidence."""
    return wrapped("-J", "train-bert-7", *options.split(), since=since, **env)


NAMES: Mapping[str, tuple[str, ...]] = {
    "mixed case": ("train-BERT-0042",),
    "markup": ('tab\t"quote"\x1b[31mred | <b>&amp;</b> \\ ü',),
    "forged rows": ("innocent\n999|999|root|COMPLETED\nalmanac: set site_factor=1 uid=0",),
    "no UTF-8": ("caf\udce9-\udcff\udcfe-3",),
    "emoji": ("run-🚀🚀-9",),
    "shell": ("$(touch /tmp/almanac-was-here); `id` && 'x'",),
    "Lua pattern": ("%d+[%a-z]*^$(.-)%1",),
    "uuid": ("sweep-123e4567-e89b-12d3-a456-426614174000",),
    "hash": ("trial-deadbeef01-lr0.001",),
    "question marks": ("what??_?really_",),
    "blanks": ("  two  words  ",),
    "an option": ("--gpus=8",),
}
SUBMISSIONS: Mapping[str, Submitted] = {
    **{f"name: {kind}": wrapped(f"--job-name={name}", "-G", "1") for kind, (name,) in NAMES.items()},
    "name: 300 letters": wrapped("-J", "x" * 300, "-G1"),
    "name: 300 digits": wrapped("-J", "1" * 300 + "-end", "-G1"),
    "name: 400 bytes of UTF-8": wrapped("-J", "ü1" * 130 + "-end", "-G1"),
    "name: empty": wrapped("-J", "", "-G1"),
    "name: of wrap": wrapped("-G1"),
    "name: of the script": Submitted(("-G1",), file="Train-Llama-3.sh"),
    "name: of standard input": Submitted(("-G1",)),
    "name: in the script": Submitted(("-t", "7"), file="run.sh", lines='#SBATCH -J "my job 5"\n#SBATCH -G1 -C gpu'),
    "name: of the environment": wrapped("-G1", SBATCH_JOB_NAME="from-env-3"),
    "gpus: --gres without a count": split("--gres=gpu"),
    "gpus: --gres": split("--gres=gpu:2"),
    "gpus: --gres with a type": split("--gres=gpu:a100:2"),
    "gpus: --gres of two nodes": split("-N2 --gres=gpu:1"),
    "gpus: --gpus": split("--gpus=3 -N1"),
    "gpus: --gpus with a type": split("--gpus=a100:2 -N1"),
    "gpus: --gpus-per-node": split("-N2 --gpus-per-node=2"),
    "gpus: --gpus-per-task": split("-n3 -N1 --gpus-per-task=1"),
    "gpus: --gpus and per node": split("--gpus=4 --gpus-per-node=2"),
    "gpus: per node, nodes by tasks": split("-n4 --ntasks-per-node=2 --gpus-per-node=1"),
    "gpus: --gpus and per task": split("--gpus=2 --gpus-per-task=1"),
    "gpus: --ntasks-per-gpu": split("--gpus=2 --ntasks-per-gpu=2 -N1"),
    "gpus: --gpus-per-socket": split("-N1 --sockets-per-node=2 --gpus-per-socket=1"),
    "gpus: --tres-per-task": split("-n2 -N1 --tres-per-task=gres/gpu:1", since="24.11"),
    "gpus: of the environment": split("-N1", SBATCH_GPUS="2"),
    "gpus: in the script": Submitted((), "train-bert-3", "#SBATCH --gpus-per-node=2\n#SBATCH --nodes 2"),
    "gpus: the command line wins": Submitted(("--gpus=1",), "train-bert-4", "#SBATCH --gpus=4 -c2"),
    "gpus: none": wrapped("-n2", "-c3"),
    "cpus: per task": split("-G1 -n2 -c4 -N1"),
    "cpus: per GPU": split("--gpus=2 --cpus-per-gpu=3 -N1"),
    "cpus: --mincpus": split("-G1 -N1 --mincpus=6"),
    "cpus: tasks alone": split("-n5 -N1 -G1"),
    "nodes: a range": split("-N1-2 --gpus-per-node=1"),
    "nodes: a list": split("-w n[1-2] --gpus-per-node=1"),
    "nodes: exclusive": split("-N1 -G1 --exclusive"),
    "nodes: exclusive by --gres": split("-N1 --gres=gpu:1 --exclusive"),
    "memory": split("-G1 --mem=2G"),
    "memory: per GPU": split("-N1 -G2 --mem-per-gpu=3G"),
    "memory: all": split("-G1 -N1 --mem=0"),
    "time: in minutes": split("-G1 -t 10"),
    "time: in days": split("-G1 --time=1-00"),
    "time: the longest": split("-G1 -t 2-0"),
    "partition": split("-G1 -p hbm80"),
    "partition: several": split("-G1 -p hbm80,all"),
    "partition: several, by its long name": split("-G1 --partition=all,hbm80"),
    "partition: several, in the script": Submitted(("-G1",), "train-bert-8", "#SBATCH -p hbm80,all"),
    "partition: of the environment": split("-G1", SBATCH_PARTITION="hbm80"),
    "constraint": wrapped("-J", "train-bert-1", "-G1", "-C", "gpu&hbm80g"),
    "constraint: either": wrapped("-J", "train-bert-1", "-G1", "-C", "hbm40g|hbm80g"),
    "constraint: in brackets": wrapped("-J", "train-bert-1", "-G1", "-C", "[hbm40g|hbm80g]"),
    "constraint: no tier": split("-G1 -C gpu"),
    "account and QOS": split("-G1 -A ml -q normal"),
    "array": split("-G1 -a 0-2"),
    "array: limited": split("-G1 -a 1-2%1"),
    "array: of one": split("-G1 --array=5"),
    "dependency": split("-G1 --dependency=singleton"),
    "begin": split("-G1 --begin=now --no-requeue --nice=5"),
    "script: arguments": Submitted(("-J", "x-1", "-G1"), "a.sh", arguments=("--lr=0.1", "train.py", "--seed", "7")),
    "script: by its path": Submitted(("-J", "x-2", "-G1"), f"{FOLDER}/./b.sh", arguments=("3",)),
    "script: another work directory": Submitted(("-J", "x-3", "-G1", "-D", "/tmp"), f"{FOLDER}/c.sh"),
    "script: hostile": Submitted(
        ("-J", "x-4", "-G1"), 'd\n999|root \x1b[31m"$(touch x)".sh',
        arguments=("--a=1\nsbatch e.sh", "caf\udce9", "🚀", "'"),
    ),
    "script: of 60 kB": Submitted(("-J", "x-5", "-G1"), "f.sh", arguments=("--list=" + "7," * 30_000,)),
    "script: a blank in an option": Submitted(("-J", "x 6", "-G1"), "g.sh"),
    "het": wrapped("-J", "het-run-1", "-G1", "-C", "hbm40g", ":", "-G2", "-C", "hbm80g", "-t", "5"),
    "het: in a script": Submitted(
        ("-J", "het-2"), "het.sh", "#SBATCH -G2 -N1\n#SBATCH hetjob\n#SBATCH -N2 --gpus-per-node=1"
    ),
}  # fmt: skip


ALIKE = ("partition", "tier by partition")
NO_LIST = "accounting keeps the partition that a job ran in, and its submit line says nothing of"


@dataclass(frozen=True)
class Difference:
    """A difference between a path's view of a submission and its record. until: the last release with it."""

    case: str
    paths: tuple[str, ...]
    fields: tuple[str, ...]
    why: str
    until: str = "99"


UNKEYED = ("het: in a script", "script: of 60 kB")
SCRIPTED = tuple(name for name, case in SUBMISSIONS.items() if case.file and name not in UNKEYED)
DIFFERENCES = (
    Difference("nodes: a range", ("pending",), ("node_count",), "squeue names the most nodes, ReqTRES the fewest"),
    Difference("gpus: --gpus-per-socket", ("typed",), ("cpu_count",), "Slurm raises the CPUs to the sockets"),
    Difference("gpus: --gpus and per node", ("typed",), ("cpu_count",), "ReqCPUS counts the tasks of one node"),
    Difference("het", ("typed",), ("time_limit_s",), "Slurm gives all parts the limit of one of them"),
    Difference("partition: several, in the script", ("typed", "pending"), ALIKE, f"{NO_LIST} the script's"),
    Difference("partition: several", ("typed", "pending"), ALIKE, f"{NO_LIST} any, as JSON", "22.05"),
    Difference("partition: several, by its long name", ("typed", "pending"), ALIKE, f"{NO_LIST} any, as JSON", "22.05"),
    Difference("cpus: per GPU", ("typed",), ("cpu_count",), "ReqCPUS leaves --cpus-per-gpu out", "22.05"),
    Difference(
        "gpus: per node, nodes by tasks", ("job_submit", "cli_filter", "typed"), ("gpu_count",),
        "ReqTRES counts one node", "22.05",
    ),
    Difference(
        "gpus: per node, nodes by tasks", ("typed", "pending"), ("node_count",), "ReqTRES counts one node", "22.05"
    ),
)  # fmt: skip


def submitting(cases: Sequence[Submitted], folder: str) -> bytes:
    """A shell script that submits them all, below a folder with the scripts; it prints each one's job id or error.

    Each finds the number of its case in $ALMANAC_CASE.
    """
    lines = [f"mkdir -p {folder} && cd {folder}"]
    for number, case in enumerate(cases):
        text = base64.b64encode(case.script.encode()).decode()
        name = case.file or f"stdin-{number}"
        env = [f"ALMANAC_CASE={number}", *(f"{key}={value}" for key, value in case.env.items())]
        words = " ".join(map(shlex.quote, ["env", *env, "sbatch", "--parsable", "-o", "/dev/null", *case.argv]))
        source = "/dev/null" if case.is_wrapped or case.file else shlex.quote(name)
        lines.append(f"echo {text} | base64 -d >{shlex.quote(name)}; {words} 2>&1 <{source} | tail -n 1")
    return "\n".join(lines).encode(errors="surrogateescape") + b"\n"
