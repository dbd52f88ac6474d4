"""Ctrl-C at each system call leaves nothing: no lock, thread, descriptor, file, request.

tests/test_signals.py interrupts the same calls at each instruction of Python.  Here SIGINT
comes at each system call of the C library, in any of its threads, and of the interpreter
and the modules: the first one, the second one, and so on, until a call makes no more.  One
that may wait returns EINTR then.
"""

import pytest

from children import run_child
from helpers import ENGINES


@pytest.mark.parametrize("engine", ENGINES)
def test_ctrl_c_at_each_system_call_leaves_nothing(
    engine, tmp_path, faulty_package, process_calls, patience_s, record_property
):
    """Each call is interrupted at each of its system calls, also a second time."""
    env = {"PYTHONPATH": str(faulty_package), "LD_PRELOAD": str(process_calls)}
    # With one block in flight, the engine "threads" never starts another thread.
    env["NVMEIO_QUEUE_DEPTH"] = "1"
    found = run_child(
        "interrupt_system_calls",
        watchdog_s=patience_s,
        folder=str(tmp_path),
        engine=engine,
        env={**env, "NVMEIO_ENGINE": engine},
    ).report
    assert {name: report["left"] for name, report in found.items() if report["left"]} == {}
    assert all(report["calls"] for report in found.values())
    total = sum(sum(report["calls"].values()) for report in found.values())
    record_property("system calls", total)
