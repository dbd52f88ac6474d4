"""Run fio for comparison: the same work on the same file."""

import contextlib
import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.measuring import forget_cached, undisturbed
from nvmeio._cli.samples import PERCENTILES, Sample
from nvmeio._cli.system import IN_MEMORY, System
from nvmeio._cli.terminal import Advance
from nvmeio._config.devices import device_of

# fio's engine for each engine of nvmeio.  The two that use no queue of the kernel are
# compared with one thread that makes blocking calls.
ENGINES = {"io_uring": "io_uring", "libaio": "libaio", "threads": "psync", "sync": "psync"}

# How often progress is reported.
WATCH_SECONDS = 0.1

# Memory that fio allocates besides its buffers, with a margin.
SPARE_BYTES = 64 << 20


def fio_version() -> str:
    """Return fio's version, such as fio-3.33; "" if it is not installed."""
    if shutil.which("fio") is None:
        return ""
    done = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


class Fio:
    """Runs fio on an existing file."""

    def __init__(
        self, path: Path, size: int, engine: str, direct: bool, queue_depth: int
    ) -> None:
        self.name = f"fio ({ENGINES[engine]})"
        self._path, self._queue_depth = path, queue_depth
        at_device = direct and device_of(path).file_system not in IN_MEMORY
        self._works_alone = ENGINES[engine] != "io_uring" or at_device
        self._arguments: dict[str, Any] = {
            "name": "nvmeio",
            "filename": str(path).replace(":", "\\:"),
            "size": size,
            "ioengine": ENGINES[engine],
            # Write the same bytes repeatedly, as nvmeio does: changing them takes CPU time.
            "scramble_buffers": 0,
            "direct": int(direct),
            "allow_file_create": 0,
            "percentile_list": ":".join(f"{percentile:g}" for percentile in PERCENTILES),
            "output-format": "json",
            "eta": "never",
        }

    def run(self, rw: str, block_bytes: int, advance: Advance, **more: Any) -> Sample:
        """Run fio's read, write or randread, with nothing of the file in the page cache.

        The sample has fio's own times, without its start; latencies are those from
        submission on (clat).  The CPU time is that of fio's thread.  It is unknown if
        kernel threads work for io_uring: without O_DIRECT, and in memory.
        """
        # fio allocates memory for its whole depth, which may be more than there is.
        depth = min(self._queue_depth, -(-self._arguments["size"] // block_bytes))
        arguments = {**self._arguments, "rw": rw, "bs": block_bytes, "iodepth": depth}
        arguments |= more
        forget_cached(self._path)
        words = [f"--{name}={value}" for name, value in arguments.items()]
        direction = "write" if rw == "write" else "read"
        job = _job(words, depth * block_bytes, direction, advance)
        done = job[direction]
        cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        percentiles = done["clat_ns"].get("percentile", {})
        return Sample(
            nbytes=done["io_bytes"],
            operations=done["total_ios"],
            # fio reports whole milliseconds: avoid 0.
            seconds=max(done["runtime"], 1) / 1e3,
            cpu_seconds=cpu_seconds if self._works_alone else math.nan,
            latency_us={
                percentile: percentiles[f"{percentile:.6f}"] / 1e3
                for percentile in PERCENTILES
                if f"{percentile:.6f}" in percentiles
            },
        )


def _tunables(nbytes: int) -> str:
    """Return the GLIBC_TUNABLES that put fio's buffers, of `nbytes` bytes, in huge pages.

    With small pages, fio's speed depends by chance on their addresses.
    """
    found = System()
    reserved = found.huge_pages_free * found.huge_page_bytes
    # Transparent huge pages need no privilege, but leave small pages at the edges: at a
    # depth of 16, fio is 5 % slower.
    kind = 2 if reserved >= nbytes + SPARE_BYTES else 1
    # perturb also touches the pages; otherwise fio would touch them during the measurement.
    return f"glibc.malloc.hugetlb={kind}:glibc.malloc.perturb=1"


def _job(
    arguments: list[str], nbytes: int, direction: str, advance: Advance
) -> dict[str, Any]:
    """Run fio, with buffers of `nbytes` bytes, and return its report on the job."""
    process, reported = None, 0
    try:
        # A signal must not come when fio runs and nobody knows its process yet.
        with undisturbed():
            process = subprocess.Popen(
                # In a thread of fio, because a forked job would be another process to end.
                ["fio", "--thread", *arguments],
                env={**os.environ, "GLIBC_TUNABLES": _tunables(nbytes)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # Its output contains the name of the file, which may have any bytes.
                errors="surrogateescape",
            )
        while True:
            try:
                out, errors = process.communicate(timeout=WATCH_SECONDS)
                break
            except subprocess.TimeoutExpired:
                # The process may have ended: /proc/PID/io cannot be read then.
                with contextlib.suppress(OSError):
                    moved = _moved(process.pid, direction)
                    advance(moved - reported)
                    reported = moved
    except BaseException:
        if process is not None:
            process.terminate()
            process.wait()
        raise
    if process.returncode:
        words = (errors or out).strip().splitlines() or [f"status {process.returncode}"]
        raise CommandError(f"fio has failed: {words[-1]}")
    # fio may print notes before the JSON.
    job: dict[str, Any] = json.loads(out[out.index("{") :])["jobs"][0]
    advance(job[direction]["io_bytes"] - reported)
    return job


def _moved(pid: int, direction: str) -> int:
    """Return how many bytes a process has read from devices, or written to files."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)[f"{direction}_bytes"])
