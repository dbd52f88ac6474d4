"""``nvmeio inspect`` lists archives and data sets of records, and what they lack."""

import io
import json
import os
import struct
import tarfile

import numpy as np
import pytest

from commands import call_nvmeio, listed


def test_the_files_of_a_tar_archive_are_listed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello")
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(tmp_path / "a.txt", "0001.txt")
    found = listed(path)
    (member,) = found["members"]
    assert (found["format"], member["name"], member["bytes"]) == ("tar", "0001.txt", 5)
    assert path.read_bytes()[member["offset"] :][:5] == b"hello"
    os.truncate(path, member["offset"] + 2)
    assert "is cut short" in call_nvmeio("inspect", path).err


def test_an_index_of_megatron_is_listed(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(bytes(12))
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 2, 3)
    index = head + struct.pack("<2i2q3q", 4, 2, 0, 8, 0, 1, 2)
    (tmp_path / "tokens.idx").write_bytes(index)
    for name in ("tokens.idx", "tokens.bin"):
        found = listed(tmp_path / name)
        (tensor,) = found["tensors"]
        assert (tensor["dtype"], tensor["shape"], tensor["bytes"]) == ("uint16", [6], 12)
        assert found["metadata"] == {"sequences": 2, "documents": 2}
    for nbytes in (20, len(index) - 1):
        (tmp_path / "tokens.idx").write_bytes(index[:nbytes])
        assert "truncated" in call_nvmeio("inspect", tmp_path / "tokens.idx").err


def mds_folder(folder, samples=2):
    """Write an MDS shard, and its index."""
    columns = {"column_names": ["x"], "column_encodings": ["int"], "column_sizes": [8]}
    text = json.dumps(columns).encode()
    begin = 4 * (samples + 2) + len(text)
    places = begin + 8 * np.arange(samples + 1)
    table = np.append(samples, places).astype(np.uint32).tobytes()
    shard = table + text + np.arange(samples).tobytes()
    (folder / "shard.00000.mds").write_bytes(shard)
    raw = {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}}
    described = {
        "samples": samples,
        "raw_data": raw,
        "format": "mds",
        "version": 2,
        **columns,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [described]}))
    return folder / "shard.00000.mds"


def test_an_archive_may_have_no_files(tmp_path):
    path = tmp_path / "shard.tar"
    path.write_bytes(tar_of([]))
    found = listed(path)
    assert (found["format"], found["members"]) == ("tar", [])
    # As a download that was interrupted after its place was reserved.
    os.truncate(path, 2 << 20)
    assert "may be an interrupted download" in call_nvmeio("inspect", path).err
    path.rename(tmp_path / "model.bin")
    assert "begins with zeros only" in call_nvmeio("inspect", tmp_path / "model.bin").err


def test_a_shard_and_a_folder_of_mds_are_listed(tmp_path):
    shard = mds_folder(tmp_path)
    for path in (tmp_path, shard):
        found = listed(path)
        assert found["format"] == "mds"
        assert found["metadata"] == {"samples": 2, "columns": {"x": "int"}}
        (member,) = found["members"]
        assert (member["name"], member["kind"]) == (shard.name, "2 samples")
    os.truncate(shard, shard.stat().st_size - 1)
    assert "an MDS shard that was truncated" in call_nvmeio("inspect", shard).err


@pytest.mark.parametrize("samples", [91, 123, 640, 896, 0x8B1F])
def test_a_shard_may_begin_like_another_file(tmp_path, samples):
    """Like a text, a pickle or gzip: it begins with the number of its samples."""
    found = listed(mds_folder(tmp_path, samples))
    assert (found["format"], found["metadata"]["samples"]) == ("mds", samples)


def tar_of(names, form=tarfile.GNU_FORMAT, **fields):
    """Return an archive of files of 5 bytes each."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 5
            for field, value in fields.items():
                setattr(member, field, value)
            archive.addfile(member, io.BytesIO(b"hello"))
    return stream.getvalue()


TWO = tar_of(["a", "b"])
DAMAGED = {
    "header": (TWO[:1124] + b"7" + TWO[1125:], "has an invalid header", ["a"]),
    "member": (TWO[: 1536 + 2], "a member has 5 bytes, 2 are left", ["a"]),
    "header cut": (TWO[: 1024 + 100], "it ends within a header", ["a"]),
    "end": (TWO[:2048], "has no end-of-archive blocks", ["a", "b"]),
    "zeros": (TWO + bytes(2 << 20), "may be an interrupted download", ["a", "b"]),
    "joined": (TWO + TWO, "other bytes follow, which are not read", ["a", "b"]),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_archive_is_listed_as_far_as_it_can_be_read(tmp_path, kind):
    path = tmp_path / "shard.tar"
    content, words, names = DAMAGED[kind]
    path.write_bytes(content)
    found = call_nvmeio("inspect", path, "--json")
    assert found.status == 1
    assert words in found.err
    said = json.loads(found.out)
    assert [each["name"] for each in said["members"]] == names
    assert words in said["problems"][0]


def old_sparse():
    """Return an archive with a sparse file of GNU's old format, with a block of its map."""
    made = tar_of(["hole", "next"])
    header = bytearray(made[:512])
    header[156:157], header[482], header[483:495] = b"S", 1, b"%011o\0" % (3 << 20)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(512) + made[512:]


