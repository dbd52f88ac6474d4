"""``nvmeio tune``: what it tries, chooses and saves."""

import itertools
import json
import math
import os
import pwd
import random
import subprocess

import numpy as np
import pytest

import nvmeio
from commands import call_nvmeio, nvmeio_in_terminal
from commands import nvmeio as run_nvmeio
from nvmeio._cli import main, tune
from nvmeio._cli.search import GOALS, ROUNDS_MAX, ROUNDS_MIN, Comparison
from nvmeio._cli.trials import DEFAULT, GRID_BLOCKS, GRID_DEPTHS, described, small_pages
from nvmeio._config.devices import device_of
from nvmeio.profiles import load_profile

# So short that each stage has one round, after which nothing is certain.
QUICK = ("--size", "64M", "--budget", "0.001s")

# How long a trial takes, by the simulated clock.
TRIAL_S = 0.1


def candidate(index):
    return {**DEFAULT, "queue_depth": index + 1}


def compared(read, write, noise=0.0, seed=0, seconds=math.inf):
    """Compare candidates of known speeds, with noise and with slow drift."""
    chance, now = random.Random(seed), [0.0]
    found = Comparison("made up", [candidate(index) for index in range(len(read))])
    found.chance.seed(seed)

    def measure(options):
        now[0] += TRIAL_S
        index = found.candidates.index(options)
        mood = 0.2 * math.sin(now[0] / 10)
        return {
            op: speeds[index] * math.exp(mood + chance.gauss(0, noise))
            for op, speeds in (("read", read), ("write", write))
        }

    found.run(measure, seconds, lambda: now[0])
    return found


def best_of(found):
    return {goal: found.candidates.index(found.best(goal, candidate(0))) for goal in GOALS}


class TestSearch:
    @pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
    @pytest.mark.parametrize("seed", range(5))
    def test_the_fastest_wins_for_each_goal(self, noise, seed):
        # The third reads fastest, the fifth writes fastest, and the fourth is best at both.
        read, write = [1, 0.9, 1.8, 1.5, 0.7], [1, 1.05, 0.8, 1.4, 1.7]
        found = compared(read, write, noise, seed)
        assert len(found.rounds) == ROUNDS_MAX
        assert best_of(found) == {"read": 2, "write": 4, "both": 3}
        lead = found.times_as_fast(candidate(2), candidate(0), "read")
        assert lead == pytest.approx(1.8, rel=0.15)

    @pytest.mark.parametrize("seed", range(10))
    def test_noise_does_not_choose_among_equals(self, seed):
        found = compared([1.0] * 12, [1.0] * 12, 0.1, seed)
        assert best_of(found) == dict.fromkeys(GOALS, 0)

    def test_of_equal_winners_the_first_is_chosen(self):
        speeds = [1, 0.5, 1.5, 1.505, 1.5]
        assert best_of(compared(speeds, speeds, 0.001)) == dict.fromkeys(GOALS, 2)

    @pytest.mark.parametrize("rounds", [1, ROUNDS_MIN - 1, ROUNDS_MIN])
    def test_too_few_rounds_make_nothing_certain(self, rounds):
        found = compared([1, 9], [1, 9], seconds=2 * TRIAL_S * (rounds - 0.3))
        assert len(found.rounds) == rounds
        winner = int(rounds >= ROUNDS_MIN)
        assert best_of(found) == dict.fromkeys(GOALS, winner)

    def test_only_complete_rounds_count(self):
        found = compared([1, 2, 3], [1, 2, 3], seconds=4.5 * TRIAL_S)
        assert len(found.rounds) == 1
        for goal, speed in itertools.product(GOALS, (1, 2, 3)):
            (measured,) = found.speeds(candidate(speed - 1), goal)
            assert measured == pytest.approx(speed, rel=0.02)

    def test_both_is_the_geometric_mean_of_reading_and_writing(self):
        found = compared([4.0], [9.0])
        read, write, both = (found.speeds(candidate(0), goal)[0] for goal in GOALS)
        assert both == pytest.approx(math.sqrt(read * write))

    def test_each_stage_changes_the_best_so_far(self):
        (_, grid), (_, more), (_, kinds) = tune.stages(["io_uring", "threads"], 2)
        pairs = [(one["block_size"], one["queue_depth"]) for one in grid]
        assert sorted(pairs) == sorted(itertools.product(GRID_BLOCKS, GRID_DEPTHS))
        memory = [block * depth for block, depth in pairs]
        assert memory == sorted(memory)
        assert more == [{"workers": 2}, {"engine": "threads"}]
        assert kinds == [{"bounce": "never"}, {"bounce": "always"}]


def test_settings_are_described_by_their_differences_from_the_default():
    assert described(DEFAULT) == "1 MiB x 128"
    changes = {"workers": 4, "engine": "libaio", "bounce": "never"}
    words = "1 MiB x 128, workers 4, engine libaio, bounce never"
    assert described({**DEFAULT, **changes}) == words


def test_memory_in_small_pages_is_touched():
    memory = small_pages(4 << 20)
    assert memory.ctypes.data % 4096 == 0
    assert np.array_equal(np.flatnonzero(memory), np.arange(0, 4 << 20, 4096))


# The command.


@pytest.fixture
def configuration(tmp_path_factory, monkeypatch):
    """An empty folder for the user's configuration."""
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


