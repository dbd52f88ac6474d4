"""A pytest plugin: child processes for the tests of faults, forks, signals and exits.

A child runs a function of ``workloads`` or ``stress/cases``.  This module starts it, lets
strace inject its faults, and stops it with a watchdog, so that a hang becomes a failure.
Children that a failed or interrupted test has left running are killed after the test.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

TESTS = Path(__file__).resolve().parent

# A child that takes longer is taken to hang.  Two processors and a sanitizer make all slow;
# emulators need still more time.
WATCHDOG_S = int(os.environ.get("NVMEIO_TEST_WATCHDOG_S", "90"))

# `make asan` sets these for Python only; tools of the system must not inherit them.
PRELOADED = ("LD_PRELOAD", "PYTHONPATH")


def under_sanitizer(*libraries):
    """Return whether one of these sanitizer libraries is preloaded."""
    return any(library in os.environ.get("LD_PRELOAD", "") for library in libraries)


def skip_under_asan(why):
    """Skip under AddressSanitizer."""
    if under_sanitizer("libasan"):
        pytest.skip(f"AddressSanitizer {why}")


def sanitized():
    """Return whether AddressSanitizer or ThreadSanitizer is preloaded."""
    return under_sanitizer("libasan", "libtsan")


def skip_sanitized(why):
    """Skip under AddressSanitizer or ThreadSanitizer."""
    if sanitized():
        pytest.skip(f"sanitizers {why}")


def can_fork():
    """Return whether a process with busy threads may fork, and its child start threads.

    ThreadSanitizer forbids it.  Under AddressSanitizer the child may inherit a held lock of
    the allocator, and hang (gcc 12).
    """
    return not sanitized()


def preloaded(folder, source):
    """Compile functions in C that replace a child's own, and return its environment."""
    (folder / "preloaded.c").write_text(source)
    words = [os.environ.get("CC", "cc"), "-D_GNU_SOURCE", "-shared", "-fPIC"]
    words += [folder / "preloaded.c", "-o", folder / "preloaded.so", "-ldl"]
    subprocess.run(words, check=True)
    return {**os.environ, "LD_PRELOAD": str(folder / "preloaded.so")}


def system_environment():
    """Return the environment for tools of the system."""
    return {key: value for key, value in os.environ.items() if key not in PRELOADED}


def find_tool(name):
    """Return the path of a system tool, or None; also look where only root's PATH leads."""
    path = os.environ["PATH"] + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
    return shutil.which(name, path=path)


