"""Fixtures of the tests of transfers: every engine, on a disk and in memory."""

import functools
import tempfile
from pathlib import Path

import pytest

import nvmeio
from helpers import BLOCK, DEPTH, ENGINES


@functools.cache
def engines_here():
    """Return what works here, tried once: libaio takes 30 ms to be tried."""
    return nvmeio.engines()


def engine_refusal(item):
    """Return why the engine that is a test's parameter does not work here, or None."""
    name = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
    found = engines_here().get(name, {"works": True})
    if found["works"]:
        return None
    return f"the engine {name} does not work here: {found['reason']}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip each test that has a parameter `engine` where that engine does not work."""
    if refusal := engine_refusal(item):
        pytest.skip(refusal)


@pytest.fixture(scope="session")
def engines():
    """What works here."""
    return engines_here()


@pytest.fixture(params=ENGINES)
def engine(request):
    """The name of each engine in turn."""
    return request.param


@pytest.fixture
def fallback(engines):
    """The engine that serves where io_uring is refused."""
    return next(name for name in ENGINES[1:] if engines[name]["works"])


@pytest.fixture(params=["disk", "shm"])
def folder(request, tmp_path):
    """A folder on the disk, and one in memory."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            yield Path(name)


@pytest.fixture
def path(folder):
    """Where a file may be made."""
    return folder / "data"


@pytest.fixture
def alignment(folder):
    """What O_DIRECT wants in the folder; 1 where there is no O_DIRECT."""
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
    """Make handles; in the end each is seen to have used the engine under test."""
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
    """Have the default handle use each engine in turn; in the end it is seen to have."""
    monkeypatch.setenv("NVMEIO_ENGINE", engine)
    nvmeio.default_handle().close()
    with nvmeio.default_handle() as handle:
        yield engine
        assert handle.stats()["engine"] == engine


@pytest.fixture
def quiet_pool():
    """No handle of the process gives memory back to the pool meanwhile."""
    nvmeio.default_handle().close()
