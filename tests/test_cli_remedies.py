"""The advice of nvmeio doctor, on simulated machines."""

import errno
import shutil
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from children import TESTS, system_environment
from helpers import ENGINES
from nvmeio._cli.doctor import Report, _system_rows
from nvmeio._cli.remedies import remedies
from nvmeio._cli.system import FAST_ENGINES, Installation, Node, Storage, System

WORKING = {"built": True, "works": True, "errno": 0, "reason": ""}

# A machine without problems.
SYSTEM = System(
    kernel="6.12.3-generic",
    distribution="Some Linux",
    package_manager="apt-get",
    container="",
    seccomp=False,
    uid=1000,
    groups=[1000],
    may_lock=False,
    may_administer=False,
    processor="Some Processor",
    processors=8,
    processors_total=8,
    features=["avx2"],
    copy_kernels={"avx2": True, "portable": True},
    copy_small="portable",
    copy_large="avx2",
    nodes=[Node(0, 32 << 30, 8)],
    memory_bytes=32 << 30,
    memory_total_bytes=32 << 30,
    pool_bytes=16 << 30,
    memlock_bytes=None,
    open_files=1024,
    transparent_huge_pages="madvise",
    huge_page_bytes=2 << 20,
    huge_pages=0,
    huge_pages_free=0,
    io_uring_disabled=0,
    io_uring_group=-1,
    aio_events=0,
    aio_events_max=65536,
)

INSTALLED = Installation(
    versions={"nvmeio": "0.1.0", "python": "3.12.1", "numpy": "2.0.0", "torch": None},
    compiler="gcc 14",
    debug=False,
    test_build=False,
    features={
        name: {"built": True, "version": "", "flags": [], "reason": ""}
        for name in ("liburing", "libaio", "openmp")
    },
    engines=dict.fromkeys(ENGINES, WORKING),
    engine="io_uring",
    error="",
    rings_fit=True,
    environment={},
    profile=None,
    profiles="0 in /config",
)

STORAGE = Storage(
    path="/mnt/nvme",
    mount_point="/mnt/nvme",
    file_system="ext4",
    source="/dev/nvme0n1p1",
    device="nvme0n1",
    model="Some Drive",
    scheduler="none",
    rotational=False,
    logical_block_bytes=512,
    physical_block_bytes=4096,
    numa_node=0,
    direct=True,
    alignment_bytes=512,
    writable=True,
    free_bytes=500 << 30,
    total_bytes=1000 << 30,
)

TWO_NODES = [Node(0, 16 << 30, 8), Node(1, 16 << 30, 0)]


def refused(name, error, **changes):
    """Return an installation whose kernel refuses an engine."""
    found = {"built": True, "works": False, "errno": error, "reason": f"errno {error}"}
    return without(name, found, **changes)


def not_built(name, library, reason="it was not found", **changes):
    """Return an installation built without a library."""
    found = {"built": False, "works": False, "errno": errno.ENOSYS, "reason": "not built"}
    feature = {"built": False, "version": "", "flags": [], "reason": reason}
    changes["features"] = {**INSTALLED.features, library: feature}
    return without(name, found, **changes)


def without(name, found, **changes):
    """Return an installation in which an engine does not work, and the next one is used."""
    base = changes.pop("base", INSTALLED)
    engines = {**base.engines, name: found}
    works = [name for name in engines if engines[name]["works"]]
    return replace(base, **{"engines": engines, "engine": works[0], **changes})


SYSCTL = {"io_uring_disabled": 2}
GROUP = {"io_uring_disabled": 1}
CHOSEN = {
    name: replace(INSTALLED, engine=name, environment={"NVMEIO_ENGINE": name})
    for name in ENGINES
}
TUNED = replace(
    INSTALLED,
    engine="threads",
    environment={"NVMEIO_PROFILE": "auto"},
    profile={"file": "/config/nvme0n1.json", "options": {"engine": "threads"}},
)
TOO_MANY_RINGS = replace(
    INSTALLED, engine="libaio", rings_fit=False, environment={"NVMEIO_WORKERS": "8"}
)
NO_RING = refused("io_uring", errno.EPERM)
NOTHING = refused("libaio", errno.EPERM, base=NO_RING)
HUGETLB = replace(INSTALLED, environment={"NVMEIO_POOL_HUGETLB": "1"})
NO_OPENMP = {"built": False, "version": "", "flags": [], "reason": "NVMEIO_WITH_OPENMP=no"}

