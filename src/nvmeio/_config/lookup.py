"""Find the profile for a handle: of a path's device, or the one NVMEIO_PROFILE selects."""

import errno
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from nvmeio._arguments.types import Path
from nvmeio._config.devices import device_of
from nvmeio._config.profile_files import (
    Profile,
    load_profile,
    profile_file,
    profiles_folder,
    read_profile,
    saved_profiles,
)
from nvmeio._events.log import log

__all__ = ["environment_file", "environment_options", "profile_at"]


def profile_at(path: Path, named_by: str = "") -> Profile:
    """Return the profile of a path's device, or raise FileNotFoundError."""
    profile = load_profile(path)
    if profile is None:
        device = device_of(path)
        raise FileNotFoundError(
            errno.ENOENT,
            f"there is no profile of {device}, the device of {named_by}"
            f"{os.fsdecode(path)!r}; make one with `nvmeio tune DIR`, DIR being a folder "
            "on it, or set XDG_CONFIG_HOME to the ~/.config of the user who has one",
            str(profile_file(device.identity)),
        )
    return profile


def environment_options(value: str) -> Mapping[str, Any]:
    """Return the options of the profile that NVMEIO_PROFILE selects.

    With "auto", return no options if no profile fits, or if the user's directory of
    profiles is missing or cannot be read.
    """
    if value != "auto" and not os.path.isabs(value):
        raise ValueError(
            f"NVMEIO_PROFILE is {value!r}; it must be auto, or an absolute path on a "
            "device that has a profile"
        )
    if value != "auto" and not os.path.exists(value):
        raise FileNotFoundError(
            errno.ENOENT, "NVMEIO_PROFILE is a path that does not exist", value
        )
    try:
        folder = profiles_folder()
        changed_ns = _changed_ns(folder)
    except OSError as error:
        # This user cannot have profiles, for example without a home in a container.
        if value != "auto":
            raise
        log.info("NVMEIO_PROFILE is auto, but there is no profile: %s", error)
        return {}
    return _remembered(value, folder, changed_ns, os.stat(os.curdir).st_dev)


def _changed_ns(folder: pathlib.Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _options(
    value: str, folder: pathlib.Path, _changed_ns: int, _current_device: int
) -> Mapping[str, Any]:
    """Find the options; the last two arguments are only keys of the cache below."""
    if value != "auto":
        return profile_at(value, "NVMEIO_PROFILE=").both.options
    file = environment_file(value)
    if file is None:
        log.info(
            "NVMEIO_PROFILE is auto, but none of %d profiles in %s is for the device of "
            "the current directory: using the defaults",
            len(saved_profiles()),
            folder,
        )
        return {}
    return read_profile(file).both.options


def environment_file(value: str) -> pathlib.Path | None:
    """Return the file of the profile that NVMEIO_PROFILE selects; None if none fits."""
    if value == "auto" and len(files := saved_profiles()) == 1:
        return files[0]
    file = profile_file(device_of(os.curdir if value == "auto" else value).identity)
    return file if file.exists() else None


# Finding a profile takes 70 to 800 us, while making a handle takes 100 us (2026-11-21, 2
# cores).  So results are cached by these arguments; saving a profile changes the
# directory's time.
_remembered = functools.lru_cache(maxsize=8)(_options)
