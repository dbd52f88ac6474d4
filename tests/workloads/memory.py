"""Processes that copy memory and use the pool."""

import contextlib
import multiprocessing
import os
import resource

import numpy as np

import nvmeio
from helpers import pattern
from nvmeio._native import settings
from workloads.common import report


def copy_all_sizes():
    """Copy at each edge size of the kernels, and report which kernel is used."""
    error = handle_error = None
    try:
        for size in (1, 1000, 1 << 16, (1 << 20) + 1, 8 << 20, (8 << 20) + 77):
            source = np.frombuffer(pattern(size), np.uint8)
            target = np.zeros(size, np.uint8)
            nvmeio.memcpy(target, source)
            assert (target == source).all()
    except ValueError as refused:
        error = str(refused)
    try:
        nvmeio.Handle().close()
    except ValueError as refused:
        handle_error = str(refused)
    kernels = settings.selected_kernels()
    report({"error": error, "handle_error": handle_error, "kernels": kernels})


def copy_once(index, threads=None):
    """Copy enough for a team of threads, or with a team of a given size."""
    source = np.full(4 << 20, index, np.uint8)
    target = np.zeros_like(source)
    nvmeio.memcpy(target, source, threads=threads)
    return bool((target == index).all())


def copy_in_children(method, threads=None):
    """Copy in the parent by a team, then in children."""
    assert copy_once(7, threads)
    context = multiprocessing.get_context(method)
    with context.Pool(3) as pool:
        right = pool.starmap(copy_once, [(n, threads) for n in range(3)], chunksize=1)
    report({"children": len(right), "right": all(right) and copy_once(9, threads)})


class Copies:
    """A map-style dataset whose items are copies."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return copy_once(index)


def copy_in_data_loader(method):
    """Copy in the parent by a team, then in the workers of a torch DataLoader."""
    from torch.utils.data import DataLoader

    assert copy_once(7)
    right = []
    for persistent in (False, True):
        loader = DataLoader(
            Copies(),
            num_workers=2,
            persistent_workers=persistent,
            multiprocessing_context=method,
        )
        for _ in range(2):
            right += [bool(batch.all()) for batch in loader]
            assert copy_once(9)
    report({"batches": len(right), "right": all(right)})


def count_copy_threads(threads, size=64 << 20, torch_threads=None):
    """Count the threads that a large copy has started and kept."""
    if torch_threads:
        import torch

        torch.set_num_threads(torch_threads)
    source = np.ones(size, np.uint8)
    before = len(os.listdir("/proc/self/task"))
    nvmeio.memcpy(np.zeros_like(source), source, threads=threads)
    report({"threads": len(os.listdir("/proc/self/task")) - before})


def copy_without_threads():
    """Copy while no thread can be started, as an ordinary user at the limit."""
    source = np.random.default_rng(1).integers(0, 255, 8 << 20, np.uint8)
    target = np.zeros_like(source)
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    nvmeio.memcpy(target, source, threads=4)
    report({"right": bool((target == source).all())})


def report_limit():
    """Report how much the pool may hold."""
    report({"bytes_limit": nvmeio.pool_stats()["bytes_limit"]})


def fill_pool(most=1 << 27):
    """Take arrays of 1 MiB until the pool is full, and again after all are freed."""
    arrays, error, stats = [], "", {"bytes_limit": None, "bytes_mapped": None}
    try:
        while len(arrays) << 20 < most:
            arrays.append(nvmeio.empty(1 << 20, "u1"))
    except (MemoryError, ValueError) as refused:
        error = str(refused)
    again = False
    with contextlib.suppress(ValueError):
        stats = nvmeio.pool_stats()
        arrays.clear()
        again = bool(nvmeio.empty(32 << 20, "u1").nbytes)
    limits = {"limit": stats["bytes_limit"], "mapped": stats["bytes_mapped"]}
    report({**limits, "error": error, "again": again})


def fill_by_halves():
    """Request less than the limit leaves, but more after rounding."""
    array, error = nvmeio.empty(1, "u1"), ""
    try:
        nvmeio.empty(3 << 20, "u1")
    except MemoryError as refused:
        error = str(refused)
    report({"error": error, "bytes": array.nbytes})


def bounce_in_bounds(folder):
    """Transfer ordinary memory while the pool has space for few bounces."""
    data = pattern(16 << 20)
    target = bytearray(len(data) + 1)
    with nvmeio.Handle(bounce="always") as handle:
        handle.write(data, f"{folder}/bounced")
        handle.read(memoryview(target)[1:], f"{folder}/bounced")
    right = bytes(memoryview(target)[1:]) == data
    report({"mapped": nvmeio.pool_stats()["bytes_mapped"], "right": right})
