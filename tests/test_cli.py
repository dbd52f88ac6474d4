"""The frame of the command line, which all commands share."""

import argparse
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import types
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import nvmeio
from children import WATCHDOG_S
from commands import call_nvmeio, command, python
from commands import nvmeio as run_nvmeio
from nvmeio import _cli as cli
from nvmeio._cli import COMMANDS, main, terminal
from nvmeio._cli.arguments import (
    CommandError,
    UsageError,
    hyphenated,
    number,
    seconds,
    size,
)
from nvmeio._cli.terminal import Terminal

# Arguments.


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("64K", 64 << 10),
        ("64k", 64 << 10),
        ("64KiB", 64 << 10),
        ("64 KB", 64 << 10),
        ("1.5M", 3 << 19),
        ("2G", 2 << 30),
        (" 1T ", 1 << 40),
        ("512B", 512),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_read(text, nbytes):
    assert size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "K", "1.3K", "0.5", "1e6", "1P", "1 2", "4096 bytes"),
        # Sizes that no file can have, and characters that Python also accepts as digits.
        *("8388608T", "9" * 400, "1\u212a", "\u0664K"),
    ],
)
def test_an_invalid_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="such as 4096, 64K"):
        size(text)


@pytest.mark.parametrize(
    ("text", "duration"),
    [("30", 30.0), ("90s", 90.0), ("0.5s", 0.5), ("2m", 120.0), ("1.5 h", 5400.0)],
)
def test_a_time_is_read(text, duration):
    assert seconds(text) == duration


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "1d", "1M", "s", "1m30s", "inf"])
def test_an_invalid_time_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="more than 0, such as 30, 90s"):
        seconds(text)


@pytest.mark.parametrize("text", ["", "0", "9", "-3", "3.0", "1" * 30, "\u0665"])
def test_a_number_outside_the_limits_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a whole number from 1 to 8"):
        number(1, 8)(text)


def test_a_number_within_the_limits_is_read():
    assert [number(1, 8)(text) for text in ("1", "8", " 5 ")] == [1, 8, 5]


@given(st.text() | st.from_regex(r"\d+(\.\d+)? ?[kKmMgGtTsh]?(i?B)?", fullmatch=True))
@example("0" * 30)
def test_any_text_is_read_or_refused(text):
    for read in (size, seconds, number(1, 1 << 62)):
        try:
            value = read(text)
        except argparse.ArgumentTypeError:
            continue
        assert 0 < value < 1 << 80


def test_flags_take_hyphens_or_underscores():
    words = ["a_b", "--block_size", "c_d", "--queue_depth=1_0", "-x_y", "--", "--e_f"]
    assert hyphenated(words) == [
        *("a_b", "--block-size", "c_d", "--queue-depth=1_0", "-x_y", "--", "--e_f"),
    ]


# Every command.


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_has_examples_that_parse(name):
    found = call_nvmeio(name, "--help")
    assert (found.status, found.err) == (0, "")
    assert max(map(len, found.out.splitlines())) <= 100
    _, _, examples = found.out.partition("examples:\n")
    lines = [line.strip() for line in examples.splitlines() if "nvmeio" in line]
    assert lines
    for line in lines:
        # Only the command: explanations and the readers of a pipe come after it.
        words = shlex.split(re.split(r" \| | >+ |  +", line)[0])
        assert words[:2] == ["nvmeio", name]
        assert cli._parser().parse_args(hyphenated(words[1:])).command == name


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_flag_is_an_error_of_one_line(name):
    found = call_nvmeio(name, "--no_such-flag")
    assert (found.status, found.out) == (2, "")
    assert re.fullmatch(rf"nvmeio {name}: error: .*; see nvmeio {name} --help\n", found.err)


def test_an_empty_command_line_asks_for_help():
    found, asked = run_nvmeio(), run_nvmeio("--help")
    assert (found.status, found.out, found.err) == (0, asked.out, "")
    assert all(f"    {name}" in found.out for name in COMMANDS)


