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
from commands import nvmeio as run_nvmeio
from commands import nvmeio_in_terminal
from nvmeio._cli import main, tune
from nvmeio._cli.race import GOALS
from nvmeio._cli.trials import (
    DEFAULT,
    GRID_BLOCKS,
    GRID_DEPTHS,
    bounces,
    described,
    distinct,
    grid,
    small_pages,
    variations,
)
from nvmeio._cli.tune import Heat, _choice
from nvmeio._config.devices import device_of
from nvmeio.profiles import load_profile

# So short that each race measures every candidate once, and none can win with certainty.
QUICK = ("--size", "64M", "--budget", "0.001s")


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


def test_the_grid_has_every_block_size_and_depth_and_the_default_first():
    candidates = grid()
    assert candidates[0] == DEFAULT
    pairs = [(one["block_size"], one["queue_depth"]) for one in candidates]
    assert sorted(pairs) == sorted(itertools.product(GRID_BLOCKS, GRID_DEPTHS))
    memory = [block * depth for block, depth in pairs[1:]]
    assert memory == sorted(memory)


def test_variations_change_the_options_that_the_grid_did_not():
    winner = {**DEFAULT, "queue_depth": 32}
    found = variations([winner, winner], ["io_uring", "threads"], 2)
    assert found[:2] == [winner, DEFAULT]
    changed = [
        {key: value for key, value in one.items() if value != winner[key]}
        for one in found[2:]
    ]
    assert changed == [
        {"workers": 2},
        {"engine": "threads"},
    ]


def test_at_most_as_many_workers_as_processors_are_tried():
    workers = {
        processors: {one["workers"] for one in variations([DEFAULT], [], processors)}
        for processors in (1, 2, 4, 64)
    }
    assert workers == {1: {1}, 2: {1, 2}, 4: {1, 2, 4}, 64: {1, 2, 4}}


def test_every_candidate_is_a_valid_configuration():
    candidates = distinct(
        [*grid(), *variations([DEFAULT], ["io_uring", "sync"], 4), *bounces(DEFAULT)]
    )
    assert len(candidates) == len({repr(one) for one in candidates})
    for one in candidates:
        if one["engine"] == "auto":
            with nvmeio.Handle(**one) as handle:
                assert handle.block_size == one["block_size"]


def test_settings_are_described_by_their_differences_from_the_default():
    assert described(DEFAULT) == "1 MiB x 128"
    changes = {"workers": 4, "engine": "libaio", "bounce": "never"}
    words = "1 MiB x 128, 4 workers, libaio, bounce never"
    assert described({**DEFAULT, **changes}) == words


def held(name, speeds):
    """A race of candidates with given speeds of reading and writing, and little noise."""
    heat = Heat(name, [candidate for candidate, _, _ in speeds])
    noise = random.Random(name)

    def measure(index):
        _, read, write = speeds[index]
        return {
            op: speed * noise.uniform(1, 1.001)
            for op, speed in (("read", read), ("write", write))
        }

    heat.run(measure, math.inf)
    return heat


OTHER = {**DEFAULT, "queue_depth": 32}
THIRD = {**DEFAULT, "queue_depth": 8}


def races(*speeds, bounced=(1, 1, 1)):
    """Three races: two of the candidates, and one of bounces with other speeds."""
    winner = held("again", speeds).best("both")
    kinds = zip(bounces(winner), bounced, strict=True)
    return [
        held("block size and depth", speeds),
        held("workers, engines", speeds),
        held("bounces", [(candidate, speed, speed) for candidate, speed in kinds]),
    ]


def chosen(heats, saved=None):
    return {goal: _choice(heats, goal, saved).options for goal in GOALS}


def test_only_a_candidate_certainly_faster_than_the_default_is_chosen():
    # The other one wins at both, but only because of writing.
    heats = races((OTHER, 1, 1.5), (DEFAULT, 1, 1))
    assert heats[1].best("read") == OTHER
    assert chosen(heats) == {"read": DEFAULT, "write": OTHER, "both": OTHER}
    choices = {goal: _choice(heats, goal, None) for goal in GOALS}
    assert choices["read"].figures["times_default"] == 1
    assert choices["write"].figures["times_default"] == pytest.approx(1.5, rel=0.01)
    assert all(choice.figures["settled"] for choice in choices.values())


def test_an_unfinished_race_chooses_the_default(monkeypatch):
    heats = races((DEFAULT, 1, 1), (OTHER, 1.5, 1.5))
    assert chosen(heats)["both"] == OTHER
    monkeypatch.setattr(heats[1], "rivals", lambda winner, goal: [0])
    assert set(map(repr, chosen(heats).values())) == {repr(DEFAULT)}