# Cases by name: how the machine differs from one without problems, the expected remedy, its
# severity, and words that must appear.
CASES = {
    "sysctl": (SYSCTL, NO_RING, {}, "io_uring-sysctl", "slow", "io_uring_disabled=0"),
    "sysctl in a container": (
        *({**SYSCTL, "container": "docker"}, NO_RING, {}),
        *("io_uring-sysctl", "slow", "on the host of this container"),
    ),
    "sysctl and seccomp": (
        *({**SYSCTL, "seccomp": True}, NO_RING, {}),
        *("io_uring-sysctl", "slow", "then check again"),
    ),
    "sysctl without a group": (GROUP, NO_RING, {}, "io_uring-sysctl", "slow", "groupadd"),
    "sysctl with a group": (
        *({**GROUP, "io_uring_group": 77}, NO_RING, {}),
        *("io_uring-sysctl", "slow", "sudo usermod -aG $(getent group 77 "),
    ),
    "sysctl and nothing else": (
        *(SYSCTL, NOTHING, {}, "io_uring-sysctl", "broken", "io_uring_disabled=0"),
    ),
    "seccomp": (
        *({"seccomp": True}, NO_RING, {}, "io_uring-seccomp", "slow"),
        "SystemCallFilter=io_uring_setup io_uring_enter io_uring_register",
    ),
    "seccomp of a group member": (
        *({**GROUP, "io_uring_group": 1000}, NO_RING, {}),
        *("io_uring-seccomp", "slow", "seccomp"),
    ),
    "seccomp of root": (
        *({**GROUP, "may_administer": True}, NO_RING, {}),
        *("io_uring-seccomp", "slow", "seccomp"),
    ),
    "seccomp in docker": (
        *({"seccomp": True, "container": "docker"}, NO_RING, {}, "io_uring-seccomp"),
        *("slow", "docker run --security-opt seccomp=nvmeio-seccomp.json"),
    ),
    "seccomp in podman": (
        *({"seccomp": True, "container": "podman"}, NO_RING, {}, "io_uring-seccomp"),
        *("slow", "podman run --security-opt seccomp=nvmeio-seccomp.json"),
    ),
    "seccomp in kubernetes": (
        *({"seccomp": True, "container": "kubernetes"}, NO_RING, {}, "io_uring-seccomp"),
        *("slow", "localhostProfile: nvmeio-seccomp.json"),
    ),
    "seccomp that hides io_uring": (
        *({"seccomp": True}, refused("io_uring", errno.ENOSYS), {}),
        *("io_uring-seccomp", "slow", "io_uring_setup"),
    ),
    "seccomp that refuses both": (
        *({"seccomp": True, "container": "docker"}, NOTHING, {}, "io_uring-seccomp"),
        *("broken", '"io_uring_register", "io_setup", "io_submit"'),
    ),
    "seccomp that refuses libaio": (
        *({**SYSCTL, "seccomp": True}, NOTHING, {}, "libaio-seccomp", "broken"),
        "io_submit",
    ),
    "old kernel": (
        *({"kernel": "4.18.0-553.el8", "seccomp": True}, refused("io_uring", errno.ENOSYS)),
        *({}, "io_uring-kernel", "slow", "Linux 5.1 or newer"),
    ),
    "kernel without io_uring": (
        *({}, refused("io_uring", errno.ENOSYS), {}),
        *("io_uring-kernel", "slow", "CONFIG_IO_URING=y"),
    ),
    "kernel without libaio": (
        *({}, refused("libaio", errno.ENOSYS, base=NO_RING), {}),
        *("libaio-kernel", "broken", "CONFIG_AIO=y"),
    ),
    "rings beyond the limit": (
        *({"kernel": "5.4.0"}, refused("io_uring", errno.ENOMEM), {}),
        *("io_uring-memlock", "slow", "prlimit --pid $$ --memlock=unlimited"),
    ),
    "no descriptors": (
        *({}, refused("io_uring", errno.EMFILE), {}),
        *("io_uring-open-files", "slow", "ulimit -n $(ulimit -Hn)"),
    ),
    "something else": (
        *({}, refused("io_uring", errno.EINVAL), {}),
        *("io_uring-failed", "slow", "errno 22"),
    ),
    "no events": (
        *({"aio_events": 65536}, refused("libaio", errno.EAGAIN, base=NO_RING), {}),
        *("libaio-events", "broken", "sudo sysctl -w fs.aio-max-nr=1048576"),
    ),
    "no liburing": (
        *({}, not_built("io_uring", "liburing"), {}, "io_uring-not-built", "slow"),
        "sudo apt-get install gcc pkg-config python3-dev liburing-dev",
    ),
    "no liburing on Fedora": (
        *({"package_manager": "dnf"}, not_built("io_uring", "liburing"), {}),
        *("io_uring-not-built", "slow", "liburing-devel"),
    ),
    "no liburing elsewhere": (
        *({"package_manager": ""}, not_built("io_uring", "liburing"), {}),
        *("io_uring-not-built", "slow", "a C compiler, and liburing with its headers"),
    ),
    "liburing left out": (
        *({}, not_built("io_uring", "liburing", "NVMEIO_WITH_LIBURING=no"), {}),
        *("io_uring-not-built", "slow", "unset NVMEIO_WITH_LIBURING"),
    ),
    "no libaio": (
        *({}, not_built("libaio", "libaio", base=NO_RING), {}),
        *("libaio-not-built", "broken", "libaio-dev"),
    ),
    "another engine": (
        *({}, CHOSEN["libaio"], {}, "engine-chosen", "slow", "unset NVMEIO_ENGINE"),
    ),
    "a slow engine": (
        *({}, CHOSEN["sync"], {}, "engine-chosen", "broken", "unset NVMEIO_ENGINE"),
    ),
    "too many rings": (
        *({"memlock_bytes": 128 << 20}, TOO_MANY_RINGS, {}),
        *("rings", "slow", "need more locked memory than 128 MiB, the limit (ulimit -l)"),
    ),
    "a misspelt variable": (
        *({}, replace(INSTALLED, environment={"NVMEIO_WORKER": "2"}), {}),
        *("unknown-variable", "hint", "did you mean NVMEIO_WORKERS?"),
    ),
    "an unknown variable": (
        *({}, replace(INSTALLED, environment={"NVMEIO_": ""}), {}),
        *("unknown-variable", "hint", "unset NVMEIO_"),
    ),
    "a wrong setting": (
        *({}, replace(INSTALLED, engine=None, error="NVMEIO_QUEUE_DEPTH is 'x'"), {}),
        *("settings", "broken", "unset NVMEIO_QUEUE_DEPTH"),
    ),
    "an engine that does not work": (
        {},
        replace(
            INSTALLED,
            engine=None,
            error="the engine libaio cannot be used",
            environment={"NVMEIO_ENGINE": "libaio"},
        ),
        *({}, "settings", "broken", "unset NVMEIO_ENGINE"),
    ),
    "no handles": (
        *({}, replace(INSTALLED, engine=None, error="Resource temporarily unavailable")),
        *({}, "settings", "broken", "ulimit -u"),
    ),
    "debugging": (
        *({}, replace(INSTALLED, debug=True), {}),
        *("debug-build", "slow", "unset NVMEIO_DEBUG"),
    ),
    "test build": (
        *({}, replace(INSTALLED, test_build=True), {}),
        *("test-build", "slow", "unset NVMEIO_TEST_BUILD"),
    ),
    "faults that nothing makes": (
        *({}, replace(INSTALLED, environment={"NVMEIO_FAULTS": "eio@3"}), {}),
        *("test-build", "hint", "NVMEIO_TEST_BUILD=1 pip install"),
    ),
    "no OpenMP": (
        {},
        replace(INSTALLED, features={**INSTALLED.features, "openmp": NO_OPENMP}),
        *({}, "openmp", "hint", "OpenMP"),
    ),
    "small pages": (
        *({"transparent_huge_pages": "never"}, INSTALLED, {}, "huge-pages", "slow"),
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    ),
    "small pages in a container": (
        *({"transparent_huge_pages": "never", "container": "docker"}, INSTALLED, {}),
        *("huge-pages", "slow", "on the host of this container"),
    ),
    "kernel without huge pages": (
        *({"transparent_huge_pages": ""}, INSTALLED, {}),
        *("huge-pages", "slow", "CONFIG_TRANSPARENT_HUGEPAGE"),
    ),
    "no reserved pages": ({}, HUGETLB, {}, "hugetlb", "hint", "vm.nr_hugepages=512"),
    "little may be locked": (
        *({"memlock_bytes": 65536}, INSTALLED, {}, "memlock", "hint"),
        "/etc/security/limits.d/",
    ),
    "little may be locked in docker": (
        *({"memlock_bytes": 65536, "container": "docker"}, INSTALLED, {}, "memlock"),
        *("hint", "--ulimit memlock=-1"),
    ),
    "less may be locked than eight rings need": (
        *({"memlock_bytes": 65536}, replace(INSTALLED, rings_fit=False), {}, "memlock"),
        *("hint", "only 64 KiB may be locked (ulimit -l), too little for 8 rings"),
    ),
    "little may be locked in kubernetes": (
        *({"memlock_bytes": 65536, "container": "kubernetes"}, INSTALLED, {}, "memlock"),
        *("hint", "LimitMEMLOCK=infinity"),
    ),
    "no such path": (
        *({}, INSTALLED, {"error": "No such file or directory"}),
        *("path", "broken", "/mnt/nvme cannot be used: No such file"),
    ),
    "page cache": (
        *({}, INSTALLED, {"direct": False, "file_system": "overlay"}),
        *("no-o-direct", "broken", "overlay has no O_DIRECT"),
    ),
    "page cache in docker": (
        *({"container": "docker"}, INSTALLED, {"direct": False}),
        *("no-o-direct", "broken", "docker run -v"),
    ),
    "not writable": (
        *({}, INSTALLED, {"writable": False}),
        *("read-only", "hint", "sudo setfacl -m u:1000:rwX /mnt/nvme"),
    ),
    "mounted to be read": (
        *({}, INSTALLED, {"writable": False, "read_only": True, "mount_point": "/a b"}),
        *("read-only", "hint", "sudo mount -o remount,rw '/a b'"),
    ),
    "little space": (
        *({}, INSTALLED, {"free_bytes": 40 << 30}, "nearly-full", "hint", "du -xh"),
    ),
    "a disk that turns": (
        *({}, INSTALLED, {"rotational": True}, "rotational", "hint", "Some Drive"),
    ),
    "bfq": (
        *({}, INSTALLED, {"scheduler": "bfq"}, "scheduler", "slow"),
        "echo none | sudo tee /sys/block/nvme0n1/queue/scheduler",
    ),
    "far away": (
        *({"nodes": TWO_NODES}, INSTALLED, {"numa_node": 1}, "numa", "hint"),
        "numactl --cpunodebind=1",
    ),
}


