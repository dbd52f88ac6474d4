"""``nvmeio tune``: find the fastest settings for a device."""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import time
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
from nvmeio._cli.race import GOALS, Race
from nvmeio._cli.terminal import Terminal
from nvmeio._cli.trials import (
    DEFAULT,
    Options,
    Trials,
    bounces,
    described,
    distinct,
    grid,
    variations,
)
from nvmeio._config.aio_json import aio_config, check_aio_file, write_aio_config
from nvmeio._config.options import variable
from nvmeio._native.info import engines
from nvmeio.profiles import (
    Choice,
    Profile,
    check_saving,
    load_profile,
    new_profile,
    profiles_folder,
    save_profile,
)

SIZE_MIN = 64 << 20
MIB = 1 << 20

# When the first two races must end, as shares of the budget; the last has the rest.
GRID_SHARE = 0.5
VARIATIONS_SHARE = 0.85

# The keys of DeepSpeed's block -> the options of a handle.
AIO_KEYS = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "intra_op_parallelism": "workers",
}

DETAILS = """\
Three comparisons: block size and queue depth; then workers and engines for
the winners; then bounce, with memory in small pages.  In every round each
candidate reads and writes the same tensor, in random order.  A candidate drops
out when it is, with 99 % confidence, not more than 3 % faster than the winner;
a comparison ends when all others have dropped out.  The default wins unless
another candidate is certainly faster at the end; among equals, the one that
needs the least memory.  Previously saved settings take part, and are kept
unless others are certainly faster.

The profile is saved for the device of DIR, in nvmeio/profiles in
$XDG_CONFIG_HOME (~/.config).  Handle.from_profile(path) uses it.  So does every
handle if the environment has NVMEIO_PROFILE=DIR, as an absolute path, or
NVMEIO_PROFILE=auto: that takes the only profile, or of several the one for the
drive of the current directory.  All files are in a folder nvmeio-bench-* in
DIR, which is removed at the end, also after Ctrl-C.

In the column "faster ones", "none" means that with 99 % confidence nothing else
is more than 3 % faster; "perhaps" means that the budget was too short to rule
that out.

examples:
  nvmeio tune /mnt/nvme
  nvmeio tune /mnt/nvme --budget 5m --plot heat.png --deepspeed ds_config.json
"""


def configure(parser: Parser) -> None:
    parser.epilog = DETAILS
    parser.add_argument("dir", metavar="DIR", help="a folder on the device")
    about = "time limit, such as 90s or 5m (default: 60s)"
    option(parser, "--budget TIME", about, seconds, 60.0)
    option(parser, "--size SIZE", "of the file (default: 1G)", size, 1 << 30)
    option(parser, "--no-save", "save no profile")
    about = 'write the "aio" block into this DeepSpeed configuration'
    option(parser, "--deepspeed FILE", about)
    add_figure_options(parser, "every trial", "a heat map")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    if options.size < SIZE_MIN:
        raise UsageError(f"--size must be at least {in_binary(SIZE_MIN)}")
    check_plotting(options)
    if not options.no_save:
        try:
            check_saving()
        except OSError as error:
            words = f"no profile can be saved: {sentence(error)}; --no-save leaves it out"
            raise CommandError(words) from None
    if options.deepspeed:
        check_aio_file(options.deepspeed)
    works = [name for name, engine in engines().items() if engine["works"]]
    saved, obstacle = _saved_options(options.dir, works)
    begin = time.monotonic()
    nbytes = options.size - options.size % MIB
    with (
        scratch_folder(options.dir, nbytes, options.reserve) as folder,
        Trials(folder, nbytes, works[0]) as trials,
    ):
        heats = _heats(trials, works, saved, begin, options.budget, terminal)
    choices = {goal: _choice(heats, goal, saved.get(goal)) for goal in GOALS}
    profile = new_profile(options.dir, **choices)
    measured = {key: profile.both.options[name] for key, name in AIO_KEYS.items()}
    block = aio_config(measured)
    keeps = not options.no_save and not obstacle
    if options.json != "-":
        count = sum(heat.trials for heat in heats)
        took = f"{time.monotonic() - begin:.0f} s"
        terminal.say(f"{profile.description}: {count} trials in {took}\n")
        _show(profile, saved, terminal)
        terminal.say("DeepSpeed's aio block, for reading and writing alike:")
        terminal.say('"aio": ' + json.dumps(block, indent=2))
        terminal.say(_beyond_the_block(profile.both.options, keeps=keeps))
        if keeps:
            terminal.say(_how_to_use(os.path.abspath(options.dir)))
    found = {
        "schema": 1,
        **dataclasses.asdict(profile),
        "direct": trials.direct,
        "trial_bytes": trials.nbytes,
        "aio": block,
        "races": [heat.as_dict() for heat in heats],
    }
    # Save the profile first: it took long, and writing the other file may fail.
    if not options.no_save and obstacle:
        terminal.note(f"not saved: {obstacle}; remove it to have another")
    elif keeps:
        terminal.note(f"saved: {save_profile(profile)}")
    keep_figures(found, lambda: _heat_map(heats[0], profile), options, terminal)
    if options.deepspeed:
        # Keys that were not measured keep their values.
        write_aio_config(options.deepspeed, measured)
        terminal.note(f"written: the aio block of {options.deepspeed}")
    return 0


