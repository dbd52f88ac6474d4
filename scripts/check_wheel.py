"""Check what a wheel links, its size and licences; use it if it is for this Python."""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from check_sdist import check_installed

BYTES_MAX = 2_500_000
# libnvmeio.so is in the wheel; all others are parts of glibc.
LINKED = {"libnvmeio.so", "libc.so.6", "libpthread.so.0", "libdl.so.2", "libm.so.6"}
LINKED |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
RUN_PATHS = {"$ORIGIN/../lib"}


def check_object(path: Path) -> None:
    """Exit with a message if a shared object needs what the wheel does not promise."""
    command = ("readelf", "--wide", "--dynamic", "--sections", "--segments", path)
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = {*re.findall(r"\(NEEDED\).*\[(.+)\]", text)}
    if needed - LINKED:
        sys.exit(f"{path.name} needs {', '.join(sorted(needed - LINKED))}")
    run_paths = {*re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.+)\]", text)}
    if run_paths - RUN_PATHS:
        sys.exit(f"{path.name} looks for libraries in {', '.join(run_paths - RUN_PATHS)}")
    if " .symtab " in text or " .debug_" in text:
        sys.exit(f"{path.name} is not stripped")
    if re.search(r"GNU_STACK .* RWE ", text) or "GNU_RELRO " not in text:
        sys.exit(f"{path.name} has an executable stack, or relocations that stay writable")


def main(path: str) -> None:
    """Check the wheel at `path`."""
    nbytes = Path(path).stat().st_size
    if nbytes > BYTES_MAX:
        sys.exit(f"{path} has {nbytes} bytes; the limit is {BYTES_MAX}")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder)
        names = {Path(name).name for name in wheel.namelist()}
        objects = [*Path(folder).rglob("*.so")]
        for path_of_object in objects:
            check_object(path_of_object)
        for file in Path(folder).rglob("*"):
            if file.is_file() and str(Path.cwd()).encode() in file.read_bytes():
                sys.exit(f"{file.relative_to(folder)} names the folder of the build")
    wanted = {"LICENSE", "LICENSE.liburing", "libnvmeio.a", "libnvmeio.so", "nvmeio.pc"}
    if wanted - names:
        sys.exit(f"{path} lacks {', '.join(sorted(wanted - names))}")
    command = (sys.executable, "-m", "auditwheel", "show", path)
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    platform = Path(path).stem.split("-")[-1]
    if f'"{platform}"' not in text:
        sys.exit(text)
    print(f"{path}: {nbytes / 1e6:.2f} MB, {len(objects)} shared objects, {platform}")
    version = "cp{}{}".format(*sys.version_info[:2])
    if f"-{version}-" in path and platform.endswith(os.uname().machine):
        check_installed(path, Path("docs/embedding.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1])
