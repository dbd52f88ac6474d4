"""nvmeio doctor: the real command, on this machine and under simulated problems."""

import errno
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest

import nvmeio
from children import TESTS, WATCHDOG_S, skip_under_asan, system_environment
from commands import command, nvmeio_in_terminal
from commands import nvmeio as run_nvmeio
from mounts import with_file, with_read_only
from nvmeio._cli.system import storage_of
from workloads.common import Faults

FAST = ("io_uring", "libaio")

# Numbers of system calls.
IO_URING_SETUP = 425
IO_SETUP = {"x86_64": 206, "aarch64": 0}

NUMBER_OR_NONE = (int, types.NoneType)
TEXT_OR_NONE = (str, types.NoneType)

# The schema of the JSON: each key has a type or a nested schema; a list has the schema of
# its items; "*" stands for all keys.
SCHEMA = {
    "schema": int,
    "verdict": str,
    "summary": str,
    "installation": {
        "versions": {
            "nvmeio": str,
            "python": str,
            "numpy": TEXT_OR_NONE,
            "torch": TEXT_OR_NONE,
        },
        "compiler": str,
        "debug": bool,
        "test_build": bool,
        "features": {"*": {"built": bool, "version": str, "flags": [str], "reason": str}},
        "engines": {"*": {"built": bool, "works": bool, "errno": int, "reason": str}},
        "engine": TEXT_OR_NONE,
        "error": str,
        "rings_fit": bool,
        "environment": {"*": str},
        "profile": (dict, types.NoneType),
        "profiles": str,
    },
    "system": {
        "kernel": str,
        "distribution": str,
        "package_manager": str,
        "container": str,
        "seccomp": bool,
        "uid": int,
        "groups": [int],
        "may_lock": bool,
        "may_administer": bool,
        "processor": str,
        "processors": int,
        "processors_total": int,
        "features": [str],
        "copy_kernels": {"*": bool},
        "copy_small": str,
        "copy_large": str,
        "nodes": [{"number": int, "memory_bytes": int, "processors": int}],
        "memory_bytes": int,
        "memory_total_bytes": int,
        "pool_bytes": NUMBER_OR_NONE,
        "memlock_bytes": NUMBER_OR_NONE,
        "open_files": NUMBER_OR_NONE,
        "transparent_huge_pages": str,
        "huge_page_bytes": int,
        "huge_pages": int,
        "huge_pages_free": int,
        "io_uring_disabled": NUMBER_OR_NONE,
        "io_uring_group": NUMBER_OR_NONE,
        "aio_events": NUMBER_OR_NONE,
        "aio_events_max": NUMBER_OR_NONE,
    },
    "paths": [
        {
            "path": str,
            "error": str,
            "mount_point": str,
            "file_system": str,
            "source": str,
            "in_memory": bool,
            "device": str,
            "model": str,
            "scheduler": str,
            "rotational": (bool, types.NoneType),
            "logical_block_bytes": int,
            "physical_block_bytes": int,
            "numa_node": NUMBER_OR_NONE,
            "direct": (bool, types.NoneType),
            "alignment_bytes": NUMBER_OR_NONE,
            "writable": bool,
            "read_only": bool,
            "free_bytes": int,
            "total_bytes": int,
        }
    ],
    "remedies": [
        {
            "key": str,
            "severity": str,
            "problem": str,
            "steps": [{"text": str, "commands": [str]}],
            "path": str,
        }
    ],
}


def differences(value, schema, place="$"):
    """Yield the differences of a value from a schema."""
    if isinstance(schema, dict):
        keys = value.keys() if "*" in schema else schema.keys()
        if not isinstance(value, dict) or value.keys() != keys:
            yield f"{place}: {value!r} has other keys than {list(keys)}"
            return
        for key in keys:
            yield from differences(value[key], schema.get(key, schema.get("*")), key)
    elif isinstance(schema, list):
        for item in value:
            yield from differences(item, schema[0], f"{place}[]")
    # In Python a boolean is an int.
    elif not isinstance(value, schema) or (schema is int and isinstance(value, bool)):
        yield f"{place}: {value!r} is no {schema}"


