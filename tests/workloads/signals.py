"""Processes under signals."""

import contextlib
import ctypes
import dis
import fcntl
import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from functools import partial

import numpy as np

import nvmeio
from helpers import Guarded, pattern
from nvmeio._events import caller
from nvmeio.checkpoint import Checkpointer, atomic_directory
from nvmeio.safetensors import load_sharded, save_sharded
from nvmeio.safetensors.numpy import load_file, save_file
from workloads.common import (
    Faults,
    make_file,
    read_checked,
    read_small,
    report,
    thread_count,
    write_checked,
)

# There an error that is raised in a generator of contextlib in place of another one forms a
# cycle with the frames of its callers, whose objects the collector frees.
ERRORS_FORM_CYCLES = (3, 12) <= sys.version_info < (3, 14)


class Storm:
    """SIGALRM every 100 us, with a handler in Python."""

    def __init__(self):
        self.count = 0

    def strike(self, *_):
        self.count += 1

    def __enter__(self):
        signal.signal(signal.SIGALRM, self.strike)
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)


def signal_storm(folder, engine, size=2 << 20, rounds=2):
    """Transfer in every way under many signals."""
    path = f"{folder}/storm-{engine}"
    data = make_file(path, size)
    op = nvmeio.aio_handle(65536, queue_depth=4, engine=engine)
    handle = op.handle
    with Storm() as storm:
        for number in range(rounds):
            read_checked(handle, path, data)
            read_checked(handle, path, data[5:], 5, 1)
            read_small(handle, path, data[: 60_000 + number])
            parts = [Guarded(size // 4) for _ in range(4)]
            for index, part in enumerate(parts):
                op.async_pread(part.array, path, index * size // 4)
            assert op.wait() == 4
            for index, part in enumerate(parts):
                assert part.content() == data[index * size // 4 : (index + 1) * size // 4]
            changed = pattern(size, number)
            write_checked(handle, f"{path}-{number}", changed)
            os.unlink(f"{path}-{number}")
        handle.fsync(path)
        op.close()
    report({"signals": storm.count, **handle.stats()})


def interrupted(call):
    """Call a function; return whether it raised KeyboardInterrupt."""
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False


def press_ctrl_c(faults):
    """Send SIGINT once a call is held and the main thread is about to wait for it."""
    faults.await_waiting()
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


def ctrl_c(folder, control, engine, ways, size):
    """Be interrupted in each way to wait for a held read, and wait again."""
    report({way: ctrl_c_in_wait(folder, control, engine, way, size) for way in ways})


def ctrl_c_in_wait(folder, control, engine, way, size):
    """Wait for a held read, be interrupted, and wait again; return what was found."""
    path = f"{folder}/ctrl-c-{engine}"
    faults = Faults(control)
    data = make_file(path, size)
    # Otherwise the page cache, which has the bytes, would serve them.
    file = nvmeio.File(path, direct=True)
    op = nvmeio.aio_handle(engine=engine)
    handle = op.handle
    guarded = Guarded(size)
    faults.set(read={"held": True})
    presser = threading.Thread(target=press_ctrl_c, args=[faults])
    presser.start()
    if way == "op":
        op.async_pread(guarded.array, file)
        came = interrupted(op.wait)
    else:
        request = handle.submit_read(guarded.array, file)
        waits = {
            "request": request.wait,
            "drain": handle.drain,
            "close": handle.close,
            "wait": lambda: nvmeio.wait([request]),
            "as_completed": lambda: list(nvmeio.as_completed([request])),
        }
        came = interrupted(waits[way])
    # The interrupt came while the read was still held.
    pending = handle.pending
    presser.join()
    faults.set()
    if way == "op":
        assert op.wait() == 1
    else:
        assert request.wait() == size
    handle.close()
    assert guarded.content() == data
    return {"interrupted": came, "pending": pending, "fired": faults.fired()}


def ctrl_c_in_calls(folder, control, engine, ways, presses):
    """Be interrupted in each blocking call."""
    report({way: ctrl_c_in_call(folder, control, engine, way, presses) for way in ways})


def ctrl_c_in_call(folder, control, engine, way, presses, size=16 << 20):
    """Press Ctrl-C once or twice in a held call; release the call after a single one."""
    path = f"{folder}/ctrl-c-call-{engine}"
    faults = Faults(control)
    make_file(path, size)
    # A gather would read cached records without waiting for the device.
    file = nvmeio.File(path, direct=True)
    handle = nvmeio.Handle(queue_depth=2, engine=engine)
    guarded = Guarded(size)
    # After the call only the request refers to it.
    arrays = [guarded.array[:]]
    held = weakref.ref(arrays[0])
    calls = {
        "read": lambda: handle.read(arrays.pop(), file),
        "gather": lambda: handle.gather(file, [0], size, arrays.pop()),
        "read_many": lambda: handle.read_many([(arrays.pop(), file, 0)]),
        "read_into": lambda: nvmeio.read_into(arrays.pop(), file),
    }
    if way == "read_into":
        # It uses the default handle, configured by the environment.
        handle.close()
        os.environ |= {"NVMEIO_QUEUE_DEPTH": "2", "NVMEIO_ENGINE": engine}
        handle = nvmeio.default_handle()

    def in_a_block():
        with nvmeio.Handle(queue_depth=2, engine=engine) as handle:
            blocks.append((handle, handle.submit_read(arrays.pop(), file)))

    blocks = []
    calls["with"] = in_a_block
    returned, still_inside = threading.Event(), []

    def press():
        press_ctrl_c(faults)
        still_inside.append(not returned.wait(0.3))
        if presses == 2:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            faults.set()

    presser = threading.Thread(target=press)
    faults.set(read={"held": True})
    presser.start()
    came = notes = None
    try:
        calls[way]()
    except KeyboardInterrupt as interruption:
        came = True
        notes = getattr(interruption, "__notes__", [])
    returned.set()
    pending = (blocks[0][0] if blocks else handle).pending
    still_held = held() is not None
    presser.join()
    faults.set()
    for left, request in blocks:
        assert left.closed
        assert request.wait() == size
        left.close()
    handle.close()
    return {
        "interrupted": came,
        "still_inside": still_inside,
        "pending": pending,
        "still_held": still_held,
        "notes": notes,
        # Blocks that were never submitted keep the canaries of Guarded.
        "dropped": way != "with" and bool((guarded.array[-4096:] == Guarded.CANARY).all()),
        "fired": faults.fired(),
    }


class Sweep:
    """Interrupts a call at each of its instructions at which Python looks for signals.

    A trace function written in C notes the signal, as the system would between two
    instructions, and Python calls the handler where it would call it for a real one.
    """

    # Python looks for signals after calls, at the beginning of functions and in loops.
    POINTS = ("CALL", "BEFORE_WITH", "WITH_EXCEPT", "JUMP_BACKWARD", "SEND", "FOR_ITER")
    # Functions of Python's own that nvmeio relies on.
    LIBRARY = ("contextlib.py", "threading.py", "weakref.py", "_weakrefset.py")

    def __init__(self, within="/nvmeio/"):
        self.within = within
        note = ctypes.PyDLL(None)["PyErr_SetInterrupt"]
        note.argtypes, note.restype = [ctypes.py_object] * 3, None
        self.note = note
        # Frames, and Python for new ones, hold the trace functions alone otherwise, and
        # Python 3.11 uses them after `strike` has taken them away.
        self.step, self.trace = self.step, self.trace
        self.points = {}

    def trace(self, frame, event, arg):
        code = frame.f_code
        name = os.path.basename(code.co_filename)
        if code not in self.points:
            wanted = self.within in code.co_filename or name in self.LIBRARY
            steps = list(dis.get_instructions(code)) if wanted else []
            self.points[code] = {
                step.offset
                for step, following in itertools.pairwise(steps)
                if following.opname.startswith(self.POINTS)
            }
        if not self.points[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame, event, arg):
        if event != "opcode" or frame.f_lasti not in self.points[frame.f_code]:
            return self.step
        place = frame.f_code, frame.f_lasti
        self.seen.append(place)
        if len(self.seen) - 1 != self.target:
            return self.step
        # The next event of this frame notes the signal.
        return self.note

    def run(self, call, target=None, again=0):
        """Call a function, interrupted at a place; return whether that was raised.

        With `again`, interrupt it once more, so many places later: in what cleans up.
        """
        self.seen, self.target, self.again = [], target, again
        before = signal.signal(signal.SIGINT, self.strike)
        came = False
        try:
            try:
                sys.settrace(self.trace)
                call()
            finally:
                # The last one may come here.
                sys.settrace(None)
        except KeyboardInterrupt:
            came = True
        signal.signal(signal.SIGINT, before)
        return came

    def strike(self, _, frame):
        # The trace function would note it again.
        while frame is not None:
            if frame.f_trace is self.note:
                frame.f_trace = self.step if self.again else None
            frame = frame.f_back
        if not self.again:
            sys.settrace(None)
        self.target, self.again = len(self.seen) + self.again - 1, 0
        raise KeyboardInterrupt

    def place(self):
        """Return the function and the line that were interrupted."""
        code, offset = self.seen[min(self.target, len(self.seen) - 1)]
        lines = [line for begin, end, line in code.co_lines() if begin <= offset < end]
        return f"{os.path.basename(code.co_filename)}:{code.co_name}", lines[0]

    def targets(self, call):
        """Return which events to interrupt: each place, the first two times."""
        self.run(call)
        count, found = Counter(), []
        for index, place in enumerate(self.seen):
            count[place] += 1
            if count[place] <= 2:
                found.append(index)
        return found


class Ground:
    """Files, arrays, and what stays open, for the calls that are interrupted."""

    def __init__(self, folder, engine="auto"):
        self.folder = folder
        self.engine = engine
        self.data = make_file(self.path("data"), 10_000)
        self.array = np.arange(1000.0).reshape(100, 10)
        for name in ("rows", "kept"):
            np.save(self.path(f"{name}.npy"), self.array)
        self.array.tofile(self.path("rows.raw"))
        self.memory = bytearray(10_000)
        save_file({"a": self.array}, self.path("model"))
        save_sharded(dict.fromkeys("ab", self.array), self.path("sharded"), 8000)
        os.mkdir(self.path("steps"))
        self.handle = nvmeio.Handle(workers=1, engine=engine)
        self.op = nvmeio.aio_handle(engine=engine)
        self.file = nvmeio.File(self.path("kept"), "w+")
        self.rows = nvmeio.ArrayFile(self.path("kept.npy"), mode="r+")
        nvmeio.default_handle()
        # The thread that calls callbacks ends a second after the last.
        caller.IDLE_MS = 0

    def path(self, name):
        return f"{self.folder}/{name}"

    def change(self):
        """Give the memory that is written other contents."""
        self.array += 1
        self.memory[:] = self.array.tobytes() + bytes(2000)

    def content(self, name):
        """Return the bytes of a file."""
        with open(self.path(name), "rb") as file:
            return file.read()

    def requests(self, count=3):
        return [
            self.handle.submit_read(bytearray(4096), self.path("data"))
            for _ in range(count)
        ]


def call_back(ground):
    with nvmeio.Handle(engine=ground.engine) as handle:
        request = handle.submit_read(bytearray(4096), ground.path("data"))
        request.add_done_callback(lambda _: None)


def append_rows(ground, name, **options):
    with nvmeio.ArrayFile(ground.path(name), mode="r+", **options) as rows:
        rows.append(np.zeros((1, 10)))


def iterate(ground):
    for request in nvmeio.as_completed(ground.requests()):
        request.wait()


def iterate_again(ground):
    """Go on after an interruption; no request is missed, and none comes twice."""
    requests, seen, interruption = ground.requests(), [], None
    completions = nvmeio.as_completed(requests)
    while interruption is None or len(seen) < len(requests):
        try:
            for request in completions:
                seen.append(request)
            break
        except KeyboardInterrupt as error:
            interruption = error
    assert len(seen) == len(requests)
    assert {*seen} == {*requests}
    if interruption is not None:
        raise interruption


def many(ground, call):
    call([(bytearray(100), ground.path("data"), 100 * n) for n in range(3)])


def refresh(ground, name, **options):
    with nvmeio.ArrayFile(ground.path(name), **options) as rows:
        rows.refresh()


def index_rows(ground):
    with nvmeio.ArrayFile(ground.path("rows.npy"), mode="r+") as rows:
        rows[[3, 1]] = rows[[1, 3]]
        rows[:, 2] = rows[:, 3]
        rows.prefetch(slice(0, 4)).wait()
        rows.flush()


def use_file(ground):
    with nvmeio.File(ground.path("new"), "w+") as file:
        file.write(b"12345\n")
        file.seek(0)
        file.readline()
        file.truncate(2)
        file.fsync()


def use_kept_file(ground):
    """Use a file that an earlier interruption must have left usable."""
    ground.file.seek(0)
    ground.file.write(b"12345\n")
    ground.handle.submit_write(ground.memory, ground.file, 6).wait()
    ground.file.seek(0)
    ground.file.readall()
    ground.file.fsync()


def use_kept_rows(ground):
    """Do the same with an array."""
    ground.rows.append(ground.array[:1])
    ground.rows.refresh()
    ground.rows[:2] = ground.rows[[2, 1]]
    ground.rows.submit_setitem(0, ground.array[5]).wait()
    ground.rows.flush()


def use_op(ground):
    """Use DeepSpeed's operator, whose memory is pinned."""
    pinned = nvmeio.empty(10_000, np.uint8)
    ground.op.async_pread(pinned, ground.path("data"))
    ground.op.wait()
    ground.op.sync_pwrite(pinned, ground.path("new"))


def use_steps(ground):
    """Save a checkpoint over the last, and restore it."""
    with Checkpointer(ground.path("steps"), keep=1) as checkpointer:
        checkpointer.save(1, {"a": ground.array})
        checkpointer.restore()


def replace_folder(ground):
    with atomic_directory(ground.path("steps/folder"), replace=True) as folder:
        (folder / "file").write_bytes(ground.memory)


RAW = {"dtype": float, "shape": (-1, 10)}
SWEPT = {
    "write_file": lambda g: nvmeio.write_file(g.memory, g.path("new"), sync=True),
    "write_file in place": lambda g: nvmeio.write_file(
        g.memory, g.path("new"), sync=True, atomic=False
    ),
    "read_file": lambda g: nvmeio.read_file(g.path("data")),
    "read_into": lambda g: nvmeio.read_into(g.memory, g.path("data")),
    "save": lambda g: nvmeio.save(g.path("new"), g.array, sync=True),
    "load": lambda g: nvmeio.load(g.path("rows.npy")),
    "create": lambda g: nvmeio.ArrayFile.create(
        g.path("new"), (3, 2), int, overwrite=True
    ).flush(),
    "append": lambda g: append_rows(g, "rows.npy"),
    "append to raw bytes": lambda g: append_rows(g, "rows.raw", **RAW),
    "refresh": lambda g: refresh(g, "rows.npy"),
    "refresh raw bytes": lambda g: refresh(g, "rows.raw", **RAW),
    "index": index_rows,
    "file": use_file,
    "submit": lambda g: g.handle.submit_write(g.memory, g.path("new")).wait(),
    "wait": lambda g: nvmeio.wait(g.requests()),
    "as_completed": iterate,
    "as_completed, again": iterate_again,
    "callback": call_back,
    "read_many": lambda g: many(g, g.handle.read_many),
    "write_many": lambda g: many(
        g,
        lambda items: g.handle.write_many([(b, g.path("new"), n) for b, _, n in items]),
    ),
    "gather": lambda g: g.handle.gather(g.path("data"), [5, 900], 10, bytearray(20)),
    "scatter": lambda g: g.handle.scatter(g.path("new"), [5, 900], 10, bytes(20)),
    "save_file": lambda g: save_file({"a": g.array}, g.path("new")),
    "load_file": lambda g: load_file(g.path("model")),
    "load_sharded": lambda g: load_sharded(g.path("sharded"), framework="np"),
    "profile": lambda g: nvmeio.profiles.load_profile(g.folder),
    "kept file": use_kept_file,
    "kept rows": use_kept_rows,
    "op": use_op,
    "checkpoint": use_steps,
    "folder": replace_folder,
}

# What these leave, and what it must be: after an interruption, that or what was there.
LEFT = {
    "write_file": (lambda g: g.content("new"), lambda g, _: bytes(g.memory)),
    "save": (lambda g: np.load(g.path("new")), lambda g, _: g.array),
    "create": (lambda g: np.load(g.path("new")), lambda *_: np.zeros((3, 2))),
    "append": (
        lambda g: np.load(g.path("rows.npy")),
        lambda _, before: np.concatenate([before, np.zeros((1, 10))]),
    ),
    "append to raw bytes": (
        lambda g: np.fromfile(g.path("rows.raw")),
        lambda _, before: np.concatenate([before, np.zeros(10)]),
    ),
    "save_file": (lambda g: load_file(g.path("new"))["a"], lambda g, _: g.array),
    "folder": (lambda g: g.content("steps/folder/file"), lambda g, _: bytes(g.memory)),
}


class Remains:
    """Finds what interrupted calls leave: descriptors, locks, files, threads, requests."""

    def __init__(self, ground, name):
        self.ground = ground
        self.read, self.expected = LEFT.get(name, (None, None))
        self.names = {*names_below(ground.folder), "new"}
        self.before = settled(Counter())

    def begin(self):
        """Note what there is, and give the next call something else to write."""
        self.content = self.read and self.read(self.ground)
        self.ground.change()

    def is_done(self):
        """Return whether the call has left what it should."""
        return self.read is None or np.array_equal(
            self.read(self.ground), self.expected(self.ground, self.content)
        )

    def check(self, call):
        """Assert that the call works without interruptions."""
        self.begin()
        call()
        assert self.is_done()

    def look(self):
        """Return what the last call, which was interrupted, has left."""
        left = {}
        if not self.is_done() and not np.array_equal(self.read(self.ground), self.content):
            left["content"] = "neither the old one nor the new one"
        ground = self.ground
        for handle in (ground.handle, ground.op.handle, nvmeio.default_handle()):
            handle.drain(30)
            if handle.pending:
                left["requests"] = handle.pending
        new, locked = self.files_left()
        if ERRORS_FORM_CYCLES and (new or locked):
            gc.collect()
            new, locked = self.files_left()
        self.names |= new
        left |= {"files": sorted(new)} if new else {}
        left |= {"locks": locked} if locked else {}
        after = open_now() - self.before and settled(self.before)
        if after:
            left["open"], self.before = after, self.before | after
        return left

    def files_left(self):
        """Return the new names, and the files that are locked."""
        found = names_below(self.ground.folder)
        files = [each for each in found if not each.endswith("/")]
        return found - self.names, [
            each for each in files if is_locked(self.ground.path(each))
        ]


def is_locked(path):
    """Return whether somebody has a lock on a file."""
    with open(path, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def names_below(folder):
    """Return the files in a folder and its folders, and the folders, with a slash."""
    return {
        os.path.relpath(os.path.join(path, name), folder) + "/" * (name in folders)
        for path, folders, names in os.walk(folder)
        for name in folders + names
    }


def open_now():
    """Return where each open descriptor leads, and the number of threads."""
    found = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{name}").partition("#")[0]] += 1
    found["threads"] = thread_count()
    return found


def settled(before):
    """Return what is open more than before, once threads have ended."""
    gc.collect()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and (
        caller.CALLER._thread is not None or (before and open_now() - before)
    ):
        time.sleep(0.001)
    return open_now() - before


def interrupt_everywhere(folder, part, parts):
    """Interrupt calls of SWEPT at some places; report what was left, and how often."""
    ground, sweep = Ground(folder), Sweep()
    found = {}
    for name, function in SWEPT.items():
        call = partial(function, ground)
        call()
        targets = sweep.targets(call)[part::parts]
        remains, came, bad = Remains(ground, name), 0, {}
        # Every third also a second time, 1 to 6 places later.
        twice = [(target, 1 + index % 6) for index, target in enumerate(targets[::3])]
        for target, again in [*((target, 0) for target in targets), *twice]:
            remains.begin()
            came += sweep.run(call, target, again)
            if left := remains.look():
                bad[" at ".join(map(str, sweep.place()))] = left
        remains.check(call)
        found[name] = {"places": len(targets), "came": came, "left": bad}
    report(found)


class Interrupter:
    """Sends SIGINT at a system call of the C library, by its test build."""

    def __init__(self):
        library = ctypes.CDLL(f"{os.path.dirname(nvmeio.__file__)}/lib/libnvmeio.so")
        self.configure = library["nvmeio_fault_configure"]
        self.interrupted = library["nvmeio_fault_interrupted"]
        self.interrupted.restype = ctypes.c_char_p
        # The interpreter's calls go through stress/process_calls.c, which is preloaded.
        hook = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "process_calls_interrupt")
        hook.value = ctypes.cast(library["nvmeio_fault_interrupt"], ctypes.c_void_p).value

    def run(self, call, numbers):
        """Call a function with SIGINT at its system calls of these numbers, from 1.

        Return the name of the last of them, or "" if there were fewer, and whether the
        signal was lost: it neither raised KeyboardInterrupt nor came after the call.
        """
        self.late = raised = False
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self.configure(",".join(f"sigint@{n}" for n in numbers).encode())
                call()
            finally:
                # Another one may come here, or one that a worker has just sent.
                signal.signal(signal.SIGINT, self.come_late)
        except KeyboardInterrupt:
            raised = True
        signal.signal(signal.SIGINT, self.come_late)
        at = (self.interrupted() or b"").decode()
        deadline = time.monotonic() + 1
        while at and not (raised or self.late) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.configure(b"")
        return at, bool(at) and not (raised or self.late)

    def come_late(self, *_):
        """Note a signal of a worker that went on after the call."""
        self.late = True


def interrupt_system_calls(folder, engine):
    """Interrupt each call of SWEPT at each system call; report them, and what was left."""
    ground, interrupter = Ground(folder, engine), Interrupter()
    found = {}
    for name, function in SWEPT.items():
        call = partial(function, ground)
        call()
        remains, made, bad = Remains(ground, name), Counter(), {}
        for number in itertools.count(1):
            remains.begin()
            at, lost = interrupter.run(call, [number])
            left = remains.look()
            if not at:
                break
            made[at] += 1
            # Also a second time, 1 to 6 calls later: in what cleans up.
            remains.begin()
            _, lost_again = interrupter.run(call, [number, number + 1 + number % 6])
            left |= remains.look()
            if lost or lost_again:
                left["signal"] = "lost"
            if left:
                bad[f"{number}: {at}"] = left
        remains.check(call)
        found[name] = {"calls": made, "left": bad}
    report(found)
