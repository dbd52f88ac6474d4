"""Handle: options, failures, closing and sharing."""

import copy
import errno
import inspect
import json
import pickle
import re
import resource
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import nvmeio
from helpers import (
    BLOCK,
    DEPTH,
    MIB,
    PAGE,
    SLOW,
    Guarded,
    limit,
    pattern,
    plugged,
    routes,
)
from nvmeio._config.constants import DEFAULTS


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("block_size", 0, 1 << 30),
        ("block_size", (1 << 30) + 1, 1 << 30),
        ("queue_depth", 0, 32768),
        ("queue_depth", -1, 32768),
        ("queue_depth", 32769, 32768),
        ("queue_depth", 1_000_000, 32768),
        ("workers", 0, 256),
        ("workers", 257, 256),
        ("block_size", 1 << 70, 1 << 30),
    ],
)
def test_values_beyond_the_limits_are_refused_at_construction(name, value, most):
    """DeepSpeed's op aborts with a huge queue, and dies of SIGFPE without one."""
    words = f"{name} is {value}; it must be from 1 to {most}$"
    with pytest.raises(ValueError, match=words):
        nvmeio.Handle(**{name: value})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"engine": "posix"}, "engine is 'posix'; it must be one of auto, io_uring"),
        ({"bounce": "maybe"}, "bounce is 'maybe'; it must be one of auto, always, never"),
        ({"direct": "yes"}, "direct is 'yes'; it must be 'auto', True or False"),
        ({"bounce": []}, "bounce is of type list; it must be one of auto"),
    ],
)
def test_unknown_words_are_refused_at_construction(option, words):
    with pytest.raises(ValueError, match=words):
        nvmeio.Handle(**option)


@pytest.mark.parametrize("value", [1.5, "8", True, np.True_], ids=repr)
@pytest.mark.parametrize("name", ["block_size", "queue_depth", "workers"])
def test_limits_are_integers(name, value):
    with pytest.raises(TypeError, match=f"{name} is {value!r}; it must be an integer"):
        nvmeio.Handle(**{name: value})


@pytest.mark.parametrize("variable", ["NVMEIO_BLOCK_SIZE", "NVMEIO_QUEUE_DEPTH"])
def test_a_limit_that_the_environment_breaks_is_named(monkeypatch, variable):
    monkeypatch.setenv(variable, "0")
    with pytest.raises(ValueError, match=f"{variable} is 0; it must be from 1 to"):
        nvmeio.Handle()


# Strings, of which all but "" would be true, and numbers meant for another argument.
NO_BOOLEANS = [("false", TypeError), ("no", TypeError), (1.0, TypeError)]
NO_BOOLEANS += [(16, ValueError), (-1, ValueError)]


