"""safe_open: single tensors, read-ahead, and parts of many tensors."""

import errno
import os
import random
import threading
import time

import numpy as np
import pytest

pytest.importorskip("torch")

import safetensors.numpy
import safetensors.torch

import nvmeio
import nvmeio.safetensors.numpy
from children import run_child, skip_sanitized
from helpers import ENGINES, MIB, PAGE, drop, need_direct
from model_samples import (
    Moved,
    bits_of,
    bits_of_all,
    filled,
    in_flight,
    outcome,
)
from nvmeio.safetensors import SafetensorError, load_sharded, safe_open
from workloads.common import Faults

S = np.s_
COUNT = 60
# A read may also take the pages at the ends of its tensors.
EDGES = 64 * PAGE


def bytes_read():
    """Return how many bytes this process has read from drives."""
    text = open("/proc/self/io").read()  # noqa: SIM115
    return int(text.split("read_bytes:")[1].split()[0])


@pytest.fixture(scope="module")
def arrays():
    """Arrays of 1 MiB, one of them a little different."""
    numbers = np.random.default_rng(3)
    return {
        f"{n:03}": numbers.integers(0, 256, (64, (MIB // 64) + n % 2), np.uint8)
        for n in range(COUNT)
    }


@pytest.fixture
def path(tmp_path, arrays):
    """The file of the arrays, cold, on a disk with O_DIRECT."""
    need_direct(tmp_path)
    safetensors.numpy.save_file(arrays, tmp_path / "model")
    drop(tmp_path / "model")
    return tmp_path / "model"


def direct_bytes(moved):
    """Return how many bytes were read with O_DIRECT, after all requests have ended."""
    nvmeio.default_handle().drain()
    # A tensor below 2 MiB that is read alone has small pages, and may be bounced.
    return moved.direct + moved.bounced


class TestLikeTheirs:
    """Results and errors, compared with safetensors.safe_open."""

    @pytest.fixture
    def mixed(self, tmp_path):
        tensors = {
            "a": filled("float32", (10, 5)),
            "b": filled("int16", (7,)),
            "c": filled("float64", ()),
            "d": filled("uint8", (0, 5)),
            "e": filled("uint8", (3, 4, 5)),
        }
        safetensors.torch.save_file(tensors, tmp_path / "mixed", {"format": "pt", "x": "y"})
        return tmp_path / "mixed"

    @pytest.mark.parametrize("kind", ["pt", "torch", "pytorch", "np", "numpy"])
    def test_keys_metadata_and_shapes_equal_theirs(self, mixed, kind):
        with safetensors.safe_open(mixed, kind) as theirs, safe_open(mixed, kind) as ours:
            assert ours.keys() == theirs.keys()
            assert ours.offset_keys() == theirs.offset_keys()
            assert ours.metadata() == theirs.metadata()
            assert bits_of_all(ours.get_tensors()) == bits_of_all(theirs.get_tensors())
            for name in theirs.keys():  # noqa: SIM118
                assert bits_of(ours.get_tensor(name)) == bits_of(theirs.get_tensor(name))
                one, other = ours.get_slice(name), theirs.get_slice(name)
                assert one.get_shape() == other.get_shape()
                assert one.get_dtype() == other.get_dtype()
            for method in ("get_tensor", "get_slice"):
                for name in ("none", "", 1, None):
                    expected = outcome(getattr(theirs, method), name)
                    found = outcome(getattr(ours, method), name)
                    assert found[0] == expected[0] or not isinstance(name, str)
                    assert found == expected or not isinstance(name, str)

    @pytest.mark.parametrize("kind", ["pt", "np"])
    @pytest.mark.parametrize("backend", ["mmap", "pread"])
    @pytest.mark.parametrize(
        "index",
        # test_safetensors_slices.py has all kinds of indices.
        [..., S[2:4], S[:, 1:3], S[0:0], (2, 3), 10, [0, 2], "x"],
        ids=str,
    )
    def test_slices_equal_theirs(self, mixed, kind, backend, index):
        with (
            safetensors.safe_open(mixed, kind, backend=backend) as theirs,
            safe_open(mixed, kind, backend=backend) as ours,
        ):
            for name in theirs.keys():  # noqa: SIM118
                expected = outcome(lambda f, n: f.get_slice(n)[index], theirs, name)
                found = outcome(lambda f, n: f.get_slice(n)[index], ours, name)
                if isinstance(expected, tuple):
                    assert found == expected
                else:
                    assert bits_of(found) == bits_of(expected)

    @pytest.mark.parametrize("kind", ["pt", "np"])
    def test_a_closed_file_refuses_as_theirs(self, mixed, kind):
        with safetensors.safe_open(mixed, kind) as theirs, safe_open(mixed, kind) as ours:
            slices = theirs.get_slice("e"), ours.get_slice("e")
        for part in (S[1:2], ..., S[:, 1]):
            # Slices can still be read.
            assert bits_of(slices[1][part]) == bits_of(slices[0][part])
        for call in (
            lambda f: f.keys(),
            lambda f: f.offset_keys(),
            lambda f: f.metadata(),
            lambda f: f.get_tensor("a"),
            lambda f: f.get_tensors(),
            lambda f: f.get_slice("a"),
            lambda f: f.__exit__(None, None, None),
        ):
            assert outcome(call, ours) == outcome(call, theirs)
        with pytest.raises(SafetensorError, match="File is closed"):
            ours.get_many({"a": None})

    def test_the_descriptor_is_closed_with_the_last_slice(self, mixed):
        def opened():
            names = os.listdir("/proc/self/fd")
            links = [outcome(os.readlink, f"/proc/self/fd/{name}") for name in names]
            return links.count(str(mixed))

        with safe_open(mixed, "np") as file:
            part = file.get_slice("e")
            assert opened() > 0
        part[1:]
        del part
        assert opened() == 0
        file = safe_open(mixed, "np")
        del file
        assert opened() == 0

    @pytest.mark.parametrize("value", [-1, "1", None, 1.5, True, 2**63])
    def test_the_budget_is_a_number_of_bytes(self, mixed, value):
        with pytest.raises((ValueError, TypeError), match="read_ahead"):
            safe_open(mixed, "np", read_ahead=value)


class TestReadAhead:
    """When read-ahead starts, and how far it goes."""

    def test_read_ahead_starts_with_the_second_tensor_in_order(self, path, default_engine):
        moved = Moved()
        with safe_open(path, "np", direct=True, read_ahead=16 * MIB) as file:
            names = file.offset_keys()
            file.get_tensor(names[0])
            assert direct_bytes(moved) <= MIB + EDGES
            file.get_tensor(names[1])
            # Two tensors ahead, which double with each request.
            assert 3 * MIB - EDGES <= direct_bytes(moved) <= 4 * MIB + EDGES
            for asked in range(2, 8):
                file.get_tensor(names[asked])
            # At most the budget, and nearly that.
            assert 16 * MIB <= direct_bytes(moved) <= (8 + 16) * MIB + EDGES

    @pytest.mark.parametrize("budget", [0, 1, MIB - 1, 3 * MIB, 64 * MIB])
    def test_read_ahead_stays_within_its_budget(self, path, budget):
        moved = Moved()
        with safe_open(path, "np", direct=True, read_ahead=budget) as file:
            for asked, name in enumerate(file.offset_keys(), 1):
                file.get_tensor(name)
                ahead = direct_bytes(moved) - asked * MIB
                assert ahead <= budget + EDGES

    def test_every_byte_is_read_once(self, path, arrays, default_engine):
        moved = Moved()
        with safe_open(path, "np", direct=True, read_ahead=8 * MIB) as file:
            for name in file.offset_keys():
                assert np.array_equal(file.get_tensor(name), arrays[name])
            assert (file._ahead, file._held) == ({}, 0)
        size = sum(array.nbytes for array in arrays.values())
        assert size - EDGES <= direct_bytes(moved) <= size + EDGES

    @pytest.mark.parametrize("order", [[0, 2, 4, 6], [3, 2, 1, 0], [0, 0, 0], [0, 2, 1, 3]])
    def test_reads_out_of_order_start_no_read_ahead(self, path, order):
        moved = Moved()
        with safe_open(path, "np", direct=True) as file:
            names = file.offset_keys()
            for place in order:
                file.get_tensor(names[place])
        assert direct_bytes(moved) <= len(order) * MIB + EDGES

    def test_pairs_in_order_cost_little_read_ahead(self, path):
        """Pairs of neighbours in random order: read-ahead stops after the first ones."""
        moved = Moved()
        with safe_open(path, "np", direct=True) as file:
            names = file.offset_keys()
            pairs = [names[at : at + 2] for at in range(0, len(names) - 1, 2)]
            random.Random(3).shuffle(pairs)
            for pair in pairs:
                for name in pair:
                    file.get_tensor(name)
        assert direct_bytes(moved) <= 1.2 * len(names) * MIB + 8 * MIB

    @pytest.mark.parametrize("part", [S[:10], S[:, :5]])
    def test_reads_of_parts_start_no_read_ahead(self, path, part):
        moved = Moved()
        with safe_open(path, "np", direct=True) as file:
            names = file.offset_keys()
            file.get_tensor(names[0])
            for name in names[1:10]:
                file.get_slice(name)[part]
            file.get_tensor(names[10])
        assert direct_bytes(moved) <= 11 * MIB + EDGES

    def test_a_part_in_between_resets_read_ahead(self, path):
        moved = Moved()
        with safe_open(path, "np", direct=True) as file:
            names = file.offset_keys()
            file.get_tensor(names[0])
            file.get_slice(names[5])[:10]
            file.get_tensor(names[1])
            assert direct_bytes(moved) <= 3 * MIB + EDGES

    @pytest.mark.parametrize("kind", ["np", "pt"])
    @pytest.mark.parametrize("whole", [S[:], ..., (S[:], S[:])])
    def test_a_whole_slice_reads_as_much_as_a_tensor(self, path, arrays, kind, whole):
        cost = []
        for take in ("get_tensor", "get_slice"):
            drop(path)
            moved = Moved()
            with safe_open(path, kind, direct=True, read_ahead=20 * MIB) as file:
                for name in file.offset_keys()[:12]:
                    found = getattr(file, take)(name)
                    found = found if take == "get_tensor" else found[whole]
                    assert np.array_equal(np.asarray(found), arrays[name])
                cost.append(direct_bytes(moved))
        assert cost[0] == cost[1]

    def test_a_tensor_may_be_read_again(self, path, arrays):
        with safe_open(path, "np", direct=True) as file:
            for name in file.offset_keys():
                first, second = file.get_tensor(name), file.get_tensor(name)
                assert np.array_equal(first, arrays[name])
                assert np.array_equal(second, arrays[name])
                assert not np.shares_memory(first, second)

    @pytest.mark.parametrize("kind", ["np", "pt"])
    @pytest.mark.parametrize("budget", [3 * MIB, 40 * MIB])
    def test_eight_threads_get_their_tensors(
        self, path, arrays, default_engine, kind, budget
    ):
        wrong = []
        with safe_open(path, kind, direct=True, read_ahead=budget) as file:
            names = iter(file.offset_keys())
            lock = threading.Lock()

            def ask(seed):
                draw = random.Random(seed)
                while True:
                    with lock:
                        name = next(names, None)
                    if name is None:
                        return
                    time.sleep(draw.choice([0, 0, 0.001, 0.003]))
                    for _ in range(draw.choice([1, 1, 1, 2])):
                        try:
                            if draw.random() < 0.2:
                                part = np.asarray(file.get_slice(name)[3:9])
                                good = np.array_equal(part, arrays[name][3:9])
                            else:
                                found = np.asarray(file.get_tensor(name))
                                good = np.array_equal(found, arrays[name])
                        except BaseException as error:
                            good = error
                        if good is not True:
                            wrong.append((name, good))

            threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == []
        assert in_flight() == 0

    def test_dropping_a_batch_keeps_the_tensors_that_others_need(self, path, arrays):
        """One thread has its batch; another reads out of order; then the first goes on."""
        with safe_open(path, "np", direct=True) as file:
            names = file.offset_keys()
            file.get_tensor(names[0])
            file.get_tensor(names[1])
            (batch, *_) = file._ahead.values()
            take, begun = batch.loading.take, []

            def take_late(name):
                if not begun:
                    begun.append(name)
                    assert np.array_equal(file.get_tensor(names[50]), arrays[names[50]])
                return take(name)

            batch.loading.take = take_late
            assert np.array_equal(file.get_tensor(names[2]), arrays[names[2]])
            assert begun == [names[2]]

    def test_closing_leaves_nothing_in_flight(self, path, default_engine):
        for count in (2, 3, 10):
            with safe_open(path, "np", direct=True) as file:
                for name in file.offset_keys()[:count]:
                    file.get_tensor(name)
            assert in_flight() == 0

    def test_closing_ends_the_reads_of_other_threads(self, path, arrays):
        for _ in range(10):
            file, said = safe_open(path, "np", direct=True), []

            def ask(file=file, said=said):
                for name in file.offset_keys():
                    try:
                        assert np.array_equal(file.get_tensor(name), arrays[name])
                    except Exception as error:
                        said.append(error)
                        return

            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            file.__exit__()
            for thread in threads:
                thread.join()
            assert {(type(e), str(e)) for e in said} <= {
                (SafetensorError, "File is closed")
            }
            assert in_flight() == 0

    @pytest.mark.parametrize("engine", ENGINES)
    def test_a_forked_child_reads_on(self, path, engine):
        skip_sanitized("cannot follow forks of a process with threads")
        env = {"NVMEIO_ENGINE": engine}
        assert run_child("fork_while_reading", env=env, path=str(path)).report == [0, 0]

    def test_a_tensor_that_cannot_be_read_fails_alone(self, faulty, arrays):
        path = faulty / "model"
        safetensors.numpy.save_file(arrays, faulty / "made")
        os.rename(faulty / "made", path)
        with safe_open(path, "np", direct=False) as file:
            place = file._file.offset(file._file.layout.by_name["007"].begin)
            Faults(path).set(read={"error": errno.EIO, "at": place + MIB // 2})
            for name in file.offset_keys():
                if name == "007":
                    with pytest.raises(OSError, match="model") as caught:
                        file.get_tensor(name)
                    assert caught.value.errno == errno.EIO
                    assert str(caught.value.filename) == str(path)
                else:
                    assert np.array_equal(file.get_tensor(name), arrays[name])
        assert in_flight() == 0

    def test_numpy_reads_on_after_a_dtype_that_it_lacks(self, tmp_path):
        tensors = {f"{n:02}": filled("uint8", (MIB,), n) for n in range(40)}
        tensors["00"] = filled("uint8", (5,))
        tensors |= {f"x{n}": filled("float8_e4m3fn", (100,), n) for n in range(3)}
        tensors |= {f"y{n}": filled("float32", (MIB,), n) for n in range(5)}
        safetensors.torch.save_file(tensors, tmp_path / "model")
        with safe_open(tmp_path / "model", "np", direct=True) as file:
            for _ in range(2):
                for name in file.offset_keys():
                    if name.startswith("x"):
                        # Not bfloat16, which numpy has once ml_dtypes is imported.
                        with pytest.raises(AttributeError, match="float8"):
                            file.get_tensor(name)
                    else:
                        expected = tensors[name].numpy()
                        assert np.array_equal(
                            file.get_tensor(name).view("u1"), expected.view("u1")
                        )

    def test_devices_get_no_read_ahead(self, path):
        """Read-ahead would be in host memory, and need a copy to the device."""
        with safe_open(path, "pt", direct=True) as file:
            file._framework.on_host = False
            for name in file.offset_keys()[:5]:
                file.get_tensor(name)
            assert file._ahead == {}


class TestMany:
    """get_many() and load_sharded(slices=): parts of many tensors in one submission."""

    ROWS, COLUMNS = 512, 8192
    # Slices with their bytes: a rank's rows, its columns, one row, every other row.
    PARTS = (S[128:256], S[:, 2048:4096], S[:, 4096:], 7, S[::2], S[3:4, :], None)

    @pytest.fixture
    def matrices(self, tmp_path):
        need_direct(tmp_path)
        numbers = np.random.default_rng(5)
        shape = self.ROWS, self.COLUMNS
        return {
            f"{n}": numbers.integers(0, 2**32, shape, np.uint32)
            for n in range(len(self.PARTS))
        }

    @pytest.mark.parametrize("align", [8, 4096])
    @pytest.mark.parametrize("way", ["get_many", "out", "load_sharded"])
    def test_slices_read_only_their_bytes(
        self, tmp_path, matrices, default_engine, align, way
    ):
        path = tmp_path / "model.safetensors"
        nvmeio.safetensors.numpy.save_file(matrices, path, align=align)
        drop(path)
        wanted = dict(zip(matrices, self.PARTS, strict=True))
        expected = {
            n: a if wanted[n] is None else a[wanted[n]] for n, a in matrices.items()
        }
        out = None
        if way == "out":
            out = {
                n: np.empty((*a.shape[:-1], 2 * a.shape[-1]), "u4")[..., ::2]
                for n, a in expected.items()
            }
        before = bytes_read()
        if way == "load_sharded":
            slices = {n: index for n, index in wanted.items() if index is not None}
            found = load_sharded(tmp_path, slices=slices, framework="np", direct=True)
        else:
            with safe_open(path, "np", direct=True) as file:
                found = file.get_many(wanted, out=out)
        cost = bytes_read() - before
        assert bits_of_all(found) == bits_of_all(expected)
        assert cost <= 1.1 * sum(array.nbytes for array in expected.values())

    @pytest.mark.parametrize("align", [8, 4096])
    @pytest.mark.parametrize("run", [1 << 10, 2 << 10, 4 << 10, 16 << 10])
    @pytest.mark.parametrize("world", [2, 8])
    def test_columns_read_only_their_sectors(self, tmp_path, align, run, world):
        """Columns of 1 KiB may also read the gaps, because many reads would be slower."""
        need_direct(tmp_path)
        rows = (4 * MIB) // run
        array = np.random.default_rng(run).integers(0, 256, (rows, run * world), np.uint8)
        path = tmp_path / "model.safetensors"
        nvmeio.safetensors.numpy.save_file(
            {"a": array[:, :-1], "b": array}, path, align=align
        )
        drop(path)
        before = bytes_read()
        index = S[:, run : 2 * run]
        found = load_sharded(
            tmp_path, names=["b"], slices={"b": index}, framework="np", direct=True
        )
        # The header is read with the kernel's read-ahead.
        cost = bytes_read() - before - MIB // 4
        assert np.array_equal(found["b"], array[index])
        sectors = run if align == 4096 else run + 2 * 512
        if run < 2 << 10 and world == 2:
            sectors = 2 * run
        assert cost <= 1.01 * rows * sectors

    @pytest.mark.parametrize("kind", ["np", "pt"])
    @pytest.mark.parametrize("direct", [True, False])
    def test_results_have_the_order_of_the_indices(self, path, arrays, kind, direct):
        draw = random.Random(9)
        names = draw.sample(sorted(arrays), 30)
        indices = [S[3:9], S[:, 5:70], 0, S[::7, ::5], None, S[:], [], S[5:5]]
        wanted = {name: draw.choice(indices) for name in names}
        if kind == "pt":
            wanted = {n: slice(0, 0) if i == [] else i for n, i in wanted.items()}
        with safe_open(path, kind, direct=direct) as file:
            found = file.get_many(wanted)
            assert in_flight() == 0
            assert file.get_many({}) == {}
        assert list(found) == names
        for name, index in wanted.items():
            array = arrays[name]
            expected = (
                array if index is None else array[slice(0, 0) if index == [] else index]
            )
            assert np.array_equal(np.asarray(found[name]), expected)
            if kind == "pt":
                assert found[name].untyped_storage().nbytes() == found[name].nbytes

    @pytest.mark.parametrize("wrong", ["name", "index", "dtype", "shape", "missing"])
    def test_invalid_arguments_are_refused_before_a_read(self, path, wrong):
        wanted = {"000": None, "001": S[2:4], "002": S[:, 3]}
        width = [(MIB // 64) + n % 2 for n in range(3)]
        out = {"000": np.zeros((64, width[0]), "u1"), "001": np.zeros((2, width[1]), "u1")}
        out["002"] = np.zeros(64, "u1")
        if wrong == "name":
            wanted["none"] = None
        elif wrong == "index":
            wanted["003"] = S[:, 10**6]
        elif wrong == "dtype":
            out["001"] = out["001"].view("i1")
        elif wrong == "shape":
            out["001"] = np.zeros((64, width[1]), "u1")
        else:
            del out["002"]
        moved = Moved()
        with (
            safe_open(path, "np", direct=True) as file,
            pytest.raises((ValueError, SafetensorError)),
        ):
            file.get_many(wanted, out=out)
        assert moved.direct == moved.buffered == 0
        assert not any(array.any() for array in out.values())

    def test_progress_with_parts_and_targets_ends_at_the_total(
        self, path, tmp_path, arrays
    ):
        os.rename(path, tmp_path / "model.safetensors")
        slices = {"000": S[::2], "001": S[1:5], "002": S[:, 3:9]}
        names = [*slices, "003", "004"]
        expected = {n: arrays[n][slices.get(n, S[:])] for n in names}
        out = {n: np.empty_like(a) for n, a in expected.items()}
        told = []
        load_sharded(
            tmp_path,
            names=names,
            slices=slices,
            out=out,
            framework="np",
            progress=lambda *pair: told.append(pair),
        )
        assert bits_of_all(out) == bits_of_all(expected)
        total = sum(array.nbytes for array in expected.values())
        assert told[-1] == (total, total)
        assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_arrays_of_many_small_tensors(tmp_path, default_engine):
    """Of sizes near boundaries."""
    sizes = [0, 1, 7, 8, 100, 511, 512, 513, PAGE, PAGE + 1]
    data = np.random.default_rng(0).integers(0, 256, 60_000, np.uint8)
    arrays = {f"{n:05}": data[n : n + sizes[n % len(sizes)]].copy() for n in range(2000)}
    safetensors.numpy.save_file(arrays, tmp_path / "model")
    for direct in (True, False):
        found = nvmeio.safetensors.numpy.load_file(tmp_path / "model", direct=direct)
        assert bits_of_all(found) == bits_of_all(dict(sorted(arrays.items())))
