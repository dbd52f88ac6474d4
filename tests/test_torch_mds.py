"""Hand-written MDS shards; tests/formats has those that streaming wrote."""

import errno
import json
import os
import pickle
import struct
import tracemalloc
from decimal import Decimal

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
import nvmeio  # noqa: E402
from helpers import POINTER, pattern  # noqa: E402
from nvmeio.torch import MDSDataset  # noqa: E402
from nvmeio.torch.data import _mds  # noqa: E402

SIZES = {"int": 8, "uint8": 1, "float16": 2, "ndarray:float32:2": 8}


def shard_bytes(samples, config=b"{}"):
    """Return a shard of samples, which are bytes."""
    lengths = [len(sample) for sample in samples]
    begin = 4 * (len(samples) + 2) + len(config)
    offsets = np.cumsum([begin, *lengths]).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + config + b"".join(samples)


def sample_bytes(*values, fixed=()):
    """Return a sample of values, which are bytes; some have a stored size."""
    sizes = [len(value) for place, value in enumerate(values) if place not in fixed]
    return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values)


def write(folder, shards, columns, **changes):
    """Write a dataset of shards, given as their bytes and numbers of samples."""
    folder.mkdir(exist_ok=True)
    entries = []
    for number, (content, samples) in enumerate(shards):
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(content)
        entry = {
            "version": 2,
            "format": "mds",
            "column_names": list(columns),
            "column_encodings": list(columns.values()),
            "column_sizes": [SIZES.get(kind) for kind in columns.values()],
            "compression": None,
            "hashes": [],
            "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
            "samples": samples,
            "size_limit": 1 << 26,
            "zip_data": None,
        }
        entries.append({**entry, **changes})
    index = {"version": 2, "shards": entries}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def make(folder, counts=(5, 0, 12, 3)):
    """Write samples of a number and bytes; return them as the dataset returns them."""
    expected, shards, number = [], [], 0
    for count in counts:
        samples = []
        for _ in range(count):
            content = pattern(number * 700 % 5003, number)
            samples.append(sample_bytes(struct.pack("<q", number), content, fixed=[0]))
            expected.append({"number": number, "content": content})
            number += 1
        shards.append((shard_bytes(samples), count))
    write(folder, shards, {"number": "int", "content": "bytes"})
    return expected


@pytest.fixture
def data(tmp_path):
    """A dataset of several shards, and its samples."""
    folder = tmp_path / "data"
    return folder, make(folder)


class TestSamples:
    def test_shards_follow_each_other(self, data):
        folder, expected = data
        dataset = MDSDataset(folder)
        assert len(dataset) == len(expected) == 20
        assert dataset.__getitems__(range(20)) == expected
        assert [dataset[i] for i in (-1, 0, 5, 16)] == [expected[i] for i in (-1, 0, 5, 16)]

    def test_a_split_is_a_folder(self, data):
        folder, expected = data
        assert MDSDataset(folder.parent, "data")[3] == expected[3]

    @pytest.mark.parametrize(
        "kinds", ["int bytes uint8", "bytes int", "int bytes", "int uint8", "bytes int str"]
    )
    def test_columns_are_in_any_order(self, tmp_path, kinds):
        stored = {"int": b"\6" + bytes(7), "uint8": b"\7", "str": b"text"}
        stored["bytes"] = content = pattern(70_000, 1)
        values = {"int": 6, "uint8": 7, "str": "text", "bytes": content}
        fixed = [place for place, kind in enumerate(kinds.split()) if kind in SIZES]
        sample = sample_bytes(*map(stored.get, kinds.split()), fixed=fixed)
        columns = {kind: kind for kind in kinds.split()}
        dataset = MDSDataset(write(tmp_path, [(shard_bytes([sample] * 3), 3)], columns))
        expected = {kind: values[kind] for kind in kinds.split()}
        assert dataset.__getitems__([2, 0, 2]) == [expected] * 3

    def test_more_shards_than_open_files_are_read(self, tmp_path):
        expected = make(tmp_path, [1, 2] * 100)
        dataset = MDSDataset(tmp_path)
        order = np.random.default_rng(0).permutation(300).tolist()
        assert dataset.__getitems__(order) == [expected[number] for number in order]

    @pytest.mark.parametrize("shards", [[], [(shard_bytes([]), 0)]])
    def test_a_dataset_may_be_empty(self, tmp_path, shards):
        dataset = MDSDataset(write(tmp_path, shards, {"number": "int"}))
        assert len(dataset) == 0
        with pytest.raises(IndexError, match="the dataset is empty: no samples in"):
            dataset[0]

    @pytest.mark.parametrize(
        ("kind", "content", "expected"),
        [
            ("str", "ü".encode(), "ü"),
            ("json", b'{"a": [1, null]}', {"a": [1, None]}),
            ("str_int", b"-123456789012345678901", -123456789012345678901),
            ("str_float", b"0.1", 0.1),
            ("str_decimal", b"0.10", Decimal("0.10")),
            ("uint8", b"\xff", np.uint8(255)),
            ("float16", b"\0\x3c", np.float16(1)),
            ("ndarray", b"\x11" + b"\x05\x02\0" + b"\xff\xff\1\0", [-1, 1]),
            ("ndarray:uint16", b"\x08\1\3" + b"\1\0\2\0\3\0", [[1, 2, 3]]),
            ("ndarray:float32:2", struct.pack("<2f", 1, -2), [1, -2]),
        ],
    )
    def test_values_are_decoded(self, tmp_path, kind, content, expected):
        sample = sample_bytes(content, fixed=[0] if kind in SIZES else [])
        dataset = MDSDataset(write(tmp_path, [(shard_bytes([sample]), 1)], {"x": kind}))
        (found,) = dataset[0].values()
        if isinstance(expected, list):
            assert found.tolist() == expected
            found[...] = 0
        else:
            assert (type(found), found) == (type(expected), expected)

    def test_decoded_arrays_have_separate_memory(self, tmp_path):
        samples = [struct.pack("<B2f", 7, number, 0) for number in range(3)]
        columns = {"before": "uint8", "x": "ndarray:float32:2"}
        dataset = MDSDataset(write(tmp_path, [(shard_bytes(samples), 3)], columns))
        arrays = [sample["x"] for sample in dataset.__getitems__([0, 1])]
        assert all(array.flags.aligned and array.flags.writeable for array in arrays)
        assert [array.tolist() for array in arrays] == [[0, 0], [1, 0]]


