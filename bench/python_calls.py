"""Count the calls of Python functions of this package, and their files, in one operation.

``python bench/python_calls.py`` prints the table of docs/design.md.  Cython's functions are
not counted.  The operations are warm: each was done twice before.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import nvmeio
from nvmeio.checkpoint import Checkpointer
from nvmeio.safetensors.torch import load_file, save_file

PACKAGE = str(Path(nvmeio.__file__).parent)
TENSORS = 10


def count(call: Callable[[], Any]) -> tuple[int, int]:
    """Return how many functions of the package a call calls, and in how many files."""
    calls: list[str] = []

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(calls), len(set(calls))


def operations(folder: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is counted, by name."""
    tensors = {f"t{number}": torch.zeros(1000) for number in range(TENSORS)}
    path, numbers = f"{folder}/model", iter(range(1, 100))
    with Checkpointer(f"{folder}/run", keep=1) as checkpointer:
        yield "Checkpointer.save", lambda: checkpointer.save(next(numbers), tensors)
        yield "Checkpointer.restore", checkpointer.restore
    yield "save_file", lambda: save_file(tensors, path)
    yield "load_file", lambda: load_file(path)
    array = f"{folder}/array.npy"
    yield "nvmeio.save", lambda: nvmeio.save(array, tensors["t0"].numpy())
    yield "nvmeio.load", lambda: nvmeio.load(array)


def main() -> None:
    """Print the table."""
    print(f"| with {TENSORS} tensors of 4,000 bytes | calls | files |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="nvmeio-bench-") as folder:
        for name, operation in operations(folder):
            for _ in range(2):
                operation()
            calls, files = count(operation)
            print(f"| `{name}` | {calls} | {files} |")


if __name__ == "__main__":
    main()
