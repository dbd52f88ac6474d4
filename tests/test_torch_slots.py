"""Slots: bytes move to a file to keep a limit of memory, and are read back ahead of use."""

import errno
import gc
import itertools
import os
import random
import threading
import time

import numpy as np
import pytest

from children import WATCHDOG_S

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the modules need torch.
import nvmeio.safetensors.torch as st  # noqa: E402
import nvmeio.torch  # noqa: E402
from nvmeio._publish import files  # noqa: E402
from nvmeio._publish.names import final_name  # noqa: E402
from nvmeio.torch import _offload  # noqa: E402
from nvmeio.torch._offload.slots import SlotFile, memory_of  # noqa: E402

SIZE = 40_000


def tensor_of(number, size=SIZE):
    """Return bytes that depend on the number."""
    numbers = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=numbers)


def written(file, number, size=SIZE):
    """Write a tensor to which no other reference exists."""
    tensor = tensor_of(number, size)
    return file.write(tensor, tensor)


def in_memory(slots):
    return [slot.serial for slot in slots if slot.data is not None]


def test_memory_keeps_the_newest_slots_and_reads_run_ahead_to_the_oldest(tmp_path):
    file = SlotFile(str(tmp_path), 3 * SIZE)
    slots = [written(file, number) for number in range(8)]
    assert in_memory(slots) == [5, 6, 7]
    file.drain()
    for number in reversed(range(8)):
        assert torch.equal(file.read(slots[number]), tensor_of(number))
        assert file.held <= 3 * SIZE
        # Two more are read while this one is in use.
        assert in_memory(slots) == [*range(max(number - 2, 0), max(number, 2) + 1)]


def test_a_wrong_read_ahead_frees_its_memory(tmp_path):
    file = SlotFile(str(tmp_path), 3 * SIZE)
    slots = [written(file, number) for number in range(9)]
    file.drain()
    assert torch.equal(file.read(slots[5]), tensor_of(5))
    assert in_memory(slots) == [3, 4, 5]
    # Memory of reads in flight cannot be freed yet.
    file.drain()
    assert torch.equal(file.read(slots[2]), tensor_of(2))
    assert in_memory(slots) == [0, 1, 2]
    file.drain()
    assert torch.equal(file.read(slots[8]), tensor_of(8))
    assert in_memory(slots) == [6, 7, 8]


def test_slots_larger_than_the_limit_are_not_kept_in_memory(tmp_path):
    file = SlotFile(str(tmp_path), 1000)
    slots = [written(file, number) for number in range(3)]
    assert file.held == 0
    for number in (1, 2, 0):
        assert torch.equal(file.read(slots[number]), tensor_of(number))
        assert file.held == 0


@pytest.mark.parametrize("memory", [0, 5 * SIZE, 1 << 30])
def test_any_order_gives_the_right_bytes_within_memory(default_engine, folder, memory):
    draw = random.Random(memory)
    file = SlotFile(str(folder), memory)
    slots = {}
    for number in range(150):
        what = draw.random()
        if what < 0.4 or not slots:
            size = draw.choice([1, 4095, 4096, 4097, SIZE])
            slots[number] = written(file, number, size)
        else:
            chosen = draw.choice(list(slots))
            slot = slots[chosen]
            if what < 0.8:
                assert torch.equal(file.read(slot), tensor_of(chosen, slot.nbytes))
            else:
                file.drop(slots.pop(chosen))
        assert file.held <= memory
        taken = sorted((slot.place, slot.place + slot.nbytes) for slot in slots.values())
        assert all(low[1] <= high[0] for low, high in itertools.pairwise(taken))
    for number, slot in slots.items():
        assert torch.equal(file.read(slot), tensor_of(number, slot.nbytes))


def test_space_in_the_file_is_reused(tmp_path):
    file = SlotFile(str(tmp_path), 2 * SIZE)
    for number in range(50):
        slot = written(file, number)
        assert torch.equal(file.read(slot), tensor_of(number))
        file.drop(slot)
    # Slots in flight keep their space for a while.
    assert file._file.size <= 6 * SIZE


def test_free_space_is_joined_with_its_neighbours():
    room = _offload.slots._Room()
    places = [room.take(size) for size in (1, 4096, 4097, 1)]
    assert places == [0, 4096, 8192, 16384]
    room.give(0, 1)
    room.give(8192, 4097)
    assert room.take(8193) == 20480
    room.give(4096, 4096)
    assert room.take(16384) == 0
    room.give(0, 16384)
    room.give(16384, 1)
    room.give(20480, 8193)
    assert (room._gaps, room._end) == ([], 0)


