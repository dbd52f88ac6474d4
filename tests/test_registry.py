"""Tensor libraries that register themselves export their tensors."""

import numpy as np
import pytest

import nvmeio
from nvmeio._memory.registry import Export, libraries, library_of, register


class Strange:
    """A tensor without the buffer protocol."""

    def __init__(self, array):
        self.array = array
        self.changes = 0


class StrangeLibrary:
    """The part of a TensorLibrary that transfers need."""

    def export(self, tensor, writable):
        address = tensor.array.__array_interface__["data"][0]
        landing = self.touch if writable else None
        return Export(address, tensor.array.nbytes, address, tensor.array, landing)

    def touch(self, tensor):
        tensor.changes += 1


@pytest.fixture
def library():
    library = StrangeLibrary()
    register(Strange, library)
    yield library
    libraries.remove((Strange, library))


def test_tensors_of_a_registered_library_are_written_and_read(library, tmp_path):
    source, target = Strange(np.arange(100)), Strange(np.zeros(100, int))
    with nvmeio.Handle() as handle:
        handle.submit_write(source, tmp_path / "data").wait()
        handle.submit_read(target, tmp_path / "data").wait()
    np.testing.assert_array_equal(target.array, source.array)
    assert (source.changes, target.changes) == (0, 1)


def test_subclasses_belong_to_the_library_of_their_base(library):
    class Stranger(Strange):
        pass

    assert library_of(Stranger(np.zeros(1))) is library


@pytest.mark.parametrize("source", [None, 3, "text", np.zeros(3)], ids=repr)
def test_other_objects_belong_to_no_library(source):
    assert library_of(source) is None
