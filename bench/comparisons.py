"""Comparisons: two candidates take turns at the same work, and their ratio is judged.

Within minutes, the speed of a disk drifts by more than candidates differ.  So each ratio
is taken between two neighbouring turns, and the median of the ratios counts.  The
candidate that begins changes with every turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import importlib.metadata
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "GIB",
    "SPEED",
    "Comparison",
    "Goal",
    "Sample",
    "compare",
    "device_bytes",
    "measured",
    "progress",
    "surroundings",
]

GIB = 1 << 30

# Packages whose version may change the figures.
PACKAGES = (
    "nvmeio",
    "numpy",
    "torch",
    "deepspeed",
    "safetensors",
    "fastsafetensors",
    "aiofile",
    "caio",
    "megatron-core",
    "webdataset",
    "mosaicml-streaming",
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """The figures of one candidate in a round.

    Attributes
    ----------
    nbytes : int
        Bytes that were transferred.
    seconds : float
        How long it took.
    cpu_seconds : float
        CPU time of all its threads, user and system.
    device_bytes : int
        Bytes that the device delivered meanwhile.
    switches : int
        Context switches of all its threads.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    device_bytes: int
    switches: int = 0

    def __add__(self, other: Sample) -> Sample:
        return Sample(
            self.nbytes + other.nbytes,
            self.seconds + other.seconds,
            self.cpu_seconds + other.cpu_seconds,
            self.device_bytes + other.device_bytes,
            self.switches + other.switches,
        )


def device_bytes() -> int:
    """Return the bytes that the device delivered to this process and reaped children."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def context_switches() -> int:
    """Return the number of context switches of this process's threads so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