def test_threads_share_a_file(tmp_path):
    file = SlotFile(str(tmp_path), 4 * SIZE)
    wrong = []

    def work(first):
        slots = {number: written(file, number) for number in range(first, first + 30)}
        for number, slot in reversed(slots.items()):
            if not torch.equal(file.read(slot), tensor_of(number)):
                wrong.append(number)
            file.drop(slot)

    threads = [threading.Thread(target=work, args=[100 * n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    file.drain()
    assert (file.held, file._slots, file._room._end) == (0, {}, 0)


def test_a_slot_dropped_during_a_call_is_freed_by_that_call(tmp_path):
    file = SlotFile(str(tmp_path), 1 << 30)
    slot = written(file, 1)
    file.drain()
    with file._lock:
        # The garbage collector may do so in the thread that holds the lock.
        file.drop(slot)
        assert file.held == SIZE
    assert torch.equal(file.read(written(file, 2)), tensor_of(2))
    assert file.held == SIZE


def test_memory_keeps_its_offset_from_an_aligned_address():
    for lead in (0, 16, 63):
        memory = memory_of(1000, torch.device("cpu"), lead)
        assert memory.data_ptr() % 64 == lead
        assert memory.nbytes == 1000


def test_the_file_ends_with_the_last_slot(tmp_path):
    gc.collect()
    nvmeio.default_handle().close()
    before = sorted(os.listdir("/proc/self/fd"))
    file = SlotFile(str(tmp_path), 3 * SIZE)
    slots = [written(file, number) for number in range(8)]
    file.read(slots[4])
    assert os.listdir(tmp_path) == []
    del file, slots
    gc.collect()
    nvmeio.default_handle().close()
    # What an earlier test has left may have gone meanwhile.
    assert {*os.listdir("/proc/self/fd")} <= {*before}


def test_a_file_open_in_a_child_takes_no_space_afterwards(tmp_path):
    file = SlotFile(str(tmp_path), 0)
    slots = [written(file, number) for number in range(4)]
    # As an inherited descriptor does.
    descriptor = os.dup(file._file.fileno())
    assert os.fstat(descriptor).st_size >= 4 * SIZE
    del file, slots
    gc.collect()
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)


def test_a_lack_of_space_is_raised_by_the_next_call_and_by_the_read(faulty_slots):
    folder, faults = faulty_slots
    file = SlotFile(folder, 3 * SIZE)
    faults.set(write={"full_at": 8 * SIZE})
    slots = []

    def write_all():
        for number in range(20):
            slots.append(written(file, number))

    with pytest.raises(OSError, match=r"39.1 KiB .* could not be written") as raised:
        write_all()
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, folder)
    file.drain()
    lost = [slot for slot in slots if slot.error is not None]
    assert lost == [slot for slot in slots if slot.place + SIZE > 8 * SIZE]
    for slot in lost:
        with pytest.raises(OSError, match="could not be written"):
            file.read(slot)
    # Freed space is reused, and earlier slots are intact.
    file.drop(slots[1])
    slots[1] = written(file, 1)
    file.drain()
    for number, slot in enumerate(slots):
        if slot not in lost:
            assert torch.equal(file.read(slot), tensor_of(number))


def test_a_failed_write_is_raised(faulty_slots):
    folder, faults = faulty_slots
    file = SlotFile(folder, 0)
    kept = written(file, 1)
    faults.set(write={"error": errno.EIO})
    with pytest.raises(OSError, match=r"Input/output error: 39.1 KiB") as raised:
        written(file, 2)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, folder)
    assert faults.fired()["write.error"] > 0
    faults.set()
    assert torch.equal(file.read(kept), tensor_of(1))
    assert torch.equal(file.read(written(file, 3)), tensor_of(3))
    # The error of the second one was not reported yet, so it has no data.
    assert (file.held, len(file._slots)) == (0, 2)


def test_a_failed_read_is_raised_and_can_be_repeated(faulty_slots):
    folder, faults = faulty_slots
    file = SlotFile(folder, 0)
    slot = written(file, 1)
    faults.set(read={"error": errno.EIO})
    with pytest.raises(OSError, match="Input/output error") as raised:
        file.read(slot)
    assert (raised.value.errno, file.held) == (errno.EIO, 0)
    assert faults.fired()["read.error"] > 0
    faults.set()
    assert torch.equal(file.read(slot), tensor_of(1))


def test_a_failed_read_ahead_affects_only_its_slot(tmp_path):
    file = SlotFile(str(tmp_path), 0)
    first, cut = written(file, 1), written(file, 2)
    file.drop(first)
    last = written(file, 3)
    assert last.place < cut.place
    file.memory = 2 * SIZE
    file._file.truncate(cut.place)
    assert torch.equal(file.read(last), tensor_of(3))
    assert cut.reads
    with pytest.raises(OSError, match="could not be read from") as raised:
        file.read(cut)
    assert raised.value.errno == errno.ENODATA
    assert "past the end of the file" in str(raised.value.__cause__)
    assert torch.equal(file.read(last), tensor_of(3))


