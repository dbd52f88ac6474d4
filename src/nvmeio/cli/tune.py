"""``nvmeio tune``: the fastest settings for a device."""

import argparse
import dataclasses
import json
import os
import statistics
import time
from typing import Any

from nvmeio.cli import plots, report
from nvmeio.cli.arguments import CommandError, Parser, UsageError, seconds, sentence, size
from nvmeio.cli.measuring import ground
from nvmeio.cli.terminal import Terminal
from nvmeio.cli.tuning.candidates import (
    DEFAULT,
    Options,
    bounces,
    described,
    grid,
    variations,
)
from nvmeio.cli.tuning.race import GOALS, Race
from nvmeio.cli.tuning.trials import Trials, small_pages
from nvmeio.cli.units import in_binary
from nvmeio.deepspeed.config import aio_config, check_aio_file, write_aio_config
from nvmeio.info import engines
from nvmeio.profiles import Choice, Profile, check_saving, new_profile, save_profile

__all__ = ["configure", "run"]

SIZE_MIN = 64 << 20
MIB = 1 << 20

# What the first two races may take of the budget; the last has what they leave.
GRID_SHARE = 0.5
VARIATIONS_SHARE = 0.85

# What DeepSpeed's block has of a handle's options.
AIO_KEYS = (
    "block_size",
    "queue_depth",
    "single_submit",
    "overlap_events",
    "intra_op_parallelism",
)

DETAILS = """\
Three races: block size and queue depth; then workers, single_submit
and engines for the winners; then bounce, with memory in small
pages.  In every round of a race each candidate reads and writes the same
tensor, in another order.  A candidate is out when it is not faster than the
winner by more than 3 %, with 99 % confidence in each comparison; a race ends
when all others are out.  The default wins unless another is certainly faster;
among those that then look alike, the one that takes least memory.

The profile is saved for the device that DIR lies on, in nvmeio/profiles in
$XDG_CONFIG_HOME (~/.config).  aio_handle.from_profile(path) uses it, and so
does every handle with NVMEIO_PROFILE=auto in the environment.  All files are
made in a folder nvmeio-bench-* in DIR that is removed at the end, also after
Ctrl-C.

examples:
  nvmeio tune /mnt/nvme
  nvmeio tune /mnt/nvme --budget 5m --plot heat.png --deepspeed ds_config.json
"""


def configure(parser: Parser) -> None:
    """Add the arguments.

    Parameters
    ----------
    parser : Parser
        Of the command.
    """
    parser.epilog = DETAILS
    add = parser.add_argument
    add("dir", metavar="DIR", help="a folder on the device")
    add(
        "--budget",
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="how long it may take, such as 90s or 5m (default: 60s)",
    )
    add(
        "--size",
        type=size,
        default=1 << 30,
        help="of the file (default: 1G)",
    )
    ground.add_option(parser)
    add("--no-save", action="store_true", help="save no profile")
    add(
        "--deepspeed",
        metavar="FILE",
        help='write the "aio" block into this DeepSpeed configuration',
    )
    report.add_options(parser, "every trial", "a heat map")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Measure, show and keep what is best.

    Parameters
    ----------
    options : argparse.Namespace
        What configure() asked for.
    terminal : Terminal
        Where the answer goes.

    Returns
    -------
    int
        0.
    """
    if options.size < SIZE_MIN:
        raise UsageError(f"--size must be at least {in_binary(SIZE_MIN)}")
    if options.plot:
        plots.require()
    if not options.no_save:
        _require_a_place_for_profiles()
    if options.deepspeed:
        check_aio_file(options.deepspeed)
    works = [name for name, engine in engines().items() if engine["works"]]
    begin = time.monotonic()
    nbytes = options.size - options.size % MIB
    with (
        ground.folder_of_its_own(options.dir, nbytes, options.reserve) as folder,
        Trials(folder, nbytes, works[0]) as trials,
    ):
        heats = _heats(trials, works, begin, options.budget, terminal)
    profile = new_profile(options.dir, **_choices(heats))
    block = aio_config({name: profile.both.options[name] for name in AIO_KEYS})
    if options.json != "-":
        took = f"{time.monotonic() - begin:.0f} s"
        _tell(profile, heats, took, block, terminal)
    found = {
        "schema": 1,
        **dataclasses.asdict(profile),
        "direct": trials.direct,
        "trial_bytes": trials.nbytes,
        "aio": block,
        "races": [heat.as_dict() for heat in heats],
    }
    # First what took so long: a file that is named may turn out not to be writable.
    if not options.no_save:
        terminal.note(f"saved: {save_profile(profile)}")
    report.keep(found, options.json)
    if options.plot:
        plots.heat_map(heats[0].speeds(), profile.description, options.plot)
        terminal.note(f"drawn: {options.plot}")
    if options.deepspeed:
        write_aio_config(options.deepspeed, block)
        terminal.note(f"written: the aio block of {options.deepspeed}")
    return 0


def _require_a_place_for_profiles() -> None:
    """See that the profile can be saved, before it takes its time to be found."""
    try:
        check_saving()
    except OSError as error:
        raise CommandError(
            f"no profile can be saved: {sentence(error)}; --no-save leaves it out"
        ) from None


@dataclasses.dataclass
class Heat:
    """A race, and who runs in it."""

    name: str
    candidates: list[Options]
    race: Race

    def best(self, goal: str) -> Options:
        """Return who has won."""
        return self.candidates[self.race.result(goal).winner]

    def speeds(self) -> list[tuple[Options, dict[str, float]]]:
        """Return for each candidate its median for each goal, in GB/s."""
        return [
            (
                candidate,
                {
                    goal: statistics.median(self.race.speeds(index, goal)) / 1e9
                    for goal in GOALS
                },
            )
            for index, candidate in enumerate(self.candidates)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as JSON has them."""
        return {
            "race": self.name,
            "rounds": self.race.rounds,
            "results": {goal: dataclasses.asdict(self.race.result(goal)) for goal in GOALS},
            "candidates": [
                {
                    "options": candidate,
                    "read_bytes_per_s": self.race.speeds(index, "read"),
                    "write_bytes_per_s": self.race.speeds(index, "write"),
                }
                for index, candidate in enumerate(self.candidates)
            ],
        }


