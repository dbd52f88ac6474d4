"""Tables of results, for the terminal and for the documentation.

They are made only from the raw numbers in the JSON, so that old tables can be made again.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from comparisons import GIB, SPEED, Comparison, Goal, Sample

__all__ = [
    "SCHEMA",
    "STYLES",
    "Outcome",
    "Table",
    "finish",
    "origin",
    "overview_rows",
    "padded",
    "picked",
    "scripts_of",
    "size_name",
    "speed_of",
    "speed_unit",
    "summary",
]

SCHEMA = 2

Row = tuple[str, ...]
# A header row, and rows with as many cells.
Table = tuple[Row, list[Row]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a script, or why it failed.

    Attributes
    ----------
    machine : dict
        The machine, the software and the options; empty if nothing was measured.
    comparisons : list of Comparison
        The comparisons.
    left_out : list of str
        The tools that were left out, each with the reason.
    failure : str
        The last line of a script that failed; else empty.
    seconds : float
        How long the script took.
    """

    machine: dict[str, Any]
    comparisons: list[Comparison]
    left_out: list[str]
    failure: str = ""
    seconds: float = 0.0

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Outcome:
        """Return the results of a script from its part of the JSON."""
        return cls(
            raw.get("machine", {}),
            [Comparison.from_dict(comparison) for comparison in raw.get("comparisons", [])],
            raw.get("left out", []),
            raw.get("failed", ""),
            raw.get("seconds", 0.0),
        )


def scripts_of(path: Path) -> dict[str, Outcome]:
    """Read the JSON of one script, or of all of them."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} is of schema {raw.get('schema')}, not {SCHEMA}")
    scripts = raw["scripts"] if "scripts" in raw else {raw["script"]: raw}
    return {name: Outcome.from_dict(outcome) for name, outcome in scripts.items()}


def size_name(nbytes: int) -> str:
    """Format a size."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def number(value: float) -> str:
    """Format a figure with three digits, or with all digits before the point."""
    if value == 0:
        return "0"
    digits = 2
    while digits < 5 and abs(value) < 10 ** (2 - digits):
        digits += 1
    while digits and abs(value) >= 10 ** (3 - digits):
        digits -= 1
    return f"{value:.{digits}f}"


def spread(values: Iterable[float]) -> str:
    """Format the median, minimum and maximum of some values."""
    values = list(values)
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{number(middle)} [{number(low)}-{number(high)}]"


def padded(table: Table) -> str:
    """Format a table that reads well as plain text and as Markdown."""
    head, rows = table
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def moves_bytes(comparison: Comparison) -> bool:
    """Return whether a comparison is measured by speed. Otherwise it is by time."""
    return any(pair[0].nbytes for pair in comparison.rounds)


def speed_unit(comparison: Comparison) -> str:
    """Return the unit of a comparison's speed."""
    if not moves_bytes(comparison):
        return "s"
    return "k/s" if comparison.record_bytes else "GB/s"


def figure_heads(comparisons: list[Comparison]) -> Row:
    """Return the heads of the two columns of figures."""
    kinds = {"speed" if moves_bytes(comparison) else "time" for comparison in comparisons}
    kind = " or ".join(sorted(kinds))
    return tuple(f"{kind} of the {candidate}" for candidate in ("first", "second"))


def speed_of(comparison: Comparison) -> Callable[[Sample], float]:
    """Return a function that computes a sample's speed in that unit."""
    if not moves_bytes(comparison):
        return lambda sample: sample.seconds
    if comparison.record_bytes:
        return lambda sample: sample.nbytes / comparison.record_bytes / sample.seconds / 1e3
    return lambda sample: sample.nbytes / sample.seconds / 1e9


