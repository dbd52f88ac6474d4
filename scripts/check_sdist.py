"""Check what an sdist contains, install it in a clean environment, and use it there."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from pathlib import Path

# Tracked files that only a checkout needs.
LEFT_OUT = (".ci/run", ".gitignore")
SMOKE = """
import sys
assert "_nvmeio_follow" in sys.modules, "the .pth file is not where Python looks"
assert "numpy" not in sys.modules
import pathlib, numpy, nvmeio
assert pathlib.Path(nvmeio.__file__).is_relative_to(sys.prefix), nvmeio.__file__
path = pathlib.Path(sys.prefix, "array.bin")
array = numpy.arange(300_000, dtype="f8")
nvmeio.write_file(array, path)
assert path.read_bytes() == array.tobytes()
assert bytes(nvmeio.read_file(path)) == array.tobytes()
assert pathlib.Path(nvmeio.get_include(), "nvmeio/nvmeio.h").is_file()
for name in ("libnvmeio.a", "libnvmeio.so", "pkgconfig/nvmeio.pc"):
    assert pathlib.Path(nvmeio.get_library_dir(), name).is_file(), name
print(nvmeio.engines())
# What works without torch, and without what torch brings.
import subprocess
import nvmeio.aio, nvmeio.checkpoint, nvmeio.npy, nvmeio.profiles, nvmeio.safetensors.numpy
for words in ("--version", "doctor --help", "bench --help", "tune --help",
              "verify --help", "inspect --help", "checkpoints --help"):
    command = [sys.executable, "-m", "nvmeio", *words.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
"""

# The Cython module of docs/embedding.md, which loads the library by importing nvmeio.
READER = """
import reader, numpy, nvmeio
nvmeio.write_file(numpy.arange(1000), "rows.bin")
before = nvmeio.pool_stats()["bytes_used"]
block = reader.Reader("rows.bin").read(80, offset=8 * 777)
assert numpy.frombuffer(block, "i8").tolist() == [*range(777, 787)]
assert nvmeio.pool_stats()["bytes_used"] > before
"""


def check_content(names: set[str]) -> None:
    """Exit with a message if a file is missing, or if the build made one that is there."""
    command = ("git", "ls-files", "-z")
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    wanted = set(listed.stdout.split("\0")) - {"", *LEFT_OUT}
    missing = sorted(wanted - names)
    if missing:
        sys.exit(f"the sdist lacks {', '.join(missing)}")
    sources = {name for name in names if name.startswith("src/nvmeio/")}
    made = [name for name in sources if name.endswith((".c", ".so", ".a", ".o", ".json"))]
    made += [name for name in names if name.startswith(("build/", ".venv/"))]
    if made:
        sys.exit(f"the sdist has files that the build makes: {', '.join(made)}")


def check_downstream(python: str, folder: str, page: str) -> None:
    """Build another project's Cython module, by its setup.py and by pkg-config."""
    run = {"check": True, "cwd": folder}
    for name, text in re.findall(
        r"^```\w+ (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    ):
        if name in ("reader.pyx", "setup.py"):
            Path(folder, name).write_text(text, encoding="utf-8")
    tools = ("Cython>=3.1", "setuptools>=77")
    subprocess.run([python, "-m", "pip", "install", "-q", *tools], check=True)
    subprocess.run([python, "setup.py", "-q", "build_ext", "--inplace"], **run)
    subprocess.run([python, "-c", READER], **run)
    (built,) = Path(folder).glob("reader.*.so")
    built.unlink()
    asked = "import nvmeio; print(nvmeio.get_library_dir() + '/pkgconfig')"
    found = subprocess.run([python, "-c", asked], **run, capture_output=True, text=True)
    environment = {**os.environ, "PKG_CONFIG_PATH": found.stdout.strip()}
    command = ("pkg-config", "--cflags", "--libs", "nvmeio")
    told = subprocess.run(command, **run, capture_output=True, text=True, env=environment)
    headers = f"-I{sysconfig.get_path('include')}"
    source = ("cc", "-shared", "-fPIC", "-O1", headers, "reader.c", "-o", built)
    subprocess.run([*source, *shlex.split(told.stdout)], **run)
    subprocess.run([python, "-c", READER], **run)


def check_installed(path: str, page: str) -> None:
    """Install an sdist or a wheel in a clean environment, and use it there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        subprocess.run([python, "-m", "pip", "install", "-q", path], check=True)
        environment = {**os.environ, "NVMEIO_DEEPSPEED": "1"}
        subprocess.run([python, "-c", SMOKE], check=True, cwd=folder, env=environment)
        check_downstream(python, folder, page)
    print(f"{path}: installed and used in a clean environment")


def main(path: str) -> None:
    """Check the sdist at `path`."""
    with tarfile.open(path) as archive:
        names = archive.getnames()
        check_content({name.partition("/")[2] for name in names})
        (page,) = [name for name in names if name.endswith("/docs/embedding.md")]
        text = archive.extractfile(page).read().decode()
    check_installed(path, text)


if __name__ == "__main__":
    main(sys.argv[1])
