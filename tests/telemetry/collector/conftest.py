"""A stub of NVIDIA's library with GPUs as the test says, and the reader on it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from telemetry.collector.reader import ReaderProcess

SOURCE = Path(__file__).parent / "nvml_stub.c"
GPUS = ["util 80", "used 20000", "watts 500", "clock 1800", "temp 60", "sm 70", "tensor 40", "dram 55", "fp32 12"]


@dataclass
class NvmlStub:
    """path: the file that the library reads. Each line holds until `set` is called again."""

    path: Path
    readers: list[ReaderProcess] = field(default_factory=list)

    def set(self, *lines: str) -> None:
        """Write the file; see nvml_stub.c. The values of GPUS are there."""
        new = self.path.with_suffix(".new")
        new.write_text("\n".join([*GPUS, *lines, ""]))
        new.rename(self.path)

    def reader(self, **options: Any) -> ReaderProcess:
        """A reader, which ends with the test."""
        folders = {name: options.pop(name, None) for name in ("mapping_dir", "prolog_dir")}
        reader = ReaderProcess({"host": "n1", **folders}, **{"pause_s": 0.0, **options})
        self.readers.append(reader)
        return reader


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compile the stub: (flag) -> the folder of libnvidia-ml.so.1."""
    made: dict[str, Path] = {}

    def compiled(flag: str) -> Path:
        if shutil.which("gcc") is None:
            pytest.skip("gcc not found")
        if flag not in made:
            folder = made[flag] = tmp_path_factory.mktemp("nvml")
            out = folder / "libnvidia-ml.so.1"
            command = ["gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", *filter(None, [flag])]
            subprocess.run([*command, "-o", out, SOURCE], check=True)
        return made[flag]

    return compiled


@pytest.fixture
def stub(
    library: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[NvmlStub]:
    """The library of a driver of today; of driver 470 where the test's parameter is "-DOLD"."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library(getattr(request, "param", ""))))
    monkeypatch.setenv("NVML_STUB", str(tmp_path / "gpus"))
    made = NvmlStub(tmp_path / "gpus")
    yield made
    for reader in made.readers:
        reader.close()
