"""The child process in C: the plain loop on liburing, and nvmeio through its C API.

The child is compiled when a benchmark starts.  It keeps its memory from turn to turn, so
that it can take turns with a candidate in this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from comparisons import Sample
from peers import Peers

import nvmeio

__all__ = ["LoopChild", "Turn", "loop_child"]

SOURCES = Path(__file__).resolve().parent / "loops"

Turn = Callable[[], Sample]


class LoopChild:
    """The child process, which waits for commands."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def run(self, *words: object) -> Sample:
        """Carry out a command of bench/loops/main.c."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = "\t".join(map(str, words))
        print(line, file=self._process.stdin, flush=True)
        status, _, answer = self._process.stdout.readline().partition(" ")
        if status != "ok":
            raise RuntimeError(f"{line!r} failed: {answer.strip() or 'the child ended'}")
        nbytes, seconds, cpu_seconds, switches, device = answer.split()
        return Sample(
            int(nbytes), float(seconds), float(cpu_seconds), int(device), int(switches)
        )

    def turn(self, *words: object) -> Turn:
        """Return a turn that carries out a command."""
        return lambda: self.run(*words)

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def compiled(folder: Path) -> Path:
    """Compile the child, and return the path of the program."""
    program = folder / "loops"
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            *("-O2", "-std=gnu11", "-D_GNU_SOURCE=", "-o", program),
            *sorted(SOURCES.glob("*.c")),
            f"-I{nvmeio.get_include()}",
            *(f"-L{nvmeio.get_library_dir()}", "-l:libnvmeio.a"),
            *nvmeio.build_info()["link_flags"],
            *("-luring", "-pthread"),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return program


@contextlib.contextmanager
def loop_child(peers: Peers) -> Iterator[LoopChild | None]:
    """Start the child, and end it on exit. Yields None if it cannot be compiled."""
    with tempfile.TemporaryDirectory(prefix="nvmeio-bench-") as folder:
        try:
            program = compiled(Path(folder))
        except OSError as error:
            peers.leave_out("the plain loop", f"no C compiler: {error.strerror}")
            yield None
            return
        except subprocess.CalledProcessError as error:
            found = re.search("error: .*|cannot find .*", error.stderr)
            peers.leave_out("the plain loop", found[0] if found else "cc failed")
            yield None
            return
        child = LoopChild(program)
        try:
            yield child
        finally:
            child.close()
