"""Tell what a folder is by the names of its files, and a file by how it begins."""

import codecs
import contextlib
import os
import re
from typing import Any

from nvmeio._files.paths import dangling

__all__ = [
    "HEAD_BYTES",
    "INDEX_END",
    "INDEX_NAME",
    "INDEX_OF_RANK",
    "MANIFEST",
    "METADATA",
    "OF_RANK",
    "PICKLE",
    "STEP",
    "TENSORS",
    "because_of_kind",
    "is_torch_legacy",
    "json_of",
    "what_begins",
    "what_is_in",
    "why_no_pickle",
]

# The name of the folder of a step of a Checkpointer, and of two of its files.
STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"

# The file that describes a checkpoint of torch.distributed.checkpoint.
METADATA = ".metadata"
# That of one rank, which has saved without the others.
OF_RANK = re.compile(r"__\d+\.metadata")
# How the name of the index of a model in several files ends.
INDEX_END = ".safetensors.index.json"
# The index of a model, and what stands for that of the files of a rank, which have none.
INDEX_NAME = f"model{INDEX_END}"
INDEX_OF_RANK = re.compile(rf"shard-\d+-{re.escape(INDEX_NAME)}")

_NAMES_MAX = 3

# How much of a file what_begins() looks at: the magic of a tar archive ends at 262.
HEAD_BYTES = 512

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = re.compile(rb"^size ([0-9]{1,18})$", re.MULTILINE)
_DECOMPRESS = "decompress it first"

# How files of other formats begin, and what they are.
_MAGICS = {
    b"\x1f\x8b": f"it is compressed by gzip; {_DECOMPRESS}",
    b"\x28\xb5\x2f\xfd": f"it is compressed by zstd; {_DECOMPRESS}",
    b"\xfd7zXZ\0": f"it is compressed by xz; {_DECOMPRESS}",
    b"BZh": f"it is compressed by bzip2; {_DECOMPRESS}",
    b"\x04\x22\x4d\x18": f"it is compressed by lz4; {_DECOMPRESS}",
    b"7z\xbc\xaf\x27\x1c": "it is a 7z archive; extract it first",
    b"PK\3\4": (
        "it is a zip archive, as torch.save and numpy.savez write; torch.load or "
        "numpy.load reads those"
    ),
    b"PK\5\6": "it is an empty zip archive",
    b"\x93NUMPY": "it is a .npy file, which numpy.load and nvmeio.load read",
    b"MMIDIDX\0": "it is the index of a Megatron dataset, which MegatronDataset reads",
    b"\x89HDF\r\n\x1a\n": "it is an HDF5 file, as Keras writes; h5py reads it",
    b"GGUF": "it is a GGUF file, which llama.cpp reads",
    b"PAR1": "it is a Parquet file",
    b"ARROW1": "it is an Arrow file",
    b"SQLite format 3\0": "it is a database of SQLite",
    b"\x7fELF": "it is a program or a shared library",
    b"%PDF-": "it is a PDF document",
    b"\x89PNG": "it is a PNG image",
    b"\xff\xd8\xff": "it is a JPEG image",
}
PICKLE = "it is a pickle, as torch.save wrote before 1.6"
_HTML = (
    "it is a page of HTML, which servers send in the place of a file that is not there or "
    "needs a login; download it again"
)
# Torch's old format begins with a pickle of a number, in a frame from protocol 4 on, and
# as decimals in protocol 1.
_TORCH_LEGACY = re.compile(
    rb"(\x80[\2-\5](\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
    rb"|L119547037146038801333356L\n)\.",
    re.DOTALL,
)


def what_is_in(folder: str) -> str:
    """Say what a folder has, and which part of nvmeio reads that."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return dangling(folder) or "there is no such folder"
    except NotADirectoryError:
        return "it is not a folder"
    except OSError as error:
        return f"it cannot be listed: {error.strerror}"
    if METADATA in names:
        return (
            "it has a checkpoint of torch.distributed.checkpoint, which "
            "nvmeio.torch.dcp.FileSystemReader reads"
        )
    if MANIFEST in names and TENSORS in names:
        return "it is a step of a nvmeio.checkpoint.Checkpointer; pass the folder above it"
    if any(map(STEP.fullmatch, names)):
        return "it has steps of a nvmeio.checkpoint.Checkpointer"
    if any(name.endswith(".safetensors") for name in names):
        return (
            "it has model files, which nvmeio.safetensors and "
            "nvmeio.torch.dcp.HuggingFaceStorageReader read"
        )
    if any(name.endswith(".distcp") for name in names):
        return (
            "it has shards of torch.distributed.checkpoint but no .metadata: the save was "
            "not completed, or rank 0 has saved to another drive"
        )
    some = ", ".join(names[:_NAMES_MAX])
    if len(names) > _NAMES_MAX:
        some += f" and {len(names) - _NAMES_MAX} more"
    return f"it has {some}" if names else "it is empty"


def is_torch_legacy(head: bytes) -> bool:
    """Return whether a file begins as torch.save wrote before 1.6."""
    return _TORCH_LEGACY.match(head) is not None


def what_begins(head: bytes, nbytes: int) -> str | None:
    """Say what a file of `nbytes` bytes is that begins with `head`; None if unknown."""
    if nbytes == 0:
        return "it is empty: nothing was written or downloaded"
    if head.startswith(_POINTER):
        found = _POINTER_BYTES.search(head)
        size = f", of {int(found[1])} bytes" if found else ""
        return (
            f"it is a Git LFS pointer, not the file itself{size}; `git lfs pull` "
            "downloads that"
        )
    for magic, words in _MAGICS.items():
        if head.startswith(magic):
            return words
    if head[257:262] == b"ustar":
        return "it is a tar archive"
    if is_torch_legacy(head) or re.match(rb"\x80[\2-\5]", head):
        return PICKLE
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return _HTML
    if text.startswith(b"<?xml"):
        return (
            "it is XML, as object stores send in the place of a file that is not there or "
            "needs a login; download it again"
        )
    if not head.strip(b"\0"):
        return "it begins with zeros only, as after an interrupted download or a crash"
    if _is_text(head):
        return "it is a text" + ", probably JSON" * text.startswith((b"{", b"["))
    return None


def _is_text(head: bytes) -> bool:
    """Return whether bytes are UTF-8 without control characters."""
    try:
        # The last character may be cut.
        found = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(each.isprintable() or each in "\t\n\r\f" for each in found)


def json_of(content: bytes) -> Any:
    """Parse the JSON of a file; ValueError says what the file is instead, if it is none."""
    # Not at the top, because it imports json, and `import nvmeio` this module.
    from nvmeio._arguments.json_texts import parse_json

    try:
        return parse_json(content)
    except ValueError as error:
        known = what_begins(content[:HEAD_BYTES], len(content))
        if known is None or content.lstrip()[:1] in (b"{", b"["):
            raise
        raise ValueError(known) from error


def why_no_pickle(content: bytes, error: Exception) -> str:
    """Say why a file is not unpickled: what it is instead, or else the error."""
    known = what_begins(content[:HEAD_BYTES], len(content))
    return str(error) if known in (None, PICKLE) else str(known)


def because_of_kind(file: str | bytes | int) -> str:
    """Return what a file is by how it begins, as the end of an error; "" if unknown."""
    with (
        contextlib.suppress(OSError),
        open(file, "rb", buffering=0, closefd=not isinstance(file, int)) as stream,
    ):
        descriptor = stream.fileno()
        head, nbytes = os.pread(descriptor, HEAD_BYTES, 0), os.fstat(descriptor).st_size
        if known := what_begins(head, nbytes):
            return f": {known}"
    return ""
