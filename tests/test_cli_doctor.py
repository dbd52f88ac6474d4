"""nvmeio doctor: the real command, on this machine and under simulated problems."""

import errno
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nvmeio
from children import TESTS, WATCHDOG_S, skip_under_asan, system_environment
from commands import command
from commands import nvmeio as run_nvmeio
from mounts import with_file, with_read_only
from nvmeio._cli.system import storage_of
from workloads.common import Faults

FAST = ("io_uring", "libaio")

# Numbers of system calls.
IO_URING_SETUP = 425
IO_SETUP = {"x86_64": 206, "aarch64": 0}


def examine(*paths, status=None, **options):
    """Run ``nvmeio doctor --json``, and return its findings."""
    found = run_nvmeio("doctor", *paths, "--json", **options)
    assert found.status in (0, 1), found.err
    report = json.loads(found.out)
    assert report["schema"] == 2
    assert found.status == (1 if report["verdict"] == "none" else 0)
    assert status in (None, found.status), report["summary"]
    return report


def keys_of(report, *severities):
    """Return the keys of the problems with the given severities."""
    return [one["key"] for one in report["problems"] if one["severity"] in severities]


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


def test_the_disk_and_the_machine_are_described(tmp_path, engines):
    report = examine(cwd=tmp_path)
    (path,) = report["paths"]
    with nvmeio.File(tmp_path / "file", "w") as file:
        assert (path["direct"], path["alignment_bytes"]) == (file.direct, file.alignment)
    space = os.statvfs(tmp_path)
    assert path["path"] == "."
    assert path["total_bytes"] == space.f_blocks * space.f_frsize
    assert 0 < path["free_bytes"] <= path["total_bytes"]
    assert (path["writable"], path["read_only"]) == (True, False)
    assert Path(path["mount_point"]) in [tmp_path, *tmp_path.parents]
    found = report["system"]
    assert found["kernel"] == platform.release()
    assert 1 <= found["processors"] <= found["processors_total"]
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert found["memlock_bytes"] == (None if soft == resource.RLIM_INFINITY else soft)
    assert report["installation"]["engine"] in engines
    assert report["installation"]["configuration"]["engines"] == engines
    keys = {"schema", "verdict", "summary", "installation", "system", "paths", "problems"}
    assert report.keys() == keys


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


def test_a_block_device_has_no_file_system(loop_device):
    device = loop_device(1 << 20, 4096)
    (found,) = examine(device)["paths"]
    assert (found["file_system"], found["mount_point"]) == ("", "")
    assert found["device"] == os.path.basename(device)
    assert found["alignment_bytes"] == 4096


def test_fuse_is_examined_like_other_file_systems(faulty, healthy):
    """It has no unnamed files, so a named one exists for a moment."""
    (found,) = examine(faulty, status=0)["paths"]
    assert found["file_system"].startswith("fuse")
    assert found["error"] == ""
    assert os.listdir(faulty) == []


def test_a_device_is_described(tmp_path):
    sys, number = tmp_path / "sys", os.stat(tmp_path).st_dev
    block = sys / "devices" / "nvme9n1"
    for name, text in (
        ("queue/scheduler", "none mq-deadline [bfq]"),
        ("device/model", "Some Drive 2TB                "),
    ):
        (block / name).parent.mkdir(parents=True, exist_ok=True)
        (block / name).write_text(f"{text}\n")
    link = sys / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(block)
    found = storage_of(str(tmp_path), sys=sys)
    assert (found.device, found.model) == ("nvme9n1", "Some Drive 2TB")
    assert found.scheduler == "bfq"


# What is amiss.


@pytest.mark.parametrize("error", [1, 38])
def test_a_filter_that_refuses_io_uring_is_reported(tmp_path, healthy, error):
    report = examine(tmp_path, prefix=filtered(IO_URING_SETUP, error=error), status=0)
    assert report["verdict"] == "slower"
    assert report["installation"]["engine"] == "libaio"
    assert report["system"]["seccomp"]
    assert keys_of(report, "slow")[0] == "io_uring-refused"
    assert "io_uring does not work: " in report["summary"]
    assert "seccomp profile" in report["summary"]