def examine(*paths, status=None, **options):
    """Run ``nvmeio doctor --json``, and return its findings."""
    found = run_nvmeio("doctor", *paths, "--json", **options)
    assert found.status in (0, 1), found.err
    report = json.loads(found.out)
    assert found.status == (1 if report["verdict"] == "none" else 0)
    assert status in (None, found.status), report["summary"]
    assert list(differences(report, SCHEMA)) == []
    assert report["schema"] == 1
    errors = [
        f"nvmeio doctor: error: {path['path']}: {path['error']}"
        for path in report["paths"]
        if path["error"]
    ]
    assert found.err.splitlines() == errors
    return report


def keys_of(report, *severities):
    """Return the keys of the remedies with the given severities."""
    return [
        remedy["key"] for remedy in report["remedies"] if remedy["severity"] in severities
    ]


@pytest.fixture
def healthy(engines, tmp_path):
    """Skip unless nothing is wrong with this machine."""
    for name in FAST:
        if not engines[name]["works"]:
            reason = engines[name]["reason"]
            pytest.skip(f"the engine {name} does not work here: {reason}")
    with nvmeio.File(tmp_path / "probe", "w") as file:
        if not file.direct:
            pytest.skip("the file system has no O_DIRECT")
    (tmp_path / "probe").unlink()


def filtered(*calls, error=1):
    """Return a command prefix under which a filter refuses some system calls."""
    script = f"""
import os, sys
sys.path.insert(0, {str(TESTS)!r})
from workloads.faults import refuse_by_seccomp
for call in {calls!r}:
    refuse_by_seccomp(call, {error})
os.execvp(sys.argv[1], sys.argv[1:])
"""
    return [sys.executable, "-c", script]


