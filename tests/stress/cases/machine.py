"""A process of a training on one of several machines: ``machine.py ROOT FAR NAME [TORCH]``.

It obeys the lines of its standard input, and answers in lines of JSON.  ``agree`` chooses
a step with the other ranks: it sends what it has to its parent, which answers with that of
all, or, with TORCH (rank, size and file), by torch.distributed.  ``restore`` reads the
agreed step.  ``save FIRST`` saves steps from FIRST on until it is killed, and tells what
was acknowledged.
"""

import json
import os
import sys
import time
import warnings
import zlib
from pathlib import Path
from urllib.parse import quote, unquote

import fsspec
import numpy as np

from nvmeio.checkpoint import Checkpointer
from nvmeio.checkpoint._ranks import agree

KEEP = 2
# The arrays of a state; large enough that a save is often killed halfway.
ARRAYS, BYTES = 3, 700_000


class Shelf(fsspec.AbstractFileSystem):
    """An object store in a folder: objects appear whole, there are no locks or renames."""

    protocol = "shelf"
    cachable = False

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.folder = Path(os.environ["NVMEIO_TEST_SHELF"])

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("shelf://").strip("/")

    def place(self, path):
        return self.folder / quote(self._strip_protocol(path), safe="")

    def objects(self):
        return (unquote(name) for name in os.listdir(self.folder) if name[0] != ".")

    def ls(self, path, detail=True, **options):
        top = self._strip_protocol(path)
        found = {}
        for name in self.objects():
            if name == top or name.startswith(f"{top}/"):
                first, *more = name[len(top) + 1 :].split("/")
                key = f"{top}/{first}" if first else top
                size = 0 if more else self.place(name).stat().st_size
                found[key] = "directory" if more else "file", size
        if not found:
            raise FileNotFoundError(path)
        return [{"name": n, "type": t, "size": s} for n, (t, s) in sorted(found.items())]

    def info(self, path, **options):
        for each in self.ls(path):
            if each["name"] == self._strip_protocol(path):
                return each
        return {"name": self._strip_protocol(path), "type": "directory", "size": 0}

    def rm_file(self, path):
        self.place(path).unlink()

    def open(self, path, mode="rb", **options):
        if mode == "rb":
            return open(self.place(path), "rb")
        return Upload(self.folder, self.place(path))


class Upload:
    """An object that is being written."""

    def __init__(self, folder, target):
        self.target = target
        self.path = folder / f".{os.getpid()}-{os.urandom(4).hex()}"
        self.stream = open(self.path, "wb")  # noqa: SIM115
        self.closed = False

    def write(self, data):
        return self.stream.write(data)

    def discard(self):
        self.stream.close()
        self.path.unlink()

    def close(self):
        self.closed = True
        self.stream.close()
        os.replace(self.path, self.target)


fsspec.register_implementation("shelf", Shelf, clobber=True)


def tell(**words):
    """Answer; a line is written as a whole, also if the process is killed then."""
    os.write(1, json.dumps(words).encode() + b"\n")


def hear():
    """Return the next command, or end with the parent."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return line.strip()


def content_of(name):
    """Return a state that shows by which save each of its parts was written."""
    number = zlib.crc32(name.encode())
    return {"name": name, "arrays": [np.full(BYTES // 4, number, np.uint32)] * ARRAYS}


def whole_name_of(state):
    """Return the name of a state, or None if its parts are of several."""
    number = zlib.crc32(state["name"].encode())
    whole = all((array == number).all() for array in state["arrays"])
    return state["name"] if whole and len(state["arrays"]) == ARRAYS else None


class Rank:
    """One process, which restores with others and then saves alone."""

    def __init__(self, root, far, name, torch=None):
        self.checkpointer = Checkpointer(root, drain_to=far, keep=KEEP, checksum=None)
        self.name, self.torch = name, torch

    def agree(self):
        """Choose the step to restore, together."""
        if self.torch:
            import torch.distributed as dist

            rank, size, file = self.torch.split(",")
            method = f"file://{file}"
            dist.init_process_group("gloo", method, rank=int(rank), world_size=int(size))
            found = self.checkpointer.agreed_step()
            dist.destroy_process_group()
        else:
            found = agree(self.checkpointer._steps, self.gather)
        self.step = found
        tell(agreed=found)

    def gather(self, mine):
        tell(gather=mine)
        # JSON makes the numbers of steps to texts.
        return [(numbered(found), failed) for found, failed in json.loads(hear())]

    def restore(self):
        """Read the agreed step."""
        state = self.checkpointer.restore(self.step)
        tell(restored=whole_name_of(state))

    def save(self, first):
        """Save until this is killed, or another writer or a dead server stops it."""
        for step in range(int(first), int(first) + 1000):
            name = f"{self.name}-{step}"
            try:
                self.checkpointer.save(step, content_of(name))
                tell(saved=step)
                if self.checkpointer.drained is not None:
                    self.checkpointer.drained.result()
                    tell(drained=step)
            except Exception as error:
                self.told(error)
                time.sleep(0.005)

    def told(self, error):
        tell(failed=f"{type(error).__name__}: {error}")


def numbered(found):
    """Return a dict with int keys, or what else was gathered."""
    if isinstance(found, dict):
        return {int(step): identities for step, identities in found.items()}
    return found


def main(root, far, name, torch=None):
    """Obey until standard input ends."""
    warnings.simplefilter("ignore")
    rank = Rank(root, None if far == "-" else far, name, torch)
    tell(ready=os.getpid())
    while True:
        command, *words = hear().split()
        try:
            getattr(rank, command)(*words)
        except Exception as error:
            rank.told(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
