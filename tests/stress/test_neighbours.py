"""Writes beside each other, of which some go past the page cache, lose no byte."""

import contextlib
import os

import pytest

from batches import run_cases
from children import Child, run_tool
from helpers import ENGINES, MIB
from mounts import device_maker, mount_new

# The sizes of blocks of xfs; None: as mkfs makes them.
KINDS = [
    ("ext4", None),
    ("xfs", None),
    ("xfs", 16384),
    ("xfs", 65536),
    ("btrfs", None),
]


@pytest.fixture
def slow_mount(tmp_path, loop_devices, control_group):
    """A function (kind, block, speed) that mounts a new file system.

    It returns its folder, and a command prefix to write to it at this speed in bytes a
    second, or at any speed if that is None.
    """
    with contextlib.ExitStack() as stack:

        def mount(kind, block, speed):
            device = stack.enter_context(device_maker(tmp_path))(512 * MIB)
            folder = tmp_path / "mount"
            mount_new(kind, device, folder, block=block)
            if speed is None:
                return folder, []
            number = os.stat(device).st_rdev
            limit = f"{os.major(number)}:{os.minor(number)}"
            prefix = control_group(
                "blkio",
                {"blkio.throttle.write_bps_device": f"{limit} {speed}"},
                {"io.max": f"{limit} wbps={speed}"},
                needed=bool(os.environ.get("CI")),
            )
            return folder, prefix

        yield mount


@pytest.mark.amount(short=6, full=60, long=1_000)
@pytest.mark.parametrize("speed", [None, 16 * MIB], ids=["fast", "slowed"])
@pytest.mark.parametrize(("kind", "block"), KINDS, ids=str)
def test_disjoint_writes_lose_no_byte(
    kind, block, speed, slow_mount, engines, seeds, record_property
):
    folder, prefix = slow_mount(kind, block, speed)
    names = [name for name in ENGINES if engines[name]["works"]]
    counts = run_cases(
        "neighbours", seeds, batch=10, prefix=prefix, folder=str(folder), engines=names
    )
    record_property("parts of files written", counts["parts"])


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_reader_beside_a_direct_write_leaves_no_old_bytes(kind, slow_mount, engines):
    folder, prefix = slow_mount(kind, None, 64 << 10)
    (path := folder / "file").write_bytes(bytes(8 * MIB))
    run_tool("sync", "--file-system", path)
    for engine in ("io_uring", "libaio", "threads"):
        if not engines[engine]["works"]:
            continue
        child = Child(
            "beside_a_reader",
            package="cases",
            prefix=prefix,
            path=str(path),
            engine=engine,
            offset=7 * MIB,
        )
        assert child.finish().report == {"in_flight": True}