def test_saved_settings_stay_until_others_are_certainly_faster():
    saved = {**OTHER, "bounce": "never"}
    alike = races((DEFAULT, 1, 1), (OTHER, 1, 1), (THIRD, 1.01, 1.01))
    assert chosen(alike, saved) == dict.fromkeys(GOALS, saved)
    slower = races((DEFAULT, 1, 1), (OTHER, 0.5, 0.5), (THIRD, 1, 1))
    assert chosen(slower, saved) == dict.fromkeys(GOALS, DEFAULT)
    beaten = races((DEFAULT, 1, 1), (OTHER, 1.2, 1.2), (THIRD, 1.5, 1.5))
    assert chosen(beaten, saved) == dict.fromkeys(GOALS, THIRD)


def test_a_bounce_is_chosen_only_for_the_settings_it_raced_with():
    heats = races((DEFAULT, 1, 1), (OTHER, 1, 1.5), bounced=(1, 1.5, 1))
    bounced = {**OTHER, "bounce": "never"}
    assert chosen(heats) == {"read": DEFAULT, "write": bounced, "both": bounced}


def test_an_unfinished_race_of_bounces_chooses_the_default(monkeypatch):
    heats = races((DEFAULT, 1, 1), (OTHER, 0.5, 0.5), bounced=(1, 1.5, 1.5))
    assert heats[2].best("both")["bounce"] == chosen(heats)["both"]["bounce"] == "never"
    monkeypatch.setattr(heats[2], "rivals", lambda winner, goal: [2])
    assert heats[2].best("both")["bounce"] == "never"
    assert chosen(heats) == dict.fromkeys(GOALS, DEFAULT)
    saved = {**DEFAULT, "bounce": "never"}
    assert chosen(heats, saved) == dict.fromkeys(GOALS, saved)


def test_a_saved_bounce_is_replaced_by_a_certainly_faster_one():
    saved = {**DEFAULT, "bounce": "never"}
    better = {**DEFAULT, "bounce": "always"}
    heats = races((DEFAULT, 1, 1), (OTHER, 0.5, 0.5), bounced=(1, 1, 3))
    assert chosen(heats, saved) == dict.fromkeys(GOALS, better)
    assert chosen(heats, better) == dict.fromkeys(GOALS, better)
    heats = races((DEFAULT, 1, 1), (OTHER, 0.5, 0.5), bounced=(1, 1, 1))
    assert chosen(heats, saved) == dict.fromkeys(GOALS, saved)


def test_a_profile_of_an_engine_that_does_not_work_here_is_kept(
    tmp_path, configuration, monkeypatch, capsys
):
    assert main(["tune", str(tmp_path), *QUICK]) == 0
    path = configuration / "nvmeio" / "profiles" / f"{load_profile(tmp_path).device}.json"
    path.write_text(path.read_text().replace('"engine": "auto"', '"engine": "libaio"'))
    before = path.read_text()
    here = {**nvmeio.engines(), "libaio": {"works": False, "reason": "no libaio here"}}
    monkeypatch.setattr(tune, "engines", lambda: here)
    assert main(["tune", str(tmp_path), *QUICK]) == 0
    assert "not saved: the profile that is there" in capsys.readouterr().err
    assert path.read_text() == before


def test_memory_in_small_pages_is_touched_and_has_small_pages():
    memory = small_pages(4 << 20)
    assert memory.ctypes.data % 4096 == 0
    assert np.array_equal(np.flatnonzero(memory), np.arange(0, 4 << 20, 4096))


