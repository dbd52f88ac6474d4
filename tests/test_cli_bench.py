"""``nvmeio bench``: measurements, output and cleanup."""

import dataclasses
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from commands import call_nvmeio, command, nvmeio, nvmeio_in_terminal
from helpers import ENGINES
from nvmeio import engines
from nvmeio._cli import fio
from nvmeio._cli.fio import Fio
from nvmeio._cli.measuring import scratch_folder
from nvmeio._cli.samples import Contest, Sample
from nvmeio._cli.system import System
from nvmeio._cli.terminal import spread

WORKS = {
    "write": ["write, new file, synced", "write"],
    "read": ["read"],
    "random": ["random read, 4 KiB"],
    "small": ["write, 16 tensors of 64 KiB", "read, 16 tensors of 64 KiB"],
    "copy": ["copy in memory"],
}
SIZE = 2 << 20
QUICK = ("--size", "2M", "--rounds", "2", "--block-size", "64K", "--queue-depth", "8")

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request, tmp_path):
    """A folder with files named like the benchmark's; these must stay."""
    if request.param == "tmpfs":
        tmp_path = request.getfixturevalue("tmpfs")
    for name in ("file", "new", "small-0"):
        (tmp_path / name).write_text(f"mine: {name}")
    yield tmp_path
    for name in ("file", "new", "small-0"):
        assert (tmp_path / name).read_text() == f"mine: {name}"
    assert sorted(os.listdir(tmp_path)) == ["file", "new", "small-0"]


def bench(folder, *arguments, out, **options):
    """Run the command on a folder; return the finished process and the report."""
    done = nvmeio("bench", folder, *QUICK, "--json", out, *arguments, **options)
    assert done.status == 0, done.err
    return done, json.loads(Path(out).read_text())


@pytest.fixture
def out(tmp_path_factory):
    """The path of the report."""
    return tmp_path_factory.mktemp("out") / "report.json"


@needs_fio
def test_every_workload_is_measured_beside_fio(folder, out):
    done, report = bench(folder, out=out)
    works = {result["work"]: result["contestants"] for result in report["results"]}
    assert list(works) == [work for names in WORKS.values() for work in names]
    fio = f"fio ({report['settings']['engine']})"
    assert {work for work in works if fio in works[work]} == {
        "write",
        "read",
        "random read, 4 KiB",
    }
    assert list(works["copy in memory"]) == ["nvmeio", "numpy"]
    for work, contenders in works.items():
        assert work in done.out
        for name, samples in contenders.items():
            assert len(samples) == 2
            for sample in samples:
                check_sample(sample, work)
                # fio cannot measure CPU time if kernel threads write its memory.
                assert (sample["cpu_seconds"] is None) == (
                    name == "fio (io_uring)" and report["storage"]["in_memory"]
                )


