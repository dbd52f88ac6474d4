"""List the contents of files of records: tar archives, MDS shards, Megatron's indices."""

import os
import struct
import tarfile
from typing import Any

from nvmeio._arguments.json_texts import parse_json
from nvmeio._cli.arguments import CommandError

__all__ = [
    "is_mds_folder",
    "mds_contents",
    "mds_folder",
    "megatron_contents",
    "tar_contents",
]

_MEGATRON = b"MMIDIDX\0\0"
# Magic, version, code of the dtype, number of sequences, length of the document indices.
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float64", 8),
    7: ("float32", 4),
    8: ("uint16", 2),
}
_MDS_INDEX = "index.json"
_TEXT_BYTES_MAX = 64 << 20


def tar_contents(path: str) -> dict[str, Any] | None:
    """Return the members of a tar archive that is not compressed; None for other files."""
    with open(path, "rb") as file:
        head = file.read(512)
        if head[257:262] != b"ustar":
            return None
        file.seek(0)
        members: list[dict[str, Any]] = []
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for each in archive:
                    if each.isreg():
                        one = {"name": each.name, "kind": "a file", "bytes": each.size}
                        members.append({**one, "offset": each.offset_data})
        except tarfile.TarError as error:
            raise CommandError(
                f"{path}: it is a tar archive that is damaged or was truncated: {error}"
            ) from None
        size = os.fstat(file.fileno()).st_size
    if members and (end := members[-1]["offset"] + members[-1]["bytes"]) > size:
        raise CommandError(
            f"{path}: it is a tar archive that was truncated: it has {size} bytes, and "
            f"{members[-1]['name']!r} ends at {end}"
        )
    return {"format": "tar", "metadata": None, "tensors": [], "members": members}


def megatron_contents(path: str) -> dict[str, Any] | None:
    """Return what the index of a Megatron dataset describes; None for other files.

    `path` may also be that of the tokens, beside the index.
    """
    index = path
    if path.endswith(".bin") and os.path.exists(path[:-4] + ".idx"):
        index = path[:-4] + ".idx"
    with open(index, "rb") as file:
        head = file.read(_MEGATRON_HEADER.size)
        if not head.startswith(_MEGATRON):
            return None
        size = os.fstat(file.fileno()).st_size
    if len(head) < _MEGATRON_HEADER.size:
        raise CommandError(f"{index}: it was truncated: it ends within its header")
    _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise CommandError(
            f"{index}: it is the index of a Megatron dataset of version {version} and the "
            f"dtype code {code}, which are unknown"
        )
    end = len(head) + 12 * sequences + 8 * documents
    if size < end:
        raise CommandError(
            f"{index}: it was truncated: it has {size} bytes, and {sequences} sequences "
            f"with {documents} document indices take {end}"
        )
    dtype, itemsize = _MEGATRON_DTYPES[code]
    data = index.removesuffix(".idx") + ".bin"
    said: dict[str, Any] = {"sequences": sequences, "documents": max(documents - 1, 0)}
    tensors = []
    try:
        nbytes = os.path.getsize(data)
    except FileNotFoundError:
        said["missing"] = data
    else:
        one = {"name": os.path.basename(data), "dtype": dtype, "bytes": nbytes, "offset": 0}
        tensors.append({**one, "shape": [nbytes // itemsize]})
    return {"format": "megatron", "metadata": said, "tensors": tensors}


def mds_contents(path: str) -> dict[str, Any] | None:
    """Return what an MDS shard says of itself; None for other files."""
    with open(path, "rb") as file:
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
    said = {"samples": samples, "columns": columns}
    one: dict[str, Any] = {"name": os.path.basename(path), "kind": f"{samples} samples"}
    members = [{**one, "bytes": size - first, "offset": first}]
    return {"format": "mds", "metadata": said, "tensors": [], "members": members}


def is_mds_folder(path: str) -> bool:
    """Return whether a folder has the index of MDS shards, or of shards like them."""
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
        for shard in _index(path)["shards"]:
            data = shard["raw_data"]
            name, count = str(data["basename"]), int(shard["samples"])
            form = str(shard["format"])
            columns = _columns(shard)
            kind = f"{count} samples"
            if not os.path.exists(os.path.join(path, name)):
                kind += ", missing"
            one = {"name": name, "kind": kind, "bytes": int(data["bytes"])}
            members.append({**one, "offset": None})
            samples += count
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CommandError(f"{index}: it is no index of MDS shards: {error!r}") from None
    said = {"samples": samples, "columns": columns}
    return {"format": form, "metadata": said, "tensors": [], "members": members}


def _index(path: str) -> dict[str, Any]:
    index = os.path.join(path, _MDS_INDEX)
    with open(index, "rb") as file:
        text = file.read(_TEXT_BYTES_MAX)
    try:
        found = parse_json(text)
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