def test_the_best_settings_are_shown_and_saved(folder, configuration, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    plot = ("--plot", out / "heat.png")
    done = run_nvmeio("tune", folder, *QUICK, "--json", out / "report.json", *plot)
    assert done.status == 0, done.err
    profile = load_profile(folder)
    assert f"saved: {configuration}/nvmeio/profiles/{profile.device}.json" in done.err
    assert f"export NVMEIO_PROFILE={folder}\n" in done.err
    # One round is never certain, so the default stays.
    for choice in (profile.both, profile.read, profile.write):
        assert choice.options == DEFAULT
        assert choice.figures["times_default"] == 1.0
    rows = [line for line in done.out.splitlines() if described(DEFAULT) in line]
    assert [row.split()[0] for row in rows] == ["read", "write", "both"]
    assert all("1 MiB x 128 (default) " in row for row in rows)
    words = "Recommended for reading and writing alike: the default,\nbecause nothing"
    assert words in done.out
    assert "The time was too short: 1 of at least 6 rounds" in done.out
    assert "The block has no key" not in done.out
    with nvmeio.Handle.from_profile(folder) as handle:
        assert handle.queue_depth == DEFAULT["queue_depth"]
    assert (out / "heat.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((out / "report.json").read_text())
    names = [each["name"] for each in report["comparisons"]]
    assert names == ["block size and depth", "workers, engines", "bounces"]
    for each in report["comparisons"]:
        for one in each["candidates"]:
            assert len(one["read_bytes_per_s"]) == each["rounds"] == 1
            assert min(one["read_bytes_per_s"] + one["write_bytes_per_s"]) > 0
    assert report["aio"] == {
        "block_size": 1048576,
        "queue_depth": 128,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 1,
    }
    begin = done.out.index('"aio": ') + len('"aio": ')
    assert json.JSONDecoder().raw_decode(done.out[begin:])[0] == report["aio"]


def test_a_faster_candidate_is_chosen_in_each_stage(tmp_path, configuration, monkeypatch):
    """The speeds are made up: each of three options of the winner adds to it."""

    def measure(self, options):
        odds = [("queue_depth", 32), ("workers", 2), ("bounce", "never")]
        speed = 1e9 * 1.2 ** sum(options[name] == value for name, value in odds)
        return {"read": speed, "write": 1e9}

    monkeypatch.setattr(tune.Trials, "measure", measure)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert main(["tune", str(tmp_path), "--size", "64M"]) == 0
    best = {"queue_depth": 32, "workers": 2, "bounce": "never"}
    profile = load_profile(tmp_path)
    assert profile.read.options == {**DEFAULT, "block_size": 128 << 10, **best}
    # The figures are those before bounces were compared.
    assert profile.read.figures["times_default"] == pytest.approx(1.2**2)
    assert profile.write.options == DEFAULT
    assert profile.both.options == profile.read.options


def test_the_options_without_a_key_in_deepspeeds_block_are_named():
    best = {**DEFAULT, "engine": "libaio", "bounce": "never"}
    assert tune._beyond_the_block(best) == (
        "The block has no key for the engine and bounce: set NVMEIO_ENGINE=libaio "
        "NVMEIO_BOUNCE=never, or use the profile.\n"
    )


def test_the_environment_does_not_change_what_is_measured(folder, configuration):
    profile = configuration / "nvmeio" / "profiles" / f"{device_of(folder).identity}.json"
    profile.parent.mkdir(parents=True)
    profile.write_text("broken")
    says = {"NVMEIO_PROFILE": "auto", "NVMEIO_ENGINE": "none", "NVMEIO_QUEUE_DEPTH": "0"}
    done = run_nvmeio("tune", folder, *QUICK, env={**os.environ, **says})
    assert done.status == 0, done.err
    assert load_profile(folder).both.options == DEFAULT


def test_the_profile_is_saved_even_if_other_outputs_fail(tmp_path, configuration):
    # A check in advance cannot know this.
    done = run_nvmeio("tune", tmp_path, *QUICK, "--json", "/dev/full")
    assert done.status == 1
    assert "No space left on device" in done.err
    assert load_profile(tmp_path).both.options == DEFAULT


def test_a_missing_home_is_reported_before_anything_is_measured(
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
        "nvmeio tune: error: no profile can be saved: the user has no home; set HOME or "
    )
    assert err.startswith(words)
    assert out == ""


def test_a_profile_that_cannot_be_saved_is_refused_in_advance(tmp_path, monkeypatch):
    # No user can make a folder inside a file.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    done = run_nvmeio("tune", tmp_path, "--budget", "1h")
    assert done.status == 1
    assert done.err.startswith("nvmeio tune: error: no profile can be saved: ")
    assert "; --no-save leaves it out\n" in done.err
    assert run_nvmeio("tune", tmp_path, *QUICK, "--no-save").status == 0


def test_ctrl_c_leaves_nothing_behind_and_saves_nothing(folder, configuration):
    done = nvmeio_in_terminal(
        *("tune", folder, "--size", "64M", "--budget", "1h"), until="block size and depth"
    )
    assert done.status == 130, done.out
    assert "interrupted" in done.out
    assert list(configuration.rglob("*.json")) == []


def test_a_disk_without_space_is_refused(loop_mount, configuration):
    folder = loop_mount("ext4", 64 << 20)
    before = sorted(os.listdir(folder))
    done = run_nvmeio("tune", folder)
    assert done.status == 1
    assert "1 GiB are needed" in done.err
    assert done.err.count("\n") == 1
    assert sorted(os.listdir(folder)) == before


def test_an_unwritable_folder_is_an_error_of_one_line(loop_mount, configuration):
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
        ([".", "--budget", "soon"], "'soon' is not a time"),
        ([".", "--size", "1M"], "--size must be at least 64 MiB"),
        ([".", "--plot", "heat"], "must end in .png or .svg"),
        ([".", "--json", "none/report.json"], "there is no folder 'none'"),
    ],
)
def test_impossible_arguments_are_an_error_of_one_line(words, complaint):
    done = call_nvmeio("tune", *words)
    assert done.status == 2
    assert complaint in done.err
    assert done.err.count("\n") == 1