def pax_sparse(size, **records):
    """Return an archive with a sparse file of a version of GNU's format for pax headers."""
    said = {f"GNU.sparse.{name}": value for name, value in records.items()}
    said[f"GNU.sparse.{size}"] = str(3 << 20)
    first = tar_of(["hole.0"], tarfile.PAX_FORMAT, pax_headers=said)
    # The two headers, each with a block of contents.
    return first[:2048] + tar_of(["next"])


SPARSE = {
    "old": old_sparse(),
    "0.0": pax_sparse("size", numblocks="1", offset="0", numbytes="5", name="hole"),
    "0.1": pax_sparse("size", map="0,5", name="hole"),
    "1.0": pax_sparse("realsize", major="1", minor="0", name="hole"),
}


@pytest.mark.parametrize("form", SPARSE)
def test_a_sparse_file_is_listed_with_its_own_size(tmp_path, form):
    (tmp_path / "shard.tar").write_bytes(SPARSE[form])
    hole, after = listed(tmp_path / "shard.tar")["members"]
    assert hole == {
        "name": "hole",
        "kind": "a sparse file",
        "bytes": 3 << 20,
        "offset": None,
    }
    assert (after["name"], after["bytes"]) == ("next", 5)


def test_many_long_names_before_one_file_are_read(tmp_path):
    made = tar_of(["n" * 200])
    (tmp_path / "shard.tar").write_bytes(made[:1024] * 2000 + made)
    (member,) = listed(tmp_path / "shard.tar")["members"]
    assert member["name"] == "n" * 200


def test_tokens_of_megatron_that_are_missing_or_short_are_an_error(tmp_path):
    tokens, index = tmp_path / "tokens.bin", tmp_path / "tokens.idx"
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 2, 3)
    index.write_bytes(head + struct.pack("<2i2q3q", 4, 2, 0, 8, 0, 1, 2))
    for content, words in (
        (None, "tokens.bin is missing"),
        (bytes(11), "tokens.bin was truncated: it has 11 bytes, and the index says 12"),
        (bytes(13), "tokens.bin has 13 bytes, and the index says 12"),
    ):
        if content is not None:
            tokens.write_bytes(content)
        found = call_nvmeio("inspect", index)
        assert found.status == 1
        assert words in found.err


def test_shards_of_mds_that_are_missing_or_differ_are_an_error(tmp_path):
    shard = mds_folder(tmp_path)
    content = shard.read_bytes()
    for changed, words in (
        (content[:-1], "was truncated: it has"),
        (b"\1" + content[1:], "is not an MDS shard"),
        (content[:-8] + b"\0" * 16, "and the index says"),
        (content[:8] + b"\xff" * 4 + content[12:], "sample 1 ends before it begins"),
        (None, "is missing"),
    ):
        if changed is None:
            shard.unlink()
        else:
            shard.write_bytes(changed)
        found = call_nvmeio("inspect", tmp_path)
        assert found.status == 1
        assert words in found.err
        assert "mds: 1 file" in found.out


def test_a_shard_of_mds_may_be_there_only_compressed(tmp_path):
    shard = mds_folder(tmp_path)
    index = tmp_path / "index.json"
    said = json.loads(index.read_text())
    packed = {"basename": f"{shard.name}.zstd", "bytes": 3, "hashes": {}}
    said["shards"][0] |= {"compression": "zstd", "zip_data": packed}
    index.write_text(json.dumps(said))
    shard.unlink()
    assert f"{shard.name}.zstd is missing" in call_nvmeio("inspect", tmp_path).err
    (tmp_path / f"{shard.name}.zstd").write_bytes(b"abc")
    (member,) = listed(tmp_path)["members"]
    assert (member["kind"], member["bytes"]) == ("2 samples, compressed", 3)