def _how_to_use(path: str) -> str:
    """Say how programs get the profile of a path's device."""
    folder = profiles_folder().parent
    selects = shlex.quote(f"NVMEIO_PROFILE={path}")
    home = shlex.quote(f"XDG_CONFIG_HOME={folder.parent}")
    mount = shlex.quote(f"{folder}:/config/nvmeio:ro")
    return (
        "To use this profile without a change to your programs:\n"
        f"  shell:    export NVMEIO_PROFILE={shlex.quote(path)}\n"
        f"  systemd:  Environment={home} {selects}\n"
        f"  docker:   -v {mount} -e XDG_CONFIG_HOME=/config -e NVMEIO_PROFILE=auto\n"
        "With auto, nvmeio takes the only profile; of several, the one for the drive of\n"
        "the current directory.\n"
    )


def _beyond_the_block(options: Options, *, keeps: bool) -> str:
    """Say how DeepSpeed gets the best settings that its block has no keys for."""
    names = [name for name in ("engine", "bounce") if options[name] != DEFAULT[name]]
    if not names:
        return ""
    settings = " ".join(f"{variable(name)}={options[name]}" for name in names)
    profile = ", or use the profile" if keeps else ""
    return f"The block has no key for the {' and '.join(names)}: set {settings}{profile}.\n"


def _settled(profile: Profile) -> bool:
    return all(getattr(profile, goal).figures["settled"] for goal in GOALS)


def _saved_options(folder: str, works: list[str]) -> tuple[dict[str, Options], str]:
    """Return the options of an earlier profile, and why it must not be replaced."""
    profile = None
    # A profile that cannot be read is replaced, as its error message recommends.
    with contextlib.suppress(OSError, ValueError):
        profile = load_profile(folder)
    if profile is None:
        return {}, ""
    found = {goal: getattr(profile, goal).options for goal in GOALS}
    usable = {*works, DEFAULT["engine"]}
    missing = {one["engine"] for one in found.values()} - usable
    kept = {goal: one for goal, one in found.items() if one["engine"] in usable}
    if missing:
        names = " and ".join(sorted(missing))
        return kept, f"the profile that is there is for {names}, which does not work here"
    return kept, ""


class Heat(Race):
    """A race with its name and candidates."""

    def __init__(self, name: str, candidates: list[Options]) -> None:
        super().__init__(len(candidates))
        self.name, self.candidates = name, candidates

    def best(self, goal: str) -> Options:
        return self.candidates[self.result(goal).winner]

    def as_dict(self) -> dict[str, Any]:
        return {
            "race": self.name,
            "rounds": self.rounds,
            "results": {goal: dataclasses.asdict(self.result(goal)) for goal in GOALS},
            "candidates": [
                {
                    "options": candidate,
                    "read_bytes_per_s": self.speeds(index, "read"),
                    "write_bytes_per_s": self.speeds(index, "write"),
                }
                for index, candidate in enumerate(self.candidates)
            ],
        }