def unprivileged():
    """Return a command prefix that runs as an ordinary user."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    # Files of root, Python among them, must stay readable.
    read = "+dac_read_search"
    prefix = ["setpriv", "--reuid", "65534", "--clear-groups"]
    return [*prefix, "--inh-caps", read, "--ambient-caps", read]


# What it finds.


def test_the_disk_is_described(tmp_path, engines):
    report = examine(tmp_path)
    (path,) = report["paths"]
    with nvmeio.File(tmp_path / "file", "w") as file:
        assert (path["direct"], path["alignment_bytes"]) == (file.direct, file.alignment)
    space = os.statvfs(tmp_path)
    assert path["path"] == str(tmp_path)
    assert path["total_bytes"] == space.f_blocks * space.f_frsize
    assert 0 < path["free_bytes"] <= path["total_bytes"]
    assert path["writable"]
    assert not path["read_only"]
    assert Path(path["mount_point"]) in [tmp_path, *tmp_path.parents]
    assert report["installation"]["engines"] == engines
    assert report["installation"]["engine"] in engines


def test_the_machine_is_described():
    found = examine("/")["system"]
    assert found["kernel"] == platform.release()
    assert found["uid"] == os.geteuid()
    assert os.getegid() in found["groups"]
    assert 1 <= found["processors"] <= found["processors_total"]
    assert {found["copy_small"], found["copy_large"]} <= found["copy_kernels"].keys()
    # The nodes' memory need not add up to the total: memory that was added to a virtual
    # machine later is in no node.
    told = [
        int(re.search(r"MemTotal:\s+(\d+) kB", path.read_text())[1]) << 10
        for path in Path("/sys/devices/system/node").glob("node[0-9]*/meminfo")
    ]
    assert sum(node["memory_bytes"] for node in found["nodes"]) == sum(told) > 0
    assert found["pool_bytes"] == nvmeio.pool_stats()["bytes_limit"]
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert found["memlock_bytes"] == (None if soft == resource.RLIM_INFINITY else soft)


def test_versions_are_reported_without_importing_torch():
    found = examine("/", without=["torch"])["installation"]["versions"]
    installed = importlib.util.find_spec("torch") is not None
    assert found["torch"] == (version("torch") if installed else None)
    assert found["nvmeio"] == nvmeio.__version__
    assert found["python"] == platform.python_version()


def test_the_default_path_is_the_current_folder(tmp_path):
    (path,) = examine(cwd=tmp_path)["paths"]
    assert path["path"] == "."
    assert (
        path["total_bytes"] == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    )


def test_memory_needs_no_o_direct(tmpfs, healthy):
    (path,) = examine(tmpfs, status=0)["paths"]
    assert (path["file_system"], path["mount_point"]) == ("tmpfs", "/dev/shm")
    assert path["in_memory"]
    assert path["device"] == ""


def test_a_file_is_only_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content" * 1000)
    before = path.stat()
    (found,) = examine(path)["paths"]
    after = path.stat()
    assert found["direct"] is not None
    assert path.read_bytes() == b"content" * 1000
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
    assert os.listdir(tmp_path) == ["file"]


def test_an_empty_file_is_no_problem(tmp_path):
    (tmp_path / "file").touch()
    (found,) = examine(tmp_path / "file")["paths"]
    assert found["error"] == ""


def test_a_block_device_has_no_file_system(loop_device):
    device = loop_device(1 << 20, 4096)
    (found,) = examine(device)["paths"]
    assert (found["file_system"], found["mount_point"]) == ("", "")
    assert found["device"] == os.path.basename(device)
    assert found["logical_block_bytes"] == found["alignment_bytes"] == 4096


def test_the_devices_sector_size_is_reported(loop_mount):
    folder = loop_mount("ext4", 32 << 20, sector=4096)
    report = examine(folder)
    (found,) = report["paths"]
    assert (found["file_system"], found["mount_point"]) == ("ext4", str(folder))
    assert found["alignment_bytes"] == found["logical_block_bytes"] == 4096
    # 32 MiB fill up quickly.
    assert "nearly-full" in keys_of(report, "hint")


def test_fuse_is_examined_like_other_file_systems(faulty, healthy):
    """It has no unnamed files, so a named one exists for a moment."""
    (found,) = examine(faulty, status=0)["paths"]
    assert found["file_system"].startswith("fuse")
    assert found["error"] == ""
    assert os.listdir(faulty) == []


def test_several_paths_are_reported_in_order(tmp_path, tmpfs):
    paths = [str(tmp_path), str(tmpfs), str(tmp_path)]
    assert [found["path"] for found in examine(*paths)["paths"]] == paths


def test_a_link_is_followed(tmp_path, tmpfs):
    (tmp_path / "link").symlink_to(tmpfs)
    (found,) = examine(tmp_path / "link")["paths"]
    assert found["file_system"] == "tmpfs"


def test_the_quota_of_a_control_group_counts(control_group):
    prefix = control_group(
        "cpu",
        {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 100_000},
        {"cpu.max": "100000 100000"},
    )
    found = examine("/", prefix=prefix)["system"]
    assert found["processors"] == 1
    assert found["processors_total"] == os.cpu_count()


# Devices that are made up.


def device(folder, number, **attributes):
    """Make a folder that looks like sysfs with one block device."""
    block = folder / "devices" / "nvme9n1"
    attributes = {
        "queue/rotational": "0",
        "queue/scheduler": "[none] mq-deadline bfq",
        "queue/logical_block_size": "512",
        "queue/physical_block_size": "4096",
        "device/model": "Some Drive 2TB                ",
        **{name.replace("__", "/"): text for name, text in attributes.items()},
    }
    for name, text in attributes.items():
        (block / name).parent.mkdir(parents=True, exist_ok=True)
        (block / name).write_text(f"{text}\n")
    link = folder / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(block)
    return folder


def test_a_device_is_described(tmp_path):
    sys = device(tmp_path / "sys", os.stat(tmp_path).st_dev, device__device__numa_node="1")
    found = storage_of(str(tmp_path), sys=sys)
    assert (found.device, found.model, found.scheduler) == (
        *("nvme9n1", "Some Drive 2TB", "none"),
    )
    assert (found.logical_block_bytes, found.physical_block_bytes) == (512, 4096)
    assert found.rotational is False
    assert found.numa_node == 1


@pytest.mark.parametrize(
    ("attributes", "field", "value"),
    [
        ({"queue__rotational": "1"}, "rotational", True),
        ({"queue__scheduler": "none mq-deadline [bfq]"}, "scheduler", "bfq"),
        ({"queue__scheduler": "none"}, "scheduler", "none"),
        ({"device__numa_node": "2"}, "numa_node", 2),
        ({"device__numa_node": "-1"}, "numa_node", None),
    ],
)
def test_the_devices_attributes_are_parsed(tmp_path, attributes, field, value):
    sys = device(tmp_path / "sys", os.stat(tmp_path).st_dev, **attributes)
    assert getattr(storage_of(str(tmp_path), sys=sys), field) == value


# What is amiss.


@pytest.mark.parametrize("error", [1, 38])
def test_a_filter_that_refuses_io_uring_is_reported(tmp_path, healthy, error):
    report = examine(tmp_path, prefix=filtered(IO_URING_SETUP, error=error), status=0)
    assert report["verdict"] == "slower"
    assert report["installation"]["engine"] == "libaio"
    assert report["system"]["seccomp"]
    assert keys_of(report, "slow")[0] == "io_uring-seccomp"
    assert "a seccomp profile blocks the system calls of io_uring" in report["summary"]


def test_a_filter_that_refuses_every_fast_engine_is_reported(tmp_path, healthy):
    prefix = filtered(IO_URING_SETUP, IO_SETUP[platform.machine()])
    report = examine(tmp_path, prefix=prefix, status=1)
    assert report["verdict"] == "none"
    assert report["summary"].startswith("no fast engine is in use here: ")
    assert report["installation"]["engine"] == "threads"
    assert set(keys_of(report, "broken")) >= {"io_uring-seccomp"}
    # nvmeio still works.
    assert report["paths"][0]["error"] == ""


@pytest.mark.parametrize("value", [1, 2])
def test_a_sysctl_that_refuses_io_uring_is_reported(tmp_path, healthy, value):
    sysctl = "/proc/sys/kernel/io_uring_disabled"
    if not os.path.exists(sysctl):
        pytest.skip("the kernel has no sysctl kernel.io_uring_disabled")
    prefix = [*with_file(tmp_path, sysctl, f"{value}\n"), *unprivileged()]
    report = examine("/", prefix=[*prefix, *filtered(IO_URING_SETUP)])
    assert report["system"]["io_uring_disabled"] == value
    assert keys_of(report, "slow")[0] == "io_uring-sysctl"
    steps = report["remedies"][0]["steps"]
    lines = [line for step in steps for line in step["commands"]]
    assert lines[0] == "sudo sysctl -w kernel.io_uring_disabled=0"
    assert any("io_uring_group" in line for line in lines) == (value == 1)


def test_disabled_huge_pages_are_reported(tmp_path, healthy):
    switch = "/sys/kernel/mm/transparent_hugepage/enabled"
    if not os.path.exists(switch):
        pytest.skip("the kernel has no huge pages to give")
    prefix = with_file(tmp_path, switch, "always madvise [never]\n")
    report = examine(tmp_path, prefix=prefix)
    assert report["verdict"] == "slower"
    assert keys_of(report, "slow") == ["huge-pages"]


def root_of_a_namespace():
    """Return a command prefix that runs as root of a user namespace only."""
    prefix = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*prefix, "true"], env=system_environment(), check=False).returncode:
        pytest.skip("user namespaces cannot be made here")
    return prefix


@pytest.mark.parametrize("who", [unprivileged, root_of_a_namespace])
def test_a_low_limit_of_locked_memory_is_reported(healthy, who):
    skip_under_asan("makes nothing of mlock")
    report = examine(
        "/",
        prefix=who(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)),
    )
    assert report["system"]["memlock_bytes"] == 65536
    assert not report["system"]["may_lock"]
    assert not report["system"]["may_administer"]
    assert "memlock" in keys_of(report, "hint")


def test_rings_that_exceed_the_limit_of_locked_memory_are_reported(healthy):
    skip_under_asan("makes nothing of mlock")
    report = examine(
        "/",
        prefix=unprivileged(),
        env={**os.environ, "NVMEIO_WORKERS": "8"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)),
    )
    if report["installation"]["rings_fit"]:
        assert report["installation"]["engine"] == "io_uring"
        pytest.skip("this kernel does not count io_uring's rings as locked memory")
    assert report["installation"]["engine"] == "libaio"
    assert "64 KiB, the limit (ulimit -l)" in report["summary"]
    # The kernel frees rings late, so even the first one may find no room.
    assert {"rings", "io_uring-memlock"} & {*keys_of(report, "slow")}


@pytest.mark.parametrize(
    ("engine", "status", "verdict"),
    [("io_uring", 0, None), ("libaio", 0, "slower"), ("threads", 1, "none")],
)
def test_a_variable_that_excludes_the_best_engine_is_reported(
    tmp_path, healthy, engine, status, verdict
):
    env = {**os.environ, "NVMEIO_ENGINE": engine}
    report = examine(tmp_path, env=env, status=status)
    assert report["installation"]["environment"]["NVMEIO_ENGINE"] == engine
    assert report["installation"]["engine"] == engine
    assert ("engine-chosen" in keys_of(report, "broken", "slow")) == (verdict is not None)
    assert verdict in (None, report["verdict"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVMEIO_ENGINE", "posix"),
        ("NVMEIO_QUEUE_DEPTH", "many"),
        ("NVMEIO_POOL_BYTES", "1"),
        ("NVMEIO_COPY", "fast"),
    ],
)
def test_an_invalid_setting_is_reported(tmp_path, name, value):
    report = examine(tmp_path, env={**os.environ, name: value}, status=1)
    assert report["installation"]["engine"] is None
    assert name in report["summary"]
    assert f"unset {name}" in report["remedies"][0]["steps"][0]["commands"]
    # Facts that need no handle are still reported.
    assert report["paths"][0]["direct"] is not None


def test_an_engine_that_a_profile_chose_is_no_fault(tmp_path, healthy):
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "NVMEIO_PROFILE": "auto"}
    script = (
        "from nvmeio import profiles\n"
        "options = {'engine': 'threads', 'bounce': 'auto', 'block_size': 1 << 19,"
        " 'queue_depth': 32, 'workers': 1}\n"
        "best = profiles.Choice(options, {})\n"
        "profile = profiles.new_profile('.', both=best, read=best, write=best)\n"
        "print(profiles.save_profile(profile))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    file = done.stdout.strip()
    report = examine(tmp_path, env=env, status=0)
    assert report["installation"]["engine"] == "threads"
    assert report["installation"]["profile"]["file"] == file
    assert "engine-chosen" not in keys_of(report, "broken", "slow", "hint")
    shown = run_nvmeio("doctor", tmp_path, env=env).out
    assert f"chosen by the profile {file}" in shown
    assert re.search(rf"^profile +{file}: 512 KiB x 32, threads$", shown, re.MULTILINE)


@pytest.mark.parametrize("profile", ["broken", "missing", "in no folder"])
def test_a_profile_that_cannot_be_used_is_named(tmp_path, profile):
    home, value = tmp_path / "home", "auto"
    folder = home / "nvmeio" / "profiles"
    if profile == "broken":
        folder.mkdir(parents=True)
        (folder / "some.json").write_text("{}")
    else:
        # NVMEIO_PROFILE=auto would fall back to the defaults.
        value = str(tmp_path)
        if profile == "in no folder":
            home.touch()
    env = {**os.environ, "NVMEIO_PROFILE": value, "XDG_CONFIG_HOME": str(home)}
    report = examine(tmp_path, env=env, status=1)
    assert report["summary"].startswith("no handle can be opened here: ")
    assert str(folder) in report["summary"]
    # A service has another home than the user who ran `nvmeio tune`.
    assert ("or set XDG_CONFIG_HOME to" in report["summary"]) == (profile == "missing")
    steps = report["remedies"][0]["steps"]
    assert steps[-1]["commands"] == ["unset NVMEIO_PROFILE"]
    assert ("nvmeio tune DIR" in steps[0]["commands"]) == (profile == "missing")


@pytest.mark.parametrize("home", ["home", "file"])
def test_the_row_says_where_profiles_were_searched(tmp_path, home):
    (tmp_path / "file").touch()
    env = {
        **os.environ,
        "NVMEIO_PROFILE": "auto",
        "XDG_CONFIG_HOME": str(tmp_path / home),
    }
    folder = tmp_path / home / "nvmeio" / "profiles"
    said = f"0 in {folder}" if home == "home" else f"{folder}: Not a directory"
    shown = run_nvmeio("doctor", tmp_path, env=env).out
    assert f"none for NVMEIO_PROFILE=auto ({said}); `nvmeio tune DIR` makes one" in shown


def test_a_missing_path_is_reported_beside_the_others(tmp_path):
    missing = tmp_path / "missing"
    report = examine(missing, tmp_path, status=1)
    assert [bool(path["error"]) for path in report["paths"]] == [True, False]
    assert f"{missing} cannot be used: No such file or directory" in report["summary"]
    assert not missing.exists()


def test_a_pipe_is_no_path(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (found,) = examine(tmp_path / "pipe", status=1)["paths"]
    assert found["error"] == "neither a file nor a folder nor a block device"


def test_a_file_system_without_o_direct_is_not_fast(healthy):
    report = examine("/proc/version", status=1)
    assert keys_of(report, "broken") == ["no-o-direct"]
    assert report["paths"][0]["direct"] is False


def test_an_unwritable_folder_is_tested_with_a_file_in_it(tmp_path):
    folder = tmp_path / "others"
    folder.mkdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    (folder / "file").write_bytes(bytes(8192))
    for path in (folder, empty):
        path.chmod(0o555)
    try:
        report = examine(folder, empty, prefix=unprivileged())
    finally:
        for path in (folder, empty):
            path.chmod(0o755)
    full, bare = report["paths"]
    assert (full["writable"], bare["writable"]) == (False, False)
    assert full["direct"] is not None
    assert bare["direct"] is None
    assert keys_of(report, "hint").count("read-only") == 2
    assert os.listdir(folder) == ["file"]


def test_a_read_only_mount_is_reported(tmp_path):
    (tmp_path / "file").write_bytes(bytes(8192))
    report = examine(tmp_path, prefix=with_read_only(tmp_path))
    (found,) = report["paths"]
    assert (found["writable"], found["read_only"]) == (False, True)
    assert found["mount_point"] == str(tmp_path)
    assert found["direct"] is not None
    (remedy,) = [found for found in report["remedies"] if found["key"] == "read-only"]
    assert any("remount,rw" in line for line in remedy["steps"][0]["commands"])


def test_a_full_disk_cannot_be_used(loop_mount):
    folder = loop_mount("ext4", 16 << 20)
    filling = subprocess.run(
        ["dd", "if=/dev/zero", f"of={folder / 'filling'}", "bs=4096"],
        env={**system_environment(), "LC_ALL": "C"},
        capture_output=True,
        check=False,
    )
    assert b"No space left on device" in filling.stderr
    report = examine(folder, status=1)
    assert report["paths"][0]["error"] == os.strerror(errno.ENOSPC)
    assert sorted(os.listdir(folder)) == ["filling", "lost+found"]


def test_wrong_bytes_are_reported(faulty):
    control = faulty / "control"
    control.touch()
    Faults(control).set(read={"flip": 70_000})
    (found,) = examine(faulty, status=1)["paths"]
    assert found["error"] == "the bytes read differ from those written"
    assert Faults(control).fired()["read.flip"] > 0
    assert os.listdir(faulty) == ["control"]


def test_a_failing_drive_is_reported(faulty):
    control = faulty / "control"
    control.touch()
    Faults(control).set(write={"error": errno.EIO, "at": 70_000})
    (found,) = examine(faulty, status=1)["paths"]
    assert found["error"].startswith(os.strerror(errno.EIO))
    assert os.listdir(faulty) == ["control"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_leaves_nothing_behind(faulty, name):
    control = faulty / "control"
    control.touch()
    Faults(control).set(read={"held": True})
    with subprocess.Popen(command("doctor", faulty), stdout=subprocess.PIPE) as process:
        Faults(control).await_waiting()
        assert len(os.listdir(faulty)) == 2
        process.send_signal(signal.Signals[name])
        # A read in flight must end before its memory is freed.
        Faults(control).set()
        assert process.wait(timeout=WATCHDOG_S) == 128 + signal.Signals[name]
    assert os.listdir(faulty) == ["control"]


# What a person sees.


def test_a_report_begins_with_the_verdict_and_has_its_tables(tmp_path, engines):
    found = run_nvmeio("doctor", tmp_path)
    assert found.err == ""
    lines = found.out.splitlines()
    works = any(engines[name]["works"] for name in FAST)
    assert found.status == (0 if works else 1)
    begins = "nvmeio works here" if works else "no fast engine is in use here"
    assert lines[0].startswith(begins)
    heads = [line.split()[0] for line in lines if line.split()[:1]]
    assert [*heads].count("engine") == heads.count("machine") == heads.count("path") == 1
    for name in engines:
        assert any(line.startswith(f"{name} ") for line in lines)
    assert any(line.startswith(str(tmp_path)) for line in lines)


def test_remedies_are_numbered(tmp_path, healthy):
    env = {**os.environ, "NVMEIO_ENGINE": "threads"}
    found = run_nvmeio("doctor", tmp_path / "missing", env=env)
    assert found.status == 1
    _, _, advice = found.out.partition("What would help, most useful first:\n")
    lines = advice.splitlines()
    assert lines[1].startswith("1. NVMEIO_ENGINE=threads is set, so nvmeio does not use ")
    assert lines[2].startswith("   - let nvmeio choose")
    assert lines[3] == "       unset NVMEIO_ENGINE"
    assert lines[5].startswith(f"2. {tmp_path / 'missing'} cannot be used: ")
    assert "environment" in found.out
    # The report itself says so.
    assert found.err == ""


def test_a_terminal_shows_the_same_report(tmp_path):
    found = nvmeio_in_terminal("doctor", tmp_path)
    plain = run_nvmeio("doctor", tmp_path)
    assert found.status == plain.status
    # Free space and the events in use may have changed.
    assert [line[:14] for line in found.out.splitlines()] == [
        line[:14] for line in plain.out.splitlines()
    ]


def test_json_is_the_same_in_a_terminal(tmp_path):
    found = nvmeio_in_terminal("doctor", tmp_path, "--json")
    assert list(differences(json.loads(found.out), SCHEMA)) == []


def test_the_schema_check_finds_differences():
    assert list(differences({"a": 1}, {"a": int})) == []
    assert list(differences({"a": True}, {"a": int}))
    assert list(differences({"a": "1"}, {"a": int}))
    assert list(differences({"a": 1, "b": 1}, {"a": int}))
    assert list(differences({}, {"a": int}))
    assert list(differences({"a": [1, "b"]}, {"a": [int]}))
    assert list(differences({"x": 1}, {"*": str}))
