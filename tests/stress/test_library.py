"""The C library under faults: its own tests, and one fault at each place in turn."""

import re
import shutil
import subprocess
from fnmatch import fnmatch

import pytest

from builds import ROOT, faults_in, read_tallies
from children import run_tool, system_environment
from helpers import ENGINES

# Programs of tests/c that check bytes, and the faults that must not strike while a program
# holds back the I/O of one engine until another has gone on.
PROGRAMS = {
    "test_transfer": {},
    "test_gather": {},
    "test_handle": {"early": 0, "wake": 0},
}
STORMS = 10
PLACES = re.compile(r"^\w+ (\w+): (\d+) of \d+ places", re.MULTILINE)


def run(program, *arguments, environment=None):
    """Run a program of C tests, which has its own watchdog; return its output."""
    prefix = [shutil.which("setarch"), "-R"] if "tsan" in program.parent.name else []
    done = subprocess.run(
        [*prefix, program, *map(str, arguments)],
        env={**system_environment(), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().splitlines()[-1].removeprefix("skipped: "))
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize(
    "sanitizer",
    [
        pytest.param("plain", marks=pytest.mark.amount(short=1, full=1, long=20)),
        pytest.param("asan", marks=pytest.mark.amount(short=0, full=1, long=4)),
        pytest.param("tsan", marks=pytest.mark.amount(short=0, full=1, long=4)),
    ],
)
def test_the_c_tests_hold_under_faults(
    faulty_programs, tmp_path, monkeypatch, seeds, sanitizer
):
    folder = faulty_programs(sanitizer)
    monkeypatch.setenv("NVMEIO_TEST_DIR", str(tmp_path))
    for seed in seeds:
        for program, words in PROGRAMS.items():
            log = tmp_path / f"{program}-{seed}"
            words = {"all": 20 + seed % 60, **words}
            run(folder / program, environment=faults_in(words, log, seed))
            tallies = read_tallies(log)
            asked_for = {kind for kind, tally in tallies.items() if tally.rate}
            silent = {kind for kind in asked_for if not tallies[kind].fired}
            # Workers are rarely woken here; the sweep covers that fault.
            silent.discard("wake")
            assert asked_for, tallies
            assert not silent, tallies
            # all= pauses so rarely that the log rounds its rate to 0.
            assert tallies["pause"].fired, tallies


def sweep(sanitizer, stride, engines, places=("disk", "memory"), **amounts):
    """Yield parameters: the stride between the places that a sweep tries."""
    for place in places:
        for engine in engines:
            marks = pytest.mark.amount(**{"short": 0, "full": 0, "long": 0, **amounts})
            yield pytest.param(place, engine, sanitizer, stride, marks=marks)


# The long run strikes every place of the fast engines.  libaio waits 0.05 s for the kernel
# at each close of a context.  TSan is slow too, and looks for races, which do not depend on
# places.
QUICK = [engine for engine in ENGINES if engine != "libaio"]
SWEEPS = [
    *sweep("plain", 360, QUICK, short=1),
    *sweep("plain", 120, QUICK, full=1),
    *sweep("plain", 12, QUICK, long=12),
    *sweep("plain", 480, ["libaio"], places=["disk"], short=1),
    *sweep("plain", 12, ["libaio"], long=2),
    *sweep("asan", 120, QUICK, full=1, long=8),
    *sweep("asan", 480, ["libaio"], places=["memory"], full=1, long=2),
    *sweep("tsan", 600, QUICK, places=["memory"], full=1, long=2),
    *sweep("tsan", 600, ["libaio"], places=["memory"], long=2),
]
# At least this many, among them one of each kind.
STRUCK_MIN = {12: 600, 120: 90, 360: 30, 480: 35, 600: 20}


@pytest.mark.parametrize(("place", "engine", "sanitizer", "stride"), SWEEPS)
def test_one_fault_at_each_place(
    faulty_programs,
    tmp_path,
    tmpfs,
    monkeypatch,
    seeds,
    record_property,
    place,
    engine,
    sanitizer,
    stride,
):
    program = faulty_programs(sanitizer) / "test_sweep"
    monkeypatch.setenv("NVMEIO_TEST_DIR", str(tmp_path if place == "disk" else tmpfs))
    total = 0
    for seed in seeds:
        said = run(program, stride, seed, STORMS, engine)
        struck = {kind: int(count) for kind, count in PLACES.findall(said)}
        assert sum(struck.values()) >= STRUCK_MIN[stride], said
        # On a disk workers wait; in memory, blocks may be done as soon as they are
        # submitted.
        silent = {kind for kind, count in struck.items() if count == 0}
        assert silent <= ({"wake"} if place == "memory" else set()), said
        total += sum(struck.values())
    record_property("faults, each at a place of its own", total)


# All places take about a minute for each engine; the short run draws some of them, besides
# the places of test_pause_faults.
PAUSES = [
    *sweep("plain", 40, ["io_uring"], places=["memory"], short=1),
    *sweep("plain", 16, QUICK, places=["memory"], full=1),
    *sweep("plain", 1, ENGINES, long=1),
    *sweep("asan", 40, ["io_uring"], places=["memory"], full=1),
    *sweep("asan", 4, QUICK, places=["memory"], long=1),
    *sweep("tsan", 80, ["io_uring"], places=["memory"], full=1),
    *sweep("tsan", 8, QUICK, places=["memory"], long=1),
]


@pytest.mark.parametrize(("place", "engine", "sanitizer", "stride"), PAUSES)
def test_one_pause_at_each_place(
    faulty_programs,
    tmp_path,
    tmpfs,
    monkeypatch,
    seeds,
    record_property,
    place,
    engine,
    sanitizer,
    stride,
):
    program = faulty_programs(sanitizer) / "test_pauses"
    monkeypatch.setenv("NVMEIO_TEST_DIR", str(tmp_path if place == "disk" else tmpfs))
    races = {"threads", "mappings", *(["forks"] if sanitizer != "tsan" else [])}
    total = 0
    for seed in seeds:
        struck = dict(PLACES.findall(run(program, stride, seed, engine)))
        assert set(struck) == races
        total += sum(map(int, struck.values()))
    record_property("pauses, each at a place of its own", total)


# Calls that ask nothing of the system.
PURE = r"(mem|str)\w+|sn?printf|sscanf|sig(fill|del)set|qsort|tdelete|tfind|twalk|_.*"


def test_each_call_into_the_system_can_be_made_to_fail_or_is_listed(faulty_programs):
    said = run_tool("nm", "--undefined-only", faulty_programs("plain") / "libnvmeio.a")
    files = re.findall(r"^(\w+)\.o:\n((?: +[Uw] \S+\n?)*)", said, re.MULTILINE)
    words = " ".join(called for file, called in files if not file.startswith("fault"))
    names = {re.sub("^__isoc[0-9]+_", "", word) for word in words.split()} - {"U", "w"}
    assert "nvmeio_faulty_pread" in names
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = page.partition("\n| call | why no fault is made of it |")[2].partition("\n\n")[
        0
    ]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([\w*]+)`", cell)]
    assert listed
    left = {name for name in names if not re.fullmatch(f"nvmeio_.*|{PURE}", name)}
    assert {
        name for name in left if not any(fnmatch(name, each) for each in listed)
    } == set()


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in ROOT.glob("tests/c/faulty/test_*_faults.c"))
)
def test_a_fault_can_be_injected_once(faulty_programs, name):
    run(faulty_programs("plain") / name)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("nonsense=1", "no such word"),
        ("eio", "wants = or @"),
        ("eio=1001", "not a number in its range"),
        ("eio=-1", "not a number in its range"),
        ("eio@0", "the first occasion is 1"),
        ("pause_ms=60001", "not a number in its range"),
        ("eio@1," * 9, "too many of this kind"),
        ("log=/dev/null/x", "Not a directory"),
    ],
)
def test_faults_that_cannot_be_made_end_the_process(faulty_programs, words, why):
    program = faulty_programs("plain") / "test_file_faults"
    with pytest.raises(AssertionError, match=why):
        run(program, environment={"NVMEIO_FAULTS": words})