def cpu_times(comparison: Comparison) -> str:
    """Format the median CPU time of both."""
    if not moves_bytes(comparison):
        return ""

    def of_a_gib(sample: Sample) -> float:
        return sample.cpu_seconds * GIB / sample.nbytes

    value = comparison.cpu_us if comparison.record_bytes else of_a_gib
    unit = "us" if comparison.record_bytes else "s/GiB"
    medians = (statistics.median(comparison.of(index, value)) for index in (0, 1))
    return f"{' / '.join(map(number, medians))} {unit}"


def delivered(comparison: Comparison) -> str:
    """Format the bytes that the device delivered per byte read, the median of both."""

    def share(sample: Sample) -> float:
        return sample.device_bytes / sample.nbytes

    medians = (statistics.median(comparison.of(index, share)) for index in (0, 1))
    return " / ".join(map(number, medians))


def memory(comparison: Comparison) -> str:
    """Format the memory that both took."""
    return " / ".join(number(value / 1e6) for value in comparison.memory) + " MB"


def rows(comparison: Comparison, counts_records: bool, has_memory: bool) -> Iterator[Row]:
    """Yield a row for each goal of a comparison, or one for its speed."""
    figures = [
        comparison.work,
        " / ".join(comparison.names),
        *(
            f"{spread(comparison.of(i, speed_of(comparison)))} {speed_unit(comparison)}"
            for i in (0, 1)
        ),
        cpu_times(comparison),
    ]
    if counts_records:
        figures.append(delivered(comparison))
    if has_memory:
        figures.append(memory(comparison) if comparison.memory else "")
    for goal in comparison.goals or (SPEED,):
        judged = (str(goal), goal.verdict(comparison)) if comparison.goals else ("", "")
        yield (*figures, spread(goal.values(comparison)), *judged)
        figures = [""] * len(figures)


def full(scripts: dict[str, Outcome]) -> Table:
    """Make the table of all comparisons."""
    comparisons = [
        comparison for outcome in scripts.values() for comparison in outcome.comparisons
    ]
    counts_records = any(comparison.record_bytes for comparison in comparisons)
    head = ("work", "first / second", *figure_heads(comparisons), "CPU time")
    if counts_records:
        head = (*head, "delivered")
    if has_memory := any(comparison.memory for comparison in comparisons):
        head = (*head, "memory")
    head = (*head, "ratio", "goal", "verdict")
    return head, [
        row
        for comparison in comparisons
        for row in rows(comparison, counts_records, has_memory)
    ]


def medians(scripts: dict[str, Outcome]) -> Table:
    """Make a short table of speeds."""
    comparisons = [
        comparison for outcome in scripts.values() for comparison in outcome.comparisons
    ]
    names = {comparison.names for comparison in comparisons}
    alike = len(names) == 1
    head: Row = ("work", "first / second", *figure_heads(comparisons), "ratio")
    if alike:
        head = ("work", *names.pop(), "ratio")
    if has_memory := any(comparison.memory for comparison in comparisons):
        head = (*head, "memory")
    found = []
    for comparison in comparisons:
        who = () if alike else (" / ".join(comparison.names),)
        speeds = (statistics.median(comparison.of(i, speed_of(comparison))) for i in (0, 1))
        cells = (f"{number(speed)} {speed_unit(comparison)}" for speed in speeds)
        ratio = number(statistics.median(SPEED.values(comparison)))
        more = (memory(comparison) if comparison.memory else "",) if has_memory else ()
        found.append((comparison.work, *who, *cells, ratio, *more))
    return head, found


def verdicts(outcome: Outcome) -> list[tuple[Comparison, Goal, str]]:
    """Return each goal with its comparison and verdict."""
    return [
        (comparison, goal, goal.verdict(comparison))
        for comparison in outcome.comparisons
        for goal in comparison.goals
    ]


