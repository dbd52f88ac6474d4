"""Profiles and their files; users import them from nvmeio.profiles.

lookup.py finds the profile for a handle; devices.py names devices.
"""

import errno
import json
import os
import pathlib
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from nvmeio._arguments.checks import shown
from nvmeio._arguments.json_texts import parse_json
from nvmeio._arguments.types import Path
from nvmeio._config.constants import TUNABLE, checked
from nvmeio._config.devices import device_of
from nvmeio._files.folders import make_folders
from nvmeio._files.paths import naming
from nvmeio._publish.names import replacement, temporary_name

# The version of the files' format.  Increase it if old files would be misread.
_VERSION = 2

_OPS = ("both", "read", "write")


@dataclass(frozen=True)
class Choice:
    """The best options for one kind of work, and the figures measured with them.

    Attributes
    ----------
    options : dict
        For ``Handle(**options)``: ``engine``, ``bounce``, ``block_size``, ``queue_depth``
        and ``workers``; all are required.
    figures : dict
        Measured values that JSON can represent.  Names end with the unit, as in
        ``gb_per_s``.

    Examples
    --------
    >>> choice = nvmeio.profiles.Choice({"workers": 2}, {"gb_per_s": 2.5})
    >>> nvmeio.Handle(**choice.options).workers
    2
    """

    options: dict[str, Any]
    figures: dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """The fastest settings of a device, as ``nvmeio tune`` measured them.

    Attributes
    ----------
    device : str
        The device's identity, which survives a reboot and names the profile's file.
    description : str
        The device and the file system that was used, for people.
    made : str
        The time of the measurement, in ISO 8601.
    nvmeio, kernel : str
        The versions that were measured.
    both, read, write : Choice
        The best options for reading and writing alike (by the geometric mean of the two
        speeds), for reading, and for writing.

    Examples
    --------
    >>> profile = nvmeio.profiles.load_profile(".")
    >>> profile is None or isinstance(profile, nvmeio.profiles.Profile)
    True
    """

    device: str
    description: str
    made: str
    nvmeio: str
    kernel: str
    both: Choice
    read: Choice
    write: Choice


def new_profile(path: Path, *, both: Choice, read: Choice, write: Choice) -> Profile:
    """Make a profile for the device of a path, with the current time and versions.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A file or directory on the device.  If it does not exist, its nearest existing
        parent is used.
    both, read, write : Choice
        The best options for each kind of work.

    Returns
    -------
    Profile
        Not saved yet; see ``save_profile``.

    Raises
    ------
    OSError
        The path cannot be accessed.

    Examples
    --------
    >>> best = nvmeio.profiles.Choice({"workers": 2}, {"gb_per_s": 2.5})
    >>> profile = nvmeio.profiles.new_profile(".", both=best, read=best, write=best)
    >>> profile.both.figures
    {'gb_per_s': 2.5}
    """
    device = device_of(path)
    return Profile(
        device=device.identity,
        description=str(device),
        made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        nvmeio=version("nvmeio"),
        kernel=os.uname().release,
        both=both,
        read=read,
        write=write,
    )


def profiles_folder() -> pathlib.Path:
    """Return the directory of this user's profiles, which need not exist.

    XDG Base Directory Specification, version 0.8.
    """
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    usable = os.path.isabs(configured)
    folder = pathlib.Path(configured) if usable else _home() / ".config"
    return folder / "nvmeio" / "profiles"


def make_profiles_folder() -> pathlib.Path:
    """Create the directory for this user only, as the XDG standard asks; return it."""
    folder = profiles_folder()
    make_folders(str(folder), mode=0o700)
    if not os.access(folder, os.W_OK, effective_ids=True):
        # This says why, such as EROFS, or EPERM of chattr +i.
        probe = temporary_name(str(folder / "profile"))
        with naming(str(folder)):
            os.mkdir(probe)
        os.rmdir(probe)
    return folder


def profile_file(device: str) -> pathlib.Path:
    """Return the file of a device's profile, which need not exist."""
    if not device or "/" in device or "\0" in device:
        raise ValueError(f"device is {device!r}; it must be the name of a file")
    return profiles_folder() / f"{device}.json"