def check_sample(sample, work):
    """Check that the figures of a round agree with each other."""
    nbytes = {"random read, 4 KiB": SIZE // 2, "copy in memory": SIZE}
    small = 16 * (64 << 10)
    assert sample["bytes"] == nbytes.get(work, small if "tensors" in work else SIZE)
    assert sample["gb_per_s"] == pytest.approx(sample["bytes"] / sample["seconds"] / 1e9)
    assert sample["iops"] == pytest.approx(sample["operations"] / sample["seconds"])
    if sample["cpu_seconds"] is not None:
        per_gib = sample["cpu_seconds"] / (sample["bytes"] / (1 << 30))
        assert sample["cpu_s_per_gib"] == pytest.approx(per_gib)
    latencies = sample["latency_us"]
    if work == "copy in memory":
        assert sample["operations"] == 0
        assert latencies == {}
        return
    operations = sample["bytes"] // (4096 if "random" in work else 65536)
    # nvmeio extends a file in larger blocks.
    assert 0 < sample["operations"] <= operations
    assert sample["operations"] == operations or "new" in work
    assert list(latencies) == ["p50", "p99", "p99.9"]
    assert 0 < latencies["p50"] <= latencies["p99"] <= latencies["p99.9"]
    # No I/O takes longer than the round.
    assert latencies["p99.9"] <= 1.1 * sample["seconds"] * 1e6 + 1000


@pytest.fixture
def fake_fio(tmp_path_factory):
    """A function that replaces fio by a script; returns its folder and the environment."""
    tools = tmp_path_factory.mktemp("tools")

    def put(script):
        (tools / "fio").write_text(f"#!/bin/bash\ncd {tools}\n{script}")
        (tools / "fio").chmod(0o755)
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        return tools, {**os.environ, "PATH": path}

    return put


@needs_fio
def test_fio_works_on_the_same_file_in_the_same_blocks(folder, out, fake_fio):
    # The script logs its arguments, and runs the real fio.
    tools, env = fake_fio(
        f'echo "$GLIBC_TUNABLES $@" >> calls\nexec {shutil.which("fio")} "$@"\n'
    )
    bench(folder, "--only", "read,random", out=out, env=env)
    version, *calls = (tools / "calls").read_text().splitlines()
    assert version.split()[-1] == "--version"
    assert len(calls) == 4
    for call in calls:
        words = dict(word.partition("=")[::2] for word in call.split())
        block = {"read": 64 << 10, "randread": 4096}[words["--rw"]]
        assert words["--bs"] == str(block)
        assert words["--iodepth"] == "8"
        assert words["--size"] == str(SIZE)
        assert words["--filename"].startswith(f"{folder}/nvmeio-bench-")
        # glibc requests huge pages for fio's memory.
        assert call.startswith("glibc.malloc.hugetlb=")


@needs_fio
def test_fio_touches_its_memory_before_the_measurement(tmp_path, out, fake_fio):
    tools, env = fake_fio(
        '[ "$1" = --version ] && echo fio && exit\n'
        f'{shutil.which("fio")} "$@" | tee -a said\n'
    )
    bench(tmp_path, "--only", "read", "--queue-depth", "32", out=out, env=env)
    said = (tools / "said").read_text()
    faults = [int(count) for count in re.findall(r'"minf" : (\d+)', said)]
    assert len(faults) == 2
    # The whole file in pages of 4 KiB would be 512 faults.
    assert max(faults) < 64


@needs_fio
@pytest.mark.parametrize(("free", "kind"), [(0, 1), (32, 1), (33, 2)])
def test_fio_uses_reserved_huge_pages_if_there_are_enough(
    tmp_path, out, fake_fio, monkeypatch, free, kind
):
    # 64 MiB for fio itself, and 1 MiB of buffers.
    tools, env = fake_fio(
        f'echo "$GLIBC_TUNABLES $@" >> calls\nexec {shutil.which("fio")} "$@"\n'
    )
    monkeypatch.setenv("PATH", env["PATH"])
    found = dataclasses.replace(System(), huge_pages_free=free, huge_page_bytes=2 << 20)
    monkeypatch.setattr("nvmeio._cli.fio.System", lambda: found)
    path = tmp_path / "file"
    path.write_bytes(bytes(2 << 20))
    Fio(path, 2 << 20, "sync", False, 1).run("read", 1 << 20, lambda _: None)
    assert f"glibc.malloc.hugetlb={kind}:" in (tools / "calls").read_text()


@needs_fio
@pytest.mark.skipif(shutil.which("fincore") is None, reason="fincore is not installed")
def test_fio_finds_nothing_in_the_page_cache(tmp_path, out, fake_fio):
    tools, env = fake_fio(
        'for word; do case "$word" in --filename=*)\n'
        'fincore --noheadings --output PAGES "${word#*=}" >> pages;; esac; done\n'
        f'exec {shutil.which("fio")} "$@"\n'
    )
    bench(tmp_path, "--buffered", "--only", "write,read", out=out, env=env)
    assert (tools / "pages").read_text().split() == ["0"] * 4


def test_the_report_says_how_the_file_was_opened_if_that_matters(folder, out):
    done, report = bench(folder, "--buffered", "--no-fio", "--only", "read", out=out)
    assert report["settings"]["direct"] is False
    done, report = bench(folder, "--direct", "--no-fio", "--only", "read", out=out)
    assert report["settings"]["direct"] is True
    in_memory = report["storage"]["in_memory"]
    assert ("O_DIRECT" in done.out, "in memory" in done.out) == (not in_memory, in_memory)


def test_without_fio_nvmeio_is_measured_alone(folder, out, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    done, report = bench(folder, out=out, env={**os.environ, "PATH": str(empty)})
    assert report["fio"] is None
    names = {name for result in report["results"] for name in result["contestants"]}
    assert names == {"nvmeio", "numpy"}
    assert "fio is not installed" in done.err
    done, report = bench(folder, "--no-fio", out=out)
    assert report["fio"] is None
    assert done.err == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_can_be_measured(tmp_path, out, engine):
    if not engines()[engine]["works"]:
        pytest.skip(f"{engine} does not work here")
    _, report = bench(tmp_path, "--engine", engine, "--only", "read,random", out=out)
    assert report["settings"]["engine"] == engine
    names = {name for result in report["results"] for name in result["contestants"]}
    kind = {"io_uring": "io_uring", "libaio": "libaio"}.get(engine, "psync")
    assert names == {"nvmeio", f"fio ({kind})"} if shutil.which("fio") else {"nvmeio"}


@pytest.mark.parametrize("memory", ["pool", "numpy", "torch", "fresh"])
def test_each_kind_of_memory_can_be_measured(tmp_path, out, memory):
    if memory == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    _, report = bench(tmp_path, "--memory", memory, "--no-fio", out=out)
    assert report["settings"]["memory"] == memory
    assert len(report["results"]) == 7


@pytest.mark.parametrize("folder_name", ["it's a:b\\:c, $x %d", os.fsdecode(b"\xff")])
@needs_fio
def test_fio_gets_file_names_of_any_bytes(tmp_path, out, folder_name):
    (tmp_path / folder_name).mkdir()
    done, report = bench(tmp_path / folder_name, "--only", "read", out=out)
    assert len(report["results"][0]["contestants"]) == 2
    assert done.err == ""


@needs_fio
def test_fio_is_left_out_of_workloads_that_it_cannot_run(tmp_path, out):
    words = ["--size", "1000001", "--block-size", "4097", "--random-block-size", "1000"]
    done, report = bench(tmp_path, *words, out=out)
    assert report["settings"]["size"] == 1000001 // 4097 * 4097
    if report["settings"]["direct"]:
        assert done.err.startswith("write: fio (")
        assert done.err.count("\n") == 3
        assert all("nvmeio" in result["contestants"] for result in report["results"])
        assert "fio (" not in str(report["results"])
    done, report = bench(tmp_path, *words, "--buffered", out=out)
    assert str(report["results"]).count("fio (") == 3


def test_a_latency_without_bound_is_null_in_json():
    sample = Sample(1 << 20, 1, 70.0, 0.1, {50.0: 12.5, 99.0: math.inf})
    contest = Contest("read", 1 << 20, {}, {"nvmeio": [sample]})
    latencies = contest.as_dict()["contestants"]["nvmeio"][0]["latency_us"]
    assert latencies == {"p50": 12.5, "p99": None}


def test_a_terminal_shows_progress(folder):
    done = nvmeio_in_terminal("bench", folder, *QUICK, "--only", "read,copy")
    assert done.status == 0, done.out
    # A speed here would use another clock than the table's.
    assert re.search(r"read, nvmeio: \d+ % *\r", done.out)
    assert "copy in memory" in done.out
    assert "latency of an I/O" in done.out


@needs_fio
@pytest.mark.parametrize(("way", "known"), [("--direct", True), ("--buffered", False)])
def test_cpu_time_unknown_to_fio_is_left_out(tmp_path, out, way, known):
    words = (way, "--engine", "io_uring", "--only", "read")
    done, report = bench(tmp_path, *words, out=out)
    ours, theirs = report["results"][0]["contestants"].values()
    assert all(sample["cpu_seconds"] > 0 for sample in ours)
    assert [sample["cpu_s_per_gib"] is not None for sample in theirs] == [known] * 2
    # Instead of fio's figure, and of the speedup in nvmeio's row.
    (row,) = [line for line in done.out.splitlines() if " fio " in line and "," in line]
    assert (row.split()[-1] == "-") == (not known)


def test_the_table_has_the_figures_of_the_report(folder, out):
    done, report = bench(folder, "--no-fio", out=out)
    for result in report["results"]:
        speeds = [sample["gb_per_s"] for sample in result["contestants"]["nvmeio"]]
        assert spread(speeds, 2) in done.out


@pytest.mark.parametrize(("depth", "alike"), [("32", True), ("31", False)])
def test_equal_percentiles_of_few_blocks_are_explained(tmp_path, out, depth, alike):
    # The file has 32 blocks.
    words = ("--only", "read", "--no-fio", "--queue-depth", depth)
    done, _ = bench(tmp_path, *words, out=out)
    reason = "Percentiles are alike if the queue of 32 holds all I/Os at once:\nread.\n"
    assert (reason in done.out) == alike
    assert ("Percentiles" in done.out) == alike


def test_repeated_ctrl_c_leaves_nothing_behind(folder):
    process = subprocess.Popen(
        command("bench", folder, "--size", "64M", "--rounds", "1000"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The many small files are made last, and must all be removed.
    while not list(folder.glob("nvmeio-bench-*/small-100")):
        assert process.poll() is None
        time.sleep(0.01)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    assert process.communicate()[1] == "nvmeio bench: interrupted\n"
    assert process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_terminating_signal_leaves_nothing_behind(folder, number):
    process = subprocess.Popen(
        command("bench", folder, "--size", "64M", "--rounds", "1000"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(name.startswith("nvmeio-bench-") for name in os.listdir(folder)):
        assert process.poll() is None
        time.sleep(0.01)
    # At a random moment of its work.
    time.sleep(0.5)
    process.send_signal(number)
    said = "nvmeio bench: interrupted\n" if number == signal.SIGINT else ""
    assert process.communicate()[1] == said
    assert process.returncode == 128 + number
    assert running_in(folder) == []


@pytest.mark.parametrize("call", ["mkdir", "rmdir"])
def test_a_signal_is_delayed_while_the_folder_is_made_or_removed(folder, monkeypatch, call):
    original = getattr(os, call)

    def disturbed(*arguments, **options):
        original(*arguments, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, call, disturbed)
    names, handler = os.listdir(folder), signal.getsignal(signal.SIGINT)
    with (
        pytest.raises(KeyboardInterrupt),
        scratch_folder(str(folder), 0, 0) as own,
    ):
        (own / "file").touch()
    assert os.listdir(folder) == names
    assert signal.getsignal(signal.SIGINT) == handler


@needs_fio
def test_a_signal_while_fio_starts_ends_fio(monkeypatch):
    started = []

    class Disturbed(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Disturbed)
    with pytest.raises(KeyboardInterrupt):
        fio._job(["--name=never", "--runtime=100"], 0, "read", print)
    assert started[0].returncode is not None


def running_in(folder):
    """Return the command lines of processes that contain a folder's name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(words)
    return found


def test_a_disk_without_space_is_refused_before_anything_is_written(loop_mount):
    folder = loop_mount("ext4", 64 << 20)
    before = sorted(os.listdir(folder))
    done = nvmeio("bench", folder, "--size", "128M")
    assert done.status == 1
    assert done.err.startswith(f"nvmeio bench: error: {folder}: ")
    assert "--reserve" in done.err
    assert done.err.count("\n") == 1
    assert sorted(os.listdir(folder)) == before
    # Space for the file, but not for the reserve that must stay free.
    done = nvmeio("bench", folder, *QUICK, "--reserve", "60M")
    assert done.status == 1
    assert "60 MiB are kept" in done.err
    done = nvmeio("bench", folder, *QUICK, "--only", "read", "--reserve", "1")
    assert done.status == 0, done.err
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("size", ["2M", "64M"])
def test_a_failed_write_is_one_line_and_leaves_nothing(tmp_path, size):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = nvmeio("bench", tmp_path, *QUICK, "--size", size, preexec_fn=limit)
    assert done.status == 1
    assert "File too large" in done.err
    assert done.err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_an_unwritable_folder_is_an_error_of_one_line(loop_mount, tmp_path):
    folder = loop_mount("ext4", 64 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    for place, words in (
        (folder, "Read-only file system"),
        (tmp_path / "none", "No such file or directory"),
        (__file__, "Not a directory"),
    ):
        done = nvmeio("bench", place, *QUICK)
        assert done.status == 1
        assert words in done.err
        assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--size", "0"], "is not a size"),
        (["--size", "1M", "--block-size", "1M"], "room for two blocks"),
        (
            ["--size=1M", "--block-size=64K", "--random-block-size=1M"],
            "two blocks of --random-block-size 1 MiB",
        ),
        (["--queue-depth", "0"], "from 1 to 32768"),
        (["--only", "read,sing"], "'sing' must be one of"),
        (["--direct", "--buffered"], "not allowed with"),
        (["--memory", "tape"], "invalid choice"),
        (["--plot", "chart.gif"], "must end in .png or .svg"),
        (["--plot", "none/chart.png"], "there is no folder 'none'"),
    ],
)
def test_impossible_arguments_are_an_error_of_one_line(tmp_path, words, complaint):
    done = call_nvmeio("bench", tmp_path, *words)
    assert done.status == 2
    assert complaint in done.err
    assert done.err.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("package", "words"),
    [("matplotlib", ["--plot", "chart.png"]), ("torch", ["--memory", "torch"])],
)
def test_a_missing_package_is_reported_before_anything_is_measured(
    tmp_path, package, words
):
    done = nvmeio("bench", tmp_path, *words, without=(package,), cwd=tmp_path)
    assert done.status == 1
    assert package in done.err
    assert "is not installed" in done.err
    assert done.err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_wrong_bytes_end_the_benchmark(faulty):
    os.setxattr(faulty, "user.faults", json.dumps({"read": {"flip": 12345}}).encode())
    done = nvmeio("bench", faulty, *QUICK, "--no-fio")
    fired = json.loads(os.getxattr(faulty, "user.fired"))
    os.setxattr(faulty, "user.faults", b"{}")
    assert fired["read.flip"] > 0
    assert done.status == 1
    assert "the bytes read differ from those written" in done.err
    assert os.listdir(faulty) == []