def measured(work: Callable[[], int]) -> Sample:
    """Run `work`, which returns how many bytes it has moved, and measure it.

    The CPU time includes all threads of this process, so nvmeio's workers too.
    """
    device = device_bytes()
    switches = context_switches()
    cpu = time.process_time()
    begin = time.perf_counter()
    nbytes = work()
    seconds = time.perf_counter() - begin
    cpu = time.process_time() - cpu
    switches = context_switches() - switches
    return Sample(nbytes, seconds, cpu, device_bytes() - device, switches)


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal: the least allowed ratio of speeds, or the largest of anything else.

    Attributes
    ----------
    quantity : {"speed", "time", "CPU time", "CPU us", "switches"}
        The figure whose ratio counts, the first candidate's divided by the second's.
        The last two are not ratios, but the first candidate's CPU time and context
        switches per record.
    limit : float
        The limit for the median over the rounds.
    """

    quantity: str
    limit: float

    def values(self, comparison: Comparison) -> list[float]:
        """Return the values that the goal judges: one for each figure of a comparison."""
        if self.quantity == "speed":
            return comparison.medians(lambda ours, theirs: theirs.seconds / ours.seconds)
        if self.quantity == "time":
            return comparison.medians(lambda ours, theirs: ours.seconds / theirs.seconds)
        if self.quantity == "CPU time":
            return comparison.medians(
                lambda ours, theirs: ours.cpu_seconds / theirs.cpu_seconds
            )
        if self.quantity == "switches":
            return comparison.medians(
                lambda ours, _: comparison.per_record(ours.switches, ours)
            )
        return comparison.medians(lambda ours, _: comparison.cpu_us(ours))

    def verdict(self, comparison: Comparison) -> str:
        """Return "reached" or "missed"; or "void", with the reason."""
        if comparison.cached_rounds():
            return "void: a cache took part"
        median = statistics.median(self.values(comparison))
        reached = median >= self.limit if self.quantity == "speed" else median <= self.limit
        return "reached" if reached else "missed"

    def __str__(self) -> str:
        return f"{self.quantity} {'>=' if self.quantity == 'speed' else '<='} {self.limit}"


SPEED = Goal("speed", 1.0)


@dataclasses.dataclass
class Comparison:
    """A comparison of two candidates at the same work.

    Attributes
    ----------
    work : str
        The work.
    names : tuple of str
        The candidate that the goals are about, and the one it is compared with.
    turns : tuple of callable
        One turn of each.
    reads : bool
        Whether the device must deliver every byte.
    goals : tuple of Goal
        The goals; empty if the comparison is for information.
    record_bytes : int
        The size of a record, if records are counted instead of bytes; else 0.
    alternations : int
        How often they take turns in a round, if a turn is too short for a figure.
    rounds : list of tuple of Sample
        The figures of both in each round.
    rounds_each : int
        How many rounds in a row make one figure, which is their median.  If there are
        several processes, these are the rounds of one process.
    memory : tuple of int
        The memory that each took, in bytes; empty if it was not measured.
    """

    work: str
    names: tuple[str, str]
    turns: tuple[Callable[[], Sample], ...]
    reads: bool
    goals: tuple[Goal, ...] = ()
    record_bytes: int = 0
    alternations: int = 1
    rounds: list[tuple[Sample, Sample]] = dataclasses.field(default_factory=list)
    rounds_each: int = 1
    memory: tuple[int, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the figures without the turns, which cannot be pickled."""
        return {**vars(self), "turns": ()}

    def run_round(self) -> None:
        """Run a round, and add its figures."""
        sums = [Sample(0, 0.0, 0.0, 0), Sample(0, 0.0, 0.0, 0)]
        for number in range(self.alternations):
            first = (len(self.rounds) + number) % 2
            for index in (first, 1 - first):
                sums[index] += self.turns[index]()
        self.rounds.append((sums[0], sums[1]))

    def medians(self, value: Callable[[Sample, Sample], float]) -> list[float]:
        """Return one value for each figure, which is a round or a process."""
        values = [value(*pair) for pair in self.rounds]
        steps = range(0, len(values), self.rounds_each)
        return [statistics.median(values[at : at + self.rounds_each]) for at in steps]

    def of(self, index: int, value: Callable[[Sample], float]) -> list[float]:
        """Return the values of one candidate."""
        return self.medians(lambda *pair: value(pair[index]))

    def cpu_us(self, sample: Sample) -> float:
        """Return the CPU time per record, in microseconds."""
        return self.per_record(sample.cpu_seconds, sample) * 1e6

    def per_record(self, value: float, sample: Sample) -> float:
        """Return a total of a sample per record."""
        return value / sample.nbytes * self.record_bytes

    def cached_rounds(self) -> int:
        """Return the number of rounds in which not every byte came from the device."""
        return sum(
            self.reads and any(sample.device_bytes < sample.nbytes for sample in pair)
            for pair in self.rounds
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the raw numbers in types that JSON has."""
        return {
            "work": self.work,
            "names": self.names,
            "reads": self.reads,
            "goals": [dataclasses.asdict(goal) for goal in self.goals],
            "record_bytes": self.record_bytes,
            "rounds_each": self.rounds_each,
            "memory": self.memory,
            "rounds": [
                [dataclasses.asdict(sample) for sample in pair] for pair in self.rounds
            ],
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Comparison:
        """Return a comparison that `as_dict` has written."""
        return cls(
            raw["work"],
            tuple(raw["names"]),
            (),
            raw["reads"],
            tuple(Goal(**goal) for goal in raw["goals"]),
            raw["record_bytes"],
            rounds=[(Sample(**ours), Sample(**theirs)) for ours, theirs in raw["rounds"]],
            rounds_each=raw["rounds_each"],
            memory=tuple(raw.get("memory", ())),
        )


def compare(comparisons: Sequence[Comparison], rounds: int) -> None:
    """Run all comparisons once a round. The first round warms up, and does not count."""
    for number in range(rounds + 1):
        progress(f"round {number} of {rounds}")
        for comparison in comparisons:
            comparison.run_round()
    for comparison in comparisons:
        del comparison.rounds[0]


def progress(words: str) -> None:
    """Report progress, in one line of a terminal, which is overwritten, or in new lines."""
    if sys.stderr.isatty():
        print(f"{words[:79]:79}", end="\r", file=sys.stderr, flush=True)
    else:
        print(words, file=sys.stderr, flush=True)


def surroundings() -> dict[str, Any]:
    """Describe the machine and the software, without paths and host names."""
    cpu = dict(
        line.split("\t: ")
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if "\t: " in line
    )
    return {
        "date": dt.date.today().isoformat(),
        "cpu": f"{os.cpu_count()} x {cpu.get('model name', platform.machine())}",
        "kernel": platform.release(),
        "load before": os.getloadavg()[0],
        "python": platform.python_version(),
        **versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