def test_writing_waits_only_while_memory_is_full(faulty_slots, monkeypatch):
    folder, faults = faulty_slots
    file = SlotFile(folder, 3 * SIZE)
    faults.set(write={"held": True})
    # None of these can be written yet.
    slots = [written(file, number) for number in range(3)]
    faults.await_waiting()
    assert file.held == 3 * SIZE
    waits, wait = threading.Event(), _offload.slots._outcome

    def signal(slot):
        waits.set()
        return wait(slot)

    monkeypatch.setattr(_offload.slots, "_outcome", signal)
    thread = threading.Thread(target=lambda: slots.append(written(file, 3)))
    thread.start()
    assert waits.wait(WATCHDOG_S)
    # It waits for the first write, which frees memory.
    assert (len(slots), file.held) == (3, 3 * SIZE)
    faults.set()
    thread.join()
    assert file.held <= 3 * SIZE
    for number, slot in enumerate(slots):
        assert torch.equal(file.read(slot), tensor_of(number))


def test_a_slot_being_written_is_read_from_memory(faulty_slots):
    folder, faults = faulty_slots
    file = SlotFile(folder, 3 * SIZE)
    faults.set(write={"held": True})
    slot = written(file, 1)
    faults.await_waiting()
    # Nothing of it is in the file.
    assert torch.equal(file.read(slot), tensor_of(1))
    assert faults.waiting() > 0
    faults.set()


def shallow(monkeypatch):
    """Make a default handle that transfers one block at a time."""
    nvmeio.default_handle().close()
    monkeypatch.setenv("NVMEIO_QUEUE_DEPTH", "1")
    return nvmeio.default_handle()


def test_reads_of_weights_come_before_writes(tmp_path, faulty_slots, monkeypatch):
    """Those that are needed, and those that are read ahead; writes came first."""
    folder, faults = faulty_slots
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    st.save_file(model.state_dict(), tmp_path / "model.safetensors")
    nvmeio.torch.disk_offload(model, tmp_path / "model.safetensors", memory="8MiB")
    plug = np.zeros(4096, np.uint8)
    nvmeio.write_file(plug, f"{folder}/plug")
    handle = shallow(monkeypatch)
    faults.set(read={"held": True})
    plugged = handle.submit_read(plug, f"{folder}/plug")
    faults.await_waiting()
    file = SlotFile(str(tmp_path), 1 << 30)
    slots = [written(file, number, 1 << 20) for number in range(4)]
    reads, done = model[0].weight.store._reads, []
    for slot in slots:
        slot.request.add_done_callback(lambda _: done.append(not any(map(pending, reads))))
    thread = threading.Thread(target=model, args=(torch.ones(1, 256),))
    thread.start()
    deadline = time.monotonic() + WATCHDOG_S
    while len(reads) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert all(map(pending, reads))
    faults.set()
    thread.join()
    plugged.wait()
    file.drain()
    assert done == [True] * 4


def pending(reading):
    return reading.request is not None and not reading.request.done()


def test_dropped_slots_are_not_written(faulty_slots, monkeypatch):
    folder, faults = faulty_slots
    handle = shallow(monkeypatch)
    file = SlotFile(folder, 1 << 30)
    faults.set(write={"held": True})
    first = written(file, 1, 1 << 20)
    faults.await_waiting()
    for number in range(2, 20):
        file.drop(written(file, number, 1 << 20))
    faults.set()
    file.drain()
    assert handle.stats()["blocks"] == 1
    assert torch.equal(file.read(first), tensor_of(1, 1 << 20))
    assert file.held == 1 << 20


def test_a_file_system_without_unnamed_files_works(tmp_path, monkeypatch):
    def refuse(folder):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), folder)

    named = []

    def look(*arguments):
        named.extend(os.listdir(tmp_path))
        return nvmeio.File(*arguments)

    monkeypatch.setattr(files, "open_unnamed", refuse)
    monkeypatch.setattr(files, "File", look)
    file = SlotFile(str(tmp_path), 0)
    assert [final_name(name) for name in named] == ["unnamed"], "cleanup() knows it"
    assert os.listdir(tmp_path) == []
    slot = written(file, 1, 5001)
    assert torch.equal(file.read(slot), tensor_of(1, 5001))


def test_an_invalid_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    for name, number in (("missing", errno.ENOENT), ("file", errno.ENOTDIR)):
        with pytest.raises(OSError, match=name) as raised:
            SlotFile(str(tmp_path / name), 0)
        assert raised.value.errno == number