def _heats(
    trials: Trials, works: list[str], begin: float, budget: float, terminal: Terminal
) -> list[Heat]:
    """Hold the races, each with those who won the one before."""
    processors = len(os.sched_getaffinity(0))

    def hold(name: str, candidates: list[Options], share: float) -> Heat:
        heat = Heat(name, candidates, Race(len(candidates)))
        left = max(0.0, begin + budget * share - time.monotonic())
        with terminal.progress(name, left, unit="s") as advance:

            def measure(index: int) -> dict[str, float]:
                started = time.monotonic()
                speeds = trials.measure(candidates[index])
                advance(time.monotonic() - started)
                return speeds

            heat.race.run(measure, time.monotonic() + left)
        trials.rest()
        return heat

    first = hold("block size and depth", grid(), GRID_SHARE)
    winners = [first.best(goal) for goal in ("both", "read", "write")]
    second = hold(
        "workers, engines",
        variations(winners, works, processors),
        VARIATIONS_SHARE,
    )
    trials.use(small_pages)
    return [first, second, hold("bounces", bounces(second.best("both")), 1.0)]


def _choices(heats: list[Heat]) -> dict[str, Choice]:
    """Put together what has won, with the figures of pool memory."""
    _, second, third = heats
    choices = {}
    for goal in GOALS:
        options = {**second.best(goal), "bounce": third.best(goal)["bounce"]}
        winner = second.race.result(goal).winner
        speeds = [speed / 1e9 for speed in second.race.speeds(winner, goal)]
        default = second.candidates.index(DEFAULT)
        figures = {
            "median_gb_per_s": statistics.median(speeds),
            "min_gb_per_s": min(speeds),
            "max_gb_per_s": max(speeds),
            "times_default": second.race.times_as_fast(winner, default, goal),
            "settled": all(heat.race.result(goal).settled for heat in heats),
        }
        choices[goal] = Choice(options, figures)
    return choices


def _tell(
    profile: Profile, heats: list[Heat], took: str, block: Options, terminal: Terminal
) -> None:
    """Show what is best, and how sure that is."""
    trials = sum(heat.race.trials for heat in heats)
    terminal.say(f"{profile.description}: {trials} trials in {took}")
    terminal.say()
    speed = "{median_gb_per_s:.2f} [{min_gb_per_s:.2f}-{max_gb_per_s:.2f}]"
    rows = []
    for goal in GOALS:
        choice: Choice = getattr(profile, goal)
        figures = choice.figures
        rows.append(
            [
                goal,
                described(choice.options),
                speed.format(**figures),
                f"{figures['times_default']:.2f}",
                "yes" if figures["settled"] else "no",
            ]
        )
    terminal.table("", ["best for", "settings", "GB/s", "x default", "settled"], rows)
    if not all(row[-1] == "yes" for row in rows):
        terminal.say(
            "Where it is not settled, other settings may be faster by as much as this\n"
            "machine's noise hides; a longer --budget can tell."
        )
        terminal.say()
    terminal.say("DeepSpeed's aio block, for reading and writing alike:")
    terminal.say('"aio": ' + json.dumps(block, indent=2))
    terminal.say()
