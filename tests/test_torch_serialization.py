"""nvmeio.torch.save, load and open_stream: torch's own files, whole or not at all."""

import errno
import io
import os
import pickle
import random
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


LEGACY = {"_use_new_zipfile_serialization": False}


def same(one, other):
    """Tell whether two states are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


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


@pytest.mark.parametrize("sync", [True, False])
def test_the_name_is_synced_if_that_is_said(path, state, monkeypatch, sync):
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    nvmeio.torch.save(state, path, sync=sync)
    assert synced == [os.path.realpath(path.parent)] * sync


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

    @pytest.mark.parametrize(
        "names", [["early", "late"], ["late", "early"], ["odd"], ["wants", "odd"]], ids=str
    )
    def test_parts_of_one_storage_in_any_order(self, path, names):
        weight = torch.randn(1000, 10)
        state = {"early": weight[3:5], "late": weight[900:], "odd": weight.view(-1)[7:9]}
        state["wants"] = torch.ones(3, requires_grad=True)
        torch.save(state, path)
        found = nvmeio.torch.load(path, names=names)
        assert same(found, {name: state[name] for name in names})
        assert all(found[n].requires_grad == state[n].requires_grad for n in names)

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
        with pytest.raises(TypeError, match="iterable of names"):
            nvmeio.torch.load(path, names="weight")
        nvmeio.torch.save([1], path)
        with pytest.raises(TypeError, match="pick from a dict"):
            nvmeio.torch.load(path, names=["weight"])

    def test_lazy_views_and_attributes_stay(self, path):
        half = torch.arange(8).to(torch.complex64) * (1 + 2j)
        state = {"conj": half.conj(), "neg": torch._neg_view(torch.ones(3)), "a": half}
        state["sparse"] = torch.eye(3).to_sparse()
        state["tagged"] = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        state["tagged"].tag = 5
        torch.save(state, path)
        expected = torch.load(path)
        for names in (["conj"], ["neg"], ["a"], ["tagged"], ["conj", "a", "neg"]):
            found = nvmeio.torch.load(path, names=names)
            for name in names:
                assert torch.equal(found[name], expected[name])
                assert type(found[name]) is type(expected[name])
        assert nvmeio.torch.load(path, names=["tagged"])["tagged"].tag == 5
        found = nvmeio.torch.load(path, names=["sparse"])["sparse"]
        assert torch.equal(found.to_dense(), torch.eye(3))
        out = {"conj": torch.zeros(8, dtype=torch.complex64), "neg": torch.zeros(3)}
        nvmeio.torch.load(path, out=out)
        assert all(torch.equal(out[name], expected[name]) for name in out)

    def test_tied_and_nested_ones_stay_tied(self, path):
        whole = torch.arange(100_000.0)
        state = {"a": whole, "b": whole[5:], "deep": {"c": [whole], "d": whole.view(-1, 2)}}
        torch.save(state | {"other": torch.ones(10)}, path)
        found = nvmeio.torch.load(path, names=["a", "b", "deep"])
        assert same(found, state)
        found["a"][7] = -1
        assert found["b"][2] == found["deep"]["c"][0][7] == found["deep"]["d"][3, 1] == -1
        # A part is read alone, to a target, too.
        out = {"b": torch.zeros(99_995), "a": torch.zeros(100_000)}
        nvmeio.torch.load(path, out=out)
        assert torch.equal(out["b"], whole[5:])
        assert torch.equal(out["a"], whole)

    @pytest.mark.parametrize("kind", ["deflated", "big-endian", "beyond its bytes"])
    def test_archives_of_strangers_are_loaded_as_torch_does(self, path, kind):
        torch.save({"a": torch.arange(4.0), "b": torch.ones(1000)}, path)
        stranger = path.with_name("stranger")
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(stranger, "w") as new:
            for entry in old.infolist():
                data = old.read(entry)
                if kind == "big-endian" and entry.filename.endswith("byteorder"):
                    data = b"big"
                if kind == "beyond its bytes" and entry.filename.endswith("data.pkl"):
                    # BININT1 4, of how many elements there are.
                    assert data.count(b"K\x04") == 2
                    data = data.replace(b"K\x04", b"M\xe8\x03")
                how = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
                new.writestr(entry, data, how)
        try:
            expected = torch.load(stranger)["a"]
        except RuntimeError:
            with pytest.raises(RuntimeError):
                nvmeio.torch.load(stranger, names=["a"])
            return
        assert kind != "beyond its bytes"
        assert torch.equal(nvmeio.torch.load(stranger, names=["a"])["a"], expected)

    def test_errors_of_torch_say_which_file(self, path):
        path.write_text("no file of torch's")
        with pytest.raises(pickle.UnpicklingError) as caught:
            nvmeio.torch.load(path)
        # Errors have notes from Python 3.11 on.
        notes = getattr(caught.value, "__notes__", [str(path)])
        assert any(str(path) in note for note in notes)

    @pytest.mark.parametrize("kind", ["legacy", "nested", "without maps"])
    def test_what_cannot_be_mapped_is_read_as_a_whole(self, path, state, kind, monkeypatch):
        if kind == "nested":
            state["model"] = {"deep": torch.ones(3)}
        if kind == "without maps":
            monkeypatch.setattr(serialization, "_mapped", lambda file: None)
        torch.save(state, path, _use_new_zipfile_serialization=kind != "legacy")
        found = nvmeio.torch.load(path, names=["weight", "epoch"])
        assert same(found, {name: state[name] for name in ("weight", "epoch")})
        out = {"weight": torch.zeros(700, 500)}
        assert nvmeio.torch.load(path, out=out)["weight"] is out["weight"]
        assert torch.equal(out["weight"], state["weight"])
        wrong = {"weight": torch.zeros(700, 500), "half": torch.zeros(1001)}
        with pytest.raises(ValueError, match=r"out\['half'\] is of torch.float32"):
            nvmeio.torch.load(path, out=wrong)
        assert not wrong["weight"].any()
        if kind == "nested":
            assert nvmeio.torch.load(path, names=["model"])["model"]["deep"].all()


def test_nothing_is_unpickled_that_is_not_allowed(path):
    torch.save({"x": io.BytesIO(b"1")}, path)
    for options in ({}, {"names": ["x"]}):
        with pytest.raises(pickle.UnpicklingError):
            nvmeio.torch.load(path, **options)
    assert nvmeio.torch.load(path, weights_only=False)["x"].read() == b"1"


@pytest.mark.parametrize("options", [{}, {"names": ["weight"]}], ids=["all", "names"])
def test_tensors_go_where_they_are_sent(path, state, options):
    nvmeio.torch.save(state, path)
    found = nvmeio.torch.load(path, map_location="meta", **options)
    assert found["weight"].device.type == "meta"


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
            assert stream.seek(sum(sizes) + 10) == sum(sizes) + 10
            assert (stream.read(5), stream.readall()) == (b"", b"")
            assert stream.tell() == sum(sizes) + 10

    def test_seeking_while_writing(self, path):
        with open_stream(path, "w") as stream:
            stream.write(b"abcdef")
            stream.seek(2)
            stream.write(b"XY")
            stream.seek(4, io.SEEK_CUR)
            stream.write(b"end")
            assert stream.seek(-3, io.SEEK_END) == 8
            stream.write(b"END.")
            assert stream.seek(0, io.SEEK_END) == 12
        assert path.read_bytes() == b"abXYef\0\0END."

    def test_its_descriptor_is_for_reading_and_is_closed(self, path):
        with open_stream(path, "w") as stream:
            stream.write(b"abc")
            # Its position would be another one than the stream's.
            with pytest.raises(io.UnsupportedOperation):
                stream.fileno()
        with open_stream(path) as stream:
            descriptor = stream.fileno()
            assert os.pread(descriptor, 3, 0) == b"abc"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        torch.save([torch.ones(1000)], plain := path.with_name("plain"), **LEGACY)
        with open_stream(path, "wb") as stream:
            torch.save([torch.ones(1000)], stream, **LEGACY)
        assert len(path.read_bytes()) == len(plain.read_bytes())
        assert same(torch.load(path), [torch.ones(1000)])

    def test_small_reads_are_served_from_what_was_read_ahead(self, path):
        data = np.random.default_rng(1).bytes(3 * MIB + 5)
        path.write_bytes(data)
        rng = random.Random(1)
        with open_stream(path) as stream:
            before = nvmeio.default_handle().stats()["requests"]
            assert [stream.read(40) for _ in range(1000)] == [
                data[at : at + 40] for at in range(0, 40_000, 40)
            ]
            assert nvmeio.default_handle().stats()["requests"] - before <= 2
            for _ in range(300):
                at, size = rng.randrange(len(data) + 9), rng.choice([1, 5000, 70_000])
                stream.seek(at)
                assert stream.read(size) == data[at : at + size]
                assert stream.tell() == max(at, min(at + size, len(data)))
            # What others append is seen.
            with open(path, "ab") as file:
                file.write(b"more")
            stream.seek(-4, io.SEEK_END)
            assert stream.read(10) == b"more"

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
