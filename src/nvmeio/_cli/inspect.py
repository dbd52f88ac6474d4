"""``nvmeio inspect``: list the tensors of a model file or .npy file, by its header."""

import argparse
import json
from typing import Any

from nvmeio._arguments.units import in_binary
from nvmeio._arrays.npy_header import has_magic, read_layout
from nvmeio._cli.arguments import CommandError, Parser, option
from nvmeio._cli.terminal import Terminal, harmless
from nvmeio._cli.torch_files import is_torch_file, tensors_of
from nvmeio._native.file import File
from nvmeio.safetensors import SafetensorError, safe_open

NOTES = """\
Reads only headers.  Offsets are in bytes from the beginning of the file; a
tensor at a multiple of 4096 can be read directly into page-aligned memory.

examples:
  nvmeio inspect model.safetensors
  nvmeio inspect model.safetensors --json | jq '.tensors[].name'
  nvmeio inspect features.npy
  nvmeio inspect checkpoint.pt
"""


def configure(parser: Parser) -> None:
    parser.epilog = NOTES
    parser.add_argument(
        "file", metavar="FILE", help="a safetensors, .npy or torch.save file"
    )
    option(parser, "--json", "write one object of JSON to standard output")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    found = _npy(options.file) or _torch(options.file) or _safetensors(options.file)
    if options.json:
        terminal.say(json.dumps(found, indent=2))
        return 0
    tensors = found["tensors"]
    rows = [
        (
            each["name"],
            each["dtype"],
            " x ".join(map(str, each["shape"])) or "-",
            in_binary(each["bytes"]),
            str(each["offset"]),
        )
        for each in tensors
    ]
    if rows:
        terminal.table(("name", "dtype", "shape", "size", "offset"), rows)
    for key, value in (found["metadata"] or {}).items():
        terminal.say(f"{harmless(key)}: {harmless(value)}")
    total = sum(each["bytes"] for each in tensors)
    count = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
    aligned = sum(each["offset"] % 4096 == 0 for each in tensors)
    terminal.say(
        f"{found['format']}: {count}, {in_binary(total)}; {aligned} at multiples of 4096"
    )
    return 0


def _npy(path: str) -> dict[str, Any] | None:
    """Return the contents of a .npy file; None for other files."""
    with File(path, direct=False) as file:
        if not has_magic(file):
            return None
        layout = read_layout(file)
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
    """Return the contents of a safetensors file, in the order of the file."""
    try:
        with safe_open(path, "np", direct=False) as file:
            layout = file._layout()
    except SafetensorError as error:
        raise CommandError(
            f"{path}: it is neither a .npy file nor a model file: {error}"
        ) from None
    return {
        "format": "safetensors",
        "metadata": layout.metadata,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.end - tensor.begin,
                "offset": layout.data_start + tensor.begin,
            }
            for tensor in layout.tensors
        ],
    }
