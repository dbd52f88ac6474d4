"""Check what an sdist contains, install it in a clean environment, and use it there."""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

WANTED = (
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "docs/index.md",
    "include/nvmeio/nvmeio.h",
    "pyproject.toml",
    "setup.py",
    "src/_nvmeio_deepspeed.py",
    "src/libnvmeio/engine.h",
    "src/libnvmeio/engine_uring.c",
    "src/nvmeio-deepspeed.pth",
    "src/nvmeio/_core.pxd",
    "src/nvmeio/_core.pyx",
    "src/nvmeio/py.typed",
    "tests/conftest.py",
)
SMOKE = """
import sys
assert "_nvmeio_deepspeed" in sys.modules, "the .pth file is not where Python looks"
assert "numpy" not in sys.modules
import pathlib, numpy, nvmeio
assert pathlib.Path(nvmeio.__file__).is_relative_to(sys.prefix), nvmeio.__file__
path = pathlib.Path(sys.prefix, "array.bin")
array = numpy.arange(300_000, dtype="f8")
nvmeio.write_file(path, array)
assert path.read_bytes() == array.tobytes()
assert bytes(nvmeio.read_file(path)) == array.tobytes()
assert pathlib.Path(nvmeio.get_include(), "nvmeio/nvmeio.h").is_file()
assert pathlib.Path(nvmeio.get_library_dir(), "libnvmeio.a").is_file()
print(nvmeio.engines())
"""


def check_content(names: set[str]) -> None:
    """Exit with a message if a file is missing, or one that the build makes is there."""
    missing = [name for name in WANTED if name not in names]
    if missing:
        sys.exit(f"the sdist lacks {', '.join(missing)}")
    sources = {name for name in names if name.startswith("src/nvmeio/")}
    made = [name for name in sources if name.endswith((".c", ".so", ".a", ".o", ".json"))]
    made += [name for name in names if name.startswith(("build/", ".venv/"))]
    if made:
        sys.exit(f"the sdist has files that the build makes: {', '.join(made)}")


def main(path: str) -> None:
    """Check the sdist at `path`."""
    with tarfile.open(path) as archive:
        check_content({name.partition("/")[2] for name in archive.getnames()})
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        subprocess.run([python, "-m", "pip", "install", "-q", path], check=True)
        environment = {**os.environ, "NVMEIO_DEEPSPEED": "1"}
        subprocess.run([python, "-c", SMOKE], check=True, cwd=folder, env=environment)
    print(f"{path}: content checked, installed and used in a clean environment")


if __name__ == "__main__":
    main(sys.argv[1])
