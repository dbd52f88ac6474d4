"""DeepSpeed's ``"aio"`` block of JSON: read into a handle's arguments, and written."""

import errno
import importlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nvmeio._arguments.checks import flag, whole
from nvmeio._config.constants import LIMITS
from nvmeio._files.paths import synced_folder
from nvmeio._files.replacing import become_like, replacement

__all__ = ["aio_config", "check_aio_file", "write_aio_config"]

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

KEYS = {"use_gds", *DEFAULTS, *ALIASES}

BOOLEANS = ("single_submit", "overlap_events", "use_gds")

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
        are unknown, a configuration without a block; and for ``use_gds``, which nvmeio
        does not do.

    Examples
    --------
    >>> from pathlib import Path
    >>> written = Path("ds_config.json").write_text('{"aio": {"queue_depth": 32}}')
    >>> options = nvmeio.deepspeed.aio_config("ds_config.json")
    >>> nvmeio.aio_handle(**options).get_queue_depth()
    32
    """
    given = path_or_dict
    if not isinstance(given, Mapping):
        given = _content(Path(given), allow_comments=True)
    arguments, remarks = _arguments(_block(given))
    if given and "aio" not in given and not _is_block(given):
        remarks.append("it is not there, so these are DeepSpeed's defaults")
    for remark in remarks:
        warnings.warn(f'of the "aio" block: {remark}', stacklevel=2)
    return arguments


def write_aio_config(path: str | os.PathLike[str], config: Any) -> dict[str, Any]:
    """Write the ``"aio"`` block of a configuration of DeepSpeed.

    Parameters
    ----------
    path : str or os.PathLike
        A file of JSON, a configuration or a block alone, which keeps all else that it
        holds; made where it does not exist.  A new file takes its place once it is complete
        and synced, with the same owner, where this user may give it, and mode.
    config : dict or aio_handle
        What ``aio_config`` takes, a path apart, or a handle.  What it lacks stays as the
        file has it.

    Returns
    -------
    dict
        The block as it was written, with every key and with real booleans.

    Raises
    ------
    OSError
        The file cannot be read or written, or no file can be made beside it.
    TypeError, ValueError
        As ``aio_config``; or a key is unknown, or the file is not plain JSON, as one with
        comments, which would be lost.

    Examples
    --------
    >>> from pathlib import Path
    >>> written = Path("ds_config.json").write_text('{"train_batch_size": 8}')
    >>> options = nvmeio.deepspeed.aio_config({"aio": {"queue_depth": 128}})
    >>> written = nvmeio.deepspeed.write_aio_config("ds_config.json", options)
    >>> nvmeio.deepspeed.aio_config("ds_config.json")["queue_depth"]
    128
    """
    if hasattr(config, "get_block_size"):
        config = {name: getattr(config, f"get_{name}")() for name in DEFAULTS}
    if not isinstance(config, Mapping):
        raise TypeError(f"config is {config!r}; it must be a dict or an aio_handle")
    given = _block(config) if "aio" in config else config
    if unknown := given.keys() - KEYS:
        raise ValueError(f"unknown keys: {_listed(unknown)}; there are {_listed(KEYS)}")
    target = os.path.realpath(path)
    block, data = _rewritten(target, given)
    if os.path.exists(target):
        _require_writable(target)
    with synced_folder(target), replacement(target) as temporary:
        # Nobody may read it before who might not read the other.
        mode = 0o600 if os.path.exists(target) else 0o666
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            become_like(descriptor, target)
            os.fsync(descriptor)
    return block


def check_aio_file(path: str | os.PathLike[str]) -> None:
    """See that ``write_aio_config`` can write a whole block; changes nothing."""
    target = os.path.realpath(path)
    _rewritten(target, DEFAULTS)
    folder = os.path.dirname(target)
    os.stat(folder)
    if os.path.exists(target):
        _require_writable(target)
    _require_writable(folder)


def _rewritten(target: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the block with what is given, and what the file will hold."""
    content: Mapping[str, Any] = {}
    if os.path.exists(target):
        content = _content(Path(target), allow_comments=False)
    foreign = content.keys() - KEYS
    if _is_block(content) and foreign:
        raise ValueError(
            f'{target} has keys of an "aio" block beside others ({_listed(foreign)}); put '
            "them into a block first, where DeepSpeed reads them"
        )
    block = _merged(_block(content), given)
    return block, _encoded(block if _is_block(content) else {**content, "aio": block})