def saved_profiles() -> list[pathlib.Path]:
    """Return the files of all profiles of this user, sorted."""
    folder = profiles_folder()
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    return [folder / name for name in names if name.endswith(".json")]


def save_profile(profile: Profile) -> pathlib.Path:
    """Save a profile, replacing the device's earlier one.

    Parameters
    ----------
    profile : Profile
        A result of ``new_profile``.

    Returns
    -------
    pathlib.Path
        The file.  It is replaced in one step: a reader, also after a crash, finds either
        the old profile or the new one.

    Raises
    ------
    OSError
        The file cannot be written.
    TypeError
        It is no Profile, an option is of the wrong type, or JSON cannot represent a figure.
    ValueError
        An option is missing, unknown or out of range, a figure is not finite, or
        ``device`` is not a valid file name.

    Examples
    --------
    >>> options = {"engine": "threads", "bounce": "auto", "block_size": 1 << 20}
    >>> options |= {"queue_depth": 32, "workers": 2}
    >>> best = nvmeio.profiles.Choice(options, {"gb_per_s": 2.5})
    >>> profile = nvmeio.profiles.new_profile(".", both=best, read=best, write=best)
    >>> file = nvmeio.profiles.save_profile(profile)
    >>> nvmeio.Handle.from_profile(".").queue_depth
    32
    """
    if not isinstance(profile, Profile):
        raise TypeError(f"profile is {shown(profile)}; it must be a Profile")
    content = {"version": _VERSION, **asdict(profile)}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    file = profile_file(profile.device)
    # Check that it can be read again before saving it.
    _profile_of(json.loads(text), file)
    make_profiles_folder()
    with (
        naming(str(file)),
        replacement(str(file)) as temporary,
        open(temporary, "x", encoding="utf-8") as stream,
    ):
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    return file


def load_profile(path: Path) -> Profile | None:
    """Load the profile for the device of a path.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        As for ``new_profile``.

    Returns
    -------
    Profile or None
        None if the device has no profile.

    Raises
    ------
    OSError
        The path or the profile's file cannot be read.
    ValueError
        The file is not a profile, or one of another version of nvmeio; the message names
        the file and the field.

    Examples
    --------
    >>> nvmeio.profiles.load_profile(".") is None
    True
    """
    file = profile_file(device_of(path).identity)
    return read_profile(file) if file.exists() else None


def read_profile(file: pathlib.Path) -> Profile:
    """Read a profile from its file; ValueError names the file and the field."""
    data = file.read_bytes()
    try:
        return _profile_of(parse_json(data), file)
    # JSON with too many nested brackets raises RecursionError.
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"the profile {str(file)!r} cannot be used: {error}; "
            "`nvmeio tune` makes another"
        ) from error


def _home() -> pathlib.Path:
    try:
        return pathlib.Path.home()
    except RuntimeError as error:
        words = "the user has no home; set HOME or XDG_CONFIG_HOME to a directory"
        raise FileNotFoundError(errno.ENOENT, words) from error


def _profile_of(content: Any, file: pathlib.Path) -> Profile:
    """Convert parsed JSON to a profile; errors name the field."""
    # Check the version first: another version may have other fields.
    if isinstance(content, dict) and content.get("version", _VERSION) != _VERSION:
        raise ValueError(f"version is {content['version']!r}; this nvmeio reads {_VERSION}")
    _check_fields(content, {"version", *Profile.__annotations__}, "it")
    device, expected = content["device"], file.name.removesuffix(".json")
    if device != expected:
        raise ValueError(
            f"device is {device!r}; it must be {expected!r}, as in the name of the file"
        )
    found = {name: value for name, value in content.items() if name != "version"}
    for op in _OPS:
        _check_fields(found[op], {"options", "figures"}, op)
        found[op] = Choice(**found[op])
        _check_fields(found[op].options, set(TUNABLE), f"{op}.options")
        for name, value in found[op].options.items():
            checked(name, value, f"{op}.options.{name}")
    return Profile(**found)


def _check_fields(content: Any, names: set[str], place: str) -> None:
    """Check that a JSON object has exactly these fields."""
    if not isinstance(content, dict):
        raise ValueError(f"{place} is not a JSON object")
    if odd := content.keys() ^ names:
        raise ValueError(f"{place} lacks these, or must not have them: {sorted(odd)}")
