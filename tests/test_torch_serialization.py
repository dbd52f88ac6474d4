"""nvmeio.torch.save and load: torch's own files, complete or unchanged."""

import errno
import gc
import io
import os
import pickle
import re
import weakref
import zipfile

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils.serialization import config

import nvmeio
import nvmeio.torch
from helpers import MIB, interrupted_after_each_call
from nvmeio.torch import serialization
from nvmeio.torch._saving import errors_of
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
    """Return whether two states are equal."""
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
def test_nvmeio_and_torch_read_each_others_files(
    path, state, default_engine, writer, reader
):
    writer(state, path)
    found = reader(path)
    assert same(found, state)
    found["weight"][3, 4] = 7
    assert found["tied"][3, 4] == found["rows"][0, 4] == found["turned"][4, 3] == 7
    assert isinstance(found["parameter"], torch.nn.Parameter)


@pytest.mark.parametrize("alignment", [64, 4096, 1 << 16])
def test_tensors_begin_at_aligned_offsets(path, state, alignment):
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
def test_invalid_alignments_are_refused(path, alignment):
    words = f"^storage_alignment is .*{alignment}"
    with pytest.raises((TypeError, ValueError), match=words):
        nvmeio.torch.save({}, path, storage_alignment=alignment)
    assert not path.exists()


@pytest.mark.parametrize("sync", [True, False])
def test_the_name_is_synced_only_with_sync(path, state, monkeypatch, sync):
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    nvmeio.torch.save(state, path, sync=sync)
    assert synced == [os.path.realpath(path.parent)] * sync


def test_a_pickling_error_leaves_the_old_file(path, state):
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
def test_failing_drives_leave_the_old_file(faulty, default_engine, fault, code):
    path = faulty / "state.pt"
    nvmeio.torch.save({"x": torch.zeros(MIB)}, path)
    before = path.read_bytes()
    Faults(path).set(**fault)
    with pytest.raises(OSError, match=re.escape(str(path))) as caught:
        nvmeio.torch.save({"x": torch.ones(MIB)}, path)
    assert caught.value.errno == code
    Faults(path).set()
    assert path.read_bytes() == before