class TestLoaders:
    def test_an_index_takes_twelve_bytes_a_sample(self, tmp_path):
        """More only for the table of a shard, and for the part that is being checked."""
        count = 4_000_000
        table = np.full(count + 2, 4 * (count + 2), "<u4")
        table[0] = count
        write(tmp_path / "data", [(table.tobytes(), count)], {})
        tracemalloc.start()
        try:
            dataset = MDSDataset(tmp_path / "data")
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(dataset) == count
        assert held < 12.1 * count
        assert peak < 32 * count

    def test_a_shard_that_is_replaced_meanwhile_is_refused(self, data, monkeypatch):
        """Between the reads of its table and of its samples."""
        folder, _ = data
        tables = _mds._tables

        def replacing(shards):
            yield from tables(shards)
            path = shards[-1].path
            with open(path, "rb") as file:
                content = file.read()
            with open(path + ".new", "wb") as file:
                file.write(content[:-1] + b"?")
            os.replace(path + ".new", path)

        monkeypatch.setattr(_mds, "_tables", replacing)
        with pytest.raises(OSError, match="was replaced or changed since") as caught:
            MDSDataset(folder)
        assert caught.value.errno == errno.ESTALE

    def test_a_dataset_is_pickled_with_absolute_paths(self, data, monkeypatch):
        folder, expected = data
        monkeypatch.chdir(folder.parent)
        dataset = MDSDataset(folder.name)
        monkeypatch.chdir("/")
        assert pickle.loads(pickle.dumps(dataset))[11] == expected[11]


def refused(folder, message, **options):
    """Assert that a dataset is refused."""
    with pytest.raises(ValueError, match=message):
        MDSDataset(folder, **options)


