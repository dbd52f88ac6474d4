"""The handle that the process shares, and the functions that use it."""

import os
import threading

import numpy as np
import pytest

import nvmeio
from children import run_child
from helpers import pattern
from workloads.forks import fork, join


def requests():
    """Return how many requests the default handle has had."""
    return nvmeio.default_handle().stats()["requests"]


def test_the_default_handle_is_always_the_same_one():
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(nvmeio.default_handle()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {id(handle) for handle in found} == {id(nvmeio.default_handle())}


def test_a_closed_default_handle_is_replaced(tmp_path):
    first = nvmeio.default_handle()
    with first:
        pass
    second = nvmeio.default_handle()
    assert second is not first
    assert nvmeio.write_file(b"bytes", tmp_path / "file") == 5
    assert nvmeio.default_handle() is second


def test_environment_and_profile_are_read_at_the_first_use(tmp_path):
    report = run_child("default_handle_once", folder=str(tmp_path)).report
    assert report.pop("another") == 16384
    assert report == {
        "engine": "sync",
        "depth": 3,
        "block": 8192,
        "same": True,
        "threads": 1,
    }


def test_a_forked_child_has_a_default_handle(tmp_path):
    nvmeio.write_file(pattern(100), tmp_path / "file")

    def read():
        assert nvmeio.read_file(tmp_path / "file").tobytes() == pattern(100)

    join(fork(read))
    read()


def torch():
    """Return nvmeio.torch, or skip."""
    pytest.importorskip("torch", reason="torch is not installed")
    return nvmeio.torch


USERS = {
    "read_file": lambda path, folder: nvmeio.read_file(path),
    "read_into": lambda path, folder: nvmeio.read_into(bytearray(128), path),
    "write_file": lambda path, folder: nvmeio.write_file(b"new", folder / "new"),
    "load": lambda path, folder: nvmeio.load(path),
    "save": lambda path, folder: nvmeio.save(folder / "new.npy", np.arange(9)),
    "ArrayFile": lambda path, folder: nvmeio.ArrayFile(path)[2:5],
    "assignment": lambda path, folder: nvmeio.ArrayFile(path, mode="r+").__setitem__(0, 1),
    "prefetch": lambda path, folder: nvmeio.ArrayFile(path).prefetch([1, 2]).wait(),
    "ArrayDataset": lambda path, folder: torch().ArrayDataset(path)[3],
    "TokenDataset": lambda path, folder: torch().TokenDataset(path, 4)[1],
    "BatchStream": lambda path, folder: list(
        torch().BatchStream(torch().ArrayDataset(path), [[1, 2]])
    ),
}


@pytest.mark.parametrize("use", USERS)
def test_functions_without_a_handle_share_the_default_one(tmp_path, use):
    path = tmp_path / "array.npy"
    np.save(path, np.arange(1000))
    tasks = len(os.listdir("/proc/self/task"))
    nvmeio.default_handle().read(bytearray(1), path)
    before, began = requests(), len(os.listdir("/proc/self/task"))
    USERS[use](path, tmp_path)
    assert requests() > before
    assert len(os.listdir("/proc/self/task")) <= max(began, tasks)


def test_closing_an_array_leaves_the_default_handle_open(tmp_path):
    path = tmp_path / "array.npy"
    np.save(path, np.arange(1000))
    with nvmeio.ArrayFile(path) as array:
        request = array.prefetch([5])
    assert request.wait() == [5]
    assert not nvmeio.default_handle().closed