def test_failed_reads_are_errors(faulty, default_engine):
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
    """names= and out= read only these entries of a dict."""

    def test_named_entries_are_loaded(self, path, state):
        nvmeio.torch.save(state, path)
        before = nvmeio.default_handle().stats()["bytes_direct"]
        found = nvmeio.torch.load(
            path, names=["rows", "half", "epoch", "empty", "parameter"]
        )
        cost = nvmeio.default_handle().stats()["bytes_direct"] - before
        assert same(found, {name: state[name] for name in found})
        assert isinstance(found["parameter"], torch.nn.Parameter)
        # The archive's directory and the pickle were read, but not the weight.
        assert cost < 200_000
        assert found["rows"].untyped_storage().nbytes() < 5000

    def test_entries_that_share_memory_still_share_it(self, path, state):
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

    def test_targets_are_filled(self, path, state):
        nvmeio.torch.save(state, path)
        out = {
            "weight": torch.zeros(700, 500),
            "parameter": torch.nn.Parameter(torch.zeros(3)),
        }
        found = nvmeio.torch.load(path, out=out)
        assert all(found[name] is out[name] for name in out)
        assert same(out, {name: state[name] for name in out})
        wrong = {"weight": torch.zeros(700, 500), "half": torch.zeros(1001)}
        with pytest.raises(ValueError, match=r"out\['half'\] has the dtype torch.float32"):
            nvmeio.torch.load(path, out=wrong)
        assert not wrong["weight"].any()
        wrong = {"weight": torch.zeros(700, 500), "parameter": torch.zeros(1).expand(3)}
        with pytest.raises(ValueError, match=r"out\['parameter'\] cannot be filled"):
            nvmeio.torch.load(path, out=wrong)
        with pytest.raises(ValueError, match="out has 'parameter', which is not in names"):
            nvmeio.torch.load(path, names=["weight"], out=wrong)
        assert not wrong["weight"].any()

    def test_targets_share_memory_only_as_in_the_file(self, path, state):
        nvmeio.torch.save(state, path)
        weight = torch.zeros(700, 500)
        for name, other in (("rows", weight[:2]), ("turned", weight.view(500, 700))):
            with pytest.raises(ValueError, match=rf"\['{name}'\] share memory"):
                nvmeio.torch.load(path, out={"weight": weight, name: other})
        assert not weight.any()
        out = {"weight": weight, "tied": weight, "rows": weight[3:5]}
        nvmeio.torch.load(path, out=out | {"turned": weight.t()})
        assert torch.equal(weight, state["weight"])

    def test_a_tensor_in_two_places_is_read_for_both(self, path):
        whole = torch.arange(100_000.0)
        nvmeio.torch.save({"w": whole, "opt": {"params": [whole]}, "v": whole}, path)
        out = {"w": torch.zeros(100_000)}
        found = nvmeio.torch.load(path, names=["w", "opt", "v"], out=out)
        # A mapped tensor would see this.
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        assert found["w"] is out["w"]
        for each in (found["w"], found["v"], found["opt"]["params"][0]):
            assert torch.equal(each, whole)

    def test_missing_names_are_refused(self, path, state):
        nvmeio.torch.save(state, path)
        with pytest.raises(KeyError, match="'no'"):
            nvmeio.torch.load(path, names=["weight", "no"])
        for names in ("weight", 5):
            with pytest.raises(
                TypeError, match=f"names is {names!r}; it must be an iterab"
            ):
                nvmeio.torch.load(path, names=names)
        for out in ([torch.zeros(1)], torch.zeros(1)):
            with pytest.raises(TypeError, match=r"out is .*; it must be a dict"):
                nvmeio.torch.load(path, out=out)
        nvmeio.torch.save([1], path)
        with pytest.raises(TypeError, match="need a dict"):
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

    def test_tied_and_nested_tensors_stay_tied(self, path):
        whole = torch.arange(100_000.0)
        state = {"a": whole, "b": whole[5:], "deep": {"c": [whole], "d": whole.view(-1, 2)}}
        torch.save(state | {"other": torch.ones(10)}, path)
        found = nvmeio.torch.load(path, names=["a", "b", "deep"])
        assert same(found, state)
        found["a"][7] = -1
        assert found["b"][2] == found["deep"]["c"][0][7] == found["deep"]["d"][3, 1] == -1
        # A part is also read alone, and into a target.
        out = {"b": torch.zeros(99_995), "a": torch.zeros(100_000)}
        nvmeio.torch.load(path, out=out)
        assert torch.equal(out["b"], whole[5:])
        assert torch.equal(out["a"], whole)

    def test_a_target_of_one_element_may_have_any_stride(self, path):
        nvmeio.torch.save({"a": torch.full((1, 1), 7.0)}, path)
        row = torch.zeros(1, 8)
        nvmeio.torch.load(path, out={"a": row.as_strided((1, 1), (8, 8), 3)})
        assert row.tolist() == [[0, 0, 0, 7, 0, 0, 0, 0]]

    @pytest.mark.parametrize("kind", ["deflated", "big-endian", "beyond its bytes"])
    def test_unusual_archives_are_loaded_as_by_torch(self, path, kind):
        torch.save({"a": torch.arange(4.0), "b": torch.ones(1000)}, path)
        stranger = path.with_name("stranger")
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(stranger, "w") as new:
            for entry in old.infolist():
                data = old.read(entry)
                if kind == "big-endian" and entry.filename.endswith("byteorder"):
                    data = b"big"
                if kind == "beyond its bytes" and entry.filename.endswith("data.pkl"):
                    # BININT1 4: the number of elements.
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
        if kind == "beyond its bytes":
            # Torch 2.9 leaves the rest as the memory was.
            assert torch.__version__ < (2, 10)
            return
        assert torch.equal(nvmeio.torch.load(stranger, names=["a"])["a"], expected)

    def test_options_of_torch_count_as_for_torch(self, path, monkeypatch):
        torch.save({"a": torch.arange(4)}, path)
        stranger = path.with_name("stranger")
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(stranger, "w") as new:
            for name in old.namelist():
                # As torch before 2.1 wrote it.
                if not name.endswith("byteorder"):
                    new.writestr(name, old.read(name))
        kinds = torch.serialization.LoadEndianness
        for order in (None, kinds.LITTLE, kinds.BIG, kinds.NATIVE):
            torch.serialization.set_default_load_endianness(order)
            try:
                expected = torch.load(stranger)["a"]
                for names in (None, ["a"]):
                    found = nvmeio.torch.load(stranger, names=names)["a"]
                    assert torch.equal(found, expected)
            finally:
                torch.serialization.set_default_load_endianness(None)
        monkeypatch.setattr(config.load, "mmap", True)
        assert torch.equal(nvmeio.torch.load(path)["a"], torch.arange(4))

    def test_errors_of_torch_name_the_file(self, path):
        path.write_text("no file of torch's")
        with pytest.raises(pickle.UnpicklingError) as caught:
            nvmeio.torch.load(path)
        # Errors have notes since Python 3.11.
        notes = getattr(caught.value, "__notes__", [str(path)])
        assert any(str(path) in note for note in notes)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_a_nested_tensor_of_the_file_fills_no_target(self, path, layout):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        nvmeio.torch.save({"a": nested}, path)
        with pytest.raises(ValueError, match=r"'a'.+the tensor in the file is nested"):
            nvmeio.torch.load(path, weights_only=False, out={"a": torch.zeros(5)})

    @pytest.mark.parametrize("kind", ["legacy", "nested", "without maps"])
    def test_files_that_cannot_be_mapped_are_read_as_a_whole(
        self, path, state, kind, monkeypatch
    ):
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
        with pytest.raises(ValueError, match=r"out\['half'\] has the dtype torch.float32"):
            nvmeio.torch.load(path, out=wrong)
        assert not wrong["weight"].any()
        if kind == "nested":
            assert nvmeio.torch.load(path, names=["model"])["model"]["deep"].all()


