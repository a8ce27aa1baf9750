"""almanac-restart in real jobs: the next GPU type with the same job id and output, and off on 22.05."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from layout import packed_code
from processes import LabError, wait_until
from sites import HOSTS, Site

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

TYPES = {"1g.10gb": "[0-1]", "2g.20gb": "2", "3g.40gb": "3"}
"""On n1, by the number of their devices."""
GRES = "".join(f"NodeName=n1 Name=gpu Type={name} File=/dev/nvidia{files}\n" for name, files in TYPES.items())
GRES = f"AutoDetect=off\n{GRES}NodeName=n[2-4] Name=gpu Type=a100 File=/dev/nvidia[0-3]\n"
WRAPPER = "from slurm_hooks.restart.wrapper import main; main()"
RUN = """/usr/bin/python3 -BIS -c 'import sys; sys.path.insert(0, "{home}/code"); del sys.argv[0]; {main}' restart"""
# A program that needs more than 1g.10gb has.
PROGRAM = r"""
kind=$(scontrol -d show job $SLURM_JOB_ID | sed -n 's/.*GRES=gpu:\([^:]*\):1(.*/\1/p')
echo "job $SLURM_JOB_ID runs on $kind"
case $kind in 1g.10gb | a100)
    echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB' >&2
    exit 3 ;;
esac
echo "done on $kind"
"""
# Memory grows by 15 MiB a second, from 700 of 1000 MiB, as if nvidia-smi said so.
FAKE_SMI = r"""#!/bin/sh
[ "$1" = -L ] && { echo "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)"; exit; }
start=$(stat -c %Y "$HOME/begun")
used=$((700 + 15 * ($(date +%s) - start)))
echo "<nvidia_smi_log><gpu><uuid>GPU-1</uuid><fb_memory_usage><used>$used MiB</used><free>$((1000 - used)) MiB</free>"
echo "</fb_memory_usage></gpu></nvidia_smi_log>"
"""
GROWING = r"""
kind=$(scontrol -d show job $SLURM_JOB_ID | sed -n 's/.*GRES=gpu:\([^:]*\):1(.*/\1/p')
if [ -e "$HOME/checkpoint" ]; then echo "goes on from $(cat "$HOME/checkpoint") on $kind"; exit 0; fi
trap 'echo "step 7" >"$HOME/checkpoint"; echo "wrote a checkpoint"; exit 0' USR1
touch "$HOME/begun"
while :; do sleep 0.2; done
"""


def _home(site: Site) -> str:
    return site.run("login", "alice", "sh", "-c", "cd && pwd").stdout.strip()


@pytest.fixture
def home(site: Site) -> str:
    """Alice's home with the code, the programs and the fake nvidia-smi."""
    home = _home(site)
    kept = "train.sh"  # of docker's users, which test_walk.py submits
    unpack = (
        f'find "$HOME" -mindepth 1 -maxdepth 1 ! -name {kept} ! -name ".*" -exec rm -rf {{}} + && '
        'mkdir -p "$HOME/code" "$HOME/bin" && tar xz -C "$HOME/code"'
    )
    done = site.run_bytes("login", "alice", "sh", "-c", unpack, stdin=packed_code())
    assert done.returncode == 0, done.stderr
    for name, text in (("program", f"#!/bin/bash\n{PROGRAM}"), ("growing", f"#!/bin/bash\n{GROWING}")):
        site.write("login", f"{home}/{name}", text.encode(), "alice", 0o755)
    site.write("login", f"{home}/bin/nvidia-smi", FAKE_SMI.encode(), "alice", 0o755)
    return home


@contextmanager
def _slices(site: Site) -> Iterator[None]:
    """n1 has MIG types for a while."""
    kept = {host: site.read(host, f"{site.etc_dir}/slurm.conf") for host in HOSTS}
    gres = {host: site.read(host, f"{site.etc_dir}/gres.conf") for host in HOSTS}
    line = re.search(r"(?m)^NodeName=n\[1-2\] (.*) Gres=gpu:a100:4 (.*)$", kept["ctl"].decode())
    assert line
    counts = ",".join(f"gpu:{name}:{2 if '-' in files else 1}" for name, files in TYPES.items())
    nodes = [f"NodeName=n1 {line[1]} Gres={counts} {line[2]}", f"NodeName=n2 {line[1]} Gres=gpu:a100:4 {line[2]}"]
    changed = kept["ctl"].decode().replace(line[0], "\n".join(nodes)).encode()
    try:
        _configure(site, dict.fromkeys(HOSTS, changed), dict.fromkeys(HOSTS, GRES.encode()))
        yield
    finally:
        site.run("ctl", "root", "scancel", "-u", "alice", check=False)
        _configure(site, kept, gres)


