"""``nvmeio tune``: find the fastest settings for a device."""

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import statistics
import time
from collections.abc import Sequence
from typing import Any

from nvmeio._arguments.units import in_binary
from nvmeio._cli import plots
from nvmeio._cli.arguments import (
    CommandError,
    Parser,
    UsageError,
    option,
    seconds,
    sentence,
    size,
)
from nvmeio._cli.measuring import (
    add_figure_options,
    check_plotting,
    keep_figures,
    scratch_folder,
)
from nvmeio._cli.search import GOALS, ROUNDS_MIN, Comparison
from nvmeio._cli.terminal import Terminal
from nvmeio._cli.trials import (
    DEFAULT,
    GRID_BLOCKS,
    GRID_DEPTHS,
    Options,
    Trials,
    described,
    small_pages,
)
from nvmeio._config.options import variable
from nvmeio._config.profile_files import (
    Choice,
    Profile,
    make_profiles_folder,
    new_profile,
    save_profile,
)
from nvmeio._native.info import engines
from nvmeio.deepspeed._aio_json import aio_config

SIZE_MIN = 64 << 20
MIB = 1 << 20
WORKERS = (2, 4)

# When the stages must end, as shares of the budget.
SHARES = (0.5, 0.85, 1.0)

# The keys of DeepSpeed's block -> the options of a handle.
AIO_KEYS = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "intra_op_parallelism": "workers",
}

DETAILS = """\
Three comparisons: block size and queue depth; then workers and engines for the
best of these; then bounce, with memory in small pages.  Settings replace the
default only if they are certainly faster; docs/tuning.md explains how that is
decided.  All files are in a folder nvmeio-bench-* in DIR, which is removed at
the end, also after Ctrl-C.

The profile is saved for the device of DIR, in nvmeio/profiles in
$XDG_CONFIG_HOME (~/.config), and replaces an earlier one.
Handle.from_profile(path) uses it.  So does every handle if the environment has
NVMEIO_PROFILE=DIR, as an absolute path, or NVMEIO_PROFILE=auto: that takes the
only profile, or of several the one for the drive of the current directory.

examples:
  nvmeio tune /mnt/nvme
  nvmeio tune /mnt/nvme --budget 5m --plot heat.png
"""


def configure(parser: Parser) -> None:
    parser.epilog = DETAILS
    parser.add_argument("dir", metavar="DIR", help="a folder on the device")
    about = "time limit, such as 90s or 5m (default: 60s)"
    option(parser, "--budget TIME", about, seconds, 60.0)
    option(parser, "--size SIZE", "of the file (default: 1G)", size, 1 << 30)
    option(parser, "--no-save", "save no profile")
    add_figure_options(parser, "every trial", "a heat map")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    if options.size < SIZE_MIN:
        raise UsageError(f"--size must be at least {in_binary(SIZE_MIN)}")
    check_plotting(options)
    if not options.no_save:
        try:
            make_profiles_folder()
        except OSError as error:
            words = f"no profile can be saved: {sentence(error)}; --no-save leaves it out"
            raise CommandError(words) from None
    works = [name for name, engine in engines().items() if engine["works"]]
    begin = time.monotonic()
    nbytes = options.size - options.size % MIB
    with (
        scratch_folder(options.dir, nbytes, options.reserve) as folder,
        Trials(folder, nbytes, works[0]) as trials,
    ):
        choices, found = _search(trials, works, options.budget, terminal)
    profile = new_profile(options.dir, **choices)
    measured = {key: profile.both.options[name] for key, name in AIO_KEYS.items()}
    block = aio_config(measured)
    if options.json != "-":
        terminal.say(f"{profile.description}: {time.monotonic() - begin:.0f} s\n")
        _show(profile, min(len(each.rounds) for each in found), terminal)
        terminal.say("DeepSpeed's aio block, for reading and writing alike:")
        terminal.say('"aio": ' + json.dumps(block, indent=2))
        terminal.say(_beyond_the_block(profile.both.options))
    report = {
        "schema": 2,
        **dataclasses.asdict(profile),
        "direct": trials.direct,
        "trial_bytes": len(trials.memory),
        "aio": block,
        "comparisons": [each.as_dict() for each in found],
    }
    # Save the profile first: it took long, and writing the other file may fail.
    if not options.no_save:
        terminal.note(f"saved: {save_profile(profile)}")
        path = shlex.quote(os.path.abspath(options.dir))
        terminal.note(f"to use it in all programs: export NVMEIO_PROFILE={path}")
    keep_figures(report, lambda: _heat_map(found[0], profile), options, terminal)
    return 0


