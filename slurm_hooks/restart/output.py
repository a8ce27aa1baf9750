"""Whether a command's error output names an out-of-memory end. The output itself is never changed.

Where standard error is a file, as in most batch jobs, the command writes to it directly, and what it added is read when
it ends. Otherwise its error output goes through a pipe and is passed on byte for byte.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading

OUT_OF_MEMORY = re.compile(
    rb"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    rb"|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED|cupy\.cuda\.memory\.OutOfMemoryError"
    rb"|RESOURCE_EXHAUSTED: (?:Out of memory|OOM|Failed to allocate)|OOM when allocating tensor"
    rb"|CUDA error: out of memory|CUDA runtime error.{0,40}out of memory|hipErrorOutOfMemory|HIP out of memory"
)
"""Messages of PyTorch, CUDA, cuDNN, cuBLAS, CuPy, JAX and TensorFlow (XLA), and HIP, as their sources write them."""
MOST_BYTES = 4 << 20
"""Of the end of the error output that is searched."""
OVERLAP = 200
BLOCK = 65_536
LAST_S = 2.0
"""How long the pipe is read on after the command's end: a process that it left behind may hold it."""


def names_out_of_memory(text: bytes) -> bool:
    return OUT_OF_MEMORY.search(text) is not None


class FileOutput:
    """Standard error is a file. command_fd: where the command writes; None: what it inherits."""

    command_fd: int | None = None

    def __init__(self, fd: int = 2) -> None:
        self._path = f"/proc/self/fd/{fd}"
        self._start = os.stat(self._path).st_size  # noqa: PTH116

    def started(self) -> None: ...

    def ran_out(self) -> bool:
        """Whether what was added since names an out-of-memory end. False where it cannot be read."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:  # noqa: PTH123
            size = os.fstat(file.fileno()).st_size
            start = self._start if size >= self._start else 0
            file.seek(max(start, size - MOST_BYTES))
            return names_out_of_memory(file.read(MOST_BYTES))
        return False


class PipeOutput:
    """Standard error is a terminal, a pipe or a socket: a thread passes the bytes on."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._read, self._write = os.pipe()
        self.command_fd: int | None = self._write
        self._seen = b""
        self._found = False
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def started(self) -> None:
        """The command has its end of the pipe."""
        os.close(self._write)
        self._thread.start()

    def ran_out(self) -> bool:
        self._thread.join(LAST_S)
        return self._found

    def _pass_on(self) -> None:
        is_open = True
        while block := os.read(self._read, BLOCK):
            text = self._seen + block
            self._found = self._found or names_out_of_memory(text)
            self._seen = text[-OVERLAP:]
            while block and is_open:
                try:
                    block = block[os.write(self._fd, block) :]
                except OSError:  # nobody reads any more; the command must not block
                    is_open = False


def watched_output(fd: int = 2) -> FileOutput | PipeOutput:
    """Raises OSError where fd is closed."""
    return FileOutput(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else PipeOutput(fd)
