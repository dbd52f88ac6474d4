"""The open files of a checkpoint, and the weights that are made of its tensors."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence

import torch

from nvmeio._arguments.checks import path_of
from nvmeio._arguments.types import Path
from nvmeio._safetensors.file import ModelFile
from nvmeio._safetensors.loading import look_up
from nvmeio._safetensors.places import leading_to, naming_model, places_of
from nvmeio._safetensors.replacing import of_one_save
from nvmeio._tensors.dtypes import torch_dtype
from nvmeio.torch._weights.lazy import LazyTensor, arranged
from nvmeio.torch._weights.store import ALIGNMENT, Extent, Making, Part, Weight

__all__ = ["Checkpoint", "check_dtype", "open_checkpoint", "some", "stacked"]


@contextlib.contextmanager
def open_checkpoint(checkpoint: Path) -> Iterator["Checkpoint"]:
    """Open a checkpoint, and close it if that fails which is done with it."""
    source = Checkpoint(os.fsdecode(path_of(checkpoint)))
    try:
        yield source
    except BaseException:
        source.close()
        raise


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise TypeError if an argument is no dtype of torch."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; it must be a dtype of torch, or None")


def some(names: Sequence[str]) -> str:
    """Return the first names of many."""
    more = len(names) - 5
    return ", ".join(names[:5]) + (f" and {more} more" if more > 0 else "")


def stacked(
    source: "Checkpoint", names: str | Sequence[str], dtype: torch.dtype | None
) -> Weight:
    """Return the weight that consists of tensors, one below the other."""
    found: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        pattern = re.compile(r"(\d+)".join(map(re.escape, name.split("*"))))
        matches = [each for each in map(pattern.fullmatch, source.places) if each]
        if not matches:
            raise ValueError(f"{source.path} has no tensor {name!r}")
        matches.sort(key=lambda each: [int(number) for number in each.groups()])
        found += [each.string for each in matches]
    if not found:
        raise ValueError("names is empty")
    tensors = [source.tensor(name) for name in found]
    if len({(each.dtype, each.shape[1:], each.dim()) for each in tensors}) > 1:
        raise ValueError(f"{some(found)} have several dtypes or widths")
    if not tensors[0].dim():
        raise ValueError(f"{found[0]} has the shape (); it must have rows")
    whole = torch.cat(tensors)
    return source.weight(found[0], whole.to(dtype or whole.dtype), None, True)


class Checkpoint:
    """The open files of a checkpoint, and the weights in them."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            leading = leading_to(path)
        except FileNotFoundError as error:
            if not os.path.isfile(os.path.join(path, ".metadata")):
                raise
            raise ValueError(
                f"{path} is a checkpoint of torch.distributed.checkpoint; weights on a "
                "drive come from safetensors files"
            ) from error
        check = of_one_save(leading)
        self.places = places_of(leading)
        self.files: dict[str, ModelFile] = {}
        try:
            for place in sorted(set(self.places.values())):
                with naming_model(place):
                    self.files[place] = ModelFile(place)
            check()
        except BaseException:
            self.close()
            raise

    def tensor(self, name: str) -> LazyTensor:
        """Return a tensor of the checkpoint, without its values."""
        place = self.places[name]
        with naming_model(place):
            _, kind, shape, *_ = look_up(self.files[place], name)
            return LazyTensor.of(name, shape, torch_dtype(kind))

    def tensors(self) -> dict[str, LazyTensor]:
        """Return all tensors of the checkpoint, without their values."""
        return {name: self.tensor(name) for name in self.places}

    def equal(self, one: LazyTensor, other: LazyTensor) -> bool:
        """Return whether two tensors have the same values, which are read.

        Of those that cannot be read piece by piece it is not known.
        """
        pair = [self.weight("", each, None, True) for each in (one, other)]
        if one.shape != other.shape or pair[0].stored != pair[1].stored:
            return False
        if any(each.making is not None for each in pair):
            return False
        return all(map(torch.equal, *(each.stored_pieces() for each in pair)))

    def weight(
        self, name: str, value: LazyTensor, dtype: torch.dtype | None, casts: bool
    ) -> Weight:
        """Return the weight that a loader has made of tensors of the checkpoint."""
        found = arranged(value)
        if dtype is None or not found.stored.is_floating_point:
            dtype = found.dtype if casts else found.stored
        parts: dict[str, Part] = {}
        extents = []
        if found.runs is not None:
            size = found.stored.itemsize
            at = 0
            for tensor, begin, count in found.runs:
                extents.append(self._extent(tensor, begin * size, count * size, at))
                at += count * size
        else:
            at = 0
            for tensor in found.names:
                shape = self.tensor(tensor).shape
                nbytes = shape.numel() * found.stored.itemsize
                parts[tensor] = Part(shape, at)
                extents.append(self._extent(tensor, 0, nbytes, at))
                at += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return Weight(
            name,
            value.shape,
            found.stored,
            dtype,
            extents,
            Making(parts, found.make) if parts else None,
        )

    def _extent(self, name: str, begin: int, nbytes: int, place: int) -> Extent:
        file = self.files[self.places[name]]
        first = look_up(file, name)[3]
        return Extent(file, file.offset(first) + begin, nbytes, place)

    def close(self) -> None:
        for file in self.files.values():
            file.close()
