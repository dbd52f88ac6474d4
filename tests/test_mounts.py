"""Faults of the file system, full devices, and devices with other sector sizes."""

import errno
import os
import re
from collections import Counter

import pytest

import nvmeio
from helpers import BLOCK, DEPTH, MIB, Guarded, kernel_release, pattern, routes
from mounts import SIZES_MIN, mount_new
from workloads.common import Faults, make_file

# The minimum of mkfs.xfs.
DEVICE_BYTES = 320 * MIB


def faulty_file(folder, size=MIB):
    """Return a path in the FUSE file system, its contents, and a function to set faults."""
    path = folder / "file"
    return path, make_file(path, size), Faults(path)


@pytest.fixture
def op(engine):
    """A handle of DeepSpeed's kind, for validation."""
    with nvmeio.aio_handle(BLOCK, DEPTH, engine=engine) as op:
        yield op
        assert op.stats()["engine"] == engine


# FUSE.


@pytest.mark.parametrize("position", [5 * BLOCK + 17, MIB - 1])
def test_an_unreadable_byte_fails_only_requests_that_need_it(faulty, handle, position):
    path, data, faults = faulty_file(faulty)
    file = nvmeio.File(path)
    faults.set(read={"error": errno.EIO, "at": position})
    with pytest.raises(OSError, match=str(path)) as caught:
        handle.submit_read(bytearray(MIB), file).wait()
    assert caught.value.errno == errno.EIO
    assert faults.fired()["read.error"] > 0
    begin = 8 * BLOCK if position < 8 * BLOCK else 0
    guarded = Guarded(2 * BLOCK)
    handle.submit_read(guarded.array, file, begin).wait()
    assert guarded.content() == data[begin : begin + 2 * BLOCK]


@pytest.mark.parametrize(
    "number", [errno.ENODATA, errno.ECANCELED, errno.ETIMEDOUT], ids=errno.errorcode.get
)
def test_errnos_of_the_drive_keep_their_meaning(faulty, handle, number):
    """These errnos must not look like the end of the file, a cancellation or a timeout."""
    path, _, faults = faulty_file(faulty)
    with nvmeio.File(path, "r+") as file:
        faults.set(**{call: {"error": number} for call in ("read", "write")})
        for submit in (handle.submit_read, handle.submit_write):
            request = submit(bytearray(BLOCK), file)
            with pytest.raises(OSError, match=str(path)) as caught:
                request.wait()
            assert request.done()
            assert caught.value.errno == errno.EIO
            assert not isinstance(caught.value, TimeoutError)
    assert min(faults.fired()[f"{call}.error"] for call in ("read", "write")) > 0