@pytest.mark.parametrize("words", [("no-such-command",), ("--no-such-flag",)])
def test_options_without_a_command_are_an_error(words):
    found = call_nvmeio(*words)
    assert (found.status, found.out) == (2, "")
    assert re.fullmatch(r"nvmeio: error: .*; see nvmeio --help\n", found.err)


def test_the_version_is_printed():
    found = run_nvmeio("--version")
    assert (found.status, found.out) == (0, f"nvmeio {nvmeio.__version__}\n")


def test_the_script_nvmeio_does_the_same():
    script = Path(sysconfig.get_path("scripts"), "nvmeio")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"nvmeio {nvmeio.__version__}\n"


# A command that runs a test's function.


@pytest.fixture
def made_up(monkeypatch):
    """A function that runs a function as a command; it returns the exit status."""

    def run(function, *words):
        module = types.ModuleType("nvmeio._cli.made_up")
        module.configure = lambda parser: parser.add_argument("--size", type=size)
        module.run = function
        monkeypatch.setitem(sys.modules, "nvmeio._cli.made_up", module)
        monkeypatch.setitem(COMMANDS, "made_up", "do what a test asks for")
        return main(["made_up", *words])

    return run


@pytest.fixture
def heeded():
    """SIGHUP is not ignored, as it is under nohup, where the command goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def raising(error):
    def run(options, terminal):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CommandError("there is\nno device"), "there is no device"),
        (
            FileNotFoundError(2, "No such file or directory", "a b"),
            "a b: No such file or d",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(5, "Input/output error", b"c"), "c: Input/output error"),
        (ValueError("NVMEIO_COPY is 'x'"), "NVMEIO_COPY is 'x'"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_error_is_one_line(made_up, capsys, error, said):
    assert made_up(raising(error)) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(f"nvmeio made_up: error: {said}")
    assert found.err.count("\n") == 1


def test_a_bug_shows_its_traceback(made_up):
    with pytest.raises(ZeroDivisionError):
        made_up(raising(ZeroDivisionError()))


def test_conflicting_arguments_are_an_error_of_usage(made_up, capsys):
    with pytest.raises(SystemExit) as ended:
        made_up(raising(UsageError("--size needs --depth")))
    assert ended.value.code == 2
    said = "nvmeio made_up: error: --size needs --depth; see nvmeio made_up --help\n"
    assert capsys.readouterr().err == said


def test_an_argument_of_the_wrong_kind_is_an_error_of_usage(made_up, capsys):
    with pytest.raises(SystemExit) as ended:
        made_up(lambda options, terminal: 0, "--size", "much")
    assert ended.value.code == 2
    assert re.fullmatch(
        r"nvmeio made_up: error: argument --size: 'much' is not a size; .*\n",
        capsys.readouterr().err,
    )


def test_ctrl_c_ends_a_command_without_a_traceback(made_up, capsys):
    assert made_up(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "nvmeio made_up: interrupted\n"


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_outputs_are_ignored(tmp_path, closing):
    shell = ("sh", "-c", f'exec "$@" {closing}', "sh")
    words = ("bench", ".", "--size=1M", "--block-size=64K", "--only=copy", "--no-fio")
    done = run_nvmeio(*words, "--json=report.json", prefix=shell, cwd=tmp_path)
    assert done.status == 0, done.err
    assert (done.out == "") == (">&-" in closing.split())
    assert done.err == ""
    assert json.loads((tmp_path / "report.json").read_text())["schema"] == 1


def test_signal_handlers_are_restored(made_up):
    before = [signal.getsignal(number) for number in cli.ENDING]
    assert made_up(lambda options, terminal: 0) == 0
    assert [signal.getsignal(number) for number in cli.ENDING] == before

    def interrupted(options, terminal):
        signal.raise_signal(signal.SIGINT)

    assert made_up(interrupted) == 130
    assert [signal.getsignal(number) for number in cli.ENDING] == before


# A command that waits for a signal, and then cleans up.
WAITING = """
import sys, time, types
from nvmeio._cli import COMMANDS, main
def run(options, terminal):
    try:
        terminal.say("ready")
        sys.stdout.flush()
        time.sleep(600)
    finally:
        terminal.say("taken away")
