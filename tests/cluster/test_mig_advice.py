"""A MIG slice that almanac advises, with a real Slurm: the submission, and the node that runs it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from advice_files import advice, family, hook_on, publish, shown_advice
from front_end import FrontEnd, ended
from mig_site import MigSite, mig_site
from sites import Site

from almanac.config import Tier
from slurm.nodes import partition_gpus, tiers_now

pytestmark = pytest.mark.cluster

TIERS = (
    Tier(name="slice", capacity_mib=4864, gres="1g.5gb"),
    Tier(name="whole", capacity_mib=40960, gres="a100"),
)
TEXT = "about 1 in 100 such jobs needs more than 3.1 GiB; it runs about 1.2 times as long as on a whole GPU."
ROWS = [family("train-bert-#", gpus, 500, bound_mib=3200, tier="slice", text=TEXT) for gpus in (1, 2)]
JOB = ("-o", "/dev/null", "-J", "train-BERT-7", "--wrap", "sleep 0")
REWRITTEN = [
    ("--gpus=1", "--gpus=1g.5gb:1"),
    ("-G1", "--gpus=1g.5gb:1"),
    ("--gpus=a100:1", "--gpus=1g.5gb:1"),
    ("--gres=gpu:1", "--gres=gpu:1g.5gb:1"),
    ("--gres=gpu", "--gres=gpu:1g.5gb:1"),
    ("--gres=gpu:a100:1 -N1", "--gres=gpu:1g.5gb:1"),
    ("--gpus-per-node=1", "--gpus-per-node=1g.5gb:1"),
    ("--gpus-per-node=a100:1 -N1 -n4", "--gpus-per-node=1g.5gb:1"),
    ("--gpus-per-task=1 -n1", "--gpus-per-task=1g.5gb:1"),
    ("--gpus=1 -n2", "--gpus=1g.5gb:1"),
]
KEPT = [
    "--gpus=a100:2", "--gres=gpu:a100:1 -N2", "--gres=gpu:a100:1 -N1-2", "--gpus-per-node=a100:1 -n2",
    "--gpus-per-task=a100:1 -n2", "--gpus=a100:1 --exclusive", "--gpus=a100:1 --gres=gpu:a100:1",
    "--gpus-per-socket=a100:1 --sockets-per-node=1", "--gres=gpu:a100:1 : --gres=gpu:a100:1",
]  # fmt: skip


@pytest.fixture(scope="module")
def sliced(_running_site: Site) -> Iterator[MigSite]:
    with mig_site(_running_site, ("n1",)) as made:
        assert made.layout("n1", {"1g.5gb": 7}, None, None, None) == "gpu:1g.5gb:7,gpu:a100:3"
        yield made


@pytest.fixture
def mig(sliced: MigSite, site: Site) -> MigSite:
    """No jobs, advice or hooks of an earlier test."""
    return sliced


@pytest.fixture(params=["filter", "wrapper"])
def way(request: pytest.FixtureRequest, mig: MigSite) -> Iterator[tuple[FrontEnd, str]]:
    """alice's terminal, and how she calls sbatch."""
    front = FrontEnd(mig.site)
    front.publish(shown_advice(*ROWS, prompt="ask", tiers=TIERS))
    if request.param == "filter":
        front.filter_on()
    yield front, "sbatch" if request.param == "filter" else front.wrapper
    front.forget()


def asked(site: Site, said: str) -> str:
    """Return the request of the job that sbatch names as submitted, by any option."""
    shown = site.job(re.findall(r"Submitted batch job (\d+)", said)[-1])
    return " ".join(f"{name}={shown[name]}" for name in ("TresPerJob", "TresPerNode", "TresPerTask") if name in shown)