class TestIndex:
    @pytest.mark.parametrize(
        "text",
        [
            *("", "{", "[]", "5", "{}", '{"version": 2}', '{"version": 2, "shards": {}}'),
            *('{"version": 1, "shards": []}', "[" * 100_000, '"\udc80"'),
            '{"version": 2, "shards": [], "shards": []}',
        ],
        ids=range(11),
    )
    def test_an_invalid_index_is_refused(self, tmp_path, text):
        (tmp_path / "index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        refused(tmp_path, r"index.json' is not an index of MDS shards")

    def test_a_pointer_in_place_of_a_file_is_named(self, data):
        folder, _ = data
        (folder / "shard.00000.mds").write_bytes(POINTER)
        refused(folder, r"00000\.mds' has \d+: it is a Git LFS pointer")
        (folder / "index.json").write_bytes(POINTER)
        refused(folder, "is not an index of MDS shards: it is a Git LFS pointer")

    def test_a_missing_index_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"index\.json"):
            MDSDataset(tmp_path)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("version", 1, "is of format 'mds', version 1"),
            ("version", True, "has version True, not of type int"),
            ("format", "csv", "is of format 'csv'"),
            ("samples", 1.0, "has samples 1.0, not of type int"),
            ("samples", True, "has samples True"),
            ("samples", -1, "has -1 samples; it must be 0 or more"),
            ("samples", 10**30, "has 1000000000000000000000000000000 samples, too many"),
            ("column_names", ["a", "a"], "has the columns"),
            ("column_names", ["a"], "has the columns"),
            ("column_names", "ab", "has column_names 'ab', not of type list"),
            ("column_names", [["a"], "b"], "unhashable"),
            ("column_names", [1, 2], "has the column 1 of encoding"),
            ("column_encodings", ["int", "int8:3"], "'int8:3', which is unknown"),
            ("column_encodings", ["int", "ndarray:U9"], "which is unknown"),
            ("column_encodings", ["int", "ndarray:int8:-1"], r"of the shape \(-1,\)"),
            (
                "column_encodings",
                ["int", "ndarray:int8:x"],
                "'ndarray:int8:x', invalid lit",
            ),
            (
                "column_encodings",
                ["int", "pkl"],
                "can run any code; pass allow_pickle=True",
            ),
            ("column_encodings", ["int", None], "of encoding None"),
            (
                "column_sizes",
                [4, None],
                "has the column 'number' of size 4, and 'int' has 8",
            ),
            ("column_sizes", [8, 100], "of size 100, and 'bytes' has None"),
            ("column_sizes", [8], "has the columns"),
            ("raw_data", None, "has raw_data None"),
            ("raw_data", {"basename": "shard.00000.mds"}, "has no 'bytes'"),
            ("raw_data", {"basename": "shard.00000.mds", "bytes": 9}, "it is incomplete"),
            *(
                ("raw_data", {"basename": name, "bytes": 9}, "which is not in the folder")
                for name in ("", "/etc/passwd", "../x", "a/../../x", "..", "a\0b")
            ),
            ("raw_data", {"basename": 5, "bytes": 9}, "has basename 5, not of type str"),
        ],
        ids=str,
    )
    def test_a_hostile_index_is_refused(self, tmp_path, field, value, message):
        sample = sample_bytes(bytes(8), b"content", fixed=[0])
        columns = {"number": "int", "content": "bytes"}
        write(tmp_path, [(shard_bytes([sample]), 1)], columns, **{field: value})
        before = nvmeio.default_handle().stats()["requests"]
        refused(tmp_path, message)
        # Only the index was read, no shard.
        assert nvmeio.default_handle().stats()["requests"] == before + 1

    def test_a_shard_entry_that_is_no_object_is_refused(self, tmp_path):
        text = '{"version": 2, "shards": [[]]}'
        (tmp_path / "index.json").write_text(text)
        refused(tmp_path, "shard 0 of .*index.json'")

    def test_a_compressed_shard_is_named(self, tmp_path):
        folder = write(
            tmp_path,
            [(shard_bytes([]), 0)],
            {"number": "int"},
            compression="zstd",
            zip_data={"basename": "shard.00000.mds.zstd", "bytes": 5, "hashes": {}},
        )
        assert len(MDSDataset(folder)) == 0
        (folder / "shard.00000.mds").unlink()
        refused(folder, r"is compressed, '.*\.zstd': decompress it to '.*00000\.mds'")

    def test_a_missing_shard_is_named(self, data):
        folder, _ = data
        (folder / "shard.00002.mds").unlink()
        with pytest.raises(FileNotFoundError, match=r"shard\.00002\.mds"):
            MDSDataset(folder)


