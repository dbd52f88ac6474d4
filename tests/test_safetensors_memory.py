"""The memory of loaded tensors: exact sizes, released in parts, never too much."""

import gc
import io
import json
import time

import numpy as np
import pytest

pytest.importorskip("torch")
huggingface_hub = pytest.importorskip("huggingface_hub")

import safetensors.numpy
import safetensors.torch
import torch

import nvmeio.safetensors
import nvmeio.safetensors.numpy
import nvmeio.safetensors.torch
from children import run_child, skip_sanitized
from helpers import MIB, PAGE, drop, need_direct
from model_samples import Moved, bits_of, bits_of_all, filled
from nvmeio._memory import available
from nvmeio._streams import reading
from nvmeio.safetensors import safe_open
from test_safetensors_region import resident

SIZES = [1, 100, PAGE - 1, PAGE, PAGE + 1, 100_000, MIB, 3 * MIB + 5, 17, 2 * MIB]


@pytest.fixture
def model(tmp_path):
    """A file of tensors of many sizes, and the tensors."""
    tensors = {f"{n:02}": filled("uint8", (size,), n) for n, size in enumerate(SIZES)}
    path = tmp_path / "model"
    safetensors.torch.save_file(tensors, path)
    return path, tensors


def load_by(way, path):
    """Load a file as a whole, tensor by tensor, by slices, or many in one call."""
    if way == "load_file":
        return nvmeio.safetensors.torch.load_file(path)
    with safe_open(path, "pt") as file:
        if way == "get_tensors":
            return file.get_tensors()
        if way == "get_tensor":
            return {name: file.get_tensor(name) for name in file.offset_keys()}
        if way == "get_slice":
            return {name: file.get_slice(name)[:] for name in file.offset_keys()}
        return file.get_many(dict.fromkeys(file.offset_keys()))


WAYS = ["load_file", "get_tensors", "get_tensor", "get_slice", "get_many"]


@pytest.mark.parametrize("way", WAYS)
def test_a_storage_is_exactly_the_bytes_of_its_tensor(model, way):
    path, tensors = model
    found = load_by(way, path)
    assert {n: bits_of(t) for n, t in found.items()} == {
        n: bits_of(t) for n, t in tensors.items()
    }
    addresses = set()
    for tensor in found.values():
        storage = tensor.untyped_storage()
        assert (storage.nbytes(), tensor.storage_offset()) == (tensor.nbytes, 0)
        addresses.add(storage.data_ptr())
    assert len(addresses) == len(found)
    written = io.BytesIO()
    torch.save(found["01"], written)
    assert written.tell() < 4000


def test_huggingface_hub_splits_shards_by_these_storages(model):
    path, tensors = model
    split = huggingface_hub.split_torch_state_dict_into_shards
    found = nvmeio.safetensors.torch.load_file(path)
    for size in ("1MB", "1GB"):
        expected = split(tensors, max_shard_size=size)
        assert split(found, max_shard_size=size).metadata == expected.metadata
        names = split(dict(sorted(found.items())), max_shard_size=size).filename_to_tensors
        assert (
            names
            == split(dict(sorted(tensors.items())), max_shard_size=size).filename_to_tensors
        )


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_bounced(model, default_engine, way):
    path, _ = model
    need_direct(path.parent)
    drop(path)
    # What was found out about memory at the same addresses, which the test before has
    # freed, counts for a quarter of a second (libnvmeio/pages.c).
    time.sleep(0.3)
    moved = Moved()
    load_by(way, path)
    # A tensor that is read alone without a huge page may have scattered pages.
    small = sum(size + 2 * PAGE for size in SIZES if size < 2 * MIB)
    assert moved.bounced <= (small if way in ("get_tensor", "get_slice") else 0)
    # The pages at the ends of each read come from the page cache.
    assert moved.direct + moved.bounced >= sum(SIZES) - 2 * len(SIZES) * PAGE
    assert moved.direct > 4 * MIB


def test_long_reads_are_cut_at_pages(tmp_path, monkeypatch):
    """Otherwise both ends of every part would come from the page cache."""
    need_direct(tmp_path)
    monkeypatch.setattr(reading, "CHUNK_BYTES", MIB)
    path, tensors = tmp_path / "model", {"a": filled("uint8", (8 * MIB,))}
    safetensors.torch.save_file(tensors, path)
    drop(path)
    moved = Moved()
    found = nvmeio.safetensors.torch.load_file(path)
    assert bits_of_all(found) == bits_of_all(tensors)
    # Where the kernel has no huge page to give, they are bounced.
    assert moved.direct + moved.bounced >= 8 * MIB - 2 * PAGE