def run_tool(*command):
    """Run a system tool and return its output; raise if it fails."""
    done = subprocess.run(
        [find_tool(str(command[0])) or command[0], *map(str, command[1:])],
        env=system_environment(),
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
    return done.stdout


@functools.cache
def strace_refusal():
    """Return why strace cannot trace here, or None; tried once, on a child of its own."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(
        ["strace", "-f", "-qqq", "-o", os.devnull, "true"],
        env=system_environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    complaint = done.stderr.strip()
    return f"strace cannot trace here: {complaint}" if done.returncode else None


def need_strace():
    """Skip if strace cannot trace here; any other failure of strace is an error."""
    if refusal := strace_refusal():
        pytest.skip(refusal)


def threads_of(pid):
    """Yield a line for each thread of a process, with its place in the kernel."""
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        with contextlib.suppress(OSError):
            words = [(task / name).read_text().strip() for name in ("wchan", "syscall")]
            yield f"thread {task.name}: {' '.join(words)}"


@dataclass
class Outcome:
    """What a child said and how it ended."""

    status: int
    stderr: str
    reports: list
    injected: Counter
    log: str = ""

    @property
    def report(self):
        """The only report of a child that succeeded and printed nothing else."""
        assert self.status == 0, self.stderr
        assert len(self.reports) == 1, self.reports
        return self.reports[0]


class Child:
    """A process that runs one function of a package, by default of workloads.

    It prints a JSON line for each report.  The line ``"ready"`` means that it waits for
    ``go()``.  ``faults`` are expressions for strace's ``inject=``; strace attaches before
    ``go()`` and counts system calls from there on.  ``traced`` names more system calls to
    log.  ``command`` is another program to run instead of Python.
    """

    running: ClassVar[set] = set()

    def __init__(
        self,
        name,
        *,
        package="workloads",
        watchdog_s=WATCHDOG_S,
        flags=(),
        prefix=(),
        faults=(),
        traced=(),
        only=None,
        env=(),
        command=None,
        **args,
    ):
        self.name = name
        self.faults = list(faults)
        self.traced = list(traced)
        self.only = only
        self.tracer = None
        self.log = None
        self.reports = []
        self.stderr = []
        self.timed_out = False
        self.threads = []
        environment = {**os.environ, **dict(env)}
        folders = [str(TESTS), str(TESTS / "stress"), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        if command is None:
            command = [sys.executable, *flags, "-m", package, name, json.dumps(args)]
        self.process = subprocess.Popen(
            [*prefix, *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.add(self)
        self.reader = threading.Thread(
            target=lambda: self.stderr.extend(self.process.stderr), daemon=True
        )
        self.reader.start()
        self.watchdog = threading.Timer(watchdog_s, self._expire)
        self.watchdog.daemon = True
        self.watchdog.start()

    def _expire(self):
        self.timed_out = True
        self.threads = list(threads_of(self.process.pid))
        # faulthandler prints where the threads are; then the child is killed.
        self.process.send_signal(signal.SIGABRT)
        time.sleep(1)
        self._kill()

    def _kill(self):
        """Kill the child and everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def next_report(self):
        """Wait for the child's next line; None when it has ended."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ready(self):
        """Wait until the child waits for ``go()``."""
        report = self.next_report()
        if report != "ready":
            self._kill()
            pytest.fail(f"{self.name} said {report!r}\n{self.finish(check=False)}")
        if self.faults or self.traced:
            self._attach()

    def _attach(self):
        calls = [*self.traced, *(fault.partition(":")[0] for fault in self.faults)]
        command = ["strace", "-f", "-qqq", "-y", "-e", f"trace={','.join(calls)}"]
        command += [word for fault in self.faults for word in ("-e", f"inject={fault}")]
        if self.only:
            command += ["-P", str(self.only)]
        # Closed by _end().
        self.log = tempfile.NamedTemporaryFile("r", prefix="nvmeio-strace-")  # noqa: SIM115
        command += ["-o", self.log.name, "-p", str(self.process.pid)]
        self.tracer = subprocess.Popen(
            command, env=system_environment(), stderr=subprocess.PIPE, text=True
        )
        self._await_tracer()

    def _await_tracer(self):
        """Wait until strace traces every thread of the child; raise if strace has ended."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(
            "TracerPid:\t0\n" in (task / "status").read_text() for task in tasks.iterdir()
        ):
            if self.tracer.poll() is not None:
                complaint = self.tracer.stderr.read()
                self._kill()
                pytest.fail(f"strace has ended: {complaint}\n{self.finish(check=False)}")
            time.sleep(0.01)

    def go(self):
        """Let the child go on."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def stop(self):
        """Kill the child and everything that it has started, and drop its reports."""
        self._kill()
        self._end()

    def finish(self, *, check=True):
        """Wait for the child to end, and return its Outcome."""
        try:
            for line in self.process.stdout:
                self.reports.append(json.loads(line))
            status = self.process.wait()
            log = self._read_log() if self.tracer else ""
        except BaseException:
            # Ctrl-C or a test's timeout: the fixtures that the child uses go next.
            self.stop()
            raise
        self._end()
        stderr = "".join(self.stderr)
        if check and self.timed_out:
            words = [f"{self.name} hangs", str(self.reports), stderr, *self.threads]
            pytest.fail("\n".join([*words, log[-5000:]]))
        # Other calls may come between the two halves of one: `<... pread64 resumed>`.
        pattern = r"(\w+)(?:\(| resumed>)[^\n]*\(INJECTED\)"
        injected = Counter(re.findall(pattern, log))
        return Outcome(status, stderr, self.reports, injected, log)

    def _read_log(self):
        """Wait for strace to end; return its log."""
        self.tracer.wait()
        return self.log.read()

    def _end(self):
        """Release the watchdog and strace of a child that has ended."""
        self.process.wait()
        self.watchdog.cancel()
        self.reader.join()
        if self.tracer:
            self.tracer.wait()
            self.tracer.stderr.close()
            self.log.close()
        # A child that ended before go() has not read its input.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()
        self.running.discard(self)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown():
    """Stop the children of a failed test before its fixtures are torn down."""
    for child in list(Child.running):
        child.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    """Stop the children of an interrupted test."""
    pytest_runtest_teardown()


def run_child(name, **options):
    """Run a function of workloads until it ends."""
    return Child(name, **options).finish()


def run_with_faults(name, *faults, **options):
    """Run a function of workloads that pauses once; inject faults from there on."""
    need_strace()
    child = Child(name, faults=faults, **options)
    child.ready()
    child.go()
    outcome = child.finish()
    for fault in faults:
        call = fault.partition(":")[0]
        assert outcome.injected[call] > 0, f"{call} was never made: {outcome}"
    return outcome


def without_capabilities(*names):
    """Return a command prefix that drops some of root's capabilities."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    return ["setpriv", "--bounding-set", ",".join(f"-{name}" for name in names)]


def as_nobody():
    """Return a command prefix that runs as nobody, because root escapes some limits."""
    prefix = without_capabilities("ipc_lock", "sys_resource", "sys_admin")
    if prefix:
        # Files of root must stay readable.
        prefix += ["--reuid", "65534", "--clear-groups"]
        prefix += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return prefix