class TestShards:
    @pytest.mark.parametrize(
        ("place", "value", "message"),
        [
            (0, 2, "has 2 samples; its index says 3"),
            (0, 2**32 - 1, "has 4294967295 samples"),
            (1, 19, "has samples from byte 19 to 52; they must be from 20 to 52"),
            (1, 2**32 - 1, "has a sample that ends before it begins"),
            (4, 53, "has samples from byte 22 to 53"),
            (4, 2**32 - 1, "has samples from byte 22 to 4294967295"),
            (2, 2**32 - 1, "has a sample that ends before it begins"),
            (3, 23, "has a sample that ends before it begins"),
        ],
    )
    def test_a_hostile_table_is_refused(self, tmp_path, place, value, message):
        content = bytearray(shard_bytes([bytes(10)] * 3))
        content[4 * place : 4 * place + 4] = struct.pack("<I", value)
        write(tmp_path, [(content, 3)], {"content": "bytes"})
        refused(tmp_path, rf"shard\.00000\.mds' {message}")

    @pytest.mark.parametrize(
        ("kind", "sample", "message"),
        [
            ("bytes", b"\1\0", "2 bytes are less than its sizes take"),
            ("bytes", struct.pack("<I", 9) + bytes(8), "12 bytes for sizes that take 13"),
            (
                "bytes",
                struct.pack("<I", 2**32 - 1),
                "4 bytes for sizes that take 4294967299",
            ),
            ("bytes", struct.pack("<I", 1) + bytes(8), "12 bytes for sizes that take 5"),
            ("int", bytes(7), "7 bytes for sizes that take 8"),
            ("str", sample_bytes(b"\xff"), "column 'x': UnicodeDecodeError"),
            ("json", sample_bytes(b"{"), "column 'x': JSONDecodeError"),
            ("json", sample_bytes(b"[" * 100_000), "column 'x': RecursionError"),
            ("str_int", sample_bytes(b"1" * 10_000), "column 'x': ValueError"),
            ("ndarray", sample_bytes(b""), "column 'x': IndexError"),
            ("ndarray", sample_bytes(b"\x07\4\1\0"), "column 'x': KeyError"),
            ("ndarray", sample_bytes(b"\x08\x07" + b"\xff" * 8), "0 bytes for an array"),
            ("ndarray", sample_bytes(b"\x08\xff" + b"\xff" * 9), "column 'x': ValueError"),
            (
                "ndarray:int16",
                sample_bytes(b"\4\2" + bytes(3)),
                "3 bytes for an array of int",
            ),
        ],
    )
    def test_a_hostile_sample_is_refused_and_named(self, tmp_path, kind, sample, message):
        columns = {"x": kind}
        shards = [(shard_bytes([]), 0), (shard_bytes([sample]), 1)]
        dataset = MDSDataset(write(tmp_path, shards, columns))
        pattern = rf"sample 0, in '.*shard\.00001\.mds', is damaged: .*{message}"
        with pytest.raises(ValueError, match=pattern):
            dataset[0]

    def test_a_sample_that_is_cut_short_is_refused(self, tmp_path):
        sample = sample_bytes(bytes(8), b"content", bytes(8), fixed=[0, 2])
        samples = [sample[:end] for end in range(len(sample))]
        columns = {"a": "int", "b": "bytes", "c": "int"}
        shard = shard_bytes(samples), len(samples)
        dataset = MDSDataset(write(tmp_path, [shard], columns))
        for row in range(len(samples)):
            with pytest.raises(ValueError, match=f"sample {row}, .* damaged: {row} bytes"):
                dataset[row]

    def test_a_pickle_is_loaded_only_if_allowed(self, tmp_path):
        sample = sample_bytes(pickle.dumps({1, 2}))
        write(tmp_path, [(shard_bytes([sample]), 1)], {"x": "pkl"})
        refused(tmp_path, "has the column 'x' of encoding 'pkl', which can run any code")
        assert MDSDataset(tmp_path, allow_pickle=True)[0] == {"x": {1, 2}}

    @pytest.mark.parametrize(
        ("kind", "content", "message"),
        [
            (
                "pil",
                struct.pack("<3I", 2**20, 2**20, 1) + b"L" + bytes(9),
                "9 bytes for an im",
            ),
            ("pil", b"short", "error"),
            ("png", b"no image", "UnidentifiedImageError"),
            (
                "list[png]",
                struct.pack("<2I", 0, 2**32 - 1),
                "8 bytes for a list of 4294967295",
            ),
            ("list[png]", struct.pack("<3I", 0, 1, 5), "12 bytes for a list of 17 bytes"),
            (
                "jpeg_array",
                struct.pack("<3I", 2, 2**32 - 1, 2**32 - 1),
                "12 bytes for a list",
            ),
        ],
    )
    def test_a_hostile_image_is_refused(self, tmp_path, kind, content, message):
        pytest.importorskip("PIL", reason="Pillow is not installed")
        shard = shard_bytes([sample_bytes(content)])
        dataset = MDSDataset(write(tmp_path, [(shard, 1)], {"x": kind}))
        with pytest.raises(ValueError, match=f"sample 0, .*column 'x': .*{message}"):
            dataset[0]
