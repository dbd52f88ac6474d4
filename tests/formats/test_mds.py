"""Read shards that MosaicML's streaming wrote, and compare with its own reader."""

import random
from decimal import Decimal

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
# It imports streaming.
peer = pytest.importorskip("streaming_peer", reason="streaming is not installed")
Image = pytest.importorskip("PIL.Image", reason="streaming is not installed")

from streaming.base.format.mds.encodings import get_mds_encodings  # noqa: E402

from nvmeio.torch import MDSDataset  # noqa: E402

COUNT = 60


def image(number, mode="RGB"):
    """Return an image."""
    size = (number % 7 + 1, number % 5 + 1)
    pixels = random.Random(number).randbytes(
        size[0] * size[1] * len(Image.new(mode, (1, 1)).tobytes())
    )
    return Image.frombytes(mode, size, pixels)


def packed(number, form="JPEG"):
    """Return the file of an image."""
    import io

    file = io.BytesIO()
    image(number).save(file, form)
    return file.getvalue()


def array(dtype, shape):
    """Return a function that makes an array."""
    return lambda number: (
        (np.arange(np.prod(shape)) * number % 120).reshape(shape).astype(dtype)
    )


# Functions that make the value of each encoding for sample `number`.
VALUES = {
    "bytes": lambda number: random.Random(number).randbytes(number * 50),
    "str": lambda number: "text ü " * number,
    "int": lambda number: -(2**62) + number,
    "json": lambda number: {"a": [number, None, 1.5], "ü": {}},
    "str_int": lambda number: -(10**number),
    "str_float": lambda number: number / 7,
    "str_decimal": lambda number: Decimal(number) / 7,
    "pil": lambda number: image(number, ("RGB", "L", "RGBA")[number % 3]),
    "jpeg": image,
    "png": image,
    "jpeg_array": lambda number: [packed(i) for i in range(number % 3 + 1)],
    "jpegarray": lambda number: [packed(i) for i in range(number % 3 + 1)],
    "list[pil]": lambda number: [image(i) for i in range(number % 4)],
    "list[jpeg]": lambda number: [image(i) for i in range(number % 4)],
    "list[png]": lambda number: [image(i) for i in range(number % 4)],
    "pkl": lambda number: {"set": {number}, "array": (1, 2)},
    "ndarray": lambda number: array(
        ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")[number % 11],
        ((3,), (2, 300), (1, 1, 70_000), (4, 1, 2, 1))[number % 4],
    )(number),
    "ndarray:float16": lambda number: array("f2", (number + 1, 2))(number),
    "ndarray:int64:2,3": array("i8", (2, 3)),
    "ndarray:uint8:5": array("u1", (5,)),
    **{
        name: lambda number, name=name: np.dtype(name).type(number * 1.5)
        for name in (
            *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
            *("float16", "float32", "float64"),
        )
    },
}


def write(folder, columns, count=COUNT, **options):
    """Write a dataset by streaming's writer."""
    options = {"size_limit": 1 << 15, **options}
    with peer.streaming.MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for number in range(count):
            writer.write({name: VALUES[kind](number) for name, kind in columns.items()})


def same(ours, theirs):
    """Return whether two values are equal and of the same type."""
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if isinstance(theirs, Image.Image):
        return (type(ours), ours.mode, ours.size, ours.tobytes()) == (
            *(type(theirs), theirs.mode, theirs.size),
            theirs.tobytes(),
        )
    return type(ours) is type(theirs) and ours == theirs


def assert_same(folder, reader, **options):
    """Assert that all samples equal the reader's, read one by one and as a batch."""
    dataset = MDSDataset(folder, **options)
    order = np.random.default_rng(0).permutation(len(reader)).tolist()
    assert len(dataset) == len(order)
    for place, sample in zip(order, dataset.__getitems__(order), strict=True):
        theirs = reader[place]
        for ours in (sample, dataset[place]):
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                assert same(ours[name], value), (place, name)


def test_every_encoding_of_streaming_is_tested():
    assert {kind.partition(":")[0] for kind in VALUES} == get_mds_encodings()


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_an_encoding_equal_streamings(tmp_path, kind):
    write(tmp_path / "data", {"value": kind, "behind": "bytes"})
    reader = peer.streaming.LocalDataset(local=str(tmp_path / "data"))
    assert_same(tmp_path / "data", reader, allow_pickle=kind == "pkl")


def test_samples_of_all_columns_equal_streamings(tmp_path):
    columns = {f"{number % 3}{kind}": kind for number, kind in enumerate(VALUES)}
    write(tmp_path / "train", columns)
    reader = peer.streaming.LocalDataset(local=str(tmp_path), split="train")
    assert len(reader.shards) > 5
    assert_same(tmp_path, reader, split="train", allow_pickle=True)


def test_samples_are_in_the_order_of_a_stream(tmp_path):
    write(tmp_path, {"number": "int32", "text": "str"})
    stream = peer.streaming.StreamingDataset(local=str(tmp_path), batch_size=1)
    expected = [sample["number"] for sample in stream]
    dataset = MDSDataset(tmp_path)
    assert [dataset[i]["number"] for i in range(COUNT)] == expected


@pytest.mark.parametrize("compression", ["zstd", "gz", "br:1"])
def test_a_compressed_dataset_is_read_once_it_is_decompressed(tmp_path, compression):
    write(tmp_path, {"text": "str"}, compression=compression, hashes=["sha1", "xxh64"])
    with pytest.raises(
        ValueError, match=r"shard 0 of .* is compressed, .*decompress it to"
    ):
        MDSDataset(tmp_path)
    stream = peer.streaming.StreamingDataset(local=str(tmp_path), batch_size=1)
    expected = [sample["text"] for sample in stream]
    dataset = MDSDataset(tmp_path)
    assert [sample["text"] for sample in dataset.__getitems__(range(COUNT))] == expected


def test_a_merged_index_leads_into_subfolders(tmp_path):
    for number in range(3):
        write(tmp_path / f"part{number}", {"number": "int"}, 10 + number)
    peer.streaming.base.util.merge_index(str(tmp_path), keep_local=True)
    reader = peer.streaming.LocalDataset(local=str(tmp_path))
    assert len(reader) == 33
    assert_same(tmp_path, reader)


def test_a_dataset_may_be_empty(tmp_path):
    write(tmp_path, {"number": "int"}, 0)
    assert len(MDSDataset(tmp_path)) == 0