def text_of(remedy):
    """Return the whole text of a remedy."""
    steps = [line for step in remedy.steps for line in (step.text, *step.commands)]
    return "\n".join([remedy.problem, *steps])


@pytest.mark.parametrize("case", CASES)
def test_each_problem_has_its_remedy(case):
    system, installed, storage, key, severity, words = CASES[case]
    storage = replace(STORAGE, **storage)
    found = remedies(replace(SYSTEM, **system), installed, [storage])
    by_key = {remedy.key: remedy for remedy in found}
    assert by_key[key].severity == severity
    assert words in text_of(by_key[key])
    assert by_key[key].steps
    # Other remedies belong to engines that were refused before this one.
    others = {name for name in by_key if name != key}
    assert others <= {"io_uring-seccomp", "io_uring-sysctl", "libaio-seccomp"}


def test_every_remedy_has_a_case():
    keys = {case[3] for case in CASES.values()}
    engines = {f"{name}-{why}" for name in FAST_ENGINES for why in ("kernel", "seccomp")}
    assert engines <= keys
    assert len(keys) == 28


@pytest.mark.parametrize(
    ("system", "installed", "storage"),
    [
        ({}, INSTALLED, {}),
        # Facts that would be problems, if something else did not make them harmless.
        ({"memlock_bytes": 65536, "may_lock": True}, INSTALLED, {}),
        ({"memlock_bytes": 128 << 20}, INSTALLED, {}),
        (SYSCTL, INSTALLED, {}),
        ({"seccomp": True, "container": "docker"}, INSTALLED, {}),
        ({"kernel": "5.10.0"}, INSTALLED, {}),
        ({"aio_events": 65536}, refused("libaio", errno.EAGAIN), {}),
        ({}, not_built("libaio", "libaio"), {}),
        (
            {"transparent_huge_pages": "never", "huge_pages": 9, "huge_pages_free": 9},
            HUGETLB,
            {},
        ),
        ({"transparent_huge_pages": "always"}, INSTALLED, {}),
        (
            {"processors": 1},
            replace(INSTALLED, features={**INSTALLED.features, "openmp": NO_OPENMP}),
            {},
        ),
        # It was measured to be the fastest.
        ({}, TUNED, {}),
        ({}, INSTALLED, {"file_system": "tmpfs", "in_memory": True, "direct": False}),
        ({}, INSTALLED, {"direct": None, "alignment_bytes": None}),
        ({}, INSTALLED, {"rotational": True, "model": ""}),
        ({}, INSTALLED, {"rotational": True, "model": "", "scheduler": "mq-deadline"}),
        ({}, INSTALLED, {"free_bytes": 60 << 30}),
        ({}, INSTALLED, {"free_bytes": 0, "total_bytes": 0}),
        ({"nodes": TWO_NODES}, INSTALLED, {"numa_node": 0}),
        ({"nodes": TWO_NODES}, INSTALLED, {"numa_node": None}),
        # A block device has no mount to change.
        ({}, INSTALLED, {"mount_point": "", "writable": False}),
    ],
)
def test_a_machine_without_problems_gets_no_advice(system, installed, storage):
    assert (
        remedies(replace(SYSTEM, **system), installed, [replace(STORAGE, **storage)]) == []
    )


