"""``nvmeio inspect``: list the tensors of a file by its header, or of a checkpoint."""

import argparse
import json
import os
from typing import Any

from nvmeio._arguments.units import in_binary
from nvmeio._arrays.npy_header import has_magic, read_layout
from nvmeio._cli.arguments import CommandError, Parser, option
from nvmeio._cli.folders import contents_of, tensors_in
from nvmeio._cli.terminal import Terminal, harmless
from nvmeio._cli.torch_files import is_torch_file, tensors_of
from nvmeio._files.kinds import INDEX_END
from nvmeio._native.file import File
from nvmeio.safetensors import SafetensorError

NOTES = """\
Reads only headers.  Offsets are in bytes from the beginning of the file; a
tensor at a multiple of 4096 can be read directly into page-aligned memory.

The folder of a checkpoint is a step of nvmeio.checkpoint, with offsets in its
tensors.safetensors, or one of torch.distributed.checkpoint, whose values are
listed with their shards as its .metadata describes them.

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
        help="a safetensors, .npy or torch.save file, or the folder of a checkpoint",
    )
    option(parser, "--json", "write one object of JSON to standard output")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    path = options.file
    if os.path.isdir(path):
        found = contents_of(path)
    else:
        found = _npy(path) or _torch(path) or _safetensors(path)
    if options.json:
        terminal.say(json.dumps(found, indent=2))
        return 0
    tensors = found["tensors"]
    # The tensors of torch.distributed.checkpoint have files in the place of offsets.
    last = "files" if "values" in found else "offset"
    rows = [
        (
            each["name"],
            each["dtype"],
            " x ".join(map(str, each["shape"])) or "-",
            in_binary(each["bytes"]),
            _files(each["files"]) if last == "files" else str(each["offset"]),
        )
        for each in tensors
    ]
    rows += [
        (each["name"], "a value", "-", in_binary(each["bytes"]), _files(each["files"]))
        for each in found.get("values", ())
    ]
    if rows:
        terminal.table(("name", "dtype", "shape", "size", last), rows)
    for key, value in (found["metadata"] or {}).items():
        text = value if isinstance(value, str) else json.dumps(value)
        terminal.say(f"{harmless(key)}: {harmless(text)}")
    total = sum(each["bytes"] for each in tensors)
    count = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
    summary = f"{found['format']}: {count}, {in_binary(total)}"
    if "values" in found:
        others = len(found["values"])
        summary += f"; {others} other value{'s' * (others != 1)}"
    else:
        aligned = sum(each["offset"] % 4096 == 0 for each in tensors)
        summary += f"; {aligned} at multiples of 4096"
    terminal.say(summary)
    return 0


def _files(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} files"


def _npy(path: str) -> dict[str, Any] | None:
    """Return the contents of a .npy file; None for other files."""
    with File(path, direct=False) as file:
        if not has_magic(file):
            return None
        layout = read_layout(file, shared=False)
    tensor = {
        "name": "",
        "dtype": str(layout.dtype),
        "shape": list(layout.shape),
        "bytes": layout.nbytes,
        "offset": layout.offset,
    }
    order = "Fortran" if layout.fortran else "C"
    return {"format": "npy", "metadata": {"order": order}, "tensors": [tensor]}


def _torch(path: str) -> dict[str, Any] | None:
    """Return the contents of a torch.save file; None for other files."""
    if not is_torch_file(path):
        return None
    return {"format": "torch", "metadata": None, "tensors": tensors_of(path)}


def _safetensors(path: str) -> dict[str, Any]:
    """Return the contents of a safetensors file."""
    try:
        return tensors_in(path)
    except SafetensorError as error:
        if path.endswith(INDEX_END):
            raise CommandError(
                f"{path}: it is the index of a model in several files, not one of them; "
                "inspect one of the files that it names"
            ) from None
        raise CommandError(
            f"{path}: it is neither a .npy file nor a model file: {error}"
        ) from None