def test_the_first_of_many_failures_is_raised_after_all_blocks(faulty, op):
    path, data, faults = faulty_file(faulty)
    file = nvmeio.File(path)
    faults.set(read={"error": errno.EIO, "at": 5 * BLOCK})
    buffers = [bytearray(BLOCK) for _ in range(MIB // BLOCK)]
    for number, buffer in enumerate(buffers):
        op.async_pread(buffer, file, number * BLOCK)
    with pytest.raises(OSError, match=str(5 * BLOCK)) as caught:
        op.wait()
    assert caught.value.errno == errno.EIO
    assert op.wait() == 0
    for number, buffer in enumerate(buffers):
        if number != 5:
            assert buffer == data[number * BLOCK : (number + 1) * BLOCK]


@pytest.mark.parametrize("workers", [1, 3])
def test_every_worker_takes_part_in_a_request(faulty, open_handle, workers):
    """With a queue depth of one, each held block belongs to another worker."""
    path, data, faults = faulty_file(faulty)
    handle = open_handle(block_size=BLOCK, queue_depth=1, workers=workers)
    guarded = Guarded(MIB)
    with nvmeio.File(path) as file:
        faults.set(read={"held": True})
        request = handle.submit_read(guarded.array, file)
        faults.await_waiting(workers)
        assert faults.waiting() == workers
        faults.set()
        assert request.wait() == MIB
    assert guarded.content() == data
    assert handle.stats()["blocks"] == MIB // BLOCK
    assert faults.fired()["read.held"] >= workers


@pytest.mark.all_combinations
@pytest.mark.parametrize("skew", [0, 3])
@pytest.mark.parametrize("short", [4096, 30_000])
def test_short_reads_are_continued(faulty, handle, short, skew):
    path, data, faults = faulty_file(faulty)
    file = nvmeio.File(path)
    faults.set(read={"short": short})
    guarded = Guarded(MIB - skew, skew)
    assert handle.submit_read(guarded.array, file, skew).wait() == MIB - skew
    assert guarded.content() == data[skew:]
    assert handle.stats()["short_transfers"] > 0
    assert faults.fired()["read.short"] > 0


@pytest.mark.parametrize("short", [4096, 30_000])
def test_short_writes_are_continued(faulty, handle, short):
    path, _, faults = faulty_file(faulty)
    data = pattern(MIB, 1)
    with nvmeio.File(path, "r+") as file:
        faults.set(write={"short": short})
        assert handle.submit_write(data, file).wait() == MIB
    assert path.read_bytes() == data
    assert faults.fired()["write.short"] > 0


@pytest.mark.parametrize("room", [0, 3 * BLOCK, 3 * BLOCK + 100])
def test_a_full_file_system_is_an_error_and_keeps_what_was_written(faulty, handle, room):
    _, _, faults = faulty_file(faulty)
    faults.set(write={"full_at": room})
    path = faulty / "new"
    data = pattern(MIB, 1)
    with pytest.raises(OSError, match=str(path)) as caught:
        handle.submit_write(data, path).wait()
    assert caught.value.errno == errno.ENOSPC
    assert faults.fired()["write.full_at"] > 0
    left = path.read_bytes()
    assert len(left) <= room
    assert left == data[: len(left)]


def test_a_failed_fsync_fails_until_the_file_is_closed(faulty, handle):
    path, _, faults = faulty_file(faulty)
    with nvmeio.File(path, "r+") as file, nvmeio.File(path, "r+") as other:
        faults.set(fsync={"error": errno.EIO})
        with pytest.raises(OSError, match=str(path)) as caught:
            handle.fsync(path)
        assert caught.value.errno == errno.EIO
        faults.set()
        for each in file.fsync, other.fsync, lambda: handle.fsync(file):
            with pytest.raises(OSError, match=str(path)) as caught:
                each()
            assert caught.value.errno == errno.EIO
        # What the kernel has told once it does not tell one who opens the file now.
        handle.fsync(path)
    with nvmeio.File(path, "r+") as file:
        file.fsync()


@pytest.mark.parametrize("position", [5 * BLOCK + 17, MIB - 1])
def test_validation_finds_a_bit_read_wrong(faulty, op, position):
    path, data, faults = faulty_file(faulty)
    file = nvmeio.File(path)
    faults.set(read={"flip": position, "times": 1})
    with pytest.raises(OSError, match=f"at byte {position}") as caught:
        op.read(bytearray(MIB), file, True)
    assert caught.value.errno == errno.EIO
    assert faults.fired() == {"read.flip": 1}
    guarded = Guarded(MIB)
    op.read(guarded.array, file, True)
    assert guarded.content() == data


@pytest.mark.parametrize("position", [5 * BLOCK + 17, MIB - 1])
def test_validation_finds_a_bit_written_wrong(faulty, op, position):
    path, _, faults = faulty_file(faulty)
    data = pattern(MIB, 1)
    faults.set(write={"flip": position, "times": 1})
    with pytest.raises(OSError, match=f"at byte {position}") as caught:
        op.write(data, path, True)
    assert caught.value.errno == errno.EIO
    assert faults.fired() == {"write.flip": 1}
    op.write(data, path, True)
    assert path.read_bytes() == data


def test_demanding_refused_direct_io_is_an_error(faulty):
    path, _, faults = faulty_file(faulty)
    faults.set(read={"error": errno.EINVAL, "times": 1})
    with pytest.raises(OSError, match=str(path)) as caught:
        nvmeio.File(path, direct=True)
    assert caught.value.errno == errno.EINVAL
    assert faults.fired() == {"read.error": 1}


def test_a_file_system_without_o_direct_works_buffered(faulty, handle):
    """Edges, odd addresses and growth: everything goes through the page cache."""
    path, _, faults = faulty_file(faulty, 0)
    source = Guarded(pattern(MIB + 77), residue=3)
    # The first read of a file with O_DIRECT is the probe for O_DIRECT.
    faults.set(read={"error": errno.EINVAL, "times": 1})
    with nvmeio.File(path, "r+") as file:
        assert (file.direct, file.alignment) == (False, 1)
        assert faults.fired() == {"read.error": 1}
        assert handle.submit_write(source.array, file, 5).wait() == MIB + 77
        target = Guarded(MIB + 77, residue=64)
        assert handle.submit_read(target.array, file, 5).wait() == MIB + 77
        handle.fsync(file)
    assert target.content() == source.content() == path.read_bytes()[5:]
    assert routes(handle) == Counter(buffered=2 * (MIB + 77))


# Loop devices.


def free_bytes(folder):
    """Return how many bytes an ordinary user may still write."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_without_space_an_existing_file_keeps_what_landed(loop_mount, kind, handle):
    folder = loop_mount(kind, DEVICE_BYTES)
    with open(folder / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(folder) - 16 * MIB)
    path = folder / "old"
    path.write_bytes(b"old")
    free = free_bytes(folder)
    source = Guarded(pattern(free + 8 * MIB), pool=True)
    with (
        nvmeio.File(path, "r+") as file,
        pytest.raises(OSError, match=str(path)) as caught,
    ):
        handle.submit_write(source.array, file).wait()
    assert caught.value.errno == errno.ENOSPC
    got = int(re.search(r"(\d+) bytes done", str(caught.value))[1])
    # Space that the file system had reserved may be used too.
    assert got <= free + 2 * MIB
    assert path.read_bytes()[:got] == source.content()[:got]
    # Blocks after the failed one may have landed too.
    assert got <= routes(handle)["direct"] <= len(source.array)


def sector_cases(sector):
    """Return (size, offset, residue) near the edges of sectors and blocks."""
    sizes = (1, 511, 512, 513, sector - 1, sector, sector + 1, BLOCK, BLOCK + sector + 1)
    offsets = (0, 1, 512, sector)
    return [
        (size, offset, skew) for size in sizes for offset in offsets for skew in (0, 512)
    ]


def check_transfers(engine, path, size=4 * BLOCK):
    """Write and read at every edge of a file; compare with a model; return the stats."""
    model = bytearray(make_file(path, size))
    with (
        nvmeio.Handle(block_size=BLOCK, engine=engine) as handle,
        nvmeio.File(path, "r+") as file,
    ):
        for number, (length, offset, residue) in enumerate(sector_cases(4096)):
            data = pattern(length, number)
            source = Guarded(data, residue, pool=True)
            handle.submit_write(source.array, file, offset).wait()
            model[offset : offset + length] = data
            start = offset // 2
            guarded = Guarded(length + offset - start, residue, pool=True)
            handle.submit_read(guarded.array, file, start).wait()
            assert guarded.content() == model[start : offset + length]
        handle.fsync(file)
        stats = handle.stats()
    assert path.read_bytes() == model
    assert stats["engine"] == engine
    return stats


def knows_alignment():
    """Return whether the kernel reports the alignment of O_DIRECT: since Linux 6.1."""
    return kernel_release() >= (6, 1)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_sectors_of_4096_bytes_are_respected(loop_mount, kind, engine):
    folder = loop_mount(kind, DEVICE_BYTES, sector=4096)
    stats = check_transfers(engine, folder / "file")
    assert stats["bytes_direct"] > 0
    assert stats["bytes_bounced"] > 0
    assert stats["bytes_buffered"] > 0
    with nvmeio.File(folder / "file") as file:
        assert (file.direct, file.alignment) == (True, 4096)


def test_sectors_of_512_bytes_are_used(loop_mount, engine):
    folder = loop_mount("ext4", 64 * MIB)
    assert check_transfers(engine, folder / "file")["bytes_direct"] > 0
    with nvmeio.File(folder / "file") as file:
        assert (file.direct, file.alignment) == (True, 512 if knows_alignment() else 4096)


def test_a_write_fills_whole_blocks_past_the_page_cache(loop_device, tmp_path, engine):
    # Only one block of 16 KiB lies within these bytes.
    device, folder = loop_device(SIZES_MIN["xfs"]), tmp_path / "blocks"
    mount_new("xfs", device, folder, block=16384)
    path, content = folder / "file", pattern(40_000, 1)
    data = bytearray(make_file(path, MIB))
    with nvmeio.Handle(engine=engine) as handle:
        handle.write(content, path, 8192)
        stats = handle.stats()
    assert stats["bytes_direct"] + stats["bytes_bounced"] == 16384
    assert stats["bytes_buffered"] == 40_000 - 16384
    data[8192:48192] = content
    assert path.read_bytes() == data


@pytest.mark.skipif(not knows_alignment(), reason="the kernel does not say it")
def test_direct_io_that_would_use_the_page_cache_is_none(loop_device, tmp_path, engine):
    # ext4 with a journal of data accepts O_DIRECT, and ignores it.
    device, folder = loop_device(64 * MIB), tmp_path / "journal"
    mount_new("ext4", device, folder, options="data=journal")
    path = folder / "file"
    data = make_file(path, MIB)
    with nvmeio.Handle(engine=engine) as handle, nvmeio.File(path, "r+") as file:
        assert not file.direct
        found = bytearray(MIB)
        assert handle.read(found, file) == MIB
        assert found == data
        assert handle.stats()["bytes_direct"] == 0
        assert handle.stats()["bytes_buffered"] == MIB
    with pytest.raises(OSError, match="no O_DIRECT") as caught:
        nvmeio.File(path, direct=True)
    assert caught.value.errno == errno.EINVAL


def test_direct_io_that_fills_holes_through_the_page_cache_is_none(loop_device, tmp_path):
    # Without extents, ext4 carries out a direct write to a hole as a buffered one.
    device, folder = loop_device(64 * MIB), tmp_path / "indirect"
    mount_new("ext4", device, folder, features="^extents,^64bit")
    path = folder / "file"
    make_file(path, MIB)
    with nvmeio.File(path, "r+") as file, nvmeio.File(path) as read_only:
        assert (file.direct, read_only.direct) == (False, True)


def test_a_block_device_is_a_file_too(loop_device, handle):
    device = loop_device(4 * MIB, 4096)
    data = pattern(MIB)
    with nvmeio.File(device, "r+") as file:
        assert (file.size, file.alignment) == (4 * MIB, 4096)
        handle.write(data, file, offset=4096)
        guarded = Guarded(MIB - 5)
        handle.read(guarded.array, file, offset=4096 + 5)
        assert guarded.content() == data[5:]
        with pytest.raises(OSError, match="past the end") as caught:
            handle.read(bytearray(10), file, offset=4 * MIB - 5)
        assert caught.value.errno == errno.ENODATA
        with pytest.raises(OSError, match=device) as caught:
            handle.write(bytes(8192), file, offset=4 * MIB - 4096)
        assert caught.value.errno == errno.ENOSPC


def test_btrfs_works_without_reporting_an_alignment(loop_mount, engine):
    folder = loop_mount("btrfs", DEVICE_BYTES)
    assert check_transfers(engine, folder / "file")["bytes_direct"] > 0
    with nvmeio.File(folder / "file") as file:
        assert (file.direct, file.alignment) == (True, 4096)


def test_tmpfs_works(tmpfs, engine):
    check_transfers(engine, tmpfs / "file")
