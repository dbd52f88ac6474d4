"""The benchmarks run and save their results, and the documentation shows these."""

import dataclasses
import hashlib
import importlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"
RESULTS = BENCH / "results"

# A script that follows the contract of run.py, and reports its arguments.
STUB = """
import json, sys
sample = {"nbytes": 4096, "seconds": 1.0, "cpu_seconds": 0.5, "device_bytes": 4096}
comparison = {"work": " ".join(sys.argv[1:-2]), "names": ["a", "b"], "reads": True,
              "goals": [], "record_bytes": 0, "rounds_each": 1,
              "rounds": [[sample, sample]]}
raw = {"schema": 2, "script": "copy", "machine": {}, "left out": ["x (y)"],
       "comparisons": [comparison]}
open(sys.argv[-1], "w").write(json.dumps(raw))
"""


@pytest.fixture
def bench(monkeypatch):
    """A function that imports a module of bench/ by name."""
    monkeypatch.syspath_prepend(BENCH)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(
            sys.modules[name].__file__
        ).is_relative_to(BENCH):
            del sys.modules[name]


@pytest.fixture
def comparison(bench):
    """A function that makes a comparison, its second candidate slower by given factors."""
    comparisons = bench("comparisons")

    def make(*factors, **given):
        def sample(seconds):
            return comparisons.Sample(1 << 30, seconds, seconds / 2, 1 << 30)

        rounds = [(sample(0.5), sample(0.5 * factor)) for factor in factors]
        given = {"work": "read", "names": ("nvmeio", "fio"), "reads": True, **given}
        return comparisons.Comparison(turns=(), rounds=rounds, **given)

    return make


@pytest.fixture
def tree(tmp_path, bench, comparison):
    """A tree with results of two scripts, and a page that shows them."""
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    goals = (bench("comparisons").Goal("speed", 1.5),)
    raw = {
        "schema": 2,
        "machine": {},
        "scripts": {
            "transfer": {
                "machine": {"cpu": "2 x Z80", "file system": "ext4 on vda"},
                "left out": ["caio (gone)"],
                "comparisons": [comparison(2.0, 1.0, 4.0, goals=goals).as_dict()],
                "seconds": 7.2,
            },
            "gather": {"failed": "no such disk", "seconds": 1.0},
        },
    }
    (results / "2026-01-31-here.json").write_text(json.dumps(raw))
    page = tmp_path / "README.md"
    page.write_text(
        "Before.\n<!-- table: all of transfer from latest -->\n<!-- end -->\nBetween.\n"
        "<!-- table: summary of all from 2026-01-31-here.json -->\n<!-- end -->\nAfter.\n"
    )
    return tmp_path


def run_bench(*arguments):
    """Run bench/run.py."""
    return subprocess.run(
        [sys.executable, BENCH / "run.py", *arguments], capture_output=True, text=True
    )


def only_json(folder):
    """Return the content of the only file in a folder."""
    (path,) = folder.glob("*.json")
    return path, json.loads(path.read_text())


