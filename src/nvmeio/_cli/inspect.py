"""``nvmeio inspect``: list what is in a file by its header, or in a folder."""

import argparse
import json
import os
import struct
import zipfile
from typing import IO, Any

from nvmeio._arguments.units import in_binary
from nvmeio._cli.arguments import CommandError, Parser, option
from nvmeio._cli.array_files import is_npz, npy_contents, npz_contents
from nvmeio._cli.folders import contents_of, models_in, tensors_in
from nvmeio._cli.record_files import mds_contents, megatron_contents, tar_contents
from nvmeio._cli.terminal import Terminal, harmless
from nvmeio._cli.torch_files import (
    in_checkpoint,
    is_torch_file,
    legacy_contents,
    script_or_saved,
)
from nvmeio._files.descriptors import open_regular
from nvmeio._files.kinds import HEAD_BYTES, INDEX_END, PICKLE, what_begins
from nvmeio._tensors.torch_files import by_name_in_folder

# How many of the errors of a file or folder are shown; --json has all.
PROBLEMS_SHOWN = 20
# The limit of the directory of a zip archive: about 2 million entries.
DIRECTORY_BYTES_MAX = 256 << 20

NOTES = """\
Reads only headers, and runs no pickle.  Offsets are in bytes from the beginning
of the file; a tensor at a multiple of 4096 can be read directly into page-aligned
memory.

Files: safetensors, .npy, .npz, torch.save (also whole modules, and files from
before torch 1.6), TorchScript, tar archives, MDS shards, Megatron's .idx with its
.bin.  Of any other file, the error says what it is where its first bytes tell.

Folders: a step of nvmeio.checkpoint, with offsets in its tensors.safetensors; a
checkpoint of torch.distributed.checkpoint, whose values are listed with their
shards as its .metadata describes them; a model in several safetensors files; the
shards of an MDS dataset.

The exit status is 1, and standard error says why, if a file is damaged or cut short,
or if a file is missing that another one names.  Checksums are not compared.

examples:
  nvmeio inspect model.safetensors
  nvmeio inspect model.safetensors --json | jq '.tensors[].name'
  nvmeio inspect features.npy
  nvmeio inspect checkpoint.pt
  nvmeio inspect run/step-100
"""


def configure(parser: Parser) -> None:
    parser.epilog = NOTES
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a file of tensors or samples, or the folder of a checkpoint or model",
    )
    option(parser, "--json", "write one object of JSON to standard output")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    path = options.file
    found = contents_of(path) if os.path.isdir(path) else file_contents(path)
    problems = found.setdefault("problems", [])
    if options.json:
        terminal.say(json.dumps(found, indent=2))
    else:
        _show(found, terminal)
    for each in problems[:PROBLEMS_SHOWN]:
        terminal.note(f"nvmeio inspect: error: {harmless(each)}")
    if len(problems) > PROBLEMS_SHOWN:
        terminal.note(f"nvmeio inspect: {len(problems) - PROBLEMS_SHOWN} more errors")
    return 1 if problems else 0


def _show(found: dict[str, Any], terminal: Terminal) -> None:
    """Write a table, and a summary."""
    tensors, members = found["tensors"], found.get("members", [])
    # The tensors of a folder have files in the place of offsets.
    folder = "values" in found
    others = found.get("values", [])
    rows = [
        (
            each["name"],
            each["dtype"],
            " x ".join(map(str, each["shape"])) or "-",
            in_binary(each["bytes"]),
            _files(each["files"]) if folder else _offset(each["offset"]),
        )
        for each in tensors
    ]
    rows += [
        (each["name"], "a value", "-", in_binary(each["bytes"]), _files(each["files"]))
        for each in others
    ]
    rows += [
        (
            each["name"],
            each["kind"],
            "-",
            in_binary(each["bytes"]),
            _offset(each["offset"]),
        )
        for each in members
    ]
    if rows:
        last = "files" if folder else "offset"
        terminal.table(("name", "dtype", "shape", "size", last), rows)
    for key, value in (found["metadata"] or {}).items():
        text = value if isinstance(value, str) else json.dumps(value)
        terminal.say(f"{harmless(key)}: {harmless(text)}")
    terminal.say(f"{found['format']}: {_summary(found, tensors, members)}")


