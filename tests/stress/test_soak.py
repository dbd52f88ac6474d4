"""Rounds of everything, after which a process holds the same resources as before."""

import statistics

import pytest

from batches import run_batch
from cases.soak import EXACT, STEPS
from children import can_fork, sanitized, skip_sanitized
from helpers import ENGINES

# Rounds until everything is loaded and started once, and the heap has its size.
WARM_UP = 20
LOOKS = 15
LOOKS_AT_LEAKS = 6
# KiB, for any length.  In 280 rounds memory varied by 130 KiB with io_uring, and by 400 KiB
# with threads, whose stacks and arenas glibc keeps (glibc 2.36, 2026-11-22).
NOISE_KIB = 1024


def drifts(held):
    """Return the names of resources that keep growing or shrinking."""
    found = {name for name in EXACT if len({look[name] for look in held}) > 1}
    third = len(held) // 3
    first, last = (
        statistics.median(look["memory"] for look in part)
        for part in (held[:third], held[-third:])
    )
    return found | ({"memory"} if abs(last - first) > NOISE_KIB else set())


@pytest.fixture
def soak(seeds, amount, patience_s):
    """A function that returns the resources held at several times during the rounds."""
    rounds = seeds.left
    alone = rounds == 1

    def soak(looks=LOOKS, **options):
        report = run_batch(
            "soak",
            seeds,
            rounds,
            watchdog_s=min(300 + 5 * amount, patience_s),
            warm_up=0 if alone else WARM_UP,
            looks=0 if alone else looks,
            **options,
        )
        return report["held"]

    return soak


@pytest.mark.amount(short=30, full=150, long=4_000)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_process_holds_no_more_than_before(
    soak, tmp_path, engine, amount, record_property
):
    steps = [step for step in STEPS if step != "fork" or can_fork()]
    held = soak(folder=str(tmp_path), engine=engine, steps=steps)
    record_property("rounds", amount)
    if held:
        record_property("looks at what is held", len(held))
        # The memory of sanitizers grows.
        unknown = {"memory"} if sanitized() else set()
        assert drifts(held) <= unknown, held
        # The pool keeps its mapped memory; the rounds never ask for more than this.
        assert max(look["mapped"] for look in held) <= 64 << 20


LEAKS = {
    "descriptor": {"descriptors"},
    "thread": {"threads"},
    "locked_page": {"locked"},
    "memory": {"memory"},
    "pool_memory": {"pool"},
}


@pytest.mark.amount(short=50, full=500, long=500)
@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_found(soak, tmp_path, leak, amount):
    if leak == "locked_page":
        skip_sanitized("lock no memory")
    if leak == "memory":
        skip_sanitized("keep memory of their own")
    held = soak(
        LOOKS_AT_LEAKS,
        folder=str(tmp_path),
        engine="sync",
        steps=["transfer"],
        leak=leak,
        # More rounds find smaller leaks.
        leak_bytes=(4 << 20) // amount,
    )
    assert not held or LEAKS[leak] <= drifts(held), held
