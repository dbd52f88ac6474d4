"""DeepSpeed's ``"aio"`` block of JSON: read into a handle's arguments, and written."""

import importlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvmeio.arguments import LIMITS, flag, whole
from nvmeio.files import replacement, synced_folder, write_file
from nvmeio.handle import aio_handle

__all__ = ["aio_config", "write_aio_config"]

# What DeepSpeed takes for a key that is not there; they are not its handle's defaults.
# Source: deepspeed/runtime/swap_tensor/constants.py.
DEFAULTS: dict[str, int | bool] = {
    "block_size": 1048576,
    "queue_depth": 8,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 1,
}

# Names that intra_op_parallelism has had; DeepSpeed's own tuner writes the second one.
ALIASES = ("thread_count", "num_threads")

WORDS = {"true": True, "false": False}


def aio_config(path_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read DeepSpeed's ``"aio"`` block into the arguments of a handle.

    Parameters
    ----------
    path_or_dict : str, os.PathLike or dict
        A file of JSON or what it holds: a configuration of DeepSpeed, what its tuner
        prints, or the block alone.

    Returns
    -------
    dict
        ``block_size``, ``queue_depth``, ``single_submit``, ``overlap_events`` and
        ``intra_op_parallelism``, each as its type; DeepSpeed's default for what the block
        lacks, which is a queue depth of 8 and overlapped events.

    Raises
    ------
    OSError
        The file cannot be read.
    TypeError
        A value is of the wrong type, or the block is not an object.
    ValueError
        The file is not JSON, a value is out of its limits, or two names of one argument
        have different values.

    Warns
    -----
    UserWarning
        For what DeepSpeed would not read as it was meant: ``thread_count`` and
        ``num_threads`` in place of ``intra_op_parallelism``, booleans in quotes, keys that
        are unknown; and for ``use_gds``, which nvmeio does not do.

    Examples
    --------
    >>> nvmeio.aio_handle(**aio_config("ds_config.json"))
    """
    given = path_or_dict
    if not isinstance(given, Mapping):
        given = _object(Path(given), lenient=True)
    return _arguments(_block(given))


def write_aio_config(
    path: str | os.PathLike[str], config: Mapping[str, Any] | aio_handle
) -> dict[str, Any]:
    """Write the ``"aio"`` block of a configuration of DeepSpeed.

    Parameters
    ----------
    path : str or os.PathLike
        A file of JSON, which keeps all else that it holds; made where it does not exist.
        It is replaced at once, by a file that is complete and synced.
    config : dict or aio_handle
        Arguments of a handle, as ``aio_config`` returns them, or a handle.

    Returns
    -------
    dict
        The block as it was written, with real booleans.

    Raises
    ------
    OSError
        The file cannot be read, or no file can be made beside it.
    TypeError, ValueError
        As ``aio_config``; or the file is not plain JSON, as one with comments, which would
        be lost.
    """
    target = Path(os.path.realpath(path))
    if not isinstance(config, Mapping):
        config = {name: getattr(config, f"get_{name}")() for name in DEFAULTS}
    arguments = _arguments(config)
    content = dict(_object(target, lenient=False)) if target.exists() else {}
    kept = {name: value for name, value in _block(content).items() if name not in ALIASES}
    block = kept | arguments
    _put(target, json.dumps(content | {"aio": block}, indent=4) + "\n")
    return block


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check a block, and fill it up with defaults."""
    block = dict(given)
    for alias in ALIASES & block.keys():
        value = block.pop(alias)
        _warn(f"{alias} is read as intra_op_parallelism; DeepSpeed would ignore it")
        if block.setdefault("intra_op_parallelism", value) != value:
            raise ValueError(
                f"{alias} is {value!r} and intra_op_parallelism "
                f"{block['intra_op_parallelism']!r}; they are one argument"
            )
    if _boolean("use_gds", block.pop("use_gds", False)):
        _warn("use_gds is true; nvmeio takes data of a GPU through memory of the host")
    arguments: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        value = block.pop(name, default)
        if isinstance(default, bool):
            arguments[name] = _boolean(name, value)
        else:
            arguments[name] = whole(name, value, 1, LIMITS[name])
    if block:
        _warn(f"unknown keys: {', '.join(map(repr, sorted(block)))}")
    return arguments


def _boolean(name: str, value: Any) -> bool:
    """Return a boolean, which DeepSpeed's tuner writes in quotes."""
    if isinstance(value, str) and value.lower() in WORDS:
        _warn(f"{name} is {value!r}, in quotes; DeepSpeed would take any text for true")
        return WORDS[value.lower()]
    return flag(name, value)


def _warn(message: str) -> None:
    # Up to whoever called aio_config() or write_aio_config().
    warnings.warn(f'in the "aio" block, {message}', stacklevel=5)


def _block(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the block in a configuration that has one, is one, or does without."""
    known = {"aio", "use_gds", *DEFAULTS, *ALIASES}
    block = content.get("aio", {} if known.isdisjoint(content) else content)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise TypeError(f'"aio" is {block!r}; it must be an object')
    return block


def _object(path: Path, *, lenient: bool) -> Mapping[str, Any]:
    """Parse a file, a lenient one as DeepSpeed does, which allows for comments."""
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text, object_pairs_hook=_without_repetition)
    except json.JSONDecodeError as error:
        problem = f"{path} is not JSON: {error}"
        if not lenient:
            raise ValueError(f"{problem}; set the block by hand") from None
        try:
            # Comes with DeepSpeed.
            hjson = importlib.import_module("hjson")
        except ModuleNotFoundError:
            raise ValueError(f"{problem}; with the package hjson it may be Hjson") from None
        content = hjson.loads(text, object_pairs_hook=_without_repetition)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds no JSON object")
    return content


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of an object's pairs; of two values of one key one would be lost."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the JSON has keys twice: {', '.join(twice)}")
    return content


def _put(path: Path, text: str) -> None:
    """Replace a file by another that is complete."""
    with synced_folder(str(path)), replacement(str(path)) as temporary:
        write_file(temporary, text.encode(), sync=True)
        if path.exists():
            shutil.copymode(path, temporary)
