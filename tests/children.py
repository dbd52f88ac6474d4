"""A pytest plugin: child processes for the tests of faults, forks, signals and exits.

What a child does is a function in ``workloads``, or in ``stress/trials``; here it is
started, its faults are made by strace, and it is stopped by a watchdog, so that nothing
hangs but fails.  What a test has started and not waited for, because it failed or was
interrupted, is killed behind it.
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

# A child that takes longer hangs.  Two processors and a sanitizer make all of them slow.
WATCHDOG_S = 90

# What `make asan` sets is for Python alone, not for tools of the system.
PRELOADED = ("LD_PRELOAD", "PYTHONPATH")


def under_sanitizer(*libraries):
    """Tell whether one of these libraries stands between the tests and the system."""
    return any(library in os.environ.get("LD_PRELOAD", "") for library in libraries)


def skip_under_asan(why):
    """Skip where AddressSanitizer stands between the tests and the system."""
    if under_sanitizer("libasan"):
        pytest.skip(f"AddressSanitizer {why}")


def sanitized():
    """Tell whether AddressSanitizer or ThreadSanitizer does."""
    return under_sanitizer("libasan", "libtsan")


def skip_sanitized(why):
    """Skip where one of the two does."""
    if sanitized():
        pytest.skip(f"sanitizers {why}")


def can_fork():
    """Tell whether a process with busy threads may fork, and its child start some.

    Under ThreadSanitizer it may not; under AddressSanitizer the child may inherit a lock of
    its allocator that nobody will open, and hang (gcc 12).
    """
    return not sanitized()


def system_environment():
    """Return the environment for tools of the system."""
    return {key: value for key, value in os.environ.items() if key not in PRELOADED}


def find_tool(name):
    """Return the path of a tool of the system, or None; PATH may lack those of root."""
    path = os.environ["PATH"] + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
    return shutil.which(name, path=path)


def run_tool(*command):
    """Run a tool of the system and return what it says; its failure is an error."""
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
    """Return why strace cannot trace here, tried once on a child of its own, or None."""
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
    """Skip where strace cannot trace; where it can, what it fails in is an error."""
    if refusal := strace_refusal():
        pytest.skip(refusal)


def threads_of(pid):
    """Yield a line for each thread of a process: where in the kernel it is."""
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
        """The one report of a child that went well, and said nothing else."""
        assert self.status == 0, self.stderr
        assert len(self.reports) == 1, self.reports
        return self.reports[0]


class Child:
    """A process that runs one function of a package, workloads if none is named.

    It prints a JSON line for each report; a line ``"ready"`` means that it waits for
    ``go()``.  With ``faults``, strace is attached before that: expressions of its
    ``inject=``, which count system calls from there on.  ``traced`` names system calls
    that it logs besides.  With ``command`` another program takes Python's place.
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
        # Says where its threads are, for faulthandler listens; then it has to go.
        self.process.send_signal(signal.SIGABRT)
        time.sleep(1)
        self._kill()

    def _kill(self):
        """Kill it, and what it has started."""
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
        command = ["strace", "-f", "-qqq", "-e", f"trace={','.join(calls)}"]
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
        """Every thread of the child has a tracer, and strace has nothing to complain of."""
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
        """Kill it and all that it has started, whatever it was about to say."""
        self._kill()
        self._end()

    def finish(self, *, check=True):
        """Wait for the end of the child, and return its Outcome."""
        try:
            for line in self.process.stdout:
                self.reports.append(json.loads(line))
            status = self.process.wait()
            log = self._read_log() if self.tracer else ""
        except BaseException:
            # Ctrl-C, or the timeout of a test: what it uses may be taken down next.
            self.stop()
            raise
        self._end()
        stderr = "".join(self.stderr)
        if check and self.timed_out:
            words = [f"{self.name} hangs", str(self.reports), stderr, *self.threads]
            pytest.fail("\n".join([*words, log[-5000:]]))
        # Between the two halves of a call others may stand: `<... pread64 resumed>`.
        pattern = r"(\w+)(?:\(| resumed>)[^\n]*\(INJECTED\)"
        injected = Counter(re.findall(pattern, log))
        return Outcome(status, stderr, self.reports, injected, log)

    def _read_log(self):
        """Wait for the end of strace; return what it has logged."""
        self.tracer.wait()
        return self.log.read()

    def _end(self):
        """Let go of what watched it, when it has ended."""
        self.process.wait()
        self.watchdog.cancel()
        self.reader.join()
        if self.tracer:
            self.tracer.wait()
            self.tracer.stderr.close()
            self.log.close()
        # One that ended before it was told to go has not read that.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()
        self.running.discard(self)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown():
    """Stop what a test that failed has not waited for, before what it uses goes."""
    for child in list(Child.running):
        child.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    """Stop the same of a test that was interrupted."""
    pytest_runtest_teardown()


def run_child(name, **options):
    """Run a function of workloads to its end."""
    return Child(name, **options).finish()


def run_with_faults(name, *faults, **options):
    """Run a function of workloads that pauses once; from there on faults are made."""
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
    """Return the words that start a command without some capabilities of root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    return ["setpriv", "--bounding-set", ",".join(f"-{name}" for name in names)]


def as_nobody():
    """Return the words that start a command for which limits hold that do not for root."""
    prefix = without_capabilities("ipc_lock", "sys_resource", "sys_admin")
    if prefix:
        # What is root's must stay readable.
        prefix += ["--reuid", "65534", "--clear-groups"]
        prefix += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return prefix
