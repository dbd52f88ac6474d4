"""Latencies of blocks: percentiles of known figures, and what transfers count."""

import itertools
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import nvmeio
from children import run_child
from helpers import BLOCK, DEPTH, ENGINES, PAGE, pattern


@pytest.fixture(scope="module")
def bounds_ns():
    """Return the longest latency of each bucket of the library."""
    with nvmeio.Handle(engine="sync") as handle:
        return handle.latencies().bounds_ns


@pytest.fixture
def counted(bounds_ns):
    """A function that makes Latencies of figures in nanoseconds."""

    def counted(figures):
        buckets = np.searchsorted(bounds_ns, figures)
        counts = np.bincount(buckets, minlength=len(bounds_ns)).astype(np.uint64)
        return nvmeio.Latencies(counts, bounds_ns)

    return counted


def blocks_without_fsyncs(handle, fsyncs=0):
    """Return how many blocks should have been counted."""
    return handle.stats()["blocks"] - fsyncs


def test_the_buckets_reach_from_a_nanosecond_beyond_a_minute(bounds_ns):
    assert (np.diff(bounds_ns) > 0).all()
    assert bounds_ns[:64].tolist() == list(range(64))
    widths = np.diff(bounds_ns[:-1])
    assert (32 * (widths - 1) <= bounds_ns[:-2] + 1).all()
    assert bounds_ns[-2] > 60e9
    assert bounds_ns[-1] == np.iinfo(np.int64).max


FIGURES = {
    "one": lambda rng: [12345],
    "two": lambda rng: [1, 10**9],
    "alike": lambda rng: [80_000] * 1000,
    "short": lambda rng: rng.integers(1, 64, 1000),
    "device": lambda rng: rng.lognormal(math.log(80_000), 0.7, 50_000).astype(np.int64),
    "stragglers": lambda rng: [*rng.integers(20_000, 30_000, 9991), *[5 * 10**9] * 9],
}


@pytest.mark.parametrize("q", [0, 0.1, 1, 25, 50, 90, 99, 99.9, 99.99, 100])
@pytest.mark.parametrize("figures", FIGURES.values(), ids=FIGURES)
def test_a_percentile_is_numpys_or_up_to_three_percent_more(counted, figures, q):
    figures = np.array(figures(np.random.default_rng(5)))
    exact_us = np.percentile(figures, q, method="inverted_cdf") / 1000
    found_us = counted(figures).percentile_us(q)
    assert exact_us <= found_us <= exact_us * (1 + 1 / 32)


def test_latencies_beyond_the_buckets_have_no_percentile(counted):
    found = counted([1000] * 9 + [70 * 10**9])
    assert found.percentile_us(90) == pytest.approx(1, rel=1 / 32)
    assert found.percentile_us(91) == math.inf


def test_without_blocks_there_is_no_percentile(counted):
    found = counted(np.empty(0, np.int64))
    assert found.count == 0
    assert math.isnan(found.percentile_us(50))
    assert repr(found) == (
        "<nvmeio.Latencies of 0 blocks: p50 nan us, p99 nan us, p99.9 nan us>"
    )


@pytest.mark.parametrize("q", [-0.1, 100.1, math.nan, math.inf, 5000])
def test_a_percentile_out_of_range_is_refused(counted, q):
    with pytest.raises(ValueError, match=f"q is {q}; it must be from 0 to 100"):
        counted([1]).percentile_us(q)
    with pytest.raises(TypeError, match="q is '9'; it must be a number from 0 to 100"):
        counted([1]).percentile_us("9")


def test_the_repr_shows_the_usual_percentiles(counted):
    figures = [40] * 900 + [50] * 98 + [60] * 2
    assert repr(counted(np.multiply(figures, 1000))) == (
        "<nvmeio.Latencies of 1000 blocks: p50 41.0 us, p99 50.2 us, p99.9 60.4 us>"
    )


def test_a_difference_counts_the_blocks_in_between(counted):
    early, late = [10, 20, 70_000], [30, 70_000, 10**10]
    between = counted(early + late) - counted(early)
    assert np.array_equal(between.counts, counted(late).counts)
    assert between.count == 3
    assert between.percentile_us(0) == 0.030


def test_only_an_earlier_snapshot_can_be_subtracted(counted):
    with pytest.raises(ValueError, match=r"of 2 blocks.+ that <.+ of 1 blocks.+ lacks"):
        counted([10]) - counted([10, 20])
    with pytest.raises(ValueError, match="subtract an earlier snapshot of the same handle"):
        counted([10, 10]) - counted([20])
    with pytest.raises(TypeError):
        counted([10]) - 1


