"""Shared by the tests against the real DeepSpeed."""

import importlib.util
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest

import nvmeio.deepspeed
from processes import rank_environment

ROOT = Path(__file__).resolve().parents[2]


def deepspeed_is_installed():
    """Return whether the package is there; this folder has its name, but no origin."""
    spec = importlib.util.find_spec("deepspeed")
    return spec is not None and spec.origin is not None


def prepare_environment():
    """Set the variables that DeepSpeed reads on import, and where it compiles ops."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    versions = f"torch-{metadata.version('torch')}-python-{platform.python_version()}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / versions))
    # DeepSpeed compiles with ninja, which is beside Python; the environment may not be
    # active.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


# Before collection, because test modules import DeepSpeed.
if deepspeed_is_installed():
    prepare_environment()


def pytest_collect_file():
    """Skip the whole folder if DeepSpeed is not installed."""
    if not deepspeed_is_installed():
        pytest.skip("deepspeed is not installed", allow_module_level=True)


def pytest_collection_modifyitems(items):
    """Give each test more time: DeepSpeed compiles some ops when they are first used."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.packaging)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture
def installed():
    """nvmeio installed in DeepSpeed, with errors reported as DeepSpeed's contract says."""
    with nvmeio.deepspeed.install():
        yield


@pytest.fixture
def raising():
    """nvmeio installed in DeepSpeed, with errors that raise."""
    with nvmeio.deepspeed.install(errors="raise"):
        yield


@pytest.fixture
def op(installed):
    """What DeepSpeed loads as its op async_io."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load()


@pytest.fixture(scope="module")
def distributed():
    """This process as the only rank of a training run."""
    import deepspeed

    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank_environment().items():
            patch.setenv(name, value)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        yield
        deepspeed.comm.destroy_process_group()