def _summary(found: dict[str, Any], tensors: list[Any], members: list[Any]) -> str:
    total = sum(each["bytes"] for each in (*tensors, *members))
    if "members" in found:
        return f"{_count(len(members), 'file')}, {in_binary(total)}"
    summary = f"{_count(len(tensors), 'tensor')}, {in_binary(total)}"
    if "values" in found:
        others = len(found["values"])
        return summary + f"; {_count(others, 'other value')}"
    offsets = [each["offset"] for each in tensors]
    aligned = sum(offset is not None and offset % 4096 == 0 for offset in offsets)
    return summary + f"; {aligned} at multiples of 4096"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _files(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} files"


def _offset(offset: int | None) -> str:
    # Of compressed arrays, and of tensors without bytes.
    return "-" if offset is None else str(offset)


def file_contents(path: str) -> dict[str, Any]:
    """Return the contents of a file, or raise CommandError that says what it is."""
    if path.endswith(INDEX_END):
        return models_in(path)
    with open_regular(path) as file:
        head, nbytes = file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size
    what = what_begins(head, nbytes)
    if path.endswith(".distcp") and (what is None or head.startswith(b"PK\3\4")):
        raise CommandError(in_checkpoint(path))
    is_empty_npz = head.startswith(b"PK\5\6") and path.endswith(".npz")
    if head.startswith(b"PK\3\4") or is_empty_npz:
        return _zip(path)
    # What proves itself by its structure, before what begins as others may.
    for contents in (
        *(npy_contents, legacy_contents, tar_contents),
        *(megatron_contents, mds_contents),
    ):
        if found := contents(path):
            return found
    # A header is shorter than 2**56 bytes, and a text has no zeros.
    if head[7:9] == b"\0{" or what is None:
        try:
            return tensors_in(path)
        except CommandError as error:
            words = str(error).removeprefix(f"{path}: ")
            raise CommandError(
                f"{path}: it is neither a .npy file nor a model file: {words}"
            ) from None
    if what is PICKLE:
        what = (
            "it is a pickle that torch.save did not write, or that was truncated; "
            "inspect runs no pickle"
        )
    raise CommandError(f"{path}: {what}")


# What zipfile raises for damaged archives; the last one for a name.
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, struct.error, UnicodeDecodeError)


def _zip(path: str) -> dict[str, Any]:
    """Return the contents of a zip archive, of torch or numpy."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(_Directory(file)) as archive:
            if is_torch_file(archive):
                return script_or_saved(path, file, archive)
            if is_npz(archive):
                return npz_contents(path, file, archive)
            names = archive.namelist()
            exported = "archive_format" in by_name_in_folder(archive)
    except _DAMAGED as error:
        raise CommandError(
            f"{path}: it begins like a zip archive, as torch.save and numpy.savez write, "
            "but its end is missing or damaged: it was truncated; write or download it "
            f"again ({error})"
        ) from None
    if exported:
        raise CommandError(
            f"{path}: it is a program of torch.export, which torch.export.load reads"
        )
    some = ", ".join(f"{name!r:.80}" for name in names[:3]) + ", ..." * (len(names) > 3)
    raise CommandError(
        f"{path}: it is a zip archive of {_count(len(names), 'file')}, {some}, and neither "
        "torch.save nor numpy.savez wrote it"
    )


class _Directory:
    """A file of which zipfile may not read much at once, whatever its end claims."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, nbytes: int = -1) -> bytes:
        if nbytes > DIRECTORY_BYTES_MAX:
            raise zipfile.BadZipFile(f"its directory has {nbytes} bytes")
        return self._file.read(nbytes)
