"""Cost of almanac-collect for 8 GPUs at 10 s, on a stub of NVIDIA's library with call times of a real one.

Runs for a minute as an ordinary user, from compiled modules as the package has them, with a scrape for each sample.
Each call of the stub takes its time as processor time, although a real one partly waits: the cost is an upper bound.
The times, and where they are from, are in COSTS_US.
Run: python benchmarks/collector.py (`make bench-collector`). ALMANAC_BENCH_SECONDS=300 measures for longer.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from figures import Figure, at_most, exactly, main

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests/telemetry/collector/nvml_stub.c"
SECONDS = int(os.environ.get("ALMANAC_BENCH_SECONDS", "60"))
INTERVAL_S, GPUS = 10, 8
MOST_SHARE, MOST_MIB = 0.5, 60
GPM_US, PLAIN_US = 3000, 100
"""GPM: "overhead was measured between 0 and 3 ms" for a sample and its metrics (EAR, gpuprof_nvml.c); so 3 ms for both.
Others: 0.09 ms for temperature, use, memory, and power together (davidboulay/OpenKraken, pull request 3, RTX 5080);
four times as much here, since servers with ECC and more GPUs may be slower. Neither was measured by us."""
COSTS_US = {"nvmlGpmSampleGet": GPM_US // 2, "nvmlGpmMetricsGet": GPM_US // 2} | dict.fromkeys(
    ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption",
     "nvmlDeviceGetTemperature", "nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksEventReasons",
     "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMigMode", "nvmlDeviceGetComputeRunningProcesses_v2",
     "nvmlEventSetWait_v2"), PLAIN_US)  # fmt: skip
STATE = ["util 80", "used 20000", "watts 500", "clock 1800", "temp 60", "sm 70", "tensor 40", "dram 55", "fp32 12",
         f"count {GPUS}", "gpm 1", *(f"cost {name} {cost}" for name, cost in COSTS_US.items())]  # fmt: skip
LIBRARIES = ("prometheus_client", "pynvml")
PYTHON = "/usr/bin/python3"  # the one of the packages; a user may not have the right to run that of an environment
PROGRAM = "import sys; sys.path.insert(0, {path!r}); from telemetry.collector.main import main; main()"


def processes(first: int) -> list[int]:
    """The process and its children."""
    text = Path(f"/proc/{first}/task/{first}/children").read_text()
    return [first, *(each for child in text.split() for each in processes(int(child)))]


def cpu_s(pids: Iterable[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib(pids: Iterable[int], name: str) -> float:
    found = [re.search(rf"(?m)^{name}: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in pids]
    return sum(int(match[1]) for match in found if match) / 1024


def measure() -> Iterable[Figure]:
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        folder.chmod(0o755)
        library = folder / "libnvidia-ml.so.1"
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        copy_program(folder / "python")
        (folder / "gpus").write_text("\n".join([*STATE, ""]))
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        yield from run(folder, url)


def copy_program(folder: Path) -> None:
    """The collector and its libraries, compiled."""
    for name in ("almanac", "telemetry"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LIBRARIES:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, folder)
    subprocess.run([PYTHON, "-m", "compileall", "-q", folder], check=True)


def run(folder: Path, address: str) -> Iterable[Figure]:
    environ = {"LD_LIBRARY_PATH": str(folder), "NVML_STUB": str(folder / "gpus"), "PATH": "/usr/bin:/bin"}
    user = {} if os.getuid() else {"user": 65534, "group": 65534, "extra_groups": []}
    program = PROGRAM.format(path=str(folder / "python"))
    argv = [PYTHON, "-BIS", "-c", program, f"--listen={address}", f"--interval={INTERVAL_S}"]
    started = subprocess.Popen(argv, env=environ, cwd="/", **user)
    try:
        scrape(address, 30)
        time.sleep(2 * INTERVAL_S)
        pids, start_s, scrapes = processes(started.pid), time.monotonic(), []
        before_s = cpu_s(pids)
        while time.monotonic() - start_s < SECONDS:
            time.sleep(INTERVAL_S)
            scrapes.append(scrape(address, 5))
        took_s = time.monotonic() - start_s
        used_s = cpu_s(pids) - before_s
        yield Figure("time of a plain call of NVML, us (assumed)", PLAIN_US)
        yield Figure("time of a GPM sample with its metrics, us (assumed)", GPM_US)
        yield exactly("uid that it ran as", int(Path(f"/proc/{started.pid}").stat().st_uid), os.getuid() or 65534)
        yield exactly("GPUs with activity in the last scrape", scrapes[-1][1].count("DCGM_FI_PROF_SM_ACTIVE{"), GPUS)
        yield at_most("processor time, % of a core", round(100 * used_s / took_s, 3), MOST_SHARE)
        yield at_most("memory, MiB (resident, shared pages counted twice)", round(memory_mib(pids, "Rss"), 1), MOST_MIB)
        yield Figure("memory, MiB (proportional)", round(memory_mib(pids, "Pss"), 1))
        yield Figure("time of a scrape, ms", round(1000 * max(took for took, _ in scrapes), 1))
        yield Figure("page, kB", round(len(scrapes[-1][1]) / 1000, 1))
    finally:
        started.terminate()
        started.wait(10)


def scrape(address: str, limit_s: float) -> tuple[float, str]:
    """Seconds, and the page; tries until it is there."""
    end_s = time.monotonic() + limit_s
    while True:
        start_s = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            if text:
                return time.monotonic() - start_s, text
        except OSError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.1)


if __name__ == "__main__":
    if shutil.which("gcc") is None:
        sys.exit("benchmarks/collector.py needs gcc")
    main(measure)