def pages_of(tensors):
    """Return the pages in which the bytes of tensors are."""
    return {
        name: (tensor.data_ptr() // PAGE, (tensor.data_ptr() + tensor.nbytes - 1) // PAGE)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("way", ["load_file", "get_tensors", "get_many"])
def test_pages_are_released_as_tensors_die_one_by_one(model, way, direct):
    path, tensors = model
    if direct:
        need_direct(path.parent)
        drop(path)
    found = load_by(way, path)
    pages = pages_of(found)
    order = np.random.default_rng(len(way)).permutation(list(found)).tolist()
    low = min(first for first, _ in pages.values())
    count = max(last for _, last in pages.values()) + 1 - low
    for name in order:
        del found[name]
        gc.collect()
        there = resident(low * PAGE, count)
        used = np.zeros(count, bool)
        for other in found:
            assert torch.equal(found[other], tensors[other])
            used[pages[other][0] - low : pages[other][1] + 1 - low] = True
        first, last = pages[name]
        mine = slice(first - low, last + 1 - low)
        assert not np.any(there[mine] & ~used[mine])


def test_pages_read_ahead_are_released_with_their_tensor(tmp_path):
    tensors = {f"{n:02}": filled("uint8", (MIB,), n) for n in range(20)}
    safetensors.torch.save_file(tensors, tmp_path / "model")
    with safe_open(tmp_path / "model", "pt") as file:
        for name in file.offset_keys():
            batch = file._ahead.get(name)
            found = file.get_tensor(name)
            if batch is not None and name == batch.names[0] != batch.names[-1]:
                break
        assert batch.names[-1] in file._ahead
        # Pages at the ends are shared with neighbours.
        inner, pages = (found.data_ptr() // PAGE + 1) * PAGE, MIB // PAGE - 2
        assert resident(inner, pages).all()
        del found
        gc.collect()
        assert not resident(inner, pages).any()


def test_memory_is_released_with_the_last_tensor(model):
    path, _ = model
    found = nvmeio.safetensors.torch.load_file(path)
    kept = found["05"]
    address, expected = kept.data_ptr(), bits_of(kept)
    view = kept[5:10].view(5, 1)
    del found, kept
    gc.collect()
    assert resident(address // PAGE * PAGE, 1).all()
    assert view.reshape(-1).numpy().tobytes() == expected[2][5:10]
    del view
    gc.collect()
    assert not resident(address // PAGE * PAGE, 1).any()


def by_hand(path, entries):
    """Write a file of tensors in this order, which a sorting writer would not choose."""
    header, data = {}, b""
    for name, dtype, shape, content in entries:
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("way", ["whole", "part", "many", "alone"])
@pytest.mark.parametrize("odd", [1, 2, 3, 4, 7, 8])
def test_tensors_at_odd_offsets_are_aligned_in_memory(tmp_path, odd, way):
    values = filled("float64", (700,)), filled("complex64", (3,)), filled("float16", (9,))
    numbers = {f"{n}": each for n, each in enumerate(values)}
    names = dict(zip(numbers, ("F64", "C64", "F16"), strict=True))
    entries = [("bytes", "U8", [odd], bytes(odd))]
    entries += [(n, names[n], list(t.shape), bits_of(t)[2]) for n, t in numbers.items()]
    by_hand(tmp_path / "model", entries)
    for kind in ("pt", "np"):
        with safe_open(tmp_path / "model", kind) as file:
            for name, tensor in numbers.items():
                expected, skip = bits_of(tensor), 1 if way == "part" else 0
                if way == "whole":
                    found = file.get_tensors()[name]
                elif way == "part":
                    found = file.get_slice(name)[1:]
                elif way == "many":
                    found = file.get_many({"bytes": None, name: None})[name]
                else:
                    found = file.get_tensor(name)
                assert bits_of(found)[2] == expected[2][skip * tensor.itemsize :]
                address = found.data_ptr() if kind == "pt" else found.ctypes.data
                assert address % tensor.itemsize == 0
                if kind == "np":
                    assert found.flags.aligned
                    assert found.flags.writeable
                else:
                    assert found.untyped_storage().nbytes() == found.nbytes


class TestTooLittle:
    """A lack of memory is an error before anything is read."""

    @pytest.mark.parametrize("way", WAYS)
    def test_the_error_has_needed_and_free_memory(self, model, monkeypatch, way):
        path, _ = model
        monkeypatch.setattr(reading, "CHECKED_BYTES", 1)
        least = 1000 if way in ("get_tensor", "get_slice") else MIB
        monkeypatch.setattr(available, "available_bytes", lambda: least)
        moved = Moved()
        with pytest.raises(MemoryError, match=r"loading .*model needs .* and 1.* free"):
            load_by(way, path)
        if way not in ("get_tensor", "get_slice"):
            assert moved.direct == moved.buffered == 0

    def test_a_limit_of_address_space_is_respected(self, tmp_path):
        skip_sanitized("keep memory of their own")
        path = tmp_path / "model"
        safetensors.numpy.save_file({"a": np.ones(256 * MIB, np.uint8)}, path)
        said, stats = run_child(
            "load_within", path=str(path), address_bytes=200 * MIB
        ).report
        assert said.startswith(f"MemoryError: loading {path} needs 256 MiB of memory, and ")
        assert said.endswith(" are free")
        assert stats["requests"] == 0

    @pytest.mark.parametrize("size", [400, 200])
    def test_the_limit_of_a_control_group_is_respected(self, tmp_path, control_group, size):
        """It counts the pool's free memory, without which there is enough for 200 MiB."""
        path = tmp_path / "model"
        safetensors.numpy.save_file({"a": np.ones(size * MIB, np.uint8)}, path)
        drop(path)
        limits = [("memory.limit_in_bytes", 300 * MIB)], [("memory.max", 300 * MIB)]
        prefix = control_group("memory", *map(dict, limits))
        said, stats = run_child(
            "load_within",
            prefix=prefix,
            path=str(path),
            address_bytes=2**40,
            idle_bytes=140 * MIB,
        ).report
        if size == 200:
            assert said == "ok"
        else:
            words = f"MemoryError: loading {path} needs 400 MiB of memory, and "
            assert said.startswith(words)
            assert stats["requests"] == 0

    def test_free_memory_of_the_pool_is_used_first(self, tmp_path):
        skip_sanitized("keep memory of their own")
        path = tmp_path / "model"
        safetensors.numpy.save_file({"a": np.ones(256 * MIB, np.uint8)}, path)
        outcomes = run_child(
            "with_idle_memory",
            env={"NVMEIO_POOL_BYTES": "1GiB"},
            path=str(path),
            folder=str(tmp_path / "run"),
            idle_bytes=300 * MIB,
            more_bytes=200 * MIB,
        ).report
        assert outcomes == dict.fromkeys(outcomes, "ok")

    def test_the_control_groups_of_containers_are_found(self, monkeypatch):
        files = {
            "/proc/self/cgroup": "0::/",
            "/sys/fs/cgroup/memory.max": "1000000",
            "/sys/fs/cgroup/memory.current": "900000",
            "/sys/fs/cgroup/memory.stat": "active_file 10000\ninactive_file 30000\nx 5",
        }

        def text(path):
            if path not in files:
                raise FileNotFoundError(path)
            return files[path]

        monkeypatch.setattr(available, "_text", text)
        assert available._left_in_groups() == [140000]
        files["/sys/fs/cgroup/memory.max"] = "max"
        assert available._left_in_groups() == []
        files["/proc/self/cgroup"] = "3:cpu,memory:/a/b\n0::/"
        for level, limit in (("/a/b", 2000), ("/a", 3000), ("", 4000)):
            folder = f"/sys/fs/cgroup/memory{level}"
            files[f"{folder}/memory.limit_in_bytes"] = str(limit)
            files[f"{folder}/memory.usage_in_bytes"] = "1000"
            files[f"{folder}/memory.stat"] = "total_active_file 1\ntotal_inactive_file 2"
        assert available._left_in_groups() == [1003, 2003, 3003]
        # As where none are mounted.
        files["/proc/self/cgroup"] = ""
        assert available._left_in_groups() == []

    def test_read_ahead_is_skipped_without_memory(self, tmp_path, monkeypatch):
        tensors = {f"{n:02}": filled("uint8", (MIB,), n) for n in range(80)}
        safetensors.torch.save_file(tensors, tmp_path / "model")
        monkeypatch.setattr(available, "available_bytes", lambda: 2 * MIB)
        with safe_open(tmp_path / "model", "pt") as file:
            found = {name: file.get_tensor(name) for name in file.offset_keys()}
        assert bits_of_all(found) == bits_of_all(tensors)


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "threads", "sync"])
def test_a_model_may_be_larger_than_the_pool(tmp_path, engine):
    path = tmp_path / "model"
    tensors = {"a": np.arange(5 * MIB), "b": np.ones((3, MIB + 1), np.uint8)}
    safetensors.numpy.save_file(tensors, path)
    env = {"NVMEIO_POOL_BYTES": "2M", "NVMEIO_ENGINE": engine}
    target = tmp_path / "again"
    report = run_child(
        "load_and_save", env=env, source=str(path), target=str(target)
    ).report
    assert report == [True, True]
    assert target.read_bytes() == path.read_bytes()
