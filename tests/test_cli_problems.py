"""The problems that nvmeio doctor names, on simulated machines."""

import errno
import re
from dataclasses import replace

import pytest

from children import TESTS
from helpers import ENGINES
from nvmeio._cli.doctor import Report, _system_rows
from nvmeio._cli.problems import FAST_ENGINES, PAGE, SECTIONS, problems
from nvmeio._cli.system import Installation, Storage, System

WORKING = {"built": True, "works": True, "errno": 0, "reason": ""}

# A machine without problems.
SYSTEM = System(
    seccomp=False,
    processors=8,
    memlock_bytes=None,
    may_lock=False,
    transparent_huge_pages="madvise",
    huge_page_bytes=2 << 20,
    huge_pages=0,
    huge_pages_free=0,
)
STORAGE = Storage(
    path="/mnt/nvme",
    mount_point="/mnt/nvme",
    file_system="ext4",
    device="nvme0n1",
    scheduler="none",
    direct=True,
    alignment_bytes=512,
    writable=True,
    free_bytes=500 << 30,
    total_bytes=1000 << 30,
)


def installed(engine="io_uring", error="", refused=(), profile=None, **settings):
    """Return an installation; `refused` has errors of engines, by name."""
    build = {"debug": settings.pop("debug", False)}
    build["test_build"] = settings.pop("test_build", False)
    build["features"] = {"openmp": {"built": settings.pop("openmp", True), "reason": ""}}
    engines = {
        name: {**WORKING, "works": False, "errno": found, "reason": f"errno {found}"}
        for name, found in dict(refused).items()
    }
    found = {"engines": {**dict.fromkeys(ENGINES, WORKING), **engines}, "build": build}
    environment = {f"NVMEIO_{name}": value for name, value in settings.items()}
    return Installation(engine, error, {**found, "environment": environment}, profile, "")


TUNED = installed(
    "threads", profile={"file": "/config/x.json", "options": {"engine": "threads"}}
)
NO_RING = installed("libaio", refused={"io_uring": errno.EPERM})
NOTHING = installed("threads", refused={"io_uring": errno.EPERM, "libaio": errno.EAGAIN})
NO_MEMORY = installed("libaio", refused={"io_uring": errno.ENOMEM})
HUGETLB = installed(POOL_HUGETLB="1")

# How the machine differs from one without problems; the expected problem, its severity,
# and words that must appear.
CASES = [
    ({}, NO_RING, {}, "io_uring-refused", "slow", "io_uring does not work: errno 1"),
    ({}, NOTHING, {}, "libaio-refused", "broken", "libaio does not work: errno 11"),
    ({}, NO_MEMORY, {}, "rings", "slow", "io_uring does not work: errno 12"),
    ({}, installed("libaio", WORKERS="8"), {}, "rings", "slow", "uses libaio, because"),
    (
        *({}, installed("libaio", ENGINE="libaio"), {}, "engine-chosen", "slow"),
        "NVMEIO_ENGINE=libaio is set, so nvmeio does not use io_uring",
    ),
    ({}, installed("sync", ENGINE="sync"), {}, "engine-chosen", "broken", "io_uring"),
    ({}, installed(None, "NVMEIO_X is 'y'"), {}, "settings", "broken", "NVMEIO_X is 'y'"),
    ({}, installed(WORKER="2"), {}, "unknown-variable", "hint", "mean NVMEIO_WORKERS?"),
    ({}, installed(**{"": ""}), {}, "unknown-variable", "hint", "NVMEIO_ is set, but"),
    ({}, installed(debug=True), {}, "debug-build", "slow", "not optimized"),
    ({}, installed(test_build=True), {}, "test-build", "slow", "inject faults"),
    ({}, installed(openmp=False), {}, "openmp", "hint", "one thread"),
    (
        *({"transparent_huge_pages": "never"}, installed(), {}, "huge-pages", "slow"),
        "are switched off",
    ),
    ({"transparent_huge_pages": ""}, installed(), {}, "huge-pages", "slow", "this kernel"),
    ({}, HUGETLB, {}, "hugetlb", "hint", "no reserved huge page is free"),
    ({"memlock_bytes": 65536}, installed(), {}, "memlock", "hint", "only 64 KiB may be"),
    ({}, installed(), {"error": "No such"}, "path", "broken", "/mnt/nvme cannot be used"),
    ({}, installed(), {"direct": False}, "no-o-direct", "broken", "ext4 has no O_DIRECT"),
    ({}, installed(), {"writable": False}, "read-only", "hint", "but not write there"),
    (
        *({}, installed(), {"writable": False, "read_only": True}, "read-only", "hint"),
        "because /mnt/nvme is mounted read-only",
    ),
    ({}, installed(), {"free_bytes": 40 << 30}, "nearly-full", "hint", "only 40 GiB of"),
    ({}, installed(), {"scheduler": "bfq"}, "scheduler", "slow", "bfq of nvme0n1"),
]


@pytest.mark.parametrize(
    ("system", "installed", "storage", "key", "severity", "words"), CASES
)
def test_each_problem_is_named(system, installed, storage, key, severity, words):
    found = problems(replace(SYSTEM, **system), installed, [replace(STORAGE, **storage)])
    by_key = {one.key: one for one in found}
    assert by_key[key].severity == severity
    assert words in by_key[key].problem
    assert by_key[key].path == (STORAGE.path if storage else "")
    # Only a refused io_uring goes with another problem: that of libaio.
    assert by_key.keys() - {key} <= {"io_uring-refused"}


