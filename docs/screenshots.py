"""Makes the pictures of docs/images from what the program prints on the site of `almanac demo`. `make screenshots`.

It needs Chromium. The site is made once, in build/screenshots; delete that folder to make it again.
"""

from __future__ import annotations

import grp
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pexpect
from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "reports"))
from browser import look  # noqa: E402 - Chromium without a window, and without a network

IMAGES = ROOT / "docs" / "images"
DEMO = ROOT / "build" / "screenshots"
BIN = Path(sys.executable).parent
USER, NAME = "dinaberg", "run82_diffusion_sweep"
COLUMNS, MAX_BYTES, COLORS = 80, 150_000, 64
SCRIPT = f"""#!/bin/bash
#SBATCH -J {NAME}
#SBATCH --gpus=4
#SBATCH -C gpu&hbm80g
"""
# Slurm's own programs, as far as the prompt needs them: nodes of both GPU memory sizes, and a submission.
SINFO = "gpu*|16|64|512000|gpu,hbm{}g|gpu:a100:4|infinite|up|all"
PROGRAMS = {
    "sbatch": "echo Submitted batch job 2000001",
    "sinfo": f"echo {shlex.quote(SINFO.format(40))}; echo {shlex.quote(SINFO.format(80))}",
}
# The demo's users have no account on this host. One of them borrows the caller's.
PUBLISH = f"""
import os, pwd
caller, known = pwd.getpwuid(os.getuid()), pwd.getpwnam
pwd.getpwnam = lambda name: caller if name == {USER!r} else known(name)
from cli.main import main
main()
"""


def main() -> None:
    config = demo_site()
    environ = {**os.environ, "ALMANAC_CONFIG": str(config), "ALMANAC_STORE": str(DEMO / "store")}
    with tempfile.TemporaryDirectory() as folder:
        shown = prompt(Path(folder), environ)
        terminal_picture(shown, IMAGES / "prompt.svg")
        page_picture(["report", telling_job(environ)], 700, None, environ, IMAGES / "report.png")
        page_picture(["site-report"], 1000, 785, environ, IMAGES / "site-report.png")
    bench = [sys.executable, ROOT / "benchmarks" / "trial.py", "--plot", IMAGES / "trial.svg"]
    subprocess.run(bench, check=True, stdout=subprocess.DEVNULL)
    for picture in sorted(IMAGES.iterdir()):
        size = picture.stat().st_size
        print(f"{picture.relative_to(ROOT)}: {size / 1000:.0f} kB")
        if size > MAX_BYTES:
            sys.exit(f"{picture.name} has more than {MAX_BYTES / 1000:.0f} kB")


def demo_site() -> Path:
    """Make the demo's site unless it is there, and return a configuration that also says where advice is published."""
    if not (DEMO / "store").is_dir():
        subprocess.run([BIN / "almanac", "demo", "--dir", DEMO], check=True)
    group = grp.getgrgid(os.getgid()).gr_name
    config = DEMO / "published.toml"
    hooks = f'\n[hooks]\nadvice_dir = "{DEMO / "advice"}"\ngroup = "{group}"\n'
    config.write_text((DEMO / "almanac.toml").read_text(encoding="utf-8") + hooks, encoding="utf-8")
    return config


def prompt(folder: Path, environ: dict[str, str]) -> str:
    """Return what a user sees who submits a script and takes the advice."""
    subprocess.run([sys.executable, "-c", PUBLISH, "publish"], env=environ, check=True)
    (folder / "train.sh").write_text(SCRIPT)
    for name, line in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    own = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "ALMANAC_CONFIG": environ["ALMANAC_CONFIG"]}
    sbatch = pexpect.spawn(
        str(BIN / "sbatch-almanac"), ["train.sh"],
        env=own, cwd=str(folder), timeout=30, encoding="utf-8", dimensions=(40, COLUMNS),
    )  # fmt: skip
    sbatch.expect_exact("for this job: ")
    shown = f"{sbatch.before}{sbatch.after}"
    sbatch.sendline("y")
    sbatch.expect(pexpect.EOF)
    return f"$ sbatch train.sh\n{shown}{sbatch.before}".replace("\r\n", "\n")


def terminal_picture(shown: str, path: Path) -> None:
    """Draw a terminal that shows this text."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(shown.rstrip()))
    picture = console.export_svg(title="sbatch", theme=MONOKAI, unique_id="prompt")
    # Without the fonts that a browser would load from another host.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    path.write_text(picture, encoding="utf-8")


def telling_job(environ: dict[str, str]) -> str:
    """Return the id of the most uneven job on 4 GPUs with three suggestions, one of them a smaller memory tier."""
    listed = ["jobs", "-a", "--where", "verdict=ok", "--min", "gpu_count=4", "--max", "gpu_count=4"]
    jobs = said([*listed, "--min", "spatial_imbalance=0", "--sort", "-spatial_imbalance", "-n", "200"], environ)
    reports = said(["report", *(str(job["job_id"]) for job in jobs)], environ)
    for report in reports:
        advice = [suggestion["advice"] for suggestion in report["suggestions"]]
        if len(advice) == 3 and any("-C" in text for text in advice):
            return str(report["job_id"])
    sys.exit("no job of the demo has three suggestions and a smaller memory tier")


def said(command: list[str], environ: dict[str, str]) -> list[dict[str, Any]]:
    """Return what a command prints as JSON."""
    done = subprocess.run([BIN / "almanac", *command, "--json"], env=environ, capture_output=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def page_picture(command: list[str], width: int, height: int | None, environ: dict[str, str], path: Path) -> None:
    """Draw the page that a command writes: width in CSS pixels, and no more than the height if one is given."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        subprocess.run([BIN / "almanac", *command, "--html", page], env=environ, check=True)
        look(page.read_text(encoding="utf-8"), width, picture=path)
    with Image.open(path) as picture:
        cut = picture.convert("RGB").crop((0, 0, width, min(picture.height, height or picture.height)))
    cut.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