def _encoded(content: Mapping[str, Any]) -> bytes:
    """Write JSON as people do, and in ASCII where it has what UTF-8 cannot encode."""
    try:
        return (json.dumps(content, indent=4, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=4) + "\n").encode()


def _merged(old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Put what is given over an old block, in which the parallelism may go by any name."""
    names = {"intra_op_parallelism", *ALIASES}
    gone = set() if names.isdisjoint(given) else names
    merged = {key: value for key, value in old.items() if key not in gone} | dict(given)
    arguments = _arguments(merged)[0]
    kept = {key: value for key, value in merged.items() if key not in ALIASES}
    if "use_gds" in kept:
        kept["use_gds"] = flag("use_gds", _unquoted(kept["use_gds"]))
    return kept | arguments


def _require_writable(path: str) -> None:
    """Refuse what this user must not write to."""
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def _arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check a block and fill it up; returns what is to be said of it as well."""
    block, remarks = dict(given), []
    for alias in [key for key in block if key in ALIASES]:
        remarks.append(f"{alias} stands for intra_op_parallelism; DeepSpeed ignores it")
        value = block.pop(alias)
        if block.setdefault("intra_op_parallelism", value) != value:
            raise ValueError(
                f"{alias} is {value!r} and intra_op_parallelism "
                f"{block['intra_op_parallelism']!r}; they are one argument"
            )
    for name, value in given.items():
        if name in BOOLEANS and _unquoted(value) is not value:
            block[name] = _unquoted(value)
            remarks.append(f"{name} is {value!r}, in quotes; DeepSpeed's op refuses text")
    if flag("use_gds", block.pop("use_gds", False)):
        remarks.append("use_gds is true; nvmeio takes a GPU's data through host memory")
    arguments: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        value = block.pop(name, default)
        if isinstance(default, bool):
            arguments[name] = flag(name, value)
            continue
        # JSON has one kind of number, and DeepSpeed takes 1e6 as well.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        arguments[name] = whole(
            name, value, 1, LIMITS["workers" if name == "intra_op_parallelism" else name]
        )
    if block:
        remarks.append(f"these keys are unknown: {_listed(block)}")
    return arguments, remarks


def _unquoted(value: Any) -> Any:
    """Return the boolean that a word stands for, and anything else as it is."""
    return WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys)))


def _block(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the block in a configuration that has one, is one, or does without."""
    block = content if _is_block(content) else content.get("aio")
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise TypeError(f'"aio" is {block!r}; it must be a JSON object')
    return block


def _is_block(content: Mapping[str, Any]) -> bool:
    """Tell whether this is a block alone."""
    return "aio" not in content and not KEYS.isdisjoint(content)


def _content(path: Path, *, allow_comments: bool) -> Mapping[str, Any]:
    """Parse a file; DeepSpeed parses Hjson, which has comments."""
    data = path.read_bytes()
    try:
        content = _parsed(data.decode("utf-8-sig"), allow_comments)
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _parsed(text: str, allow_comments: bool) -> Any:
    if not text.strip():
        raise ValueError("it is empty")
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except json.JSONDecodeError as error:
        if not allow_comments:
            raise ValueError(f"only plain JSON can be rewritten: {error}") from error
        problem = error
    try:
        # Comes with DeepSpeed.
        hjson = importlib.import_module("hjson")
    except ModuleNotFoundError:
        raise ValueError(f"{problem}; for comments, install hjson") from problem
    return hjson.loads(text, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of an object's pairs; of two values of one key one would be lost."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = {key for key in keys if keys.count(key) > 1}
        raise ValueError(f"duplicate keys: {_listed(twice)}")
    return content
