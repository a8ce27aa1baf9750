"""A job with an advised slice on real Slurm: it runs on the slice, and its report is that of the slice.

On the native site, whose Prometheus can be asked. slurmd has no NVML: mig_site.py's Prolog gives the UUIDs, and the
exporter shows instances as dcgm-exporter does, with GPU_I_ID and GPU_I_PROFILE and without the job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from advice_files import family, shown_advice
from front_end import FrontEnd
from mig_site import MigSite, mig_site
from native_site import NativeSite
from processes import wait_until
from testbed import Cluster

from almanac.config import Config, Filters, Prometheus, Slurm, Tier
from reports.job.build import build
from reports.job.evidence import JobContext, figure_rows
from slurm.commands import SlurmCommands
from telemetry.ingest import IngestResult, ingest
from telemetry.metrics.summary import summarize
from telemetry.site import Site as AlmanacSite
from telemetry.sources.hook_records import PrologSource
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.sacct import SacctSource
from telemetry.store.store import Store

pytestmark = pytest.mark.cluster

TIERS = (
    Tier(name="slice", capacity_mib=4864, gres="1g.5gb"),
    Tier(name="whole", capacity_mib=40960, gres="a100"),
)
ROWS = [family("train-bert-#", 1, 500, bound_mib=3200, tier="slice", text="a slice is enough.")]
CONFIG = Config(filters=Filters(min_elapsed_s=2, min_gpu_util_pct=-1.0))


@pytest.fixture(scope="module")
def mig(cluster: Cluster) -> Iterator[MigSite]:
    with mig_site(NativeSite(cluster.lab)) as made:
        made.layout("n1", {"1g.5gb": 7}, None, None, None)
        made.give_uuids("n1")
        yield made


def submit(cluster: Cluster, front: FrontEnd, name: str, gib: float, *options: str) -> int:
    """A job that uses so much memory until the file go is there, as alice submits it with the wrapper."""
    profiles = cluster.lab.root / "profiles"
    work = f"echo {gib} >{profiles}/$SLURM_JOB_ID; until [ -e {profiles}/go ]; do sleep 0.2; done"
    words = (front.wrapper, "-n1", "-o", "/dev/null", "-J", name, *options, "--wrap", work)
    done = front.run(*words, ALMANAC_ADVICE="apply")
    assert done.returncode == 0, done.stderr
    return int(re.findall(rb"Submitted batch job (\d+)", done.stdout)[-1])


def reports(cluster: Cluster, folder: Path, jobs: list[int], since_s: int) -> dict[int, JobContext]:
    store = Store.create(folder / "store")
    until_s = int(time.time()) + 1
    commands = SlurmCommands(timeout_s=60, env=cluster.lab.env)
    for source in (
        SacctSource(commands, "lab", (), Slurm(), time.time, delimiter=lambda: ";;"),
        PrologSource(cluster.prolog_dir, "lab"),
        PrometheusSource(Prometheus(url=cluster.prometheus.url, delay_s=0)),
    ):
        result = IngestResult(source.name, since_s, until_s)
        ingest(source, store.of("lab"), since_s, until_s, result, lambda rows, reached_s: None)
    summarize(store.of("lab"), CONFIG, since_s, until_s)
    return {each.job_id: each for each in build(AlmanacSite.of(store.of("lab"), CONFIG, until_s), jobs)}


def test_a_job_with_an_advised_slice_runs_on_it_and_its_report_shows_the_slice(
    cluster: Cluster, mig: MigSite, tmp_path: Path
) -> None:
    site, since_s = mig.site, int(time.time()) - 10
    front = FrontEnd(site)
    front.publish(shown_advice(*ROWS, prompt="ask", tiers=TIERS))
    try:
        advised = submit(cluster, front, "train-BERT-7", 3.0, "--gpus=1")
        beside = submit(cluster, front, "other", 1.0, "--gpus=1g.5gb:1")
        whole = submit(cluster, front, "large", 20.0, "-w", "n1", "--gpus=a100:1")
        jobs = [advised, beside, whole]
        for job in jobs:
            site.wait_for(job, "RUNNING")
        # The map of instances is written in the background, and the record then once more.
        wait_until("the instances in the records", lambda: all(
            any("mig" in record for record in cluster.prolog_records(job)) for job in (advised, beside)
        ))  # fmt: skip
        instances = [cluster.prolog_records(job)[0]["mig"].split() for job in (advised, beside)]
        listed = site.run("n1", "root", f"{mig.bin_dir('n1')}/nvidia-smi", "-L").stdout
        assert len({device for device, _, _ in instances}) == 2
        assert all(device in listed and gpu in listed for device, gpu, _ in instances)
        time.sleep(10)  # the memory fills within 5 s, and a scrape comes each second
        (cluster.lab.root / "profiles/go").touch()
        for job in jobs:
            site.wait_for(job, "COMPLETED")
        site.wait_for_accounting(*jobs)
    finally:
        front.forget()
        site.reset()
    tres = site.run("ctl", "root", "sacct", "-nPX", "-o", "AllocTRES,NodeList", "-j", str(advised)).stdout.strip()
    assert "gres/gpu:1g.5gb=1" in tres and tres.endswith("|n1")

    found = reports(cluster, tmp_path, jobs, since_s)
    for job, gib in ((advised, 3.0), (beside, 1.0)):
        context, shown = found[job], {row.name: row.value for row in figure_rows(found[job])}
        assert context.is_mig and len(context.gpus) == 1
        assert shown["MIG slice"] == "1g.5gb, 4.8 GiB", shown
        assert context.metrics["hbm_peak_mib"] == pytest.approx(gib * 1024, rel=0.1)
        assert context.metrics["hbm_capacity_mib"] == pytest.approx(4864, abs=1)
    # A whole GPU beside slices: Slurm's index is not the GPU's, so nothing is known rather than another's use.
    assert not found[whole].is_mig
    assert found[whole].metrics["hbm_peak_mib"] is None