def _configure(site: Site, slurm_conf: dict[str, bytes], gres_conf: dict[str, bytes]) -> None:
    for host in HOSTS:
        site.write(host, f"{site.etc_dir}/slurm.conf", slurm_conf[host])
        site.write(host, f"{site.etc_dir}/gres.conf", gres_conf[host])
    site.run("ctl", "root", "sv", "-w", "30", "restart", "slurmctld")
    site.run("n1", "root", "sv", "-w", "30", "restart", "slurmd")

    def is_there() -> bool:
        shown = site.run("ctl", "root", "sinfo", "-h", "-n", "n1", "-p", "all", "-o", "%T", check=False)
        return shown.stdout.strip() == "idle"

    wait_until("n1 to be idle", is_there)
    site.wait_for_nodes()


def _submit(site: Site, home: str, command: str, *options: str) -> int:
    """A job that appends to one output file, whose name its id tells."""
    script = f"#!/bin/bash\nexport PATH={home}/bin:$PATH\n{RUN.format(home=home, main=WRAPPER)} {command}\n"
    done = site.run(
        "login", "alice", "sbatch", "--parsable", "-o", f"{home}/%j.out", "--mem=100", *options, stdin=script
    )
    return int(done.stdout.strip())


def _output(site: Site, home: str, job: int) -> str:
    return site.run("login", "alice", "cat", f"{home}/{job}.out", check=False).stdout


def _ended(site: Site, home: str, job: int, state: str = "COMPLETED") -> str:
    """The output, once the job has ended so."""
    try:
        site.wait_for(job, state)
    except LabError as error:
        raise LabError(f"{error}\n{_output(site, home, job)}\n{site.job(job)}") from None
    text = _output(site, home, job)
    print(f"== {site.release}, job {job}: Restarts={site.job(job).get('Restarts')}\n{text}")
    return text


def _start_now(site: Site, home: str, job: int) -> None:
    """Ends Slurm's requeue delay of 121 s once the job has been queued again; its owner may."""
    try:
        wait_until(f"job {job} to be queued again", lambda: site.job(job).get("Reason") == "BeginTime")
    except LabError as error:
        raise LabError(f"{error}\n{_output(site, home, job)}\n{site.job(job)}") from None
    time.sleep(2)  # slurmd refuses the job within the second in which it revoked the credential of the earlier run
    site.run("login", "alice", "scontrol", "update", f"jobid={job}", "starttime=now")


KEEP = ("--open-mode=append", "--requeue")


def _is_off(site: Site, home: str) -> None:
    job = _submit(site, home, "-- ./program", "--gres=gpu:a100:1", *KEEP)
    text = _ended(site, home, job, "FAILED")
    assert "almanac-restart: no restarts: restarts need Slurm 24.11 or later, this is Slurm 22.05" in text
    assert f"job {job} runs on a100" in text and "CUDA out of memory" in text
    assert site.job(job)["ExitCode"] == "3:0" and site.job(job)["Restarts"] == "0"


def test_a_job_goes_on_with_the_next_type_under_its_id(site: Site, home: str) -> None:
    """On 22.05, where a job would hold both types, the wrapper says so and leaves the job alone."""
    if site.release == "22.05":
        _is_off(site, home)
        return
    with _slices(site):
        moved = [
            _submit(site, home, "-- ./program", f"{option}=1g.10gb:1".replace("gres=", "gres=gpu:"), *KEEP)
            for option in ("--gres", "--gpus")
        ]
        early = _submit(site, home, "--signal USR1 --grace 20 --poll 0.3 --run-time 0:40 -- ./growing",
                        "--gres=gpu:1g.10gb:1", *KEEP)  # fmt: skip
        fixed = _submit(site, home, "-- ./program", "--gres=gpu:1g.10gb:1", "--open-mode=append", "--no-requeue")
        emptied = _submit(site, home, "-- ./program", "--gres=gpu:1g.10gb:1", "--open-mode=truncate")
        text = _ended(site, home, fixed, "FAILED")
        assert "no restarts: the job cannot be requeued" in text
        assert site.job(fixed)["ExitCode"] == "3:0"
        assert "a restart would empty the output file" in _ended(site, home, emptied, "FAILED")
        for job in (*moved, early):
            _start_now(site, home, job)
        for job in moved:
            text = _ended(site, home, job)
            steps = ("runs on 1g.10gb", "CUDA out of memory", "moving job", "runs on 2g.20gb", "done on 2g.20gb")
            places = [text.index(step) for step in steps]
            assert places == sorted(places), text
            assert text.count("almanac-restart:") == 1, text
            assert site.job(job)["Restarts"] == "1"
        text = _ended(site, home, early)
        steps = ("grows too fast", "wrote a checkpoint", "moving job", "goes on from step 7 on 2g.20gb")
        places = [text.index(step) for step in steps]
        assert places == sorted(places), text
