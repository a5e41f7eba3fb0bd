"""Runs kernels in a process of its own, natively or in Triton's interpreter, so that a crash ends no test run.

As a program it reads pairs (path of a module with `kernel`, Job) from stdin and answers with lists of numpy arrays.
"""

import contextlib
import ctypes
import importlib.util
import mmap
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"


@dataclass(frozen=True)
class Job:
    """ends: for each buffer, the number of elements after which no memory may be touched."""

    buffers: list[torch.Tensor]
    ends: list[int]
    scalars: list[int]
    programs: int


class Worker:
    """Keep it for many kernels: it starts in seconds."""

    def __init__(self, interpret: bool):
        environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, path: Path, job: Job) -> list[torch.Tensor]:
        """The buffers as the kernel leaves them. Raises: RuntimeError with what went wrong, a crash among it."""
        assert self._process.stdin and self._process.stdout
        try:
            pickle.dump((str(path), job), self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(f"the process ended with status {self._process.wait()}") from error
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class _Guarded:
    """A copy of a tensor's first elements with memory behind them that nobody may touch."""

    def __init__(self, tensor: torch.Tensor, count: int):
        size = count * tensor.element_size()
        pages = -(-size // mmap.PAGESIZE)
        self._map = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        behind = ctypes.c_void_p(address + pages * mmap.PAGESIZE)
        if libc.mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
        self.tensor = torch.frombuffer(self._map, dtype=tensor.dtype, count=count, offset=pages * mmap.PAGESIZE - size)
        self.tensor.copy_(tensor[:count])


def _run(path: str, job: Job) -> list[torch.Tensor]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    guarded = [_Guarded(buffer, end) for buffer, end in zip(job.buffers, job.ends, strict=True)]
    module.kernel[(job.programs,)](*(buffer.tensor for buffer in guarded), *job.scalars)
    results = []
    for buffer, copy in zip(job.buffers, guarded, strict=True):
        result = buffer.clone()
        result[: copy.tensor.numel()] = copy.tensor
        results.append(result)
    return results


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel or a compiler prints is no answer
    while True:
        try:
            path, job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any
        try:
            answer = _run(path, job)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    from fuzz_worker import main  # under this name, `Job` is the one that the other process pickles

    main()
