"""Duels: two contestants take turns at the same work, and their ratio is judged.

The speed of a disk drifts over minutes by more than contestants differ.  So each ratio is
taken between neighbours in time, and only then the median; who begins changes with every
turn.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "GIB",
    "Duel",
    "Goal",
    "Sample",
    "device_bytes",
    "measured",
    "spread",
    "surroundings",
    "table",
]

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one contestant did in a round.

    Attributes
    ----------
    nbytes : int
        Bytes that were transferred.
    seconds : float
        How long it took.
    cpu_seconds : float
        CPU time of all its threads, user and system.
    device_bytes : int
        Bytes that the kernel had the device deliver meanwhile.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    device_bytes: int

    def __add__(self, other: Sample) -> Sample:
        return Sample(
            self.nbytes + other.nbytes,
            self.seconds + other.seconds,
            self.cpu_seconds + other.cpu_seconds,
            self.device_bytes + other.device_bytes,
        )


def device_bytes() -> int:
    """Return what the device has delivered to this process and its reaped children."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def measured(work: Callable[[], int]) -> Sample:
    """Run `work`, which returns how many bytes it has moved.

    The CPU time is that of all threads of this process, so of nvmeio's lanes too.
    """
    device = device_bytes()
    cpu = time.process_time()
    begin = time.perf_counter()
    nbytes = work()
    seconds = time.perf_counter() - begin
    cpu = time.process_time() - cpu
    return Sample(nbytes, seconds, cpu, device_bytes() - device)


@dataclasses.dataclass
class Duel:
    """Two contestants at the same work.

    Attributes
    ----------
    work : str
        What they do.
    names : tuple of str
        The contestant that goals are about, and the one it is compared with.
    turns : tuple of callable
        One turn of each.
    reads : bool
        Whether the device must deliver every byte.
    alternations : int
        How often they take turns in a round; for turns too short for a figure.
    rounds : list of tuple of Sample
        What both did in each round.
    """

    work: str
    names: tuple[str, str]
    turns: tuple[Callable[[], Sample], Callable[[], Sample]]
    reads: bool
    alternations: int = 1
    rounds: list[tuple[Sample, Sample]] = dataclasses.field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the turns behind: to another process go the figures alone."""
        return {**vars(self), "turns": ()}

    def fight(self) -> None:
        """Add a round."""
        sums = [Sample(0, 0.0, 0.0, 0), Sample(0, 0.0, 0.0, 0)]
        for number in range(self.alternations):
            first = (len(self.rounds) + number) % 2
            for index in (first, 1 - first):
                sums[index] += self.turns[index]()
        self.rounds.append((sums[0], sums[1]))

    def cached_rounds(self) -> int:
        """Count the rounds in which not every byte came from the device."""
        return sum(
            self.reads and any(sample.device_bytes < sample.nbytes for sample in pair)
            for pair in self.rounds
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the raw numbers as JSON can hold them."""
        return {
            "work": self.work,
            "names": self.names,
            "rounds": [
                [dataclasses.asdict(sample) for sample in pair] for pair in self.rounds
            ],
        }


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a ratio has to be: of speeds at least, of times at most the limit.

    Attributes
    ----------
    quantity : {"speed", "time", "CPU time"}
        What the ratio is taken of, the first contestant's to the second's.
    limit : float
        Is compared with the median over the rounds.
    """

    quantity: str
    limit: float

    def ratios(self, duel: Duel) -> list[float]:
        """Return the ratio of each round."""
        if self.quantity == "speed":
            return [theirs.seconds / ours.seconds for ours, theirs in duel.rounds]
        if self.quantity == "time":
            return [ours.seconds / theirs.seconds for ours, theirs in duel.rounds]
        return [ours.cpu_seconds / theirs.cpu_seconds for ours, theirs in duel.rounds]

    def verdict(self, duel: Duel) -> str:
        """Say whether the goal is reached."""
        if duel.cached_rounds():
            return "void: a cache took part"
        median = statistics.median(self.ratios(duel))
        reached = median >= self.limit if self.quantity == "speed" else median <= self.limit
        return "reached" if reached else "missed"

    def __str__(self) -> str:
        return f"{self.quantity} {'>=' if self.quantity == 'speed' else '<='} {self.limit}"


def surroundings() -> dict[str, Any]:
    """Describe where and with what it was measured, without paths and host names."""
    cpu = dict(
        line.split("\t: ")
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if "\t: " in line
    )
    packages = ("torch", "numpy", "nvmeio")
    return {
        "date": dt.date.today().isoformat(),
        "cpu": f"{os.cpu_count()} x {cpu.get('model name', platform.machine())}",
        "kernel": platform.release(),
        "load before": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def spread(values: Iterable[float], digits: int) -> str:
    """Write the median, minimum and maximum of some values."""
    values = list(values)
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Write a table that reads well as plain text and as Markdown."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, tuple("-" * width for width in widths), *rows]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in lines
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)
