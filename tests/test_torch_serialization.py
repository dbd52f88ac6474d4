"""nvmeio.torch.save, load and open_stream: torch's own files, whole or not at all."""

import errno
import io
import os
import pickle
import re
import zipfile

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import nvmeio
import nvmeio.torch
from helpers import MIB
from nvmeio.torch import open_stream, serialization
from workloads.common import Faults


@pytest.fixture
def state():
    torch.manual_seed(1)
    weight = torch.randn(700, 500)
    return {
        "weight": weight,
        "tied": weight,
        "rows": weight[3:5],
        "turned": weight.t(),
        "half": torch.randn(1001, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(3.0, dtype=torch.float64),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "epoch": 3,
    }


def same(one, other):
    """Tell whether two states are equal."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name], value) if isinstance(value, torch.Tensor) else
        one[name] == value
        for name, value in other.items()
    )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.pt"


@pytest.mark.parametrize("writer", [torch.save, nvmeio.torch.save])
@pytest.mark.parametrize("reader", [torch.load, nvmeio.torch.load])
def test_either_reads_what_the_other_wrote(path, state, default_engine, writer, reader):
    writer(state, path)
    found = reader(path)
    assert same(found, state)
    found["weight"][3, 4] = 7
    assert found["tied"][3, 4] == found["rows"][0, 4] == found["turned"][4, 3] == 7
    assert isinstance(found["parameter"], torch.nn.Parameter)


@pytest.mark.parametrize("alignment", [64, 4096, 1 << 16])
def test_tensors_begin_where_they_should(path, state, alignment):
    nvmeio.torch.save(state, path, storage_alignment=alignment)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for each in archive.infolist():
            if "/data/" in each.filename and each.file_size and "." not in each.filename:
                with open(path, "rb") as file:
                    file.seek(each.header_offset + 26)
                    lengths = np.frombuffer(file.read(4), "<u2")
                begin = each.header_offset + 30 + int(lengths.sum())
                assert begin % alignment == 0 or not each.filename[-1].isdigit()
    assert same(torch.load(path), state)


@pytest.mark.parametrize("alignment", [0, 63, 96, 1 << 31, 64.0, "4096"])
def test_bad_alignments(path, alignment):
    with pytest.raises((TypeError, ValueError), match="storage_alignment"):
        nvmeio.torch.save({}, path, storage_alignment=alignment)
    assert not path.exists()


def test_what_cannot_be_pickled_leaves_the_old_file(path, state):
    nvmeio.torch.save(state, path)
    before = path.read_bytes()
    with pytest.raises((pickle.PicklingError, AttributeError)):
        nvmeio.torch.save({"big": torch.ones(MIB), "f": lambda: 1}, path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"write": {"error": errno.EIO, "at": 2 * MIB}}, errno.EIO),
        ({"write": {"full_at": MIB}}, errno.ENOSPC),
        ({"fsync": {"error": errno.EIO}}, errno.EIO),
    ],
    ids=str,
)
def test_drives_that_fail_leave_the_old_file(faulty, default_engine, fault, code):
    path = faulty / "state.pt"
    nvmeio.torch.save({"x": torch.zeros(MIB)}, path)
    before = path.read_bytes()
    Faults(path).set(**fault)
    with pytest.raises(OSError, match=re.escape(str(path))) as caught:
        nvmeio.torch.save({"x": torch.ones(MIB)}, path)
    assert caught.value.errno == code
    Faults(path).set()
    assert path.read_bytes() == before


def test_reads_that_fail_are_errors(faulty, default_engine):
    path = faulty / "state.pt"
    nvmeio.torch.save({"x": torch.zeros(MIB), "y": torch.ones(3)}, path)
    Faults(path).set(read={"error": errno.EIO, "at": MIB})
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for options in ({}, {"names": ["x"]}):
        with pytest.raises(OSError, match=re.escape(str(path))):
            nvmeio.torch.load(path, **options)
    Faults(path).set()
    assert nvmeio.torch.load(path)["y"].all()


class TestParts:
    """names= and out=: of a dict, and only their bytes."""

    def test_names(self, path, state):
        nvmeio.torch.save(state, path)
        before = nvmeio.default_handle().stats()["bytes_direct"]
        found = nvmeio.torch.load(
            path, names=["rows", "half", "epoch", "empty", "parameter"]
        )
        cost = nvmeio.default_handle().stats()["bytes_direct"] - before
        assert same(found, {name: state[name] for name in found})
        assert isinstance(found["parameter"], torch.nn.Parameter)
        # The directory and the pickle, and not the weight.
        assert cost < 200_000
        assert found["rows"].untyped_storage().nbytes() < 5000

    def test_those_that_share_still_do(self, path, state):
        nvmeio.torch.save(state, path)
        found = nvmeio.torch.load(path, names=["turned", "rows", "tied"])
        assert same(found, {name: state[name] for name in found})
        found["tied"].zero_()
        assert not found["turned"].any()
        assert not found["rows"].any()

    def test_out(self, path, state):
        nvmeio.torch.save(state, path)
        out = {
            "weight": torch.zeros(700, 500),
            "parameter": torch.nn.Parameter(torch.zeros(3)),
        }
        found = nvmeio.torch.load(path, out=out)
        assert all(found[name] is out[name] for name in out)
        assert same(out, {name: state[name] for name in out})
        wrong = {"weight": torch.zeros(700, 500), "half": torch.zeros(1001)}
        with pytest.raises(ValueError, match=r"out\['half'\] is of torch.float32"):
            nvmeio.torch.load(path, out=wrong)
        assert not wrong["weight"].any()

    def test_what_there_is_not(self, path, state):
        nvmeio.torch.save(state, path)
        with pytest.raises(KeyError, match="'no'"):
            nvmeio.torch.load(path, names=["weight", "no"])
        with pytest.raises(TypeError, match="several names"):
            nvmeio.torch.load(path, names="weight")
        nvmeio.torch.save([1], path)
        with pytest.raises(TypeError, match="pick from a dict"):
            nvmeio.torch.load(path, names=["weight"])

    @pytest.mark.parametrize("kind", ["legacy", "nested", "without fakes"])
    def test_where_torch_does_not_tell_all_is_read(self, path, state, kind, monkeypatch):
        if kind == "nested":
            state["model"] = {"deep": torch.ones(3)}
        if kind == "without fakes":
            monkeypatch.setattr(serialization, "_skeleton", lambda file: None)
        torch.save(state, path, _use_new_zipfile_serialization=kind != "legacy")
        found = nvmeio.torch.load(path, names=["weight", "epoch"])
        assert same(found, {name: state[name] for name in ("weight", "epoch")})
        out = {"weight": torch.zeros(700, 500)}
        assert nvmeio.torch.load(path, out=out)["weight"] is out["weight"]
        assert torch.equal(out["weight"], state["weight"])
        if kind == "nested":
            assert nvmeio.torch.load(path, names=["model"])["model"]["deep"].all()


def test_nothing_is_unpickled_that_is_not_allowed(path):
    torch.save({"x": io.BytesIO(b"1")}, path)
    for options in ({}, {"names": ["x"]}):
        with pytest.raises(pickle.UnpicklingError):
            nvmeio.torch.load(path, **options)
    assert nvmeio.torch.load(path, weights_only=False)["x"].read() == b"1"


def test_a_script_module(path):
    module = torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(3))
    torch.jit.save(module, path)
    found = nvmeio.torch.load(path, weights_only=False)
    assert torch.equal(found(torch.ones(3)), module(torch.ones(3)))


class TestStreams:
    """open_stream: a file for anything that takes one."""

    @pytest.mark.parametrize(
        "sizes", [[1, 5, 100_000], [3 * MIB + 1], [MIB, MIB, 17] * 3, []]
    )
    def test_all_is_written_and_read(self, path, default_engine, sizes):
        parts = [np.random.default_rng(n).bytes(size) for n, size in enumerate(sizes)]
        with open_stream(path, "wb") as stream:
            for part in parts:
                assert stream.write(part) == len(part)
            assert stream.tell() == sum(sizes)
            assert (stream.writable(), stream.readable()) == (True, False)
        assert path.read_bytes() == b"".join(parts)
        with open_stream(path) as stream:
            for part in parts:
                assert stream.read(len(part)) == part
            assert stream.read(10) == b""
            assert stream.seek(0) == 0
            assert stream.readall() == b"".join(parts)
            if sizes:
                assert stream.seek(-1, io.SEEK_END) == sum(sizes) - 1
                buffer = bytearray(10)
                assert stream.readinto(buffer) == 1

    def test_seeking_while_writing(self, path):
        with open_stream(path, "w") as stream:
            stream.write(b"abcdef")
            stream.seek(2)
            stream.write(b"XY")
            stream.seek(4, io.SEEK_CUR)
            stream.write(b"end")
        assert path.read_bytes() == b"abXYef\0\0end"

    def test_others_write_and_read_through_it(self, path):
        with open_stream(path, "wb") as stream, zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("a", "text" * MIB)
        with open_stream(path) as stream, zipfile.ZipFile(stream) as archive:
            assert archive.read("a") == b"text" * MIB
        with open_stream(path, "wb") as stream:
            np.save(stream, np.arange(MIB))
        with open_stream(path) as stream:
            assert np.array_equal(np.load(stream), np.arange(MIB))
        with open_stream(path, "wb") as stream:
            torch.save({"x": torch.arange(MIB)}, stream)
        with open_stream(path) as stream:
            assert torch.equal(torch.load(stream)["x"], torch.arange(MIB))

    def test_a_short_write_is_no_loss(self, faulty, default_engine):
        path = faulty / "stream"
        path.touch()
        Faults(path).set(write={"short": 5000, "times": 20})
        with open_stream(path, "wb") as stream:
            stream.write(b"x" * (3 * MIB))
        Faults(path).set()
        assert path.read_bytes() == b"x" * (3 * MIB)

    def test_what_fails_at_the_end_is_raised_by_close(self, faulty, default_engine):
        path = faulty / "stream"
        path.touch()
        Faults(path).set(write={"full_at": 100})
        stream = open_stream(path, "wb")
        stream.write(b"x" * 1000)
        with pytest.raises(OSError, match=re.escape(str(path))):
            stream.close()
        assert stream.closed

    def test_what_it_refuses(self, path):
        path.write_bytes(b"abc")
        for mode in ("a", "r+", "rt", None):
            with pytest.raises((TypeError, ValueError), match="mode"):
                open_stream(path, mode)
        with pytest.raises(FileExistsError):
            open_stream(path, "xb")
        with open_stream(path) as stream:
            with pytest.raises(io.UnsupportedOperation):
                stream.write(b"x")
            for offset, whence in ((-1, 0), (-4, 2), (0, 3)):
                with pytest.raises(ValueError, match="it must be"):
                    stream.seek(offset, whence)
        with pytest.raises(ValueError, match="closed"):
            stream.tell()
        with open_stream(path, "w") as stream, pytest.raises(io.UnsupportedOperation):
            stream.read(1)