def test_unpickling_is_restricted(path):
    torch.save({"x": io.BytesIO(b"1")}, path)
    for options in ({}, {"names": ["x"]}):
        with pytest.raises(pickle.UnpicklingError):
            nvmeio.torch.load(path, **options)
    assert nvmeio.torch.load(path, weights_only=False)["x"].read() == b"1"


@pytest.mark.parametrize("options", [{}, {"names": ["weight"]}], ids=["all", "names"])
def test_map_location_is_respected(path, state, options):
    nvmeio.torch.save(state, path)
    found = nvmeio.torch.load(path, map_location="meta", **options)
    assert found["weight"].device.type == "meta"


def test_a_script_module_is_loaded(path):
    module = torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(3))
    torch.jit.save(module, path)
    found = nvmeio.torch.load(path, weights_only=False)
    assert torch.equal(found(torch.ones(3)), module(torch.ones(3)))


def test_torch_writes_and_reads_a_file(path):
    with nvmeio.File(path, "w") as file:
        torch.save({"x": torch.arange(MIB)}, file)
    with nvmeio.File(path) as file:
        assert torch.equal(torch.load(file)["x"], torch.arange(MIB))


def test_a_short_write_of_a_stream_loses_nothing(faulty, default_engine):
    path = faulty / "stream"
    path.touch()
    Faults(path).set(write={"short": 5000, "times": 20})
    with nvmeio.File(path, "w") as stream:
        stream.write(b"x" * (3 * MIB))
        stream.write(b"y" * 100_000)
    Faults(path).set()
    assert path.read_bytes() == b"x" * (3 * MIB) + b"y" * 100_000


@pytest.mark.parametrize("size", [1000, 2 * MIB])
def test_a_failed_write_of_a_stream_leaves_the_position(faulty, default_engine, size):
    path = faulty / "stream"
    path.touch()
    Faults(path).set(write={"full_at": 100})
    with nvmeio.File(path, "w") as stream:
        stream.write(b"12345")
        with pytest.raises(OSError, match=re.escape(str(path))):
            stream.write(b"x" * size)
        assert stream.tell() == 5
    Faults(path).set()


@pytest.mark.parametrize("way", ["save", "load"])
def test_ctrl_c_after_any_call_is_raised(tmp_path, way):
    """And ends no process: torch's writer ends an archive in a destructor."""
    state, path = {str(n): torch.ones(10) for n in range(3)}, tmp_path / "state.pt"
    nvmeio.torch.save(state, path)
    call = {
        "save": lambda: nvmeio.torch.save(state, path),
        "load": lambda: nvmeio.torch.load(path),
    }[way]
    call()

    child = os.fork()
    if not child:
        # What is raised in a destructor of other tests' garbage goes nowhere.
        gc.disable()
        try:
            raised = list(interrupted_after_each_call(call))
            os._exit(0 if all(raised) and len(raised) > 100 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert nvmeio.torch.load(path).keys() == state.keys()


class Interrupted(io.BytesIO):
    """A file whose `count`-th transfer, and later ones, a signal's handler interrupts."""

    def __init__(self, content, count):
        super().__init__(content)
        self.left = count

    def _count(self):
        self.left -= 1
        if self.left <= 0:
            raise KeyboardInterrupt

    def write(self, data):
        self._count()
        return super().write(data)

    def read(self, *size):
        self._count()
        return super().read(*size)

    def readinto(self, buffer):
        self._count()
        return super().readinto(buffer)


@pytest.mark.parametrize("is_noted", [True, False])
def test_an_interrupted_save_raises_what_interrupted_it(is_noted):
    """Torch says that the file has an unexpected position."""

    def save(stream):
        with errors_of(stream) as noting:
            if not is_noted:
                # The handler runs before the first line of what notes the error.
                noting.write = stream.write
            torch.save(torch.ones(1000), noting)

    stream = Interrupted(b"", 3)
    with pytest.raises(KeyboardInterrupt):
        save(stream)
    held = weakref.ref(stream)
    del stream
    gc.collect()
    assert held() is None


def test_an_interrupted_load_raises_what_interrupted_it(path, state):
    """Torch says that the file is corrupted, or goes on."""
    nvmeio.torch.save(state, path)
    stream = Interrupted(path.read_bytes(), 3)
    with pytest.raises(KeyboardInterrupt), errors_of(stream) as noting:
        torch.load(noting)


def test_a_save_after_an_interrupt_raises_its_own_error(path):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            nvmeio.torch.save(lambda: None, path)


def test_parts_are_loaded_in_memory_whatever_the_default_device(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"a": torch.arange(5.0), "b": 3}, path)
    target = torch.zeros(5)
    with torch.device("meta"):
        found = nvmeio.torch.load(path, names=["a"])["a"]
        nvmeio.torch.load(path, out={"a": target})
    assert found.tolist() == target.tolist() == [0, 1, 2, 3, 4]