def summary(scripts: dict[str, Outcome]) -> Table:
    """Make a table of how many goals each script reached."""
    found = []
    for name, outcome in scripts.items():
        judged = [verdict for _, _, verdict in verdicts(outcome)]
        reached, missed = judged.count("reached"), judged.count("missed")
        words = f"failed: {outcome.failure}" if outcome.failure else ""
        words = words or "; ".join(f"{left} left out" for left in outcome.left_out)
        counts = (len(outcome.comparisons), reached, missed, len(judged) - reached - missed)
        took = f"{outcome.seconds:.0f} s"
        found.append((f"`bench_{name}.py`", *map(str, counts), took, words))
    head = ("script", "comparisons", "goals reached", "missed", "void", "took", "notes")
    return head, found


def missed(scripts: dict[str, Outcome]) -> Table:
    """Make a table of the goals that were not reached."""
    found = [
        (
            f"`bench_{name}.py`",
            comparison.work,
            " / ".join(comparison.names),
            str(goal),
            spread(goal.values(comparison)),
            verdict,
        )
        for name, outcome in scripts.items()
        for comparison, goal, verdict in verdicts(outcome)
        if verdict != "reached"
    ]
    head = ("script", "work", "first / second", "goal", "measured", "verdict")
    return head, found


def conditions(scripts: dict[str, Outcome]) -> Table:
    """Make a table of the machine, the software and the options."""
    abouts = {name: outcome.machine for name, outcome in scripts.items() if outcome.machine}
    keys = dict.fromkeys(key for about in abouts.values() for key in about)
    found = []
    for key in keys:
        values = {
            name: shown(key, about[key]) for name, about in abouts.items() if key in about
        }
        if len(values) > 1 and len(set(values.values())) == 1:
            found.append((key, values.popitem()[1]))
        elif len(abouts) == 1:
            found.append((key, *values.values()))
        else:
            parts = (f"{value} ({name})" for name, value in values.items())
            found.append((key, ", ".join(parts)))
    return ("", ""), found


