"""Arrays of any dtype for tests, and .npy files that numpy has written."""

import math

import numpy as np
from numpy.lib import format as npy

RECORD = np.dtype([("key", ">i8"), ("when", "M8[s]"), ("vector", "f4", (3,))])
DTYPES = ("?", "i1", "<u2", ">u2", "f2", "f8", "c16", "M8[D]", "m8[ns]", "S3", "U2", "V5")
DTYPES = {name: np.dtype(name) for name in DTYPES} | {"record": RECORD}


def numbers(shape, dtype="f4"):
    """Return an array of which no two elements are equal."""
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def noise(shape, dtype, seed=0):
    """Return an array of random bits; all of them are valid as elements of the dtype."""
    dtype = np.dtype(dtype)
    values = np.random.default_rng(seed).integers(0, 100, (*shape, dtype.itemsize), "u1")
    if dtype.kind in "?U":
        values = (values % 2) * (np.arange(dtype.itemsize) % 4 == 0).astype("u1")
    return np.ascontiguousarray(values).view(dtype).reshape(shape)


def write_npy(path, array, version=None):
    """Write a .npy file by numpy."""
    with open(path, "wb") as file:
        npy.write_array(file, array, version=version, allow_pickle=True)
    return path
