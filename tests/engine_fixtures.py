"""Fixtures of the tests of transfers: every engine, on a disk and in memory."""

import functools
import tempfile
from pathlib import Path

import pytest

import nvmeio
from helpers import BLOCK, DEPTH, ENGINES, SLOW


@functools.cache
def engines_here():
    """Return which engines work here; tried once, because trying libaio takes 30 ms."""
    return nvmeio.engines()


def engine_refusal(item):
    """Return why the engine of a test's parameter does not work here, or None."""
    name = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
    found = engines_here().get(name, {"works": True})
    if found["works"]:
        return None
    return f"the engine {name} does not work here: {found['reason']}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip a test if the engine of its parameter `engine` does not work here."""
    if refusal := engine_refusal(item):
        pytest.skip(refusal)


@pytest.fixture(scope="session")
def engines():
    """The engines that work here."""
    return engines_here()


@pytest.fixture(params=ENGINES)
def engine(request):
    """The name of an engine; each one in turn."""
    return request.param


@pytest.fixture
def fallback(engines):
    """The engine that is used if io_uring is refused."""
    return next(name for name in ENGINES[1:] if engines[name]["works"])


@pytest.fixture(params=["disk", "shm"])
def folder(request, tmp_path):
    """A folder; on the disk and in memory in turn."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            yield Path(name)


@pytest.fixture
def path(folder):
    """The path of a file that does not exist yet."""
    return folder / "data"


@pytest.fixture
def alignment(folder):
    """The alignment for O_DIRECT in the folder; 1 without O_DIRECT."""
    with nvmeio.File(folder / "alignment", "w") as file:
        found = file.alignment
    (folder / "alignment").unlink()
    return found


@pytest.fixture
def handle_class():
    """The class of the handles that open_handle makes."""
    return nvmeio.Handle


@pytest.fixture
def open_handle(engine, handle_class):
    """Make handles; at the end, check that each has used the engine under test."""
    handles = []

    def open_handle(**options):
        handles.append(handle_class(engine=engine, **options))
        return handles[-1]

    yield open_handle
    for handle in handles:
        assert handle.stats()["engine"] == engine
        handle.close()


@pytest.fixture
def handle(open_handle):
    """A handle with a queue of a few small blocks."""
    return open_handle(block_size=BLOCK, queue_depth=DEPTH)


@pytest.fixture
def default_engine(engine, monkeypatch):
    """Make the default handle use each engine in turn; at the end, check that it did."""
    monkeypatch.setenv("NVMEIO_ENGINE", engine)
    nvmeio.default_handle().close()
    with nvmeio.default_handle() as handle:
        yield engine
        assert handle.stats()["engine"] == engine


@pytest.fixture
def slow_default(default_engine, monkeypatch):
    """A default handle that `plugged` can keep busy."""
    for name, value in SLOW.items():
        monkeypatch.setenv(f"NVMEIO_{name.upper()}", str(value))
    nvmeio.default_handle().close()
    with nvmeio.default_handle() as handle:
        yield handle


@pytest.fixture
def quiet_pool():
    """Keep every handle of the process from returning memory to the pool meanwhile."""
    nvmeio.default_handle().close()