@pytest.mark.every_release
@pytest.mark.parametrize(("typed", "option"), REWRITTEN)
def test_every_option_that_names_one_gpu_is_rewritten_and_the_job_runs_on_the_slice(
    mig: MigSite, way: tuple[FrontEnd, str], typed: str, option: str
) -> None:
    front, sbatch = way
    done = front.run(sbatch, *JOB[:2], *shlex.split(typed), *JOB[2:], ALMANAC_ADVICE="apply")
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    assert "1g.5gb" in asked(mig.site, said), (option, asked(mig.site, said))
    assert "a100" not in asked(mig.site, said)
    job = int(said.split()[-1])
    mig.site.wait_for(job, "COMPLETED")
    mig.site.wait_for_accounting(job)
    tres = mig.site.run("ctl", "root", "sacct", "-nPX", "-o", "AllocTRES,NodeList", "-j", str(job)).stdout.strip()
    assert tres.endswith("|n1")
    assert "gres/gpu:1g.5gb=1" in tres


@pytest.mark.parametrize("typed", KEPT)
def test_a_job_that_may_use_more_than_one_gpu_keeps_what_it_asked_for(
    mig: MigSite, way: tuple[FrontEnd, str], typed: str
) -> None:
    front, sbatch = way
    head, colon, tail = typed.partition(" : ")
    more = [":", *shlex.split(tail), "-J", "train-BERT-7"] if colon else []
    words = (sbatch, "-H", *JOB[:4], *shlex.split(head), *more, *JOB[4:])
    done = front.run(*words, ALMANAC_ADVICE="apply")
    plain = front.run("sbatch", *words[1:], ALMANAC_ADVICE="off")
    assert done.returncode == plain.returncode
    assert done.returncode or "1g.5gb" not in asked(mig.site, done.stdout.decode())


def test_what_is_shown_at_a_terminal(mig: MigSite, way: tuple[FrontEnd, str]) -> None:
    front, sbatch = way
    shell = front.terminal(sbatch, "--gpus=1", *JOB)
    shell.expect_exact("for this job: ")
    assert str(shell.before + shell.after).replace("\r\n", "\n") == (
        "almanac: slice is enough: about 1 in 100 such jobs needs more than 3.1 GiB; it\n"
        "         runs about 1.2 times as long as on a whole GPU.\n"
        '         Submit with --gpus="1g.5gb:1" instead?\n'
        "         [y]es, [N]o, [a]lways, or ne[v]er for this job: "
    )
    shell.sendline("y")
    assert "1g.5gb" in asked(mig.site, ended(shell))


@pytest.mark.every_release
def test_job_submit_tells_only_jobs_of_one_gpu_of_a_slice(mig: MigSite) -> None:
    site = mig.site
    publish(site, site.run("ctl", "root", "id", "-u", "alice").stdout.strip(), advice(*ROWS, tell=True, tiers=TIERS))
    hook_on(site)
    try:
        for typed, is_told in (("--gpus=1", True), ("--gres=gpu:1 -N1-2", False), ("--gpus=1 --exclusive", False)):
            words = ("sbatch", "-H", *shlex.split(typed), *JOB)
            done = site.run("login", "alice", *words, env={"ALMANAC_ADVICE": "off"})
            assert ("slice is enough" in done.stderr) == is_told, (typed, done.stderr)
    finally:
        site.reset()


def test_only_types_that_exist_now_are_advised(mig: MigSite, way: tuple[FrontEnd, str]) -> None:
    """Once the layout has changed, Slurm refuses the type; almanac has not offered it."""
    front, sbatch = way

    def commands(argv: object) -> bytes:
        return mig.site.run("ctl", "root", *argv).stdout.encode()  # type: ignore[misc]

    assert tiers_now(TIERS, commands).missing == ()
    mig.layout("n1", None, None, None, None)
    try:
        assert {kind for gpus in partition_gpus(commands) for kind in gpus.types} == {"a100"}
        assert [tier.name for tier in tiers_now(TIERS, commands).missing] == ["slice"]
        refused = front.run("sbatch", "--gpus=1g.5gb:1", *JOB, ALMANAC_ADVICE="off")
        assert refused.returncode != 0
        front.forget()
        done = front.run(sbatch, "-H", "--gpus=1", *JOB, ALMANAC_ADVICE="apply")
        assert "1g.5gb" not in asked(mig.site, done.stdout.decode())
    finally:
        mig.layout("n1", {"1g.5gb": 7}, None, None, None)
        front.forget()
