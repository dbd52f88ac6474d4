"""``load_file`` for any framework."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from nvmeio._arguments.checks import shown
from nvmeio._safetensors.file import Direct, Mapped, ModelFile, mapped_choice
from nvmeio._safetensors.loading import load, wanted
from nvmeio._streams.progress import Progress, check_progress
from nvmeio._tensors.frameworks import Framework

__all__ = ["load_file"]


def load_file(
    filename: str | os.PathLike[str],
    framework: Framework,
    *,
    names: Iterable[str] | None,
    out: Mapping[str, Any] | None,
    progress: Progress | None,
    direct: Direct,
    mapped: Mapped,
) -> dict[str, Any]:
    """Read or map all or some tensors of a file, in the order of the file."""
    if isinstance(names, str) or not isinstance(names, Iterable | None):
        raise TypeError(f"names is {names!r}; it must be an iterable of names, or None")
    if not isinstance(out, Mapping | None):
        raise TypeError(f"out is {shown(out)}; it must be a dict of tensors, or None")
    check_progress(progress)
    file = ModelFile(filename, direct, mapped_choice(mapped, direct, out))
    try:
        if out is not None and names is None:
            names = list(out)
        chosen = wanted(file, names, framework)
        return load(chosen, framework, out=out, progress=progress)
    finally:
        file.close()
