"""Files named by path: opened once, checked again by each request, and closed."""

import contextlib
import errno
import os
import resource
import signal

import pytest

import nvmeio
from helpers import (
    BLOCK,
    PAGE,
    SLOW,
    cool,
    descriptors_below,
    left_open,
    limit,
    pattern,
    plugged,
)


@pytest.fixture
def slow_handle(open_handle):
    """A handle that `plugged` can keep busy."""
    return open_handle(**SLOW)


@pytest.mark.parametrize("size", [PAGE, PAGE + 1])
def test_requests_in_flight_share_one_open_file(slow_handle, path, alignment, size):
    path.write_bytes(pattern(size))
    # Otherwise it is read from the page cache, which takes a second descriptor.
    cool(path)
    targets = [bytearray(size) for _ in range(50)]
    with plugged(slow_handle, path.parent):
        requests = [slow_handle.submit_read(target, path) for target in targets]
        # One descriptor with O_DIRECT if there is O_DIRECT, and one for the page cache if
        # that may be needed.
        assert descriptors_below(path.parent).count(str(path)) == (
            1 if alignment == 1 or size == PAGE else 2
        )
    assert [request.wait() for request in requests] == [size] * 50
    assert targets == [pattern(size)] * 50
    assert left_open(path.parent) == []


def test_every_call_closes_what_it_opened(handle, path):
    handle.write(pattern(BLOCK + 9), path)
    handle.submit_write(pattern(BLOCK + 9), path).wait()
    with path.open("r+b") as file:
        handle.write(b"1", file.fileno())
    handle.read(bytearray(BLOCK), path)
    handle.submit_read(bytearray(BLOCK), path).wait()
    handle.fsync(path)
    assert left_open(path.parent) == []


def test_a_closed_handle_has_no_descriptor(engine, path):
    """Rings, eventfds and files of workers and callers are closed."""
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with nvmeio.Handle(block_size=BLOCK, engine=engine, workers=2) as handle:
            handle.write(pattern(BLOCK), path)
            handle.submit_read(bytearray(BLOCK), path)
            assert handle.stats()["engine"] == engine
        # What an earlier test has left may have gone meanwhile.
        assert {*os.listdir("/proc/self/fd")} <= {*before}


def test_failures_close_the_files_that_they_opened(handle, path):
    path.write_bytes(b"1234")
    with pytest.raises(OSError, match="past the end"):
        handle.read(bytearray(5), path)
    assert handle.submit_read(bytearray(5), path).exception() is not None
    with pytest.raises(ValueError, match="read-only"):
        handle.submit_read(b"1234", path)
    assert left_open(path.parent) == []


def test_a_refused_buffer_creates_no_file(handle, path):
    for bad in (object(), 5, "text"):
        with pytest.raises(TypeError):
            handle.submit_write(bad, path)
    assert not path.exists()


@pytest.mark.parametrize("give_up", [os.replace, lambda new, path: os.unlink(path)])
def test_a_file_that_was_replaced_is_not_taken_for_the_new_one(slow_handle, path, give_up):
    """The path leads to a new file while requests on the old one are in flight."""
    path.write_bytes(b"old file")
    (path.parent / "new").write_bytes(b"new file")
    old, new = bytearray(8), bytearray(8)
    with plugged(slow_handle, path.parent):
        requests = [slow_handle.submit_read(old, path)]
        give_up(path.parent / "new", path)
        if not path.exists():
            path.write_bytes(b"new file")
        requests.append(slow_handle.submit_read(new, path))
    assert [request.wait() for request in requests] == [8, 8]
    assert (old, new) == (b"old file", b"new file")
    assert left_open(path.parent) == []


def test_writes_go_to_the_file_that_has_the_name(slow_handle, path):
    path.write_bytes(b"the old one")
    kept = path.parent / "kept"
    with plugged(slow_handle, path.parent):
        requests = [slow_handle.submit_write(b"1st", path)]
        os.replace(path, kept)
        requests.append(slow_handle.submit_write(b"2nd", path))
        requests.append(slow_handle.submit_write(b"3rd", path, 3))
    assert [request.wait() for request in requests] == [3, 3, 3]
    assert kept.read_bytes() == b"1st old one"
    assert path.read_bytes() == b"2nd3rd"


def test_reading_and_writing_one_path_at_once(slow_handle, path):
    """A file opened for reading is not used for writing, and the other way round."""
    path.write_bytes(b"12345678")
    target = bytearray(4)
    with plugged(slow_handle, path.parent):
        requests = [
            slow_handle.submit_read(target, path),
            slow_handle.submit_write(b"abcd", path, 4),
            slow_handle.submit_fsync(path),
        ]
    assert [request.wait() for request in requests] == [4, 4, 0]
    assert target == b"1234"
    assert path.read_bytes() == b"1234abcd"