def test_a_filter_that_refuses_every_fast_engine_is_reported(tmp_path, healthy):
    prefix = filtered(IO_URING_SETUP, IO_SETUP[platform.machine()])
    report = examine(tmp_path, prefix=prefix, status=1)
    assert report["verdict"] == "none"
    assert report["summary"].startswith("nvmeio works slowly here, or not at all: io_uri")
    assert report["installation"]["engine"] == "threads"
    assert keys_of(report, "broken") == ["io_uring-refused", "libaio-refused"]
    # nvmeio still works.
    assert report["paths"][0]["error"] == ""


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
    assert "memlock" in keys_of(report, "hint")


@pytest.mark.parametrize(
    ("engine", "status", "verdict"),
    [("libaio", 0, "slower"), ("threads", 1, "none")],
)
def test_a_variable_that_excludes_the_best_engine_is_reported(
    tmp_path, healthy, engine, status, verdict
):
    env = {**os.environ, "NVMEIO_ENGINE": engine}
    report = examine(tmp_path, env=env, status=status)
    assert report["installation"]["engine"] == engine
    assert "engine-chosen" in keys_of(report, "broken", "slow")
    assert report["verdict"] == verdict


@pytest.mark.parametrize(
    ("name", "value"), [("NVMEIO_ENGINE", "posix"), ("NVMEIO_POOL_BYTES", "1")]
)
def test_an_invalid_setting_is_reported(tmp_path, name, value):
    report = examine(tmp_path, env={**os.environ, name: value}, status=1)
    assert report["installation"]["engine"] is None
    assert name in report["summary"]
    assert report["problems"][0]["see"] == "docs/troubleshooting.md#a-setting-is-wrong"
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
    assert re.search(
        rf"^profile +{file}: 512 KiB x 32, engine threads$", shown, re.MULTILINE
    )


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
    assert keys_of(report, "broken") == ["settings"]
    assert str(folder) in report["summary"]
    # A service has another home than the user who ran `nvmeio tune`.
    assert ("or set XDG_CONFIG_HOME to" in report["summary"]) == (profile == "missing")


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
    missing, pipe = tmp_path / "missing", tmp_path / "pipe"
    os.mkfifo(pipe)
    report = examine(missing, pipe, tmp_path, status=1)
    assert [path["error"] for path in report["paths"]] == [
        *("No such file or directory", "neither a file nor a folder nor a block device"),
        "",
    ]
    assert f"{missing} cannot be used: No such file or directory" in report["summary"]
    assert not missing.exists()


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
    assert "read-only" in keys_of(report, "hint")


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


def test_a_report_begins_with_the_verdict_and_ends_with_the_problems(tmp_path, healthy):
    found = run_nvmeio("doctor", tmp_path)
    assert (found.status, found.err) == (0, "")
    lines = found.out.splitlines()
    assert lines[0].startswith("nvmeio works here")
    heads = [line.split()[0] for line in lines if line.split()[:1]]
    assert heads.count("engine") == heads.count("machine") == heads.count("path") == 1
    assert {"io_uring", "libaio", "threads", "sync", "profile", str(tmp_path)} <= {*heads}
    env = {**os.environ, "NVMEIO_ENGINE": "threads"}
    found = run_nvmeio("doctor", tmp_path / "missing", env=env)
    assert (found.status, found.err) == (1, "")
    *_, first, second, third, fourth = found.out.splitlines()
    assert first.startswith("1. NVMEIO_ENGINE=threads is set, so nvmeio does not use ")
    assert second == "   see docs/troubleshooting.md#a-setting-is-wrong"
    assert third.startswith(f"2. {tmp_path / 'missing'} cannot be used: ")
    assert fourth == "   see docs/troubleshooting.md#a-path-cannot-be-used"
    assert re.search(r"^environment +NVMEIO_ENGINE=threads$", found.out, re.MULTILINE)