def _heats(
    trials: Trials,
    works: list[str],
    saved: dict[str, Options],
    begin: float,
    budget: float,
    terminal: Terminal,
) -> list[Heat]:
    """Hold the races, each with the winners of the one before."""
    processors = len(os.sched_getaffinity(0))

    def hold(name: str, candidates: list[Options], share: float) -> Heat:
        heat = Heat(name, candidates)
        left = max(0.0, begin + budget * share - time.monotonic())
        advance = terminal.progress(name, left)

        def measure(index: int) -> dict[str, float]:
            started = time.monotonic()
            speeds = trials.measure(candidates[index])
            advance(time.monotonic() - started)
            return speeds

        heat.run(measure, time.monotonic() + left)
        trials.close_handles()
        return heat

    first = hold("block size and depth", grid(), GRID_SHARE)
    winners = [first.best(goal) for goal in ("both", "read", "write")]
    before = [_without_bounce(options) for options in saved.values()]
    candidates = distinct([*variations(winners, works, processors), *before])
    second = hold("workers, engines", candidates, VARIATIONS_SHARE)
    trials.use_small_pages()
    return [first, second, hold("bounces", bounces(second.best("both")), 1.0)]


def _without_bounce(options: Options) -> Options:
    """Return options with the default bounce, as in the second race."""
    return {**options, "bounce": DEFAULT["bounce"]}


def _choice(heats: list[Heat], goal: str, saved: Options | None) -> Choice:
    """Return the best options for a goal, with the figures for memory of the pool.

    These are the default or the earlier profile's, unless the winner is certainly faster
    and its race is settled.
    """
    first, second, third = heats
    default = second.candidates.index(DEFAULT)
    result = second.result(goal)
    chosen = result.winner
    if not (result.settled and second.is_faster(chosen, default, goal)):
        chosen = default
    options = dict(second.candidates[chosen])
    # The third race had only variations of these options.
    if options == second.best("both") and third.result(goal).settled:
        options["bounce"] = third.best(goal)["bounce"]
    if saved is not None:
        kept = second.candidates.index(_without_bounce(saved))
        # If only their bounce differs, the third race compared them.
        race, new, old = second, chosen, kept
        if chosen == kept and options in third.candidates and saved in third.candidates:
            race, new = third, third.candidates.index(options)
            old = third.candidates.index(saved)
        if not race.is_faster(new, old, goal):
            chosen, options = kept, saved
    speeds = [speed / 1e9 for speed in second.speeds(chosen, goal)]
    figures = {
        "median_gb_per_s": statistics.median(speeds),
        "min_gb_per_s": min(speeds),
        "max_gb_per_s": max(speeds),
        "times_default": second.times_as_fast(chosen, default, goal),
        "settled": not second.rivals(chosen, goal)
        and all(heat.result(goal).settled for heat in (first, third)),
    }
    return Choice(options, figures)


def _show(profile: Profile, saved: dict[str, Options], terminal: Terminal) -> None:
    """Show the best settings, whether that is settled, and a recommendation."""
    rows = []
    for goal in GOALS:
        options, figures = (choice := getattr(profile, goal)).options, choice.figures
        default = options == DEFAULT
        rows.append(
            [
                goal,
                described(options) + " (default)" * default,
                "{median_gb_per_s:.2f} [{min_gb_per_s:.2f}-{max_gb_per_s:.2f}]".format(
                    **figures
                ),
                "default" if default else f"{figures['times_default']:.2f}",
                "none" if figures["settled"] else "perhaps",
            ]
        )
    terminal.table(["best for", "settings", "GB/s", "x default", "faster ones"], rows)
    options = profile.both.options
    if options == DEFAULT:
        words = "the default,\nbecause nothing else is certainly faster."
    elif options == saved.get("both"):
        words = f"{described(options)}, as saved before,\n"
        words += "because nothing else is certainly faster."
    else:
        words = f"{described(options)},\nwhich is certainly faster than the default."
    terminal.say(f"Recommended for reading and writing alike: {words}")
    if not _settled(profile):
        terminal.say(
            'Where "faster ones" says "perhaps", the time was too short to rule out that\n'
            "others are more than 3 % faster still; a longer --budget can tell."
        )
    terminal.say()


def _heat_map(heat: Heat, profile: Profile) -> Any:
    speeds = [
        {goal: statistics.median(heat.speeds(index, goal)) / 1e9 for goal in GOALS}
        for index in range(len(heat.candidates))
    ]
    pairs = list(zip(heat.candidates, speeds, strict=True))
    return plots.heat_map(pairs, profile.description)