def test_the_best_settings_are_shown_and_saved(folder, configuration, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    done = run_nvmeio(
        *("tune", folder, *QUICK, "--json", out / "report.json"),
        *("--plot", out / "heat.png", "--deepspeed", out / "ds.json"),
    )
    assert done.status == 0, done.err
    profile = load_profile(folder)
    assert f"saved: {configuration}/nvmeio/profiles/{profile.device}.json" in done.err
    # One trial is never certain, so the default stays.
    for choice in (profile.both, profile.read, profile.write):
        assert choice.options == DEFAULT
        assert choice.figures["settled"] is False
        assert choice.figures["times_default"] == 1.0
    rows = [line for line in done.out.splitlines() if described(DEFAULT) in line]
    assert [row.split()[0] for row in rows] == ["read", "write", "both"]
    assert all("1 MiB x 128 (default) " in row for row in rows)
    assert [row.split()[-2:] for row in rows] == [["default", "perhaps"]] * 3
    words = "Recommended for reading and writing alike: the default,\nbecause nothing"
    assert words in done.out
    assert f"  shell:    export NVMEIO_PROFILE={folder}\n" in done.out
    assert (
        f"Environment=XDG_CONFIG_HOME={configuration} NVMEIO_PROFILE={folder}" in done.out
    )
    assert f" -v {configuration}/nvmeio:/config/nvmeio:ro -e XDG_CONFIG_HOME=" in done.out
    assert "The block has no key" not in done.out
    with nvmeio.Handle.from_profile(folder) as handle:
        assert handle.queue_depth == DEFAULT["queue_depth"]
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


def test_the_options_without_a_key_in_deepspeeds_block_are_named():
    best = {**DEFAULT, "engine": "libaio", "bounce": "never"}
    assert tune._beyond_the_block(best, keeps=True) == (
        "The block has no key for the engine and bounce: set NVMEIO_ENGINE=libaio "
        "NVMEIO_BOUNCE=never, or use the profile.\n"
    )


def check_block(shown, block, written):
    """Check that DeepSpeed's block is the same on screen, in the report and in its file."""
    assert block == {
        "block_size": 1048576,
        "queue_depth": 128,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 1,
    }
    begin = shown.index('"aio": ') + len('"aio": ')
    assert json.JSONDecoder().raw_decode(shown[begin:])[0] == block
    assert json.loads(written.read_text())["aio"] == block


def test_a_deepspeed_configuration_keeps_its_other_keys(
    tmp_path, configuration, tmp_path_factory
):
    target = tmp_path_factory.mktemp("ds") / "config.json"
    block = '{"use_gds": false, "overlap_events": false}'
    target.write_text(f'{{"train_batch_size": 8, "aio": {block}}}')
    done = run_nvmeio("tune", tmp_path, *QUICK, "--no-save", "--deepspeed", target)
    assert done.status == 0, done.err
    written = json.loads(target.read_text())
    assert written["train_batch_size"] == 8
    assert written["aio"]["queue_depth"] == 128
    # It was not measured.
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
    with nvmeio.Handle.from_profile(tmp_path) as handle:
        assert handle.queue_depth == best["queue_depth"]


def test_the_environment_does_not_change_what_is_measured(folder, configuration):
    profile = configuration / "nvmeio" / "profiles" / f"{device_of(folder).identity}.json"
    profile.parent.mkdir(parents=True)
    profile.write_text("broken")
    says = {"NVMEIO_PROFILE": "auto", "NVMEIO_ENGINE": "none", "NVMEIO_QUEUE_DEPTH": "0"}
    done = run_nvmeio("tune", folder, *QUICK, env={**os.environ, **says})
    assert done.status == 0, done.err
    assert load_profile(folder).both.options == DEFAULT


def test_saved_settings_are_measured_too(tmp_path, configuration):
    run_nvmeio("tune", tmp_path, *QUICK)
    (file,) = (configuration / "nvmeio" / "profiles").iterdir()
    odd = {"block_size": 768 << 10, "queue_depth": 77}
    profile = json.loads(file.read_text())
    for goal in GOALS:
        profile[goal]["options"].update(odd)
    file.write_text(json.dumps(profile))
    found = json.loads(run_nvmeio("tune", tmp_path, *QUICK, "--json", "-").out)
    candidates = [one["options"] for one in found["races"][1]["candidates"]]
    assert any(odd.items() <= options.items() for options in candidates)


def test_a_configuration_that_cannot_be_rewritten_is_refused_in_advance(
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
    assert done.err.endswith("Not a directory; --no-save leaves it out\n")
    assert run_nvmeio("tune", tmp_path, *QUICK, "--no-save").status == 0


def test_a_terminal_shows_the_races(folder, configuration):
    done = nvmeio_in_terminal("tune", folder, "--size", "64M", "--budget", "3s")
    assert done.status == 0, done.out
    for name in ("block size and depth", "workers, engines", "bounces"):
        assert name in done.out


def test_ctrl_c_leaves_nothing_behind_and_saves_nothing(folder, configuration):
    done = nvmeio_in_terminal(
        *("tune", folder, "--size", "64M", "--budget", "1h"), until="block size and depth"
    )
    assert done.status == 130, done.out
    assert "interrupted" in done.out
    assert os.listdir(configuration) == []


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
    done = run_nvmeio("tune", *words)
    assert done.status == 2
    assert complaint in done.err
    assert done.err.count("\n") == 1


def test_a_chart_that_cannot_be_drawn_is_refused_in_advance(tmp_path, configuration):
    words = ("--plot", "heat.png")
    done = run_nvmeio("tune", ".", *words, without=("matplotlib",), cwd=tmp_path)
    assert done.status == 1
    assert "matplotlib" in done.err
    assert os.listdir(tmp_path) == []