def test_a_snapshot_does_not_change(counted, handle, path):
    found = handle.latencies()
    handle.write(bytes(BLOCK), path)
    assert found.count == 0
    with pytest.raises(ValueError, match="read-only"):
        found.counts[0] = 1
    with pytest.raises(AttributeError):
        found.counts = counted([1]).counts
    again = pickle.loads(pickle.dumps(handle.latencies()))
    assert np.array_equal(again.counts, handle.latencies().counts)
    assert again.percentile_us(99) == handle.latencies().percentile_us(99)


# Synchronous calls run small transfers in the caller's thread; requests run in workers.
WAYS = {
    "sync": lambda handle, verb, *args: getattr(handle, verb)(*args),
    "request": lambda handle, verb, *args: getattr(handle, f"submit_{verb}")(*args).wait(),
}


@pytest.mark.all_combinations
@pytest.mark.parametrize("bounce", ["auto", "always", "never"])
@pytest.mark.parametrize("transfer", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("size", [1, PAGE, BLOCK, 3 * DEPTH * BLOCK + 777])
def test_every_block_is_counted_once(open_handle, path, size, transfer, bounce):
    handle = open_handle(block_size=BLOCK, queue_depth=DEPTH, bounce=bounce)
    expected, found = pattern(size), bytearray(size)
    # Extending a file writes other blocks.
    path.write_bytes(found)
    transfer(handle, "write", expected, path)
    written = handle.latencies()
    assert written.count == blocks_without_fsyncs(handle) >= -(-size // BLOCK)
    transfer(handle, "read", found, path)
    assert found == expected
    read = handle.latencies() - written
    assert written.count + read.count == blocks_without_fsyncs(handle)
    assert 0 < read.percentile_us(0) <= read.percentile_us(50) <= read.percentile_us(100)


def test_blocks_that_are_submitted_one_by_one_are_counted(engine, path):
    options = {"intra_op_parallelism": 2, "engine": engine}
    handle = nvmeio.aio_handle(BLOCK, DEPTH, single_submit=True, **options).handle
    path.write_bytes(bytes(20 * BLOCK))
    handle.write(pattern(20 * BLOCK), path)
    handle.read(bytearray(20 * BLOCK), path)
    assert handle.latencies().count == blocks_without_fsyncs(handle) >= 40


def test_an_fsync_is_not_counted(handle, path):
    handle.write(bytes(BLOCK), path)
    before = handle.latencies()
    handle.fsync(path)
    handle.fsync(path)
    assert (handle.latencies() - before).count == 0
    assert before.count == blocks_without_fsyncs(handle, fsyncs=2)


def test_blocks_of_gathers_and_scatters_are_counted(handle, path):
    path.write_bytes(pattern(200 * PAGE))
    offsets = np.random.default_rng(3).permutation(100) * 2 * PAGE
    memory = np.empty((100, 100), np.uint8)
    handle.gather(path, offsets, 100, memory, max_gap=0)
    gathered = handle.latencies()
    assert gathered.count == blocks_without_fsyncs(handle) == 100
    handle.scatter(path, offsets, 100, memory)
    assert handle.latencies().count == blocks_without_fsyncs(handle) >= 200


def test_threads_are_counted_together(open_handle, folder):
    handle = open_handle(block_size=BLOCK, queue_depth=DEPTH, workers=2)

    def work(number):
        path, data = folder / f"of thread {number}", pattern(BLOCK, number)
        looks = [handle.latencies()]
        for _ in range(25):
            handle.write(data, path)
            assert handle.submit_read(bytearray(BLOCK), path).wait() == BLOCK
            looks.append(handle.latencies())
        for before, after in itertools.pairwise(looks):
            assert (after - before).count >= 2

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert handle.latencies().count == blocks_without_fsyncs(handle) >= 8 * 25 * 2


def test_a_closed_handle_keeps_its_latencies(handle, path):
    path.write_bytes(bytes(3 * BLOCK))
    handle.write(pattern(3 * BLOCK), path)
    handle.read(bytearray(PAGE), path)
    before = handle.latencies()
    handle.close()
    assert np.array_equal(handle.latencies().counts, before.counts)
    assert before.count == blocks_without_fsyncs(handle) >= 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_child_starts_with_no_latencies(tmp_path, engine):
    report = run_child("fork_latencies", folder=str(tmp_path), engine=engine).report
    assert report["parent"] > report["child"] > 0
