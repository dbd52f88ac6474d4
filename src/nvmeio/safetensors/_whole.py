"""``load_file`` for any framework."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from nvmeio._safetensors.file import Direct, Mapped, ModelFile, mapped_choice
from nvmeio._safetensors.loading import load, wanted
from nvmeio._streams.progress import Progress, check_progress
from nvmeio._tensors.frameworks import Framework
from nvmeio._tensors.targets import chosen_names

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
    names = chosen_names(names, out)
    check_progress(progress)
    file = ModelFile(filename, direct, mapped_choice(mapped, direct, out))
    try:
        chosen = wanted(file, names, framework)
        return load(chosen, framework, out=out, progress=progress)
    finally:
        file.close()
