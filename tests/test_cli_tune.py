"""``nvmeio tune``: what it tries, what it finds, and what it keeps."""

import itertools
import json
import os
import pwd
import subprocess

import numpy as np
import pytest

import nvmeio
from commands import nvmeio as run_nvmeio
from commands import nvmeio_in_terminal
from nvmeio._devices import device_of
from nvmeio.cli import main
from nvmeio.cli.tuning.candidates import (
    DEFAULT,
    GRID_BLOCKS,
    GRID_DEPTHS,
    bounces,
    described,
    distinct,
    grid,
    variations,
)
from nvmeio.cli.tuning.trials import small_pages
from nvmeio.profiles import load_profile

# So short that every candidate is measured once in each race, and none is sure to win.
QUICK = ("--size", "64M", "--budget", "0.001s")


@pytest.fixture
def configuration(tmp_path_factory, monkeypatch):
    """An empty folder for the configuration of the user."""
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    return folder


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request, tmp_path):
    """An empty folder, which must be empty at the end."""
    if request.param == "tmpfs":
        tmp_path = request.getfixturevalue("tmpfs")
    yield tmp_path
    assert os.listdir(tmp_path) == []


def test_the_default_is_tried_first_and_every_block_with_every_depth():
    candidates = grid()
    assert candidates[0] == DEFAULT
    pairs = [(one["block_size"], one["queue_depth"]) for one in candidates]
    assert sorted(pairs) == sorted(itertools.product(GRID_BLOCKS, GRID_DEPTHS))
    memory = [block * depth for block, depth in pairs[1:]]
    assert memory == sorted(memory)


def test_variations_change_what_the_grid_did_not():
    winner = {**DEFAULT, "queue_depth": 32}
    found = variations([winner, winner], ["io_uring", "threads"], 2)
    assert found[:2] == [winner, DEFAULT]
    changed = [
        {key: value for key, value in one.items() if value != winner[key]}
        for one in found[2:]
    ]
    assert changed == [
        {"single_submit": True},
        {"intra_op_parallelism": 2},
        {"engine": "threads"},
    ]


def test_no_more_workers_are_tried_than_there_are_processors():
    workers = {
        processors: {
            one["intra_op_parallelism"] for one in variations([DEFAULT], [], processors)
        }
        for processors in (1, 2, 4, 64)
    }
    assert workers == {1: {1}, 2: {1, 2}, 4: {1, 2, 4}, 64: {1, 2, 4}}


def test_every_candidate_is_a_configuration_of_a_handle():
    candidates = distinct(
        [*grid(), *variations([DEFAULT], ["io_uring", "sync"], 4), *bounces(DEFAULT)]
    )
    assert len(candidates) == len({repr(one) for one in candidates})
    for one in candidates:
        if one["engine"] == "auto":
            with nvmeio.aio_handle(**one) as handle:
                assert handle.get_block_size() == one["block_size"]


def test_settings_are_described_by_what_is_unusual():
    assert described(DEFAULT) == "1 MiB x 128"
    changes = {
        "intra_op_parallelism": 4,
        "single_submit": True,
        "engine": "libaio",
        "bounce": "never",
    }
    words = "1 MiB x 128, 4 workers, one by one, libaio, bounce never"
    assert described({**DEFAULT, **changes}) == words


def test_small_pages_are_touched_and_small():
    memory = small_pages(4 << 20)
    assert memory.ctypes.data % 4096 == 0
    assert np.array_equal(np.flatnonzero(memory), np.arange(0, 4 << 20, 4096))


