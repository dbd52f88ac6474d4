"""List the contents of files of records: tar archives, MDS shards, Megatron's indices."""

import os
from typing import Any

import numpy as np

from nvmeio._arguments.json_texts import parse_json
from nvmeio._cli.arguments import CommandError
from nvmeio._cli.pieces import wrong_with
from nvmeio._files.descriptors import open_regular
from nvmeio._files.kinds import HEAD_BYTES, json_of
from nvmeio._files.megatron import MAGIC, MegatronIndex
from nvmeio._files.tar import Archive, is_tar

__all__ = [
    "is_mds_folder",
    "mds_contents",
    "mds_folder",
    "megatron_contents",
    "tar_contents",
]

_MDS_INDEX = "index.json"
_TEXT_BYTES_MAX = 64 << 20
# How many offsets of samples are read at once.
_PLACES_AT_ONCE = 1 << 20


def tar_contents(path: str) -> dict[str, Any] | None:
    """Return the members of a tar archive that is not compressed; None for other files."""
    with open_regular(path) as file:

        def read(offset: int, nbytes: int) -> bytes:
            file.seek(offset)
            return file.read(nbytes)

        if not is_tar(read(0, HEAD_BYTES), path):
            return None
        archive = Archive(path, os.fstat(file.fileno()).st_size, read)
        members: list[dict[str, Any]] = []
        problems = []
        try:
            for each in archive.members():
                kind = "a sparse file" if each.is_sparse else "a file"
                # The bytes of a sparse file are in several places.
                offset = None if each.is_sparse else each.begin
                one = {"name": each.name, "kind": kind, "bytes": each.size}
                members.append({**one, "offset": offset})
        except ValueError as error:
            problems.append(str(error))
    problems += [f"the archive {path!r} {remark}" for remark in archive.remarks]
    found = {"format": "tar", "metadata": None, "tensors": [], "members": members}
    return {**found, "problems": problems}


def megatron_contents(path: str) -> dict[str, Any] | None:
    """Return what the index of a Megatron dataset describes; None for other files.

    `path` may also be that of the tokens, beside the index.
    """
    index = path
    if path.endswith(".bin") and os.path.exists(path[:-4] + ".idx"):
        index = path[:-4] + ".idx"
    with open_regular(index) as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
    found = MegatronIndex(index)
    data = index.removesuffix(".idx") + ".bin"
    folder, name = os.path.split(data)
    wrong = wrong_with(folder or ".", name, found.end, exactly=True)
    documents = max(len(found.documents) - 1, 0)
    said = {"sequences": len(found.lengths), "documents": documents}
    tensor = {
        "name": name,
        "dtype": found.dtype.name,
        "shape": [found.end // found.dtype.itemsize],
        "bytes": found.end,
        "offset": 0,
    }
    contents = {"format": "megatron", "metadata": said, "tensors": [tensor]}
    return {**contents, "problems": [wrong] if wrong else []}


def mds_contents(path: str) -> dict[str, Any] | None:
    """Return what an MDS shard says of itself; None for other files."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        samples = int.from_bytes(file.read(4), "little")
        # The offset of each sample and of the end, then JSON, then the samples.
        begin, text = 4 * (samples + 2), b""
        if begin < size:
            first = int.from_bytes(file.read(4), "little")
            file.seek(begin - 4)
            end = int.from_bytes(file.read(4), "little")
            if begin < first <= min(size, begin + _TEXT_BYTES_MAX):
                text = file.read(first - begin)
    if not text.startswith(b"{"):
        return None
    try:
        columns = _columns(parse_json(text))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if end != size:
        raise CommandError(
            f"{path}: it is an MDS shard that was truncated: it has {size} bytes, and its "
            f"{samples} samples end at {end}"
        )
    if (wrong := _first_out_of_order(path, samples)) is not None:
        raise CommandError(
            f"{path}: it is a damaged MDS shard: sample {wrong} ends before it begins"
        )
    said = {"samples": samples, "columns": columns}
    one: dict[str, Any] = {"name": os.path.basename(path), "kind": f"{samples} samples"}
    members = [{**one, "bytes": size - first, "offset": first}]
    return {"format": "mds", "metadata": said, "tensors": [], "members": members}


def _first_out_of_order(path: str, samples: int) -> int | None:
    """Return the first sample of an MDS shard that ends before it begins, if any."""
    for first in range(0, samples, _PLACES_AT_ONCE):
        count = min(_PLACES_AT_ONCE, samples - first) + 1
        places = np.fromfile(path, "<u4", count, offset=4 * (first + 1))
        wrong = places[1:] < places[:-1]
        if wrong.any():
            return first + int(wrong.argmax())
    return None


def is_mds_folder(path: str, names: list[str]) -> bool:
    """Return whether a folder has MDS shards, or the index of shards like them."""
    if any(name.endswith(".mds") for name in names):
        return True
    try:
        return "shards" in _index(path)
    except (CommandError, OSError):
        return False


def mds_folder(path: str) -> dict[str, Any]:
    """Return the shards of an MDS folder by its index."""
    index = os.path.join(path, _MDS_INDEX)
    try:
        samples, form = 0, "mds"
        members: list[dict[str, Any]] = []
        columns: dict[str, str] = {}
        problems = []
        seen: set[str] = set()
        for shard in _index(path)["shards"]:
            name, nbytes = _piece(shard["raw_data"])
            count, form = _count(shard["samples"]), str(shard["format"])
            columns = _columns(shard)
            kind = f"{count} samples"
            wrong = wrong_with(path, name, nbytes, exactly=True)
            packed = shard.get("zip_data") if shard.get("compression") else None
            if packed and not os.path.exists(os.path.join(path, name)):
                name, nbytes = _piece(packed)
                kind += ", compressed"
                wrong = wrong_with(path, name, nbytes, exactly=True)
            elif name in seen:
                wrong = f"{index}: it names {name!r:.200} twice"
            elif not wrong and form == "mds":
                wrong = _wrong_shard(os.path.join(path, name), count)
            seen.add(name)
            if wrong:
                problems.append(wrong)
            one = {"name": name, "kind": kind, "bytes": nbytes}
            members.append({**one, "offset": None})
            samples += count
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        words = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CommandError(f"{index}: it is no index of MDS shards: {words}") from None
    said = {"samples": samples, "columns": columns}
    found = {"format": form, "metadata": said, "tensors": [], "members": members}
    return {**found, "problems": problems}


def _piece(said: Any) -> tuple[str, int]:
    """Return the name and the size of a file, as the index has them."""
    return str(said["basename"]), _count(said["bytes"])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.100} is not a number of bytes or samples")
    return value


def _wrong_shard(path: str, samples: int) -> str | None:
    """Say how a shard contradicts its index; None if it does not."""
    try:
        found = mds_contents(path)
    except CommandError as error:
        return str(error)
    if found is None:
        return f"{path} is not an MDS shard"
    count = found["metadata"]["samples"]
    if count == samples:
        return None
    return f"{path} has {count} samples, and the index says {samples}"


def _index(path: str) -> dict[str, Any]:
    index = os.path.join(path, _MDS_INDEX)
    with open_regular(index) as file:
        text = file.read(_TEXT_BYTES_MAX)
    try:
        found = json_of(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{index}: it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CommandError(
            f"{index}: it is a {type(found).__name__}, not an index of shards"
        )
    return found


def _columns(said: Any) -> dict[str, str]:
    """Return the encoding of each column."""
    names, encodings = said["column_names"], said["column_encodings"]
    return {str(name): str(kind) for name, kind in zip(names, encodings, strict=True)}
