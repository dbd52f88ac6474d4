"""Transfer and wait while signals are sent to every thread."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import nvmeio
from helpers import PAGE, Guarded, pattern
from workloads.common import (
    gather_checked,
    make_file,
    pause,
    read_checked,
    read_small,
    report,
    write_checked,
)

SIZE = 256 << 10
# Real-time signals are queued: each one is delivered, none are merged.
PELT = signal.SIGRTMIN + 2
ALARM_S = 50e-6


class Pelter(threading.Thread):
    """Sends a number of signals to other threads, one after the other."""

    def __init__(self, amount):
        super().__init__()
        self.amount = amount
        self.targets = []
        self.sent = 0
        self.over = threading.Event()

    def run(self):
        while self.sent < self.amount:
            for target in self.targets:
                try:
                    signal.pthread_kill(target, PELT)
                    self.sent += 1
                except BlockingIOError:
                    pass  # the queue of signals is full
            time.sleep(ALARM_S)
        self.over.set()


def storm(folder, engine, amount):
    """Wait, read and gather in threads, and write in the main thread, all under signals."""
    path = f"{folder}/storm"
    data = make_file(path, SIZE)
    options = {"block_size": 16384, "queue_depth": 4, "engine": engine}
    handles = [nvmeio.Handle(**options) for _ in range(2)]
    pelter = Pelter(amount)
    alarms = 0

    def count_alarm(*_):
        nonlocal alarms
        alarms += 1

    def work(step):
        pelter.targets.append(threading.get_ident())
        rounds = 0
        while not pelter.over.is_set():
            step(handles[rounds % 2], rounds)
            rounds += 1
        return rounds

    steps = [
        lambda handle, number: read_checked(handle, path, data[number % 9 :], number % 9),
        lambda handle, number: read_small(handle, path, data[: PAGE + number % 99]),
        lambda handle, number: gather_checked(handle, path, data),
    ]

    def write(handle, number):
        # A drain, and an fsync after a write.
        changed = pattern(SIZE // 2, number)
        write_checked(handle, f"{path}-written", changed)
        handle.fsync(f"{path}-written")
        parts = [Guarded(SIZE // 4) for _ in range(4)]
        for index, part in enumerate(parts):
            handle.submit_read(part.array, path, index * SIZE // 4)
        handle.drain()
        assert b"".join(part.content() for part in parts) == data

    signal.signal(PELT, lambda *_: None)
    signal.signal(signal.SIGALRM, count_alarm)
    with ThreadPoolExecutor(len(steps)) as pool:
        workers = [pool.submit(work, step) for step in steps]
        pelter.start()
        signal.setitimer(signal.ITIMER_REAL, ALARM_S, ALARM_S)
        try:
            rounds = [work(write)]
        finally:
            pelter.over.set()
            signal.setitimer(signal.ITIMER_REAL, 0)
        rounds += [worker.result() for worker in workers]
    pelter.join()
    assert [handle.pending for handle in handles] == [0, 0]
    retries = sum(handle.stats()["retries"] for handle in handles)
    for handle in handles:
        handle.close()
    report({"sent": pelter.sent, "alarms": alarms, "rounds": rounds, "retries": retries})


def interrupted_calls(folder, engine, rounds):
    """Read and write small blocks one at a time, each with a call or two."""
    path = f"{folder}/calls"
    data = make_file(path, 1 << 20)
    options = {"block_size": PAGE, "queue_depth": 1, "workers": 2}
    with nvmeio.Handle(engine=engine, **options) as handle:
        read_small(handle, path, data[:PAGE])
        pause()
        for number in range(rounds):
            read_checked(handle, path, data)
            read_small(handle, path, data[: PAGE * (1 + number % 16)])
            gather_checked(handle, path, data)
            write_checked(handle, f"{path}-written", data[number % PAGE :][:SIZE])
            handle.fsync(f"{path}-written")
        assert handle.pending == 0
        report({"retries": handle.stats()["retries"]})
