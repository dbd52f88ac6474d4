"""What was built, what works here, and which engine is chosen."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import nvmeio
from helpers import ENGINES
from nvmeio._native.info import resources


def test_completion_offers_public_names_and_modules():
    modules = {"aio", "checkpoint", "deepspeed", "profiles", "safetensors"}
    if importlib.util.find_spec("torch") is not None:
        modules.add("torch")
    assert {*dir(nvmeio)} == {*nvmeio.__all__, *modules, "__version__"}


def test_help_describes_the_package_without_torch():
    script = "import sys, nvmeio; sys.modules['torch'] = None; help(nvmeio)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "at the speed of the drive" in run.stdout
    assert "nvmeio.torch" in run.stdout


def test_what_few_programs_need_is_not_imported():
    script = "import sys, numpy; before = {*sys.modules}; import nvmeio; "
    script += "print(*({'dataclasses', 'logging', 'concurrent'} & {*sys.modules} - before))"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout == "\n"


@pytest.mark.parametrize(
    ("begin", "printed"),
    [
        ("", ""),
        ("import logging", ""),
        ("import logging; logging.basicConfig()", "WARNING:nvmeio:full\n"),
    ],
    ids=["not imported", "not configured", "configured"],
)
def test_the_log_is_for_programs_that_configure_logging(begin, printed):
    script = f"from nvmeio._events.log import log\n{begin}\nlog.warning('%s', 'full')"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stderr == printed


def test_public_modules_are_imported_on_access():
    script = "import nvmeio; print(nvmeio.profiles.load_profile.__name__)"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_engines_are_listed_in_order_of_preference():
    assert list(nvmeio.engines()) == list(ENGINES)


def test_an_engine_works_or_says_why_not():
    for name, found in nvmeio.engines().items():
        assert set(found) == {"built", "works", "errno", "reason"}
        assert found["works"] == (found["errno"] == 0) == (found["reason"] == ""), name
        assert found["built"] or not found["works"], name


@pytest.mark.parametrize("name", ["threads", "sync"])
def test_threads_and_sync_work_everywhere(name):
    assert nvmeio.engines()[name] == {
        "built": True,
        "works": True,
        "errno": 0,
        "reason": "",
    }


def test_build_info_reports_the_features():
    found = nvmeio.build_info()
    assert found["version"] == nvmeio.__version__
    assert found["engines"] == nvmeio.engines()
    assert {"compiler", "cython", "flags", "link_flags", "features"} <= set(found)
    assert {"debug", "test_build"} <= set(found)
    for feature in found["features"].values():
        assert feature["built"] == (feature["reason"] == "")
    assert json.loads(json.dumps(found)) == found


def test_usable_processors_are_at_most_all_processors():
    found = resources()
    assert 1 <= found["processors"] <= len(os.sched_getaffinity(0))
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    assert 1 << 20 < found["memory_bytes"] <= page * pages


def test_an_engine_is_built_if_its_library_is_there():
    features = nvmeio.build_info()["features"]
    found = {name: engine["built"] for name, engine in nvmeio.engines().items()}
    assert found.pop("io_uring") == features["liburing"]["built"]
    assert all(found.values())


def test_auto_chooses_the_first_engine_that_works(monkeypatch):
    monkeypatch.delenv("NVMEIO_ENGINE", raising=False)
    works = [name for name, found in nvmeio.engines().items() if found["works"]]
    with nvmeio.Handle() as handle:
        assert handle.stats()["engine"] == works[0]
    # A passed "auto" overrides the environment.
    monkeypatch.setenv("NVMEIO_ENGINE", "sync")
    with nvmeio.Handle(engine="auto") as handle:
        assert handle.stats()["engine"] == works[0]


def test_the_environment_names_an_engine(engine, monkeypatch):
    monkeypatch.setenv("NVMEIO_ENGINE", engine)
    with nvmeio.Handle() as handle:
        assert handle.stats()["engine"] == engine


def test_an_argument_wins_over_the_environment(engine, monkeypatch):
    monkeypatch.setenv("NVMEIO_ENGINE", "nonsense")
    with nvmeio.Handle(engine=engine) as handle:
        assert handle.stats()["engine"] == engine


def test_a_wrong_environment_is_named(monkeypatch):
    monkeypatch.setenv("NVMEIO_ENGINE", "posix")
    with pytest.raises(
        ValueError, match="NVMEIO_ENGINE is 'posix'; it must be one of auto, io"
    ):
        nvmeio.Handle()


@pytest.mark.parametrize(
    ("variable", "option", "most"),
    [
        ("NVMEIO_BLOCK_SIZE", "block_size", 1 << 30),
        ("NVMEIO_QUEUE_DEPTH", "queue_depth", 32768),
        ("NVMEIO_WORKERS", "workers", 256),
    ],
)
class TestNumbers:
    """The environment sets options that are not passed."""

    def test_the_environment_is_used(self, monkeypatch, variable, option, most):
        monkeypatch.setenv(variable, "7")
        with nvmeio.Handle() as handle:
            assert getattr(handle, option) == 7

    def test_an_argument_wins(self, monkeypatch, variable, option, most):
        monkeypatch.setenv(variable, "nonsense")
        with nvmeio.Handle(**{option: 5}) as handle:
            assert getattr(handle, option) == 5

    def test_an_empty_variable_counts_as_not_set(self, monkeypatch, variable, option, most):
        with nvmeio.Handle() as handle:
            default = getattr(handle, option)
        monkeypatch.setenv(variable, "")
        with nvmeio.Handle() as handle:
            assert getattr(handle, option) == default

    @pytest.mark.parametrize("value", ["many", "1.5", "0x10"])
    def test_an_invalid_variable_is_named(self, monkeypatch, variable, option, most, value):
        monkeypatch.setenv(variable, value)
        with pytest.raises(
            ValueError, match=f"{variable} is '{value}'; it must be an integer"
        ):
            nvmeio.Handle()

    @pytest.mark.parametrize("value", [-1, 0, 1 << 31])
    def test_a_variable_out_of_range_is_refused(
        self, monkeypatch, variable, option, most, value
    ):
        monkeypatch.setenv(variable, str(value))
        with pytest.raises(ValueError, match=rf"is {value}; it must be from 1 to {most}"):
            nvmeio.Handle()


@pytest.mark.parametrize(
    ("option", "text", "value", "other"),
    [
        ("bounce", "never", "never", "auto"),
        ("direct", "0", False, "auto"),
        ("direct", "1", True, False),
        ("direct", "auto", "auto", True),
        ("check_overlap", "1", True, False),
        ("check_overlap", "0", False, True),
    ],
)
def test_the_environment_chooses(monkeypatch, option, text, value, other):
    monkeypatch.setenv(f"NVMEIO_{option.upper()}", text)
    with nvmeio.Handle() as handle, nvmeio.Handle(**{option: other}) as another:
        assert getattr(handle, option) == value
        assert getattr(another, option) == other


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("bounce", "it must be one of auto, always, never"),
        ("direct", "it must be auto, 0 or 1"),
        ("check_overlap", "it must be 0 or 1"),
    ],
)
def test_a_wrong_choice_is_named(monkeypatch, option, words):
    variable = f"NVMEIO_{option.upper()}"
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ValueError, match=f"{variable} is 'yes'; {words}"):
        nvmeio.Handle()


def test_an_engine_that_does_not_work_is_refused_with_the_reason():
    broken = {name: found for name, found in nvmeio.engines().items() if not found["works"]}
    for name, found in broken.items():
        with pytest.raises(OSError, match=name) as caught:
            nvmeio.Handle(engine=name)
        assert caught.value.errno == found["errno"]
        assert found["reason"] in str(caught.value)


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="engine is 'aio'"):
        nvmeio.Handle(engine="aio")
    with pytest.raises(ValueError, match="engine is 7"):
        nvmeio.Handle(engine=7)


def test_none_counts_as_an_engine_not_passed():
    with nvmeio.Handle(engine=None) as handle, nvmeio.Handle() as default:
        assert handle.stats()["engine"] == default.stats()["engine"]