@pytest.mark.parametrize(("value", "error"), NO_BOOLEANS)
def test_booleans_are_not_guessed(handle, path, value, error):
    words = f"is {value!r}; it must be True or False"
    for call in (
        lambda: nvmeio.Handle(check_overlap=value),
        lambda: handle.fsync(path, data_only=value),
        lambda: nvmeio.write_file(b"1", path, sync=value),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not path.exists()


@pytest.mark.parametrize("yes", [True, np.True_, 1, np.int64(1)], ids=repr)
def test_booleans_of_every_kind_are_taken(open_handle, path, yes):
    handle = open_handle(check_overlap=yes)
    assert handle.check_overlap is True
    assert handle.write(b"12345678", path) == 8
    handle.fsync(path, data_only=yes)


def test_options_have_the_passed_values_and_do_not_change(engine):
    options = {
        "direct": False,
        "bounce": "never",
        "block_size": 5000,
        "queue_depth": 7,
        "workers": 2,
        "check_overlap": True,
    }
    with nvmeio.Handle(engine=engine, **options) as handle:
        for name, value in {"engine": engine, **options}.items():
            assert getattr(handle, name) == value
            with pytest.raises(AttributeError):
                setattr(handle, name, value)


def test_help_names_the_sources_of_defaults(monkeypatch):
    parameters = inspect.signature(nvmeio.Handle).parameters.values()
    assert [each.name for each in parameters] == list(DEFAULTS)
    keyword = inspect.Parameter.KEYWORD_ONLY
    assert {(each.kind, each.default) for each in parameters} == {(keyword, None)}
    monkeypatch.delenv("NVMEIO_PROFILE", raising=False)
    for name in DEFAULTS:
        monkeypatch.delenv(f"NVMEIO_{name.upper()}", raising=False)
    words = " ".join(inspect.getdoc(nvmeio.Handle).split())
    assert "else from a profile" in words
    with nvmeio.Handle() as handle:
        for name, default in DEFAULTS.items():
            told = f'"{default}"' if isinstance(default, str) else str(default)
            variable = rf"``NVMEIO_{name.upper()}``(?: \([^)]*\))?, else {told}[.:]"
            assert re.search(rf" {name} : .*?{variable}", words), name
            assert name == "engine" or getattr(handle, name) == default


@pytest.mark.parametrize(
    ("call", "keyword"),
    [
        (lambda handle: nvmeio.Handle(depth=3), "depth"),
        (lambda handle: handle.read(bytearray(1), "x", ofset=1), "ofset"),
        (lambda handle: nvmeio.File("x", dirct=True), "dirct"),
        (lambda handle: nvmeio.aio_handle(workers=3), "workers"),
    ],
)
def test_a_wrong_keyword_is_refused(handle, call, keyword):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        call(handle)


def test_options_have_no_order():
    with pytest.raises(TypeError, match="positional"):
        nvmeio.Handle("sync")


@pytest.mark.parametrize("offset", [-1, 1 << 63])
def test_an_offset_that_no_file_has_is_refused(handle, path, offset):
    path.write_bytes(b"12345678")
    with pytest.raises(ValueError, match=rf"offset is {offset}; it must be from 0 to"):
        handle.submit_read(bytearray(8), path, offset)
    for odd in (1.0, True, None):
        with pytest.raises(TypeError, match=f"offset is {odd}; it must be an integer"):
            handle.submit_read(bytearray(8), path, odd)


def test_an_end_that_no_file_has_is_refused(handle, path):
    path.write_bytes(b"12345678")
    with pytest.raises(ValueError, match=f"offset is {(1 << 63) - 4} for 8 bytes"):
        handle.submit_read(bytearray(8), path, (1 << 63) - 4)


def test_writes_never_truncate(handle, path):
    path.write_bytes(bytes(3 * BLOCK))
    handle.write(b"new", path, offset=10)
    handle.submit_write(pattern(BLOCK), path).wait()
    assert handle.write(b"", path) == 0
    assert path.read_bytes() == pattern(BLOCK) + bytes(2 * BLOCK)


@pytest.mark.parametrize("size", [3 * BLOCK + 5, 3 * MIB + 5])
def test_a_failed_write_leaves_no_more_than_was_written(handle, path, size):
    """An incomplete write is an error, and leaves no file of the full size.

    Files of 128 KiB and more are preallocated, which fails at once.
    """
    with (
        limit(resource.RLIMIT_FSIZE, 2 * BLOCK),
        pytest.raises(OSError, match="File too large") as caught,
    ):
        handle.write(pattern(size), path)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    left = path.read_bytes()
    assert len(left) <= 2 * BLOCK
    assert left == pattern(size)[: len(left)]


def test_several_writers_create_one_file(open_handle, path):
    """As ranks that write their parts: none replaces the file of the others."""
    parts = [pattern(BLOCK + 1000 * rank, seed=rank) for rank in range(6)]
    offsets = np.cumsum([0] + [len(part) for part in parts])
    handles = [open_handle(block_size=BLOCK, queue_depth=DEPTH) for _ in parts]
    requests = [
        handle.submit_write(part, path, int(offset))
        for handle, part, offset in zip(handles, parts, offsets, strict=False)
    ]
    assert [request.wait() for request in requests] == [len(part) for part in parts]
    assert path.read_bytes() == b"".join(parts)


def test_fsync_follows_the_writes_before_it(handle, path):
    requests = [handle.submit_write(pattern(BLOCK), path, i * BLOCK) for i in range(20)]
    assert handle.submit_fsync(path).wait() == 0
    assert all(request.done() for request in requests)
    assert handle.fsync(path) is None
    assert path.read_bytes() == 20 * pattern(BLOCK)


def test_a_handle_that_is_dropped_has_finished_its_work(engine, path):
    """A handle may be dropped with requests pending; DeepSpeed's op aborts."""
    handle = nvmeio.Handle(block_size=PAGE, queue_depth=DEPTH, engine=engine)
    expected = pattern(50 * BLOCK)
    target = Guarded(len(expected))
    path.write_bytes(expected)
    handle.submit_read(target.array, path)
    request = handle.submit_read(bytearray(expected), path)
    gone = weakref.ref(handle)
    del handle
    assert gone() is None
    assert target.content() == expected
    assert request.done()
    assert request.wait() == len(expected)


def test_close_waits_and_refuses_new_requests(open_handle, path):
    expected = pattern(50 * BLOCK)
    target = Guarded(len(expected))
    path.write_bytes(expected)
    handle = open_handle(block_size=PAGE, queue_depth=DEPTH)
    with handle as entered:
        assert entered is handle
        request = handle.submit_read(target.array, path)
    assert handle.closed
    assert request.done()
    assert target.content() == expected
    assert repr(handle).endswith(" closed>")
    assert routes(handle).total() == len(expected)
    handle.close()
    with pytest.raises(ValueError, match="the handle is closed"):
        handle.__enter__()
    for call in (handle.read, handle.submit_read):
        with pytest.raises(ValueError, match="the handle is closed"):
            call(target.array, path)
    handle.drain()
    assert handle.pending == 0


def test_an_exception_leaves_the_block_after_all_requests(handle, path):
    request = handle.submit_write(pattern(BLOCK), path)
    with pytest.raises(KeyError, match="mine"), handle:
        raise KeyError("mine")
    assert handle.closed
    assert request.done()
    assert path.read_bytes() == pattern(BLOCK)


def test_a_handle_is_initialized_once(open_handle):
    handle = open_handle()
    with pytest.raises(ValueError, match="open already"):
        handle.__init__()


def test_a_handle_that_was_never_opened_says_so(path):
    handle = nvmeio.Handle.__new__(nvmeio.Handle)
    for call in (
        handle.drain,
        handle.close,
        handle.stats,
        handle.latencies,
        lambda: handle.pending,
        lambda: handle.engine,
        lambda: handle.workers,
        lambda: repr(handle),
        lambda: handle.read(bytearray(1), path),
        lambda: handle.submit_read(bytearray(1), path),
    ):
        with pytest.raises(ValueError, match="never opened"):
            call()
    assert handle.closed


def test_pending_and_repr_show_requests_in_flight(open_handle, engine, folder):
    handle = open_handle(**SLOW)
    (folder / "data").write_bytes(b"12345678")
    assert handle.pending == 0
    with plugged(handle, folder):
        plugs = handle.pending
        requests = [handle.submit_read(bytearray(8), folder / "data") for _ in range(3)]
        assert handle.pending == plugs + 3
        assert repr(handle) == (
            f"<nvmeio.Handle engine={engine} block_size=1 queue_depth=1 "
            f"workers=1 pending={plugs + 3}>"
        )
    assert [request.wait() for request in requests] == [8, 8, 8]
    assert handle.pending == 0


def test_counters_are_plain_dicts():
    """Because yaml.safe_dump and torch.load refuse subclasses of dict."""
    for stats in (nvmeio.pool_stats(), nvmeio.default_handle().stats()):
        assert type(stats) is dict
        assert json.loads(json.dumps(stats)) == stats


def test_pickling_carries_the_options(engine, path):
    options = {
        "engine": engine,
        "direct": False,
        "bounce": "never",
        "block_size": 8192,
        "queue_depth": 7,
        "workers": 2,
        "check_overlap": True,
    }
    with pickle.loads(pickle.dumps(nvmeio.Handle(**options))) as handle:
        assert {name: getattr(handle, name) for name in options} == options
        handle.write(bytes(BLOCK), path)
        assert routes(handle) == Counter(buffered=BLOCK)
        assert handle.stats()["engine"] == engine


@pytest.mark.parametrize("kind", [nvmeio.Handle, nvmeio.aio_handle])
def test_a_closed_handle_is_unpickled_closed(kind):
    handle = kind()
    handle.close()
    assert pickle.loads(pickle.dumps(handle)).closed
    assert copy.copy(handle).closed


class Subclass(nvmeio.Handle):
    """A handle with its own attribute and constructor."""

    def __init__(self, name, **options):
        super().__init__(block_size=8192, **options)
        self.names = [name]


@pytest.mark.parametrize(
    "clone",
    [lambda handle: pickle.loads(pickle.dumps(handle)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_a_copy_is_of_the_same_class(engine, path, clone):
    with (
        Subclass("one", engine=engine, workers=2) as handle,
        clone(handle) as found,
    ):
        assert found is not handle
        assert type(found) is Subclass
        assert found.names == ["one"]
        assert (found.block_size, found.workers) == (8192, 2)
        assert found.write(bytes(BLOCK), path) == BLOCK
        assert found.stats()["engine"] == engine
        assert handle.stats()["requests"] == 0


def test_threads_share_a_handle(open_handle, folder):
    handle = open_handle(block_size=BLOCK, queue_depth=DEPTH, workers=2)
    rounds, size = 25, 3 * BLOCK + 17

    def work(number):
        path = folder / f"of thread {number}"
        for turn in range(rounds):
            expected = pattern(size, seed=number * rounds + turn)
            targets = [bytearray(size) for _ in range(3)]
            write = (
                handle.write
                if turn % 2
                else lambda *args: handle.submit_write(*args).wait()
            )
            write(expected, path)
            requests = [handle.submit_read(target, path) for target in targets[:2]]
            handle.read(targets[2], path)
            assert [request.wait() for request in requests] == [size, size]
            assert targets == [expected] * 3

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert handle.stats()["requests"] == 8 * rounds * 4
    assert routes(handle).total() == 8 * rounds * 4 * size
    assert handle.pending == 0


def test_signatures_can_be_inspected():
    for name, member in inspect.getmembers(nvmeio.Handle, callable):
        if not name.startswith("__"):
            assert inspect.signature(member).parameters, name
            assert inspect.getdoc(member), name
    shown = str(inspect.signature(nvmeio.Handle.read))
    assert shown.startswith("(self, buffer, file, offset=0)")