def test_what_is_best_is_shown_and_kept(folder, configuration, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    done = run_nvmeio(
        *("tune", folder, *QUICK, "--json", out / "report.json"),
        *("--plot", out / "heat.png", "--deepspeed", out / "ds.json"),
    )
    assert done.status == 0, done.err
    profile = load_profile(folder)
    assert f"saved: {configuration}/nvmeio/profiles/{profile.device}.json" in done.err
    # Nothing can be sure by one trial, so that the default stays.
    for choice in (profile.both, profile.read, profile.write):
        assert choice.options == DEFAULT
        assert choice.figures["settled"] is False
        assert choice.figures["times_default"] == 1.0
    rows = [line for line in done.out.splitlines() if described(DEFAULT) in line]
    assert [row.split()[0] for row in rows] == ["read", "write", "both"]
    assert [row.split()[-1] for row in rows] == ["no"] * 3
    with nvmeio.aio_handle.from_profile(folder) as handle:
        assert handle.get_queue_depth() == DEFAULT["queue_depth"]
    assert (out / "heat.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((out / "report.json").read_text())
    assert [race["race"] for race in report["races"]] == [
        "block size and depth",
        "workers, engines",
        "bounces",
    ]
    for race in report["races"]:
        for candidate in race["candidates"]:
            assert len(candidate["read_bytes_per_s"]) == race["rounds"] == 1
            assert min(candidate["read_bytes_per_s"]) > 0
    check_block(done.out, report["aio"], out / "ds.json")


def check_block(shown, block, written):
    """DeepSpeed's block is the same on the screen, in the report and in its file."""
    assert block == {
        "block_size": 1048576,
        "queue_depth": 128,
        "single_submit": False,
        "overlap_events": False,
        "intra_op_parallelism": 1,
    }
    begin = shown.index('"aio": ') + len('"aio": ')
    assert json.JSONDecoder().raw_decode(shown[begin:])[0] == block
    assert json.loads(written.read_text())["aio"] == block


def test_a_configuration_of_deepspeed_keeps_what_else_it_has(
    tmp_path, configuration, tmp_path_factory
):
    target = tmp_path_factory.mktemp("ds") / "config.json"
    target.write_text('{"train_batch_size": 8, "aio": {"use_gds": false}}')
    done = run_nvmeio("tune", tmp_path, *QUICK, "--no-save", "--deepspeed", target)
    assert done.status == 0, done.err
    written = json.loads(target.read_text())
    assert written["train_batch_size"] == 8
    assert written["aio"]["queue_depth"] == 128
    assert written["aio"]["overlap_events"] is False
    assert os.listdir(configuration) == []


def test_the_report_has_every_round_that_a_race_had_time_for(tmp_path, configuration):
    words = ("--size", "64M", "--budget", "8s", "--json", "-")
    done = run_nvmeio("tune", tmp_path, *words)
    report = json.loads(done.out)
    for race in report["races"]:
        longest = max(len(one["read_bytes_per_s"]) for one in race["candidates"])
        assert longest == race["rounds"]
    best = report["both"]["options"]
    with nvmeio.aio_handle.from_profile(tmp_path) as handle:
        assert handle.get_queue_depth() == best["queue_depth"]


def test_the_environment_has_no_say_in_what_is_measured(folder, configuration):
    profile = configuration / "nvmeio" / "profiles" / f"{device_of(folder).identity}.json"
    profile.parent.mkdir(parents=True)
    profile.write_text("broken")
    says = {"NVMEIO_PROFILE": "auto", "NVMEIO_ENGINE": "none", "NVMEIO_QUEUE_DEPTH": "0"}
    done = run_nvmeio("tune", folder, *QUICK, env={**os.environ, **says})
    assert done.status == 0, done.err
    assert load_profile(folder).both.options == DEFAULT


def test_a_configuration_that_cannot_be_rewritten_is_told_of_before(
    tmp_path, configuration
):
    broken = tmp_path / "ds.json"
    broken.write_text("{")
    done = run_nvmeio("tune", tmp_path, "--budget", "1h", "--deepspeed", broken)
    assert done.status == 1
    assert "only plain JSON can be rewritten" in done.err
    assert done.err.count("\n") == 1
    assert broken.read_text() == "{"
    assert os.listdir(configuration) == []


def test_the_profile_is_kept_though_nothing_else_can_be(tmp_path, configuration):
    # What no look beforehand can know.
    done = run_nvmeio("tune", tmp_path, *QUICK, "--json", "/dev/full")
    assert done.status == 1
    assert "No space left on device" in done.err
    assert load_profile(tmp_path).both.options == DEFAULT


def test_a_user_without_a_home_is_told_before_anything_is_measured(
    tmp_path, monkeypatch, capsys
):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert main(["tune", str(tmp_path), *QUICK]) == 1
    out, err = capsys.readouterr()
    words = (
        "nvmeio tune: error: no profile can be saved: the user has no home; HOME or XDG_"
    )
    assert err.startswith(words)
    assert out == ""


def test_a_profile_that_cannot_be_saved_is_told_of_before(tmp_path, monkeypatch):
    # A folder cannot be made in a file, whoever asks.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    done = run_nvmeio("tune", tmp_path, "--budget", "1h")
    assert done.status == 1
    assert done.err.startswith("nvmeio tune: error: no profile can be saved: ")
    assert done.err.endswith("Not a directory; --no-save leaves it out\n")
    assert run_nvmeio("tune", tmp_path, *QUICK, "--no-save").status == 0


def test_a_terminal_shows_the_races(folder, configuration):
    done = nvmeio_in_terminal("tune", folder, "--size", "64M", "--budget", "3s")
    assert done.status == 0, done.out
    for name in ("block size and depth", "workers, engines", "bounces"):
        assert name in done.out


def test_ctrl_c_leaves_nothing_behind_and_keeps_nothing(folder, configuration):
    done = nvmeio_in_terminal(
        *("tune", folder, "--size", "64M", "--budget", "1h"), until="block size and depth"
    )
    assert done.status == 130, done.out
    assert "interrupted" in done.out
    assert os.listdir(configuration) == []


def test_a_disk_without_room_is_refused(loop_mount, configuration):
    folder = loop_mount("ext4", 64 << 20)
    before = sorted(os.listdir(folder))
    done = run_nvmeio("tune", folder)
    assert done.status == 1
    assert "1 GiB are needed" in done.err
    assert done.err.count("\n") == 1
    assert sorted(os.listdir(folder)) == before


def test_a_folder_that_cannot_be_written_is_one_line(loop_mount, configuration):
    folder = loop_mount("ext4", 128 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    done = run_nvmeio("tune", folder, *QUICK)
    assert done.status == 1
    assert "Read-only file system" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "required: DIR"),
        ([".", "--budget", "soon"], "'soon' is no time"),
        ([".", "--size", "1M"], "--size must be at least 64 MiB"),
        ([".", "--plot", "heat"], "must end in .png or .svg"),
        ([".", "--json", "none/report.json"], "there is no folder 'none'"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(words, complaint):
    done = run_nvmeio("tune", *words)
    assert done.status == 2
    assert complaint in done.err
    assert done.err.count("\n") == 1


def test_a_chart_that_cannot_be_drawn_is_said_before_anything_is_done(
    tmp_path, configuration
):
    words = ("--plot", "heat.png")
    done = run_nvmeio("tune", ".", *words, without=("matplotlib",), cwd=tmp_path)
    assert done.status == 1
    assert "matplotlib" in done.err
    assert os.listdir(tmp_path) == []