module = types.ModuleType("nvmeio._cli.waiting")
module.configure, module.run = lambda parser: None, run
sys.modules["nvmeio._cli.waiting"] = module
COMMANDS["waiting"] = "wait"
sys.exit(main(["waiting"]))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_command_after_its_cleanup(name):
    number = signal.Signals[name]
    with subprocess.Popen(
        [*python(), "-c", WAITING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=WATCHDOG_S)
    assert out == "taken away\n"
    assert process.returncode == 128 + number
    assert err == ("nvmeio waiting: interrupted\n" if name == "SIGINT" else "")


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("second", cli.ENDING)
def test_a_second_signal_does_not_interrupt_the_cleanup(made_up, second):
    cleaned = []

    def impatient(options, terminal):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(second)
            cleaned.append("everything")

    assert made_up(impatient) == 130
    assert cleaned == ["everything"]


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("number", cli.ENDING)
def test_a_signal_counts_where_python_drops_its_exception(
    made_up, number, early, monkeypatch
):
    class Early(threading.Thread):
        def start(self):
            # The hook that is told of the exception is still running.
            signal.raise_signal(number)
            super().start()
            signal.raise_signal(number)

    if early:
        monkeypatch.setattr(threading, "Thread", Early)

    class Loses:
        def __del__(self):
            signal.raise_signal(number)

    def goes_on(options, terminal):
        Loses()
        time.sleep(WATCHDOG_S)

    if number == signal.SIGINT:
        assert made_up(goes_on) == 130
    else:
        with pytest.raises(SystemExit) as ended:
            made_up(goes_on)
        assert ended.value.code == 128 + number


def test_a_signal_counts_if_the_cleanup_takes_long(made_up, monkeypatch):
    def stuck(options, terminal):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            monkeypatch.setattr(cli, "CLEANUP_S", 0.0)
            signal.raise_signal(signal.SIGINT)

    assert made_up(stuck) == 130


def test_a_signal_that_nohup_ignores_stays_ignored():
    with subprocess.Popen(
        ["nohup", *python()[2:], "-c", WAITING],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=WATCHDOG_S)
    assert out == "taken away\n"
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("words", "status"), [(["doctor"], 1), (["--help"], 0)])
def test_a_closed_pipe_is_no_error(words, status, unbuffered):
    ours, theirs = os.pipe()
    os.close(ours)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        done = subprocess.run(
            command(*words),
            stdout=theirs,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=WATCHDOG_S,
        )
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (status, b"")


# Tables.


def test_a_plain_table_right_aligns_figures(capsys):
    rows = [("read", "3.9", "[bold]"), ("write", "12.25", ""), ("copy", "-", "x")]
    Terminal().table(("what", "GB/s", "note"), rows)
    assert capsys.readouterr().out.splitlines() == [
        "what    GB/s  note",
        "read     3.9  [bold]",
        "write  12.25",
        "copy       -  x",
        "",
    ]


def test_progress_is_shown_in_a_terminal_and_erased(monkeypatch):
    now = [100.0]
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    shown = Terminal()
    advance = shown.progress("reading", 200)
    for amount, taken in [(50, 0.5), (50, 0.1), (100, 1.5)]:
        now[0] += taken
        advance(amount)
    shown.note("done")
    lines = [each.strip(" ") for each in screen.getvalue().split("\r") if each.strip(" ")]
    # Not refreshed more often than a person can read.
    assert lines == ["reading: 0 %", "reading: 25 %", "reading: 100 %", "done\n"]