def test_every_problem_has_a_case_and_a_section_on_the_page():
    assert {case[3] for case in CASES} == set(SECTIONS)
    text = (TESTS.parent / PAGE).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    assert set(SECTIONS.values()) <= anchors
    for system, found, storage, key, *_ in CASES:
        given = problems(replace(SYSTEM, **system), found, [replace(STORAGE, **storage)])
        assert f"{PAGE}#{SECTIONS[key]}" in [one.see for one in given]


@pytest.mark.parametrize(
    ("system", "installed", "storage"),
    [
        ({}, installed(), {}),
        # Facts that would be problems, if something else did not make them harmless.
        ({"memlock_bytes": 65536, "may_lock": True}, installed(), {}),
        ({"memlock_bytes": 128 << 20}, installed(), {}),
        ({"seccomp": True}, installed(), {}),
        ({}, installed(refused={"libaio": errno.EAGAIN}), {}),
        ({"transparent_huge_pages": "never", "huge_pages_free": 9}, HUGETLB, {}),
        ({"transparent_huge_pages": "always"}, installed(), {}),
        ({"processors": 1}, installed(openmp=False), {}),
        # It was measured to be the fastest.
        ({}, TUNED, {}),
        ({}, installed(), {"in_memory": True, "direct": False, "free_bytes": 0}),
        ({}, installed(), {"direct": None, "alignment_bytes": None}),
        ({}, installed(), {"free_bytes": 60 << 30}),
        ({}, installed(), {"free_bytes": 0, "total_bytes": 0}),
        # A block device has no mount to change.
        ({}, installed(), {"mount_point": "", "writable": False}),
    ],
)
def test_a_machine_without_problems_gets_no_advice(system, installed, storage):
    storages = [replace(STORAGE, **storage)]
    assert problems(replace(SYSTEM, **system), installed, storages) == []


def test_the_most_severe_problem_comes_first():
    storages = [replace(STORAGE, path="/a", free_bytes=1), Storage("/b", error="gone")]
    found = problems(replace(SYSTEM, memlock_bytes=0), NO_RING, storages)
    assert [(one.severity, one.path) for one in found] == [
        ("broken", "/b"),
        ("slow", ""),
        ("hint", ""),
        ("hint", "/a"),
    ]


@pytest.mark.parametrize("engine", [*ENGINES, None])
@pytest.mark.parametrize("refused", [(), ("io_uring",), ("libaio",), FAST_ENGINES])
def test_a_problem_is_broken_exactly_if_no_fast_engine_is_used(engine, refused):
    engine = "threads" if engine in refused else engine
    errors = dict.fromkeys(refused, errno.EPERM)
    found = problems(SYSTEM, installed(engine, "" if engine else "no", errors), [STORAGE])
    broken = any(one.severity == "broken" for one in found)
    assert broken == (engine not in FAST_ENGINES)
    assert (found == []) == (engine == "io_uring")


# The description of the machine, and the summary.


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        (
            {"seccomp": True, "kernel": "6.1"},
            "kernel",
            "Linux 6.1, system calls are filtered",
        ),
        ({}, "locked memory", "no limit"),
        ({"memlock_bytes": 8 << 20}, "locked memory", "at most 8 MiB (ulimit -l)"),
        (
            {"memlock_bytes": 8 << 20, "may_lock": True},
            *("locked memory", "no limit, by CAP_IPC_LOCK"),
        ),
        (
            {"huge_pages": 9, "huge_pages_free": 4},
            *("huge pages", "transparent: madvise; reserved: 9 of 2 MiB, 4 of them free"),
        ),
    ],
)
def test_the_machine_is_described_plainly(changes, name, words):
    assert dict(_system_rows(replace(SYSTEM, **changes)))[name] == words


SLOWER = "nvmeio works here, but slower than it could"
NOT_AT_ALL = "nvmeio works slowly here, or not at all"


@pytest.mark.parametrize(
    ("system", "installed", "storages", "expected"),
    [
        (
            *({}, installed(), [STORAGE]),
            ("full", "nvmeio works here at full speed: io_uring, O_DIRECT"),
        ),
        (
            *({}, TUNED, [replace(STORAGE, in_memory=True, direct=False)]),
            ("full", "nvmeio works here at full speed: threads (chosen by a profile)"),
        ),
        # Hints do not change the verdict.
        (
            *({"memlock_bytes": 65536}, installed(), []),
            ("full", "nvmeio works here at full speed: io_uring"),
        ),
        (
            *({}, NO_RING, [STORAGE]),
            ("slower", f"{SLOWER}: io_uring does not work: errno 1"),
        ),
        (
            *({}, installed(), [STORAGE, Storage("/x", error="No such file")]),
            ("none", f"{NOT_AT_ALL}: /x cannot be used: No such file"),
        ),
    ],
)
def test_the_summary_is_the_verdict_with_its_reasons(system, installed, storages, expected):
    machine = replace(SYSTEM, **system)
    report = Report(machine, installed, storages, problems(machine, installed, storages))
    assert (report.verdict, report.summary) == expected