def test_root_needs_no_sudo():
    system = replace(SYSTEM, uid=0, transparent_huge_pages="never", **SYSCTL)
    found = remedies(system, NO_RING, [replace(STORAGE, writable=False)])
    assert {remedy.key for remedy in found} == {
        "io_uring-sysctl",
        "huge-pages",
        "read-only",
    }
    assert not any("sudo" in text_of(remedy) for remedy in found)


def test_the_most_severe_problem_comes_first():
    storages = [replace(STORAGE, path="/a", free_bytes=1), Storage("/b", error="gone")]
    found = remedies(replace(SYSTEM, **SYSCTL, memlock_bytes=0), NO_RING, storages)
    assert [(remedy.severity, remedy.path) for remedy in found] == [
        ("broken", "/b"),
        ("slow", ""),
        ("hint", ""),
        ("hint", "/a"),
    ]


ENGINE_STATES = st.sampled_from(
    [WORKING, refused("sync", errno.EPERM).engines["sync"]]
    + [refused("sync", error).engines["sync"] for error in range(1, 41)]
    + [not_built("sync", "libaio").engines["sync"]]
)


@given(
    states=st.tuples(ENGINE_STATES, ENGINE_STATES),
    chosen=st.sampled_from([*ENGINES, None, "auto"]),
    disabled=st.sampled_from([None, 0, 1, 2]),
    container=st.sampled_from(["", "docker", "podman", "kubernetes", "container"]),
    seccomp=st.booleans(),
)
def test_a_problem_is_broken_exactly_if_no_fast_engine_is_used(
    states, chosen, disabled, container, seccomp
):
    engines = {**INSTALLED.engines, **dict(zip(FAST_ENGINES, states, strict=True))}
    working = [name for name in engines if engines[name]["works"]]
    engine = working[0] if chosen not in working else chosen
    error = "" if chosen else "there are no threads"
    installed = replace(
        INSTALLED,
        engines=engines,
        engine=engine if chosen else None,
        error=error,
        environment={"NVMEIO_ENGINE": chosen} if chosen in working else {},
    )
    system = replace(
        SYSTEM, io_uring_disabled=disabled, container=container, seccomp=seccomp
    )
    found = remedies(system, installed, [STORAGE])
    broken = any(remedy.severity == "broken" for remedy in found)
    assert broken == (installed.engine not in FAST_ENGINES)
    best = working[0] == installed.engine == "io_uring"
    assert best == (found == [])


