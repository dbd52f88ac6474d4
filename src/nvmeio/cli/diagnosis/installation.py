"""What nvmeio itself is here: versions, what was built, which engine it takes, and why."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from nvmeio._build import Feature, build_record
from nvmeio._types import EngineInfo
from nvmeio.cli.arguments import sentence
from nvmeio.handle import aio_handle
from nvmeio.info import engines

__all__ = ["FAST_ENGINES", "Installation", "installation"]

# Those by which one thread keeps the queue of a device full.
FAST_ENGINES = ("io_uring", "libaio")


@dataclass(frozen=True)
class Installation:
    """What is installed, and what this process makes of it.

    Attributes
    ----------
    versions : dict of str to (str or None)
        Of nvmeio, Python, numpy and torch; None for what is not installed.
    compiler : str
        What nvmeio was compiled with.
    debug : bool
        Whether that was without optimization.
    test_build : bool
        Whether faults can be made in it.
    features : dict
        For each optional library by name, what the build made of it.
    engines : dict
        For each engine by name, in order of preference, whether it works here.
    engine : str or None
        The one that a handle takes; None where no handle can be opened.
    error : str
        Why not; "" where it can.
    environment : dict of str to str
        The variables that nvmeio reads and that are set.
    """

    versions: dict[str, str | None]
    compiler: str
    debug: bool
    test_build: bool
    features: dict[str, Feature]
    engines: dict[str, EngineInfo]
    engine: str | None
    error: str
    environment: dict[str, str]

    @property
    def fast(self) -> bool:
        """Whether the engine that nvmeio takes is a fast one."""
        return self.engine in FAST_ENGINES


def installation() -> Installation:
    """Look at the installation, and open a handle for a moment.

    Returns
    -------
    Installation
        Nothing is raised where no handle can be opened: the result says so.
    """
    record = build_record()
    engine, error = _engine()
    return Installation(
        versions={
            "nvmeio": record["version"],
            "python": platform.python_version(),
            "numpy": _version("numpy"),
            "torch": _version("torch"),
        },
        compiler=record["compiler"],
        debug=record["debug"],
        test_build=record["test_build"],
        features=record["features"],
        engines=engines(),
        engine=engine,
        error=error,
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("NVMEIO_")
        },
    )


def _engine() -> tuple[str | None, str]:
    """Return the engine that a handle takes by itself, or why there is no handle."""
    try:
        with aio_handle() as handle:
            engine: str = handle.stats()["engine"]
    except (OSError, ValueError, MemoryError) as error:
        return None, sentence(error)
    return engine, ""


def _version(package: str) -> str | None:
    """Return the version of a package without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
