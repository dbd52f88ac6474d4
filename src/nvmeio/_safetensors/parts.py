"""Which part of a tensor a file has, as writers of many ranks say in its metadata."""

from collections.abc import Mapping, Sequence
from typing import Any

from nvmeio._arguments.json_texts import parse_json
from nvmeio._tensors.errors import SafetensorError

__all__ = [
    "OFFSETS_KEY",
    "PARTS_KEY",
    "SAVE_KEY",
    "SIZE_KEY",
    "VERSION_KEY",
    "part_of",
    "parts_in",
]

# The keys of torch.distributed.checkpoint, which tell its version, and the offsets of each
# tensor's part.
VERSION_KEY, PARTS_KEY, OFFSETS_KEY = "DCP_VERSION", "DCP_SHARDING_INFO", "saved_offsets"
# What nvmeio adds: which save a file is of, and beside the offsets the whole shape.
SAVE_KEY, SIZE_KEY = "nvmeio_save", "nvmeio_size"


def parts_in(metadata: Mapping[str, str], path: str) -> dict[str, Any] | None:
    """Return what a file's metadata say of its parts; None if its tensors are whole."""
    text = metadata.get(PARTS_KEY)
    if not text:
        return None
    try:
        found = parse_json(text)
    except (ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        raise SafetensorError(f"{path}: {PARTS_KEY} is not a JSON object")
    return found


def part_of(
    parts: Mapping[str, Any] | None, name: str, shape: Sequence[int], path: str
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the offsets of a part in its tensor, and the tensor's shape, if recorded."""
    if parts is None:
        return (0,) * len(shape), tuple(shape)
    told = parts.get(name)
    told = told if isinstance(told, dict) else {}
    offsets = _numbers(told.get(OFFSETS_KEY), len(shape))
    size = _numbers(told.get(SIZE_KEY, told.get(OFFSETS_KEY)), len(shape))
    if offsets is None or size is None:
        raise SafetensorError(f"{path}: it has no valid offsets of its part of {name!r}")
    if SIZE_KEY not in told:
        return offsets, None
    ends = [low + count for low, count in zip(offsets, shape, strict=True)]
    if any(end > extent for end, extent in zip(ends, size, strict=True)):
        raise SafetensorError(
            f"{path}: its part of {name!r} ends at {ends}, beyond the shape {[*size]}"
        )
    return offsets, size


def _numbers(said: object, count: int) -> tuple[int, ...] | None:
    """Return a list of `count` offsets or extents, or None if it is not valid."""
    if not isinstance(said, list) or len(said) != count:
        return None
    if not all(type(each) is int and 0 <= each < 2**63 for each in said):
        return None
    return tuple(said)
