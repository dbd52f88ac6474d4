"""What was built, what works here, and which engine is taken."""

import json
import os

import pytest

import nvmeio
from helpers import ENGINES
from nvmeio.info import resources


def test_engines_are_listed_in_order_of_preference():
    assert list(nvmeio.engines()) == list(ENGINES)


def test_an_engine_works_or_says_why_not():
    for name, found in nvmeio.engines().items():
        assert set(found) == {"built", "works", "errno", "reason"}
        assert found["works"] == (found["errno"] == 0) == (found["reason"] == ""), name
        assert found["built"] or not found["works"], name


@pytest.mark.parametrize("name", ["threads", "sync"])
def test_what_needs_nothing_works_everywhere(name):
    assert nvmeio.engines()[name] == {
        "built": True,
        "works": True,
        "errno": 0,
        "reason": "",
    }


def test_build_info_tells_what_there_is():
    found = nvmeio.build_info()
    assert found["version"] == nvmeio.__version__
    assert found["engines"] == nvmeio.engines()
    assert {"compiler", "cython", "flags", "link_flags", "features"} <= set(found)
    assert {"debug", "test_build"} <= set(found)
    for feature in found["features"].values():
        assert feature["built"] == (feature["reason"] == "")
    assert json.loads(json.dumps(found)) == found


def test_no_more_may_be_used_than_there_is():
    found = resources()
    assert 1 <= found["processors"] <= len(os.sched_getaffinity(0))
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    assert 1 << 20 < found["memory_bytes"] <= page * pages


def test_without_debugging_the_build_is_optimized():
    """Case 17: DeepSpeed's is built with -O0."""
    found = nvmeio.build_info()
    levels = [flag for flag in found["flags"] if flag.startswith("-O")]
    assert (levels[-1:] in (["-O2"], ["-O3"])) != found["debug"]


@pytest.mark.parametrize(
    ("name", "library"), [("io_uring", "liburing"), ("libaio", "libaio")]
)
def test_an_engine_is_built_where_its_library_is(name, library):
    features = nvmeio.build_info()["features"]
    assert nvmeio.engines()[name]["built"] == features[library]["built"]


def test_auto_takes_the_first_that_works(monkeypatch):
    monkeypatch.delenv("NVMEIO_ENGINE", raising=False)
    works = [name for name, found in nvmeio.engines().items() if found["works"]]
    with nvmeio.aio_handle() as handle:
        assert handle.stats()["engine"] == works[0]
    with nvmeio.aio_handle(engine="auto") as handle:
        assert handle.stats()["engine"] == works[0]


def test_the_environment_names_an_engine(engine, monkeypatch):
    monkeypatch.setenv("NVMEIO_ENGINE", engine)
    with nvmeio.aio_handle() as handle:
        assert handle.stats()["engine"] == engine


@pytest.mark.parametrize("value", ["", "auto"])
def test_the_environment_may_leave_it_open(monkeypatch, value):
    monkeypatch.setenv("NVMEIO_ENGINE", value)
    works = [name for name, found in nvmeio.engines().items() if found["works"]]
    with nvmeio.aio_handle() as handle:
        assert handle.stats()["engine"] == works[0]


def test_an_argument_wins_over_the_environment(engine, monkeypatch):
    monkeypatch.setenv("NVMEIO_ENGINE", "nonsense")
    with nvmeio.aio_handle(engine=engine) as handle:
        assert handle.stats()["engine"] == engine


def test_a_wrong_environment_is_named(monkeypatch):
    monkeypatch.setenv("NVMEIO_ENGINE", "posix")
    with pytest.raises(
        ValueError, match="NVMEIO_ENGINE is 'posix'; it must be one of auto, io"
    ):
        nvmeio.aio_handle()


@pytest.mark.parametrize(
    ("variable", "getter", "most"),
    [
        ("NVMEIO_BLOCK_SIZE", "get_block_size", 1 << 30),
        ("NVMEIO_QUEUE_DEPTH", "get_queue_depth", 32768),
    ],
)
class TestSettings:
    """The environment gives what is not passed."""

    def test_the_environment_is_used(self, monkeypatch, variable, getter, most):
        monkeypatch.setenv(variable, "4096")
        with nvmeio.aio_handle() as handle:
            assert getattr(handle, getter)() == 4096

    def test_an_argument_wins(self, monkeypatch, variable, getter, most):
        monkeypatch.setenv(variable, "nonsense")
        with nvmeio.aio_handle(8192, 512) as handle:
            assert getattr(handle, getter)() in (8192, 512)

    def test_an_empty_one_counts_as_not_set(self, monkeypatch, variable, getter, most):
        with nvmeio.aio_handle() as handle:
            default = getattr(handle, getter)()
        monkeypatch.setenv(variable, "")
        with nvmeio.aio_handle() as handle:
            assert getattr(handle, getter)() == default

    @pytest.mark.parametrize("value", ["many", "1.5", "0x10"])
    def test_a_wrong_one_is_named(self, monkeypatch, variable, getter, most, value):
        monkeypatch.setenv(variable, value)
        with pytest.raises(
            ValueError, match=f"{variable} is '{value}'; it must be an integer"
        ):
            nvmeio.aio_handle()

    @pytest.mark.parametrize("value", [-1, 0, 1 << 31])
    def test_one_out_of_range_is_refused(self, monkeypatch, variable, getter, most, value):
        monkeypatch.setenv(variable, str(value))
        with pytest.raises(ValueError, match=rf"is {value}; it must be from 1 to {most}"):
            nvmeio.aio_handle()


def test_an_engine_that_does_not_work_is_refused_with_the_reason():
    broken = {name: found for name, found in nvmeio.engines().items() if not found["works"]}
    for name, found in broken.items():
        with pytest.raises(OSError, match=name) as caught:
            nvmeio.aio_handle(engine=name)
        assert caught.value.errno == found["errno"]
        assert found["reason"] in str(caught.value)


def test_an_unknown_engine_is_no_engine():
    with pytest.raises(ValueError, match="engine is 'aio'"):
        nvmeio.aio_handle(engine="aio")
    with pytest.raises(ValueError, match="engine is 7"):
        nvmeio.aio_handle(engine=7)


def test_none_is_an_engine_that_was_not_passed():
    with nvmeio.aio_handle(engine=None) as handle, nvmeio.aio_handle() as default:
        assert handle.stats()["engine"] == default.stats()["engine"]
