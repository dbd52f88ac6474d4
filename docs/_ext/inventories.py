"""The names of Python, numpy and torch that the documentation links, and where they are.

The build writes them as the inventories that sphinx.ext.intersphinx would otherwise
download.
"""

import zlib
from pathlib import Path

__all__ = ["ALIASES", "NAMES", "write"]

_URLS = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}
# For each kind of Sphinx's and each page, the names that it explains, where * is the name.
_NAMES = {
    "python": """
        py:class library/stdtypes.html bool bytes dict float int list memoryview set str
        py:class library/stdtypes.html tuple
        py:class library/functions.html object
        py:class library/concurrent.futures.html concurrent.futures.Future
        py:class library/io.html io.BytesIO io.RawIOBase
        py:exception library/asyncio-exceptions.html asyncio.CancelledError
        py:exception library/concurrent.futures.html concurrent.futures.CancelledError
        py:exception library/io.html io.UnsupportedOperation
        py:class library/os.html os.PathLike
        py:class library/pathlib.html pathlib.Path
        py:data library/constants.html False None True
        py:exception library/exceptions.html AttributeError BaseException
        py:exception library/exceptions.html BlockingIOError Exception FileExistsError
        py:exception library/exceptions.html FileNotFoundError ImportError IndexError
        py:exception library/exceptions.html KeyError KeyboardInterrupt MemoryError
        py:exception library/exceptions.html ModuleNotFoundError NotADirectoryError
        py:exception library/exceptions.html NotImplementedError OSError OverflowError
        py:exception library/exceptions.html PermissionError RuntimeError RuntimeWarning
        py:exception library/exceptions.html TimeoutError TypeError UserWarning ValueError
        py:function library/asyncio-task.html asyncio.gather asyncio.timeout asyncio.wait
        py:function library/concurrent.futures.html concurrent.futures.as_completed
        py:function library/concurrent.futures.html concurrent.futures.wait
        py:function library/fcntl.html fcntl.flock fcntl.lockf
        py:function library/functions.html callable open
        py:function library/os.html os.fsync os.replace
        std:term glossary.html iterable sequence
        """,
    "numpy": """
        py:class reference/generated/*.html numpy.dtype numpy.memmap numpy.ndarray
        py:function reference/generated/*.html numpy.asarray numpy.empty numpy.load
        py:function reference/generated/*.html numpy.save numpy.show_config
        py:module reference/index.html numpy
        std:label reference/arrays.scalars.html arrays.scalars
        std:term glossary.html array_like
        """,
    "torch": """
        py:class data.html torch.utils.data.BatchSampler torch.utils.data.ConcatDataset
        py:class data.html torch.utils.data.DataLoader torch.utils.data.Dataset
        py:class data.html torch.utils.data.DistributedSampler torch.utils.data.Subset
        py:class distributed.checkpoint.html torch.distributed.checkpoint.FileSystemReader
        py:class distributed.checkpoint.html torch.distributed.checkpoint.FileSystemWriter
        py:class generated/*.html torch.nn.Module
        py:class optim.html torch.optim.Optimizer
        py:class tensor_attributes.html torch.device torch.dtype
        py:class tensors.html torch.Tensor
        py:function autograd.html torch.autograd.graph.save_on_cpu
        py:function checkpoint.html torch.utils.checkpoint.checkpoint
        py:function generated/*.html torch.compile torch.empty torch.empty_like
        py:function generated/*.html torch.from_numpy torch.func.grad torch.load torch.save
        """,
}
_ANCHORS = {
    "py:module": "module-{}",
    "std:label": "arrays-scalars",
    "std:term": "term-{}",
}


def _lines(project: str) -> list[list[str]]:
    return [line.split() for line in _NAMES[project].strip().splitlines()]


NAMES = {
    name
    for project in _NAMES
    for kind, _, *names in _lines(project)
    for name in names
    if kind.startswith("py:")
}
# What a type is called in a list of parameters, where that is not its whole name.
ALIASES = {name: name for name in NAMES} | {
    "Future": "concurrent.futures.Future",
    "Optimizer": "torch.optim.Optimizer",
}


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Write the inventories into a folder; return intersphinx's mapping to them."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, url in _URLS.items():
        entries = [
            f"{name} {kind} 1 {page.replace('*', name)}#"
            f"{_ANCHORS.get(kind, '{}').format(name)} -\n"
            for kind, page, *names in _lines(project)
            for name in names
        ]
        head = (
            f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
            "# The remainder of this file is compressed using zlib.\n"
        )
        path = folder / f"{project}.inv"
        path.write_bytes(head.encode() + zlib.compress("".join(entries).encode()))
        mapping[project] = (url, str(path))
    return mapping