# The suggested commands.


def commands_of(key, case, program):
    """Return the commands of a remedy that begin with a word."""
    system, installed, storage, *_ = CASES[case]
    found = remedies(replace(SYSTEM, **system), installed, [replace(STORAGE, **storage)])
    steps = next(remedy.steps for remedy in found if remedy.key == key)
    lines = [line for step in steps for line in step.commands]
    return [line for line in lines if line.startswith(program)]


def test_every_command_is_quoted_for_a_shell():
    shell = shutil.which("sh")
    for system, installed, storage, *_ in CASES.values():
        for remedy in remedies(
            replace(SYSTEM, **system), installed, [replace(STORAGE, **storage)]
        ):
            for line in (line for step in remedy.steps for line in step.commands):
                done = subprocess.run(
                    [shell, "-n", "-c", line],
                    env=system_environment(),
                    stderr=subprocess.PIPE,
                    check=False,
                )
                assert (done.returncode, done.stderr) == (0, b""), line


def test_the_page_has_the_recipe_of_the_advice():
    """test_docs_containers.py shows that the page's commands allow io_uring."""
    shown = (TESTS.parent / "docs" / "troubleshooting.md").read_text()
    for container in ("docker", "kubernetes"):
        case = f"seccomp in {container}"
        for program in ("curl", "jq", "install"):
            for command in commands_of("io_uring-seccomp", case, program):
                assert f"\n{command}\n" in shown