@pytest.mark.slow
def test_a_quick_run_saves_all_results(tmp_path, bench):
    results, work = tmp_path / "results", tmp_path / "work"
    results.mkdir()
    work.mkdir()
    arguments = ["--quick", "--only", "checkpoint", "--machine", "here"]
    done = run_bench(*arguments, "--dir", work, "--results", results)
    assert done.returncode == 0, done.stderr
    path, raw = only_json(results)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-here\.json", path.name)
    assert raw["schema"] == 2
    assert list(raw["scripts"]) == ["checkpoint"]
    assert {"cpu", "kernel", "load before", "nvmeio", "file system"} <= raw[
        "machine"
    ].keys()
    outcome = bench("report").scripts_of(path)["checkpoint"]
    assert outcome.failure == ""
    assert outcome.seconds > 0
    assert "`bench_checkpoint.py`" in done.stdout
    assert len(outcome.comparisons) > 3
    for comparison in outcome.comparisons:
        assert len(comparison.rounds) == outcome.machine["rounds"]
        assert min(s.nbytes * s.seconds for pair in comparison.rounds for s in pair) > 0
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_leaves_nothing_behind(tmp_path, number):
    work, results = tmp_path / "work", tmp_path / "results"
    work.mkdir()
    results.mkdir()
    arguments = ["--only", "gather", "--dir", work, "--results", results]
    process = subprocess.Popen(
        [sys.executable, BENCH / "run.py", *arguments], stderr=subprocess.DEVNULL
    )
    while not list(work.glob("*/*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert list(work.iterdir()) == []
    assert list(results.iterdir()) == []


WITHOUT_PEERS = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.modules.update(dict.fromkeys(("torch", "safetensors", "aiofile", "caio")))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_missing_peers_are_left_out_and_reported(tmp_path):
    out = tmp_path / "found.json"
    script = [BENCH / "bench_checkpoint.py", "--size", "1M", "--rounds", "1"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            WITHOUT_PEERS,
            BENCH,
            *script,
            "--dir",
            tmp_path,
            "--json",
            out,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    raw = json.loads(out.read_text())
    assert [words.split()[0] for words in raw["left out"]] == ["torch", "aiofile", "caio"]
    assert len(re.findall("^left out: ", done.stderr, re.MULTILINE)) == 3
    others = {comparison["names"][1] for comparison in raw["comparisons"]}
    # A checkpoint is compared with a copy, which is no peer.
    others -= {"plain loop", "copy into memory used before", "alone"}
    assert others == {"numpy.save", "numpy.load", "numpy.memmap, touched", "Python"}


@pytest.fixture
def stubbed(bench, tmp_path, monkeypatch):
    """run.py with stubs in place of the scripts."""
    run = bench("run")
    monkeypatch.setattr(run, "HERE", tmp_path)
    jobs = {name: dataclasses.replace(job, needs=()) for name, job in run.JOBS.items()}
    monkeypatch.setattr(run, "JOBS", jobs)
    for name in ("copy", "gather"):
        (tmp_path / f"bench_{name}.py").write_text(STUB)
    return run


def test_a_script_that_fails_is_recorded_and_the_others_go_on(stubbed, tmp_path, capsys):
    words = "the disk is on fire: '/mnt/x/data', or 3/4 of it"
    (tmp_path / "bench_gather.py").write_text(f"import sys; sys.exit({words!r})")
    (tmp_path / "results").mkdir()
    options = ["--dir", str(tmp_path), "--results", str(tmp_path / "results")]
    status = stubbed.main([*options, "--machine", "m", "--only", "gather", "copy"])
    assert status == 1
    _, raw = only_json(tmp_path / "results")
    # Without the folder, because the file is committed.
    told = "the disk is on fire: 'data', or 3/4 of it"
    assert raw["scripts"]["gather"]["failed"] == told
    assert raw["scripts"]["copy"]["comparisons"][0]["work"] == stubbed.JOBS["copy"].options
    assert f"failed: {told}" in capsys.readouterr().out


def test_a_script_that_takes_too_long_is_ended(stubbed, tmp_path):
    (tmp_path / "bench_copy.py").write_text("import time; time.sleep(600)")
    assert stubbed.run("copy", [], 1)["failed"] == "it took more than 1 s"


def test_a_script_whose_requirements_are_missing_is_left_out(
    stubbed, monkeypatch, tmp_path
):
    job = stubbed.Job("", ("no_such_module",))
    monkeypatch.setitem(stubbed.JOBS, "copy", job)
    raw = stubbed.outcome_of("copy", tmp_path, False)
    assert raw == {"left out": ["no_such_module (pip install nvmeio[bench])"]}


def test_raw_numbers_survive_the_json(bench, comparison):
    comparisons = bench("comparisons")
    one = comparison(1.0, 2.0, goals=(comparisons.Goal("CPU time", 1.3),), memory=(12, 34))
    again = comparisons.Comparison.from_dict(json.loads(json.dumps(one.as_dict())))
    assert again == one


def test_a_goal_is_judged_by_the_median(bench, comparison):
    goal = bench("comparisons").Goal("speed", 1.5)
    assert goal.verdict(comparison(0.1, 1.5, 9.0)) == "reached"
    assert goal.verdict(comparison(0.1, 1.4, 9.0)) == "missed"


def test_context_switches_are_judged_per_record(bench, comparison):
    comparisons = bench("comparisons")
    one = comparison(1.0, record_bytes=1 << 20)
    ours, theirs = one.rounds[0]
    one.rounds[0] = (dataclasses.replace(ours, switches=2048), theirs)
    assert comparisons.Goal("switches", 2.0).verdict(one) == "reached"
    assert comparisons.Goal("switches", 1.9).verdict(one) == "missed"


@pytest.fixture
def child(bench):
    """The child process that runs the plain loop, compiled here."""
    peers = bench("peers").Peers()
    with bench("loop_child").loop_child(peers) as found:
        if found is None:
            pytest.skip(peers.left_out[0])
        yield found


@pytest.mark.packaging
def test_the_plain_loop_reads_and_writes_right_bytes(child, tmp_path):
    path, size = tmp_path / "file", 1 << 20
    path.write_bytes(bytes(size))
    every_block = (path, 1 << 16, 8, size)
    assert child.run("plain blocks", "write", *every_block, "small").nbytes == size
    assert path.read_bytes() == b"\1" * size
    assert child.run("engine blocks", "write", *every_block).nbytes == size
    for words in (
        ("plain blocks", "read", *every_block, "huge"),
        ("engine blocks", "read", *every_block),
        ("plain gather", path, 4096, 8, 256, "huge"),
        ("plain threads", path, 4, 64),
        ("engine threads", path, 4, 64, -1),
    ):
        sample = child.run(*words)
        assert sample.nbytes == size
        assert sample.seconds > 0
        assert sample.cpu_seconds > 0
    assert child.run("plain opens", path, 5).nbytes == 5
    assert child.run("engine opens", path, 5).nbytes == 5


@pytest.mark.packaging
def test_the_plain_loop_makes_new_files(child, tmp_path):
    prefix, size = tmp_path / "new", 1 << 20
    assert child.run("plain fresh", prefix, 4, 1 << 16, 8, size, "small").nbytes == size
    found = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert found == {f"new.{index}": size // 4 for index in range(4)}
    with pytest.raises(RuntimeError, match="File exists"):
        child.run("plain fresh", prefix, 4, 1 << 16, 8, size, "small")


@pytest.mark.packaging
def test_the_plain_loop_reports_what_failed(child, tmp_path):
    (tmp_path / "short").write_bytes(bytes(4096))
    for words, why in (
        (
            ("plain blocks", "read", tmp_path / "none", 4096, 8, 4096, "huge"),
            "No such file",
        ),
        (("plain blocks", "read", tmp_path / "short", 4096, 8, 8192, "huge"), "No data"),
        (("engine blocks", "read", tmp_path / "short", 4096, 8, 8192), "No data"),
        (("plain sail", tmp_path), "Invalid argument"),
    ):
        with pytest.raises(RuntimeError, match=why):
            child.run(*words)


def test_a_loop_that_cannot_be_compiled_is_left_out(bench, monkeypatch):
    monkeypatch.setenv("CC", "false")
    peers = bench("peers").Peers()
    with bench("loop_child").loop_child(peers) as found:
        assert found is None
    assert peers.left_out == ["the plain loop (cc failed)"]


def test_a_figure_of_several_processes_is_the_median_of_each(bench, comparison):
    one = comparison(1.0, 2.0, 9.0, 4.0, 4.0, 4.0, rounds_each=3)
    assert bench("comparisons").SPEED.values(one) == [2.0, 4.0]


def test_a_read_served_by_a_cache_is_void(bench, comparison):
    comparisons = bench("comparisons")
    one = comparison(1.0)
    ours, theirs = one.rounds[0]
    one.rounds[0] = (ours, comparisons.Sample(theirs.nbytes, 1.0, 1.0, theirs.nbytes - 1))
    assert comparisons.SPEED.verdict(one) == "void: a cache took part"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0123456, "0.0123"),
        (0.98765, "0.988"),
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (12345.6, "12346"),
    ],
)
def test_figures_have_three_digits(bench, value, text):
    assert bench("report").number(value) == text


def test_tables_are_filled_and_then_found_to_be_the_same(tree, bench):
    tables = bench("tables")
    assert tables.main(["--check"], tree) == 1
    assert tables.main([], tree) == 0
    text = (tree / "README.md").read_text()
    assert "| read | nvmeio / fio | 2.15 [2.15-2.15] GB/s |" in text
    assert "| 2.00 [1.00-4.00] | speed >= 1.5 | reached |" in text
    assert "| `bench_transfer.py` | 1 | 1 | 0 | 0 | 7 s | caio (gone) left out |" in text
    assert "failed: no such disk" in text
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "\nBetween.\n" in text
    assert tables.main(["--check"], tree) == 0
    (tree / "README.md").write_text(text.replace("2.00 [1.00-4.00]", "3.00 [1.00-4.00]"))
    assert tables.main(["--check"], tree) == 1


@pytest.mark.parametrize(
    ("comment", "error"),
    [
        ("all of copy from latest", KeyError),
        ("sums of transfer from latest", KeyError),
        ("all of transfer from missing.json", OSError),
        ("all of transfer from latest where nothing", ValueError),
    ],
)
def test_a_table_that_cannot_be_made_is_an_error(tree, bench, comment, error):
    text = f"<!-- table: {comment} -->\n<!-- end -->\n"
    with pytest.raises(error):
        bench("tables").filled(text, tree / "bench" / "results")


def test_the_newest_results_are_the_latest(tree, bench):
    results = tree / "bench" / "results"
    for name, content in {
        "2025-12-31-x.json": {"scripts": {}},
        "2026-02-01-copy.json": {"comparisons": []},
    }.items():
        (results / name).write_text(json.dumps(content))
    assert bench("tables").latest(results).name == "2026-01-31-here.json"


def test_charts_are_pictures_of_the_numbers_they_name(bench, tmp_path):
    charts = bench("charts")
    path = bench("tables").latest(RESULTS)
    options = ["--out", str(tmp_path)]
    assert charts.main(["--check", *options]) == 1
    assert charts.main(options) == 0
    digest = hashlib.sha256(path.read_bytes()).hexdigest().encode()
    for name in charts.CHARTS:
        picture = (tmp_path / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
        assert digest in picture
    assert charts.main(["--check", *options]) == 0
    changed = tmp_path / path.name
    changed.write_text(path.read_text() + " ")
    assert charts.main(["--check", "--json", str(changed), *options]) == 1


def test_the_first_screen_divides_by_the_limit(bench, comparison):
    charts, report = bench("charts"), bench("report")
    work = "read, one request, default handle"
    loop = comparison(0.5, work=work, names=("nvmeio", "plain loop"))
    peer = ("nvmeio.read_file", "Python")
    python = comparison(4.0, work="read bytes", names=peer)
    scripts = {
        "transfer": report.Outcome({}, [loop], []),
        "checkpoint": report.Outcome({"cpu": "2 x Z80"}, [python], []),
    }
    row = ("read a file as bytes", "2.15 GB/s", "Python's read: 0.537 GB/s", "4.29 GB/s")
    head, rows = report.overview(scripts)
    assert rows == [(*row, "50%")]
    assert head[0] == "2 x Z80"
    (axes,) = charts.overview(scripts).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([50, 12.5])


def test_whiskers_reach_from_the_minimum_to_the_maximum(bench, comparison):
    outcome = bench("report").Outcome({}, [comparison(2.0, 1.0, 4.0)], [])
    (axes,) = bench("charts").bars(outcome, "title").axes
    ours, theirs = axes.containers[1], axes.containers[3]
    speed = (1 << 30) / 0.5 / 1e9
    assert [bar.get_width() for bar in ours] == [pytest.approx(speed)]
    assert [bar.get_width() for bar in theirs] == [pytest.approx(speed / 2)]
    (segment,) = theirs.errorbar.lines[2][0].get_segments()
    assert segment[:, 0] == pytest.approx([speed / 4, speed])
