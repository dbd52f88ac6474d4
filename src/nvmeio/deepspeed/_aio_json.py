"""Read DeepSpeed's ``"aio"`` block of JSON into a handle's arguments, and write it."""

import importlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nvmeio._arguments.checks import flag, whole
from nvmeio._arguments.json_texts import unique
from nvmeio._config.constants import LIMITS
from nvmeio._files.paths import naming, resolved
from nvmeio._publish.files import replace_file

__all__ = ["aio_config", "write_aio_config"]

# DeepSpeed's values for missing keys, which are not the defaults of its handle.
# Source: deepspeed/runtime/swap_tensor/constants.py.
DEFAULTS: dict[str, int | bool] = {
    "block_size": 1048576,
    "queue_depth": 8,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 1,
}

# Other names of intra_op_parallelism; DeepSpeed's own tuner writes the second one.
ALIASES = ("thread_count", "num_threads")

KEYS = {"use_gds", *DEFAULTS, *ALIASES}

BOOLEANS = ("single_submit", "overlap_events", "use_gds")

WORDS = {"true": True, "false": False}


def aio_config(path_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read DeepSpeed's ``"aio"`` block into the arguments of ``aio_handle``.

    Parameters
    ----------
    path_or_dict : str, os.PathLike or dict
        A JSON file, or its contents: a DeepSpeed configuration, the output of DeepSpeed's
        tuner, or the block alone.

    Returns
    -------
    dict
        ``block_size``, ``queue_depth``, ``single_submit``, ``overlap_events`` and
        ``intra_op_parallelism``, converted to their types.  Missing keys have DeepSpeed's
        defaults, such as ``queue_depth=8`` and ``overlap_events=True``.

    Raises
    ------
    OSError
        The file cannot be read.
    TypeError
        A value is of the wrong type, or the block is not an object.
    ValueError
        The file is not JSON, a value is out of range, or two names of one argument have
        different values.

    Warns
    -----
    UserWarning
        DeepSpeed would not read the block as intended: it has ``thread_count`` or
        ``num_threads`` instead of ``intra_op_parallelism``, booleans in quotes or unknown
        keys, or there is no block.  Also for ``use_gds``, which nvmeio does not support.

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
        remarks.append("it is missing, so DeepSpeed's defaults are used")
    for remark in remarks:
        warnings.warn(f'the "aio" block: {remark}', stacklevel=2)
    return arguments


def write_aio_config(path: str | os.PathLike[str], config: Any) -> dict[str, Any]:
    """Write the ``"aio"`` block of a DeepSpeed configuration.

    Parameters
    ----------
    path : str or os.PathLike
        A JSON file: a configuration or a block alone.  Everything else in it is kept.  It
        is created if it does not exist.  A complete and synced new file replaces it, with
        the same mode and, if permitted, the same owner.
    config : dict or aio_handle
        A dict that ``aio_config`` accepts, or a handle.  Keys that are missing keep their
        values in the file.

    Returns
    -------
    dict
        The block as written, with every key and with real booleans.

    Raises
    ------
    OSError
        The file cannot be read or written, or a new file cannot be created beside it.
    TypeError, ValueError
        As ``aio_config``.  Or a key is unknown, or the file is not plain JSON: comments
        would be lost.

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
        raise ValueError(f"unknown keys: {_listed(unknown)}; known are {_listed(KEYS)}")
    target = resolved(os.fspath(path))
    block, data = _rewritten(target, given)
    replace_file(data, target, sync=True)
    return block


def _rewritten(target: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the merged block, and the new contents of the file."""
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
    """Encode JSON with indents; in ASCII if it has text that UTF-8 cannot encode."""
    try:
        return (json.dumps(content, indent=4, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=4) + "\n").encode()


def _merged(old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge given values into an old block, which may use any name of the parallelism."""
    names = {"intra_op_parallelism", *ALIASES}
    gone = set() if names.isdisjoint(given) else names
    merged = {key: value for key, value in old.items() if key not in gone} | dict(given)
    arguments = _arguments(merged)[0]
    kept = {key: value for key, value in merged.items() if key not in ALIASES}
    if "use_gds" in kept:
        kept["use_gds"] = flag("use_gds", _unquoted(kept["use_gds"]))
    return kept | arguments


def _arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check a block and add defaults; return it with the warnings about it."""
    block, remarks = dict(given), []
    for alias in [key for key in block if key in ALIASES]:
        remarks.append(f"{alias} stands for intra_op_parallelism; DeepSpeed ignores it")
        value = block.pop(alias)
        if block.setdefault("intra_op_parallelism", value) != value:
            raise ValueError(
                f"{alias} is {value!r} and intra_op_parallelism "
                f"{block['intra_op_parallelism']!r}; they name one argument: keep one"
            )
    for name, value in given.items():
        if name in BOOLEANS and _unquoted(value) is not value:
            block[name] = _unquoted(value)
            remarks.append(f"{name} is {value!r}, in quotes; DeepSpeed's op refuses text")
    if flag("use_gds", block.pop("use_gds", False)):
        remarks.append("use_gds is true, but nvmeio copies GPU data through host memory")
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
    """Convert "true" and "false" to booleans; return anything else unchanged."""
    return WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys)))


def _block(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the block of a configuration, which has one, is one, or lacks it."""
    block = content if _is_block(content) else content.get("aio")
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise TypeError(f'"aio" is {block!r}; it must be a JSON object')
    return block


def _is_block(content: Mapping[str, Any]) -> bool:
    """Return whether this is a block alone."""
    return "aio" not in content and not KEYS.isdisjoint(content)


def _content(path: Path, *, allow_comments: bool) -> Mapping[str, Any]:
    """Parse a file; with comments as Hjson, as DeepSpeed does."""
    with naming(str(path)):
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
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        if not allow_comments:
            raise ValueError(f"only plain JSON can be rewritten: {error}") from error
        problem = error
    try:
        # DeepSpeed depends on it.
        hjson = importlib.import_module("hjson")
    except ModuleNotFoundError:
        raise ValueError(f"{problem}; for comments, install hjson") from problem
    return hjson.loads(text, object_pairs_hook=unique)