def stages(works: Sequence[str], processors: int) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return what each stage changes; of equals, the first is chosen: the cheapest.

    `works` are the engines that work here, beginning with the one that "auto" chooses.
    """
    pairs = itertools.product(GRID_BLOCKS, GRID_DEPTHS)
    grid = [
        {"block_size": block, "queue_depth": depth}
        for block, depth in sorted(pairs, key=lambda pair: pair[0] * pair[1])
    ]
    more = [{"workers": count} for count in WORKERS if count <= processors]
    others = [{"engine": name} for name in works[1:]]
    kinds = [{"bounce": kind} for kind in ("never", "always")]
    return [
        ("block size and depth", grid),
        ("workers, engines", [*more, *others]),
        ("bounces", kinds),
    ]


def _search(
    trials: Trials, works: list[str], budget: float, terminal: Terminal
) -> tuple[dict[str, Choice], list[Comparison]]:
    """Compare stage by stage; return the best options for each goal, and all figures."""
    begin = time.monotonic()
    best = dict.fromkeys(GOALS, DEFAULT)
    figures: dict[str, dict[str, Any]] = {}
    found: list[Comparison] = []
    parts = stages(works, len(os.sched_getaffinity(0)))
    for (name, changes), share in zip(parts, SHARES, strict=True):
        candidates = [DEFAULT, *best.values()]
        candidates += [{**one, **change} for one in best.values() for change in changes]
        if name == "bounces":
            trials.memory = small_pages(len(trials.memory))
        # Without duplicates.
        candidates = list({repr(one): one for one in candidates}.values())
        comparison = Comparison(name, candidates)
        deadline = begin + budget * share
        advance = terminal.progress(name, deadline - time.monotonic())

        def measure(options: Options) -> dict[str, float]:
            started = time.monotonic()
            speeds = trials.measure(options)
            advance(time.monotonic() - started)  # noqa: B023
            return speeds

        comparison.run(measure, deadline)
        trials.close_handles()
        best = {goal: comparison.best(goal, one) for goal, one in best.items()}
        # The figures are those with memory of the pool.
        if name != "bounces":
            figures = {goal: _figures(comparison, best[goal], goal) for goal in GOALS}
        found.append(comparison)
    return {goal: Choice(best[goal], figures[goal]) for goal in GOALS}, found


def _figures(comparison: Comparison, options: Options, goal: str) -> dict[str, Any]:
    speeds = [speed / 1e9 for speed in comparison.speeds(options, goal)]
    return {
        "median_gb_per_s": statistics.median(speeds),
        "min_gb_per_s": min(speeds),
        "max_gb_per_s": max(speeds),
        "times_default": comparison.times_as_fast(options, DEFAULT, goal),
        "rounds": len(speeds),
    }


def _show(profile: Profile, rounds: int, terminal: Terminal) -> None:
    """Show the best settings, and a recommendation."""
    rows = []
    for goal in GOALS:
        choice: Choice = getattr(profile, goal)
        default = choice.options == DEFAULT
        speed = "{median_gb_per_s:.2f} [{min_gb_per_s:.2f}-{max_gb_per_s:.2f}]"
        times = "default" if default else f"{choice.figures['times_default']:.2f}"
        words = described(choice.options) + " (default)" * default
        rows.append([goal, words, speed.format(**choice.figures), times])
    terminal.table(["best for", "settings", "GB/s", "x default"], rows)
    words = "the default,\nbecause nothing else is certainly faster."
    if profile.both.options != DEFAULT:
        words = f"{described(profile.both.options)},\n"
        words += "which is certainly faster than the default."
    terminal.say(f"Recommended for reading and writing alike: {words}")
    if rounds < ROUNDS_MIN:
        terminal.say(
            f"The time was too short: {rounds} of at least {ROUNDS_MIN} rounds in the "
            "shortest comparison,\nso it changed nothing; a longer --budget can tell."
        )
    terminal.say()


def _beyond_the_block(options: Options) -> str:
    """Say how DeepSpeed gets the best settings that its block has no keys for."""
    names = [name for name in ("engine", "bounce") if options[name] != DEFAULT[name]]
    if not names:
        return ""
    settings = " ".join(f"{variable(name)}={options[name]}" for name in names)
    return (
        f"The block has no key for the {' and '.join(names)}: set {settings}, or use the "
        "profile.\n"
    )


def _heat_map(comparison: Comparison, profile: Profile) -> Any:
    speeds = [
        (one, {op: statistics.median(comparison.speeds(one, op)) / 1e9 for op in GOALS})
        for one in comparison.candidates
    ]
    return plots.heat_map(speeds, profile.description)
