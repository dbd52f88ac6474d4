"""The files of profiles; nvmeio.profiles is what users import of them.

Which profile a handle takes is lookup.py's, what a device is called is devices.py's.
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

from nvmeio._arguments.types import Path
from nvmeio._config.constants import TUNABLE, checked
from nvmeio._config.devices import device_of
from nvmeio._files.replacing import replacement

# Of the files' format; it changes when a file of before would be misread.
_VERSION = 2

_OPS = ("both", "read", "write")
_TEXTS = ("device", "description", "made", "nvmeio", "kernel")


@dataclass(frozen=True)
class Choice:
    """The options that were best for one kind of work, and what was measured with them.

    Attributes
    ----------
    options : dict
        For ``Handle(**options)``: ``engine``, ``bounce``, ``block_size``, ``queue_depth``
        and ``workers``; none may be missing.
    figures : dict
        Whatever JSON can hold, with the unit last in the names.

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
    """What was found out about a device.

    Attributes
    ----------
    device : str
        Which one, by a name that lasts and that the file bears.
    description : str
        The device and the file system that it was measured through, for people.
    made : str
        When, by ISO 8601.
    nvmeio, kernel : str
        The versions that it was measured with.
    both, read, write : Choice
        The best for reading and writing alike, for reading, and for writing.

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


def new_profile(path: Path, *, both: Choice, read: Choice, write: Choice) -> Profile:
    """Make a profile of the device that a path lies on, of now and of this machine.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A file or a folder; where it does not exist, the nearest folder above counts.
    both, read, write : Choice
        What was best.

    Returns
    -------
    Profile
        Not saved yet.

    Raises
    ------
    OSError
        The path may not be looked at.

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
    """Return where this user's profiles are.

    Returns
    -------
    pathlib.Path
        ``nvmeio/profiles`` in ``$XDG_CONFIG_HOME``, or in ``~/.config`` where that is not
        set or not absolute; it need not exist.

    Raises
    ------
    FileNotFoundError
        The user has no home, as in a container that knows no name for its user.

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
    """See that a profile can be saved; leaves nothing behind.

    Raises
    ------
    OSError
        There is no folder for profiles, and none can be made, or nothing in it.

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
        # Not with a name that was there for a moment.
        raise OSError(error.errno, error.strerror, str(folder)) from None


def profile_file(device: str) -> pathlib.Path:
    """Return where the profile of a device is, or would be.

    Parameters
    ----------
    device : str
        As ``Profile.device`` has it.

    Returns
    -------
    pathlib.Path
        The file.

    Examples
    --------
    >>> nvmeio.profiles.profile_file("nvme0n1").name
    'nvme0n1.json'
    """
    return profiles_folder() / f"{device}.json"


def saved_profiles() -> list[pathlib.Path]:
    """Return the files of all profiles of this user.

    Returns
    -------
    list of pathlib.Path
        Sorted; empty where none was ever saved.

    Raises
    ------
    OSError
        The folder cannot be read.

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


def save_profile(profile: Profile) -> pathlib.Path:
    """Save a profile in place of the one that its device had.

    Parameters
    ----------
    profile : Profile
        Whatever ``new_profile`` made.

    Returns
    -------
    pathlib.Path
        The file.  Whoever reads meanwhile, or after a crash, finds the old one or the new
        one, complete.

    Raises
    ------
    OSError
        It cannot be written, with errno and path.
    TypeError
        An option is of the wrong type, or the figures hold what JSON cannot.
    ValueError
        An option is missing, unknown or out of its limits; a figure is not finite; or the
        device's name is none for a file.

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
    content = {"version": _VERSION, **asdict(profile)}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    file = profile_file(profile.device)
    # What cannot be read again is not saved.
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


def load_profile(path: Path) -> Profile | None:
    """Load the profile of the device that a path lies on.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        As for ``new_profile``.

    Returns
    -------
    Profile or None
        None where the device has none.

    Raises
    ------
    OSError
        The path may not be looked at, or the file not be read.
    ValueError
        As for ``read_profile``.

    Examples
    --------
    >>> nvmeio.profiles.load_profile(".") is None
    True
    """
    file = profile_file(device_of(path).identity)
    return read_profile(file) if file.exists() else None


def read_profile(file: pathlib.Path) -> Profile:
    """Read a profile from its file.

    Parameters
    ----------
    file : pathlib.Path
        Of ``saved_profiles()``, or ``profile_file()``.

    Returns
    -------
    Profile
        What it holds.

    Raises
    ------
    OSError
        It does not exist or cannot be read.
    ValueError
        It is no profile, or one of another version of nvmeio; says which file, and what
        in it.

    Examples
    --------
    >>> [nvmeio.profiles.read_profile(file) for file in nvmeio.profiles.saved_profiles()]
    []
    """
    if file.is_fifo():
        # Whoever opened it would wait for somebody to write.
        raise ValueError(f"the profile {str(file)!r} cannot be used: it is a pipe")
    data = file.read_bytes()
    try:
        return _profile_of(json.loads(data), _device_in(file))
    # RecursionError is what JSON in too many brackets ends in.
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"the profile {str(file)!r} cannot be used: {error}; "
            "`nvmeio tune` makes another"
        ) from error


def _home() -> pathlib.Path:
    try:
        return pathlib.Path.home()
    except RuntimeError as error:
        words = "the user has no home; HOME or XDG_CONFIG_HOME can name a folder"
        raise FileNotFoundError(errno.ENOENT, words) from error


def _make_folder(folder: pathlib.Path) -> None:
    """Make a folder and those above it, for this user alone, as the specification asks."""
    for place in (*reversed(folder.parents), folder):
        place.mkdir(mode=0o700, exist_ok=True)


def _device_in(file: pathlib.Path) -> str:
    """Return the device that a file is named for."""
    return file.name.removesuffix(".json")


def _profile_of(content: Any, device: str) -> Profile:
    """Make a profile of parsed JSON."""
    # Of another version the other fields may be others.
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
        raise ValueError(f"{op}.figures is no object")
    place = f"{op}.options"
    found = _fields(fields["options"], TUNABLE, place)
    options = {name: checked(name, found[name], f"{place}.{name}") for name in TUNABLE}
    return Choice(options, fields["figures"])


def _fields(content: Any, names: tuple[str, ...], place: str) -> dict[str, Any]:
    """Return a JSON object that has these fields and no others."""
    if not isinstance(content, dict):
        raise ValueError(f"{place} is no object")
    for name in names:
        if name not in content:
            raise ValueError(f"{place} lacks {name!r}")
    for name in content:
        if name not in names:
            raise ValueError(f"{place} has {name!r}, which is unknown")
    return content