def test_different_spellings_of_a_path_share_one_file(handle, path):
    path.write_bytes(b"12345678")
    spellings = [path, str(path), bytes(path), path.parent / "." / path.name]
    targets = [bytearray(8) for _ in spellings]
    requests = [handle.submit_read(*of) for of in zip(targets, spellings, strict=True)]
    assert [request.wait() for request in requests] == [8] * len(spellings)
    assert targets == [b"12345678"] * len(spellings)


@contextlib.contextmanager
def few_descriptors(count):
    """Let this process open about so many more descriptors; yield whether none is left."""
    free = os.dup(0)
    os.close(free)

    def none_left():
        try:
            # Two, as a file takes.
            ends = os.pipe()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            return True
        for end in ends:
            os.close(end)
        return False

    with limit(resource.RLIMIT_NOFILE, free + count):
        yield none_left


def cancel_all(plugs):
    for plug in reversed(plugs):
        plug.cancel()


def test_hundreds_of_files_in_flight_need_few_descriptors(slow_handle, folder):
    """Submission waits for completions if descriptors run out."""
    contents = {folder / str(number): pattern(400, number) for number in range(300)}
    met = False
    with plugged(slow_handle, folder) as plugs, few_descriptors(24) as none_left:
        writes = []
        for name, content in contents.items():
            writes.append(slow_handle.submit_write(content, name))
            if not met and none_left():
                met = True
                assert not any(request.done() for request in writes)
                cancel_all(plugs)
        assert met
        assert [request.wait() for request in writes] == [400] * 300
        targets = [bytearray(400) for _ in contents]
        requests = [
            slow_handle.submit_read(*of) for of in zip(targets, contents, strict=True)
        ]
        assert [request.wait() for request in requests] == [400] * 300
    assert targets == list(contents.values())
    assert left_open(folder) == []


def test_a_descriptor_that_came_free_unseen_is_used(slow_handle, path):
    """The last request in flight ends, and what is closed is none of the handle's files."""
    path.write_bytes(pattern(400))
    target, fillers = bytearray(400), []

    def free_them(*_):
        while fillers:
            os.close(fillers.pop())
        cancel_all(plugs)

    # The handler runs where the submission waits for requests in flight.
    with plugged(slow_handle, path.parent) as plugs, few_descriptors(4) as none_left:
        while not none_left():
            fillers.append(os.dup(0))
        # One may be left, of the two that it tries to make.
        with contextlib.suppress(OSError):
            fillers.append(os.dup(0))
        before = signal.signal(signal.SIGALRM, free_them)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert slow_handle.submit_read(target, path).wait() == 400
        finally:
            signal.signal(signal.SIGALRM, before)
    assert target == pattern(400)


@pytest.mark.parametrize("by", ["object", "descriptor"])
def test_requests_of_one_file_object_need_few_descriptors(slow_handle, path, by):
    """Each request opens its own file; submission waits for one that is done."""
    content = pattern(1000)
    path.write_bytes(content)
    targets = [bytearray(4) for _ in range(250)]
    met = False
    with (
        open(path, "rb") as file,
        plugged(slow_handle, path.parent) as plugs,
        few_descriptors(24) as none_left,
    ):
        named = file if by == "object" else file.fileno()
        requests = []
        for offset, target in enumerate(targets):
            requests.append(slow_handle.submit_read(target, named, offset))
            if not met and none_left():
                met = True
                cancel_all(plugs)
        assert met
        assert [request.wait() for request in requests] == [4] * 250
    assert targets == [content[offset : offset + 4] for offset in range(250)]


@pytest.mark.parametrize("by", ["object", "descriptor"])
def test_an_error_of_a_descriptor_names_its_path(handle, path, by):
    path.write_bytes(b"abc")
    with open(path, "rb") as file:
        named = file if by == "object" else file.fileno()
        request = handle.submit_read(bytearray(5), named)
        failing = [
            (errno.ENODATA, request.wait),
            (errno.ENODATA, lambda: handle.read(bytearray(5), named)),
            (errno.ENODATA, lambda: handle.gather(named, [0], 5, bytearray(5))),
            (errno.EBADF, lambda: handle.write(b"abc", named)),
        ]
        for number, call in failing:
            with pytest.raises(OSError, match=path.name) as caught:
                call()
            assert (caught.value.errno, caught.value.filename) == (number, str(path))
    with open(path, "ab") as file, pytest.raises(OSError, match="for appending") as caught:
        handle.write(b"abc", file if by == "object" else file.fileno())
    assert caught.value.filename == str(path)


def test_a_missing_file_fails_in_the_submitting_call(handle, path):
    for read in (handle.read, handle.submit_read):
        with pytest.raises(FileNotFoundError) as caught:
            read(bytearray(5), path)
        assert caught.value.filename == str(path)
    assert handle.pending == 0


@pytest.mark.parametrize("mask", [0o022, 0o077, 0])
def test_the_umask_applies_to_new_files(handle, path, mask):
    before = os.umask(mask)
    try:
        handle.write(b"1", path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