def shown(key: str, value: Any) -> str:
    """Format a value of that table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    return size_name(value) if key == "size" else str(value)


# The first screen of bench/README.md, and the chart of README.md.  A row has its work, the
# other candidate, the comparison, and the comparison whose second candidate is the limit:
# a plain loop on io_uring (bench/README.md#the-plain-loop).  A comparison is given by the
# name of its script, and a pattern for "work: first / second".
Wanted = tuple[str, str]
READ: Wanted = ("transfer", "^read, one request, default handle: nvmeio / plain loop$")
WRITE: Wanted = ("transfer", "^write, new, pool memory: nvmeio / plain loop")
ROWS: Wanted = ("gather", "^4 KiB x 128, disk: gather / plain loop$")
OVERVIEW: tuple[tuple[str, str, Wanted, Wanted], ...] = (
    (
        "read a file as bytes",
        "Python's read",
        ("checkpoint", "^read bytes: nvmeio.read_file / Python$"),
        READ,
    ),
    (
        "write bytes to a new file, durably",
        "Python's write, fsync",
        ("checkpoint", "^write bytes: nvmeio.write_file / Python$"),
        WRITE,
    ),
    (
        "load an array",
        "numpy.load",
        ("checkpoint", "^load an array: nvmeio.load / numpy.load$"),
        READ,
    ),
    (
        "save an array, durably",
        "numpy.save, fsync",
        ("checkpoint", "^save an array: nvmeio.save / numpy.save$"),
        WRITE,
    ),
    (
        "load a model's tensors into new memory",
        "torch.load",
        ("checkpoint", "^load .*new memory: nvmeio / torch.load$"),
        READ,
    ),
    (
        "the same from safetensors' format",
        "safetensors",
        ("checkpoint", "^load .*new memory: nvmeio / safetensors.*touched$"),
        READ,
    ),
    (
        "save a model's tensors, durably",
        "safetensors, fsync",
        ("checkpoint", "^save (a model|tensors): nvmeio / safetensors"),
        WRITE,
    ),
    (
        "read random rows of 4 KiB",
        "numpy.memmap",
        ("gather", "^1000 rows of 4 KiB: gather / numpy.memmap$"),
        ROWS,
    ),
    (
        "random rows for a DataLoader",
        "numpy.memmap",
        ("dataloader", "cold, 0 workers: ArrayDataset / numpy.memmap$"),
        ROWS,
    ),
    (
        "read a tensor by the calls of DeepSpeed's op",
        "DeepSpeed's op",
        ("deepspeed", "^read, large, unpinned; depth 32: nvmeio / DeepSpeed$"),
        READ,
    ),
    (
        "a step of AdamW, states on disk",
        "DeepSpeed's ZeRO-3",
        ("offload", "^a step of AdamW, fused: offloaded / DeepSpeed's ZeRO-3"),
        ("offload", "^a step of AdamW, fused: offloaded / the larger"),
    ),
)


def medians_of(
    scripts: dict[str, Outcome], wanted: Wanted
) -> tuple[str, list[float]] | None:
    """Return the unit and median speeds of both candidates; None if they have not run."""
    script, pattern = wanted
    for comparison in picked(scripts.get(script, Outcome({}, [], [])), pattern):
        speeds = (comparison.of(i, speed_of(comparison)) for i in (0, 1))
        return speed_unit(comparison), [statistics.median(each) for each in speeds]
    return None


def picked(outcome: Outcome, pattern: str) -> list[Comparison]:
    """Return the comparisons whose "work: first / second" matches a pattern."""
    return [
        comparison
        for comparison in outcome.comparisons
        if re.search(pattern, f"{comparison.work}: {' / '.join(comparison.names)}")
    ]


def origin(outcome: Outcome) -> str:
    """Return a line that says where something was measured."""
    words = (outcome.machine.get(key) for key in ("cpu", "file system", "date"))
    return ", ".join(word for word in words if word)


def overview_rows(
    scripts: dict[str, Outcome],
) -> Iterator[tuple[str, str, str, float, float, float]]:
    """Yield what was measured: work, peer, unit, speeds of nvmeio and the peer, limit."""
    for work, peer, wanted, limit in OVERVIEW:
        both, top = medians_of(scripts, wanted), medians_of(scripts, limit)
        if both is not None and top is not None:
            unit, (ours, theirs) = both
            yield work, peer, unit, ours, theirs, top[1][1]


def overview(scripts: dict[str, Outcome]) -> Table:
    """Make the table of the rows that matter most, each beside its limit."""
    where = origin(scripts.get("checkpoint", Outcome({}, [], [])))
    return (where, "nvmeio", "instead", "limit", "nvmeio's share of it"), [
        (
            work,
            f"{number(ours)} {unit}",
            f"{peer}: {number(theirs)} {unit}",
            f"{number(top)} {unit}",
            f"{ours / top:.0%}",
        )
        for work, peer, unit, ours, theirs, top in overview_rows(scripts)
    ]


# The styles of tables, by the names that the documentation uses.
STYLES: dict[str, Callable[[dict[str, Outcome]], Table]] = {
    "overview": overview,
    "all": full,
    "medians": medians,
    "summary": summary,
    "missed goals": missed,
    "conditions": conditions,
}


def finish(
    script: str,
    about: dict[str, Any],
    comparisons: list[Comparison],
    left_out: list[str],
    path: Path | None,
) -> None:
    """Print the results of a script, and write its JSON."""
    scripts = {script: Outcome(about, comparisons, left_out)}
    print(padded(conditions(scripts)))
    if about.get("huge pages for fio") is False:
        print("\nfio only had transparent huge pages, and is slower so (others need root)")
    print("\nmedian [minimum-maximum]; bench/README.md explains the table\n")
    print(padded(full(scripts)), flush=True)
    if path is not None:
        raw = {
            "schema": SCHEMA,
            "script": script,
            "machine": about,
            "left out": left_out,
            "comparisons": [comparison.as_dict() for comparison in comparisons],
        }
        path.write_text(json.dumps(raw) + "\n", encoding="utf-8")
        print(f"\n{path.name} has the raw numbers", file=sys.stderr)