# The description of the machine.


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({}, "copy kernels", "avx2, portable"),
        (
            {"copy_kernels": {"avx2": True, "neon": False}},
            *("copy kernels", "avx2; not with this processor: neon"),
        ),
        ({}, "small copies", "by portable"),
        ({}, "large copies", "by avx2"),
        ({}, "locked memory", "no limit"),
        ({"memlock_bytes": 8 << 20}, "locked memory", "at most 8 MiB (ulimit -l)"),
        (
            {"memlock_bytes": 8 << 20, "may_lock": True},
            *("locked memory", "no limit, by CAP_IPC_LOCK (without it 8 MiB: ulimit -l)"),
        ),
    ],
)
def test_the_machine_is_described_plainly(changes, name, words):
    assert dict(_system_rows(replace(SYSTEM, **changes)))[name] == words


# The summary line.


def summary(system=SYSTEM, installed=INSTALLED, *storages):
    report = Report(system, installed, storages, remedies(system, installed, storages))
    return report.verdict, report.summary


def test_the_summary_names_engine_and_route():
    memory = replace(STORAGE, in_memory=True, direct=False)
    found = summary(SYSTEM, INSTALLED, STORAGE, memory, STORAGE)
    assert found == (
        "full",
        "nvmeio works here at full speed: io_uring, O_DIRECT, in memory",
    )


def test_the_summary_names_the_choice_of_a_profile():
    text = "nvmeio works here at full speed: threads (chosen by a profile), O_DIRECT"
    assert summary(SYSTEM, TUNED, STORAGE) == ("full", text)


def test_the_summary_says_what_is_slow():
    system = replace(SYSTEM, transparent_huge_pages="never", **SYSCTL)
    verdict, text = summary(system, NO_RING, STORAGE)
    assert verdict == "slower"
    assert text == (
        "nvmeio works here, but slower than it could: sysctl kernel.io_uring_disabled is "
        "2, which blocks io_uring for all processes; transparent huge pages are switched "
        "off, so that some drives reach less than half their speed"
    )


def test_the_summary_says_if_nothing_is_fast():
    verdict, text = summary(SYSTEM, NOTHING, STORAGE)
    assert verdict == "none"
    assert text.startswith("no fast engine is in use here: a seccomp profile blocks the ")


def test_the_summary_distinguishes_problems_of_a_path_and_of_the_machine():
    found = summary(SYSTEM, INSTALLED, STORAGE, Storage("/x", error="No such file"))
    assert found == (
        "none",
        "io_uring works here, but not with every path: /x cannot be used: No such file",
    )


def test_hints_do_not_change_the_verdict():
    system = replace(SYSTEM, memlock_bytes=65536)
    assert summary(system, INSTALLED, STORAGE)[0] == "full"
