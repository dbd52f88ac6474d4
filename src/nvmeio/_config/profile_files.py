"""Profiles and their files; users import them from nvmeio.profiles.

lookup.py finds the profile for a handle; devices.py names devices.
"""

import errno
import json
import os
import pathlib
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from nvmeio._arguments.checks import shown
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import Path
from nvmeio._config.constants import TUNABLE, checked
from nvmeio._config.devices import device_of
from nvmeio._files.replacing import replacement

# The version of the files' format.  Increase it if old files would be misread.
_VERSION = 2

_OPS = ("both", "read", "write")
_TEXTS = ("device", "description", "made", "nvmeio", "kernel")


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
    >>> options = {"engine": "threads", "bounce": "auto", "block_size": 1 << 20}
    >>> options |= {"queue_depth": 32, "workers": 2}
    >>> choice = nvmeio.profiles.Choice(options, {"gb_per_s": 2.5})
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
    >>> options = {"engine": "threads", "bounce": "auto", "block_size": 1 << 20}
    >>> options |= {"queue_depth": 32, "workers": 2}
    >>> best = nvmeio.profiles.Choice(options, {})
    >>> profile = nvmeio.profiles.new_profile(".", both=best, read=best, write=best)
    >>> isinstance(profile, nvmeio.profiles.Profile)
    True
    >>> profile.read.options["queue_depth"]
    32
    """

    device: str
    description: str
    made: str
    nvmeio: str
    kernel: str
    both: Choice
    read: Choice
    write: Choice


@suggesting
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
    >>> options = {"engine": "threads", "bounce": "auto", "block_size": 1 << 20}
    >>> options |= {"queue_depth": 32, "workers": 2}
    >>> best = nvmeio.profiles.Choice(options, {"gb_per_s": 2.5})
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
    """Return the directory of this user's profiles.

    Returns
    -------
    pathlib.Path
        ``nvmeio/profiles`` in ``$XDG_CONFIG_HOME``, or in ``~/.config`` if that is not set
        or not absolute.  It need not exist.

    Raises
    ------
    FileNotFoundError
        The user has no home, for example in a container that has no entry for the user.

    References
    ----------
    XDG Base Directory Specification, version 0.8.

    Examples
    --------
    >>> nvmeio.profiles.profiles_folder().parts[-2:]
    ('nvmeio', 'profiles')
    """
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    usable = os.path.isabs(configured)
    folder = pathlib.Path(configured) if usable else _home() / ".config"
    return folder / "nvmeio" / "profiles"


def check_saving() -> None:
    """Check that a profile can be saved, without saving one.

    Raises
    ------
    OSError
        The directory of profiles cannot be created, or no file in it.

    Examples
    --------
    >>> nvmeio.profiles.check_saving()
    """
    folder = profiles_folder()
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        # Name the directory, not the temporary file.
        raise OSError(error.errno, error.strerror, str(folder)) from None


@suggesting
def profile_file(device: str) -> pathlib.Path:
    """Return the file of a device's profile.

    Parameters
    ----------
    device : str
        As in ``Profile.device``.

    Returns
    -------
    pathlib.Path
        The file, which need not exist.

    Raises
    ------
    ValueError
        ``device`` is not the name of a file.

    Examples
    --------
    >>> nvmeio.profiles.profile_file("nvme0n1").name
    'nvme0n1.json'
    """
    if not device or "/" in device or "\0" in device:
        raise ValueError(f"device is {device!r}; it must be the name of a file")
    return profiles_folder() / f"{device}.json"


def saved_profiles() -> list[pathlib.Path]:
    """Return the files of all profiles of this user.

    Returns
    -------
    list of pathlib.Path
        Sorted; empty if no profile was saved.

    Raises
    ------
    OSError
        The directory of profiles cannot be read.

    Examples
    --------
    >>> nvmeio.profiles.saved_profiles()
    []
    """
    folder = profiles_folder()
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    return [folder / name for name in names if name.endswith(".json")]


@suggesting
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
    _profile_of(json.loads(text), _device_in(file))
    _make_folder(file.parent)
    with (
        replacement(str(file)) as temporary,
        open(temporary, "x", encoding="utf-8") as stream,
    ):
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    return file


@suggesting
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
        As for ``read_profile``.

    Examples
    --------
    >>> nvmeio.profiles.load_profile(".") is None
    True
    """
    file = profile_file(device_of(path).identity)
    return read_profile(file) if file.exists() else None


@suggesting
def read_profile(file: pathlib.Path) -> Profile:
    """Read a profile from its file.

    Parameters
    ----------
    file : pathlib.Path
        From ``saved_profiles()`` or ``profile_file()``.

    Returns
    -------
    Profile
        The profile.

    Raises
    ------
    OSError
        The file does not exist or cannot be read.
    ValueError
        The file is not a profile, or one of another version of nvmeio; the message names
        the file and the field.

    Examples
    --------
    >>> [nvmeio.profiles.read_profile(file) for file in nvmeio.profiles.saved_profiles()]
    []
    """
    if file.is_fifo():
        # Opening a pipe would block until somebody writes to it.
        raise ValueError(f"the profile {str(file)!r} cannot be used: it is a pipe")
    data = file.read_bytes()
    try:
        return _profile_of(json.loads(data), _device_in(file))
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


def _make_folder(folder: pathlib.Path) -> None:
    """Create a directory and its parents, for this user only, as the XDG standard asks."""
    for place in (*reversed(folder.parents), folder):
        place.mkdir(mode=0o700, exist_ok=True)


def _device_in(file: pathlib.Path) -> str:
    """Return the device of a profile's file, by its name."""
    return file.name.removesuffix(".json")


def _profile_of(content: Any, device: str) -> Profile:
    """Convert parsed JSON to a profile."""
    # Check the version first: another version may have other fields.
    if isinstance(content, dict) and content.get("version", _VERSION) != _VERSION:
        raise ValueError(f"version is {content['version']!r}; this nvmeio reads {_VERSION}")
    fields = _fields(content, ("version", *_TEXTS, *_OPS), "it")
    for name in _TEXTS:
        if not isinstance(fields[name], str):
            raise ValueError(f"{name} is {fields[name]!r}; it must be a string")
    if fields["device"] != device:
        raise ValueError(
            f"device is {fields['device']!r}; it must be {device!r}, as in "
            "the name of the file"
        )
    found: dict[str, Any] = {name: fields[name] for name in _TEXTS}
    found |= {op: _choice_of(fields[op], op) for op in _OPS}
    return Profile(**found)


def _choice_of(content: Any, op: str) -> Choice:
    fields = _fields(content, ("options", "figures"), op)
    if not isinstance(fields["figures"], dict):
        raise ValueError(f"{op}.figures is not a JSON object")
    place = f"{op}.options"
    found = _fields(fields["options"], TUNABLE, place)
    options = {name: checked(name, found[name], f"{place}.{name}") for name in TUNABLE}
    return Choice(options, fields["figures"])


def _fields(content: Any, names: tuple[str, ...], place: str) -> dict[str, Any]:
    """Check that a JSON object has exactly these fields, and return it."""
    if not isinstance(content, dict):
        raise ValueError(f"{place} is not a JSON object")
    for name in names:
        if name not in content:
            raise ValueError(f"{place} lacks {name!r}")
    for name in content:
        if name not in names:
            raise ValueError(f"{place} has {name!r}, which is unknown")
    return content
