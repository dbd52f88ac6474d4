"""Samples of tar archives, and the index that is saved beside an archive."""

import gzip
import io
import itertools
import json
import logging
import os
import pickle
import re
import shutil
import tarfile
import time
import tracemalloc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
from helpers import POINTER, pattern  # noqa: E402
from nvmeio.safetensors.numpy import load_file, save_file  # noqa: E402
from nvmeio.torch import BatchStream, TarDataset  # noqa: E402
from nvmeio.torch.data import _tar, _tar_index  # noqa: E402
from nvmeio.torch.data._tar_index import _key_and_suffix  # noqa: E402

FORMATS = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}


def member(name, content=b"", kind=tarfile.REGTYPE, **fields):
    """Return a file as a member of an archive."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def write(path, members, kind="pax"):
    """Write an archive with Python's tarfile."""
    with tarfile.open(path, "w", format=FORMATS[kind]) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return path


def block(name=b"a.txt", size=b"%011o\0" % 0, kind=b"0", rest=b""):
    """Return a hand-written header."""
    header = bytearray(512)
    header[: len(name)] = name
    header[100:108] = b"0000644\0"
    header[124:136] = size
    header[156:157] = kind
    header[257:265] = b"ustar\00000"
    header[345 : 345 + len(rest)] = rest
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def padded(content):
    """Return bytes padded to the end of a block."""
    return content + bytes(-len(content) % 512)


def pax(*records):
    """Return a hand-written pax header."""
    content = b"".join(records)
    return block(b"pax", b"%011o\0" % len(content), b"x") + padded(content)


END = bytes(1024)


def without_url(samples):
    """Return samples without the path of their archive."""
    return [
        {name: value for name, value in sample.items() if name != "__url__"}
        for sample in samples
    ]


def samples_of(path, **options):
    """Return all samples of an archive."""
    dataset = TarDataset(path, **options)
    return without_url(dataset.__getitems__(range(len(dataset))))


def make_shard(path, count=20, seed=0):
    """Write an archive of samples; return them as the dataset returns them."""
    members, expected = [], []
    for number in range(count):
        sample = {
            "jpg": pattern(977 * number % 9001, seed + number),
            "cls": str(number).encode(),
        }
        # Each archive has other numbers in its names.
        if seed % 2:
            sample = dict(reversed(sample.items()))
        key = f"{seed}/{number:04}"
        members += [member(f"{key}.{name}", one) for name, one in sample.items()]
        expected.append({"__key__": key, "__url__": str(path), **sample})
    write(path, members)
    return expected


@pytest.fixture
def shards(tmp_path):
    """Three archives, and their samples."""
    paths = [tmp_path / f"shard-{number}.tar" for number in range(3)]
    expected = [make_shard(path, 20 + 5 * i, i) for i, path in enumerate(paths)]
    return paths, list(itertools.chain.from_iterable(expected))


@pytest.fixture
def shard(tmp_path):
    """An archive that is older than any index made of it."""
    path = tmp_path / "shard.tar"
    make_shard(path)
    past = time.time_ns() - 10**9
    os.utime(path, ns=(past, past))
    return path


class TestSamples:
    @pytest.mark.parametrize("kind", FORMATS)
    def test_files_with_one_name_are_a_sample(self, tmp_path, kind):
        # A name and a folder of 70 letters need the prefix field of a ustar header.
        names = ["a", "folder/b", "n" * 70 + "/" + "m" * 70, "ü"]
        if kind != "ustar":
            names.append("x" * 80 + "/" + "y" * 300)
        members, expected = [], []
        for number, name in enumerate(names):
            sample = {"jpg": pattern(500 + number), "seg.png": b"", "txt": b"t" * 512}
            # Python's tarfile adds a pax header for such a time.
            members += [
                member(f"{name}.{field}", one, mtime=1.5 if kind == "pax" else 1)
                for field, one in sample.items()
            ]
            expected.append({"__key__": name, **sample})
        assert samples_of(write(tmp_path / "a.tar", members, kind)) == expected

    def test_names_are_split_as_webdataset_splits_them(self):
        pattern = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
        for size in range(10):
            for letters in itertools.product("a./", repeat=size):
                path = "".join(letters)
                found = pattern.match(path)
                assert _key_and_suffix(path) == (found and found.groups())

    def test_a_sample_in_two_places_is_refused(self, tmp_path):
        names = ["a.X", "a.y", "b.x", "c.x", "a.z", "a.b/c.x.Y", "a.b/c.z"]
        path = write(tmp_path / "a.tar", [member(name, b"1") for name in names])
        with pytest.raises(
            ValueError, match="sample 'a' at two places, as samples 0 and 3"
        ):
            samples_of(path)
        path = write(path, [member(name, b"1") for name in names if name != "a.z"])
        assert [sample["__key__"] for sample in samples_of(path)] == [
            "a",
            "b",
            "c",
            "a.b/c",
        ]

    def test_keys_of_one_hash_are_two_samples(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_tar_index, "hash", lambda key: len(key), raising=False)
        path = write(tmp_path / "a.tar", [member(f"{key}.x", b"1") for key in "abc"])
        assert [sample["__key__"] for sample in samples_of(path)] == ["a", "b", "c"]

    def test_times_in_headers_of_gnu_are_no_folder(self, tmp_path):
        header = bytearray(block(b"a.txt", b"%011o\0" % 5, rest=b"15112160463\0" * 2))
        header[257:265] = b"ustar  \0"
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        (tmp_path / "a.tar").write_bytes(bytes(header) + padded(b"12345") + END)
        assert samples_of(tmp_path / "a.tar") == [{"__key__": "a", "txt": b"12345"}]

    def test_other_members_are_left_out(self, tmp_path):
        members = [
            member("folder.d", kind=tarfile.DIRTYPE),
            member("a.txt", b"first"),
            member("__meta.data__", b"{}"),
            member("a.link", kind=tarfile.SYMTYPE, linkname="a.txt"),
            member("a.hard", kind=tarfile.LNKTYPE, linkname="a.txt"),
            member("a.fifo", kind=tarfile.FIFOTYPE),
            member("README", b"x" * 600),
            member("__skipped__/b.txt", b"1"),
            member(".hidden", b"1"),
            member("a.other", b"x" * 700, kind=b"Z"),
            member("a.json", b"second"),
        ]
        path = write(tmp_path / "a.tar", members, "ustar")
        expected = [{"__key__": "a", "txt": b"first", "json": b"second"}]
        assert samples_of(path) == expected

    def test_archives_follow_each_other(self, shards):
        paths, expected = shards
        dataset = TarDataset(paths)
        assert len(dataset) == len(expected) == 75
        assert dataset.__getitems__(range(75)) == expected
        assert dataset[-1] == expected[-1]
        assert [dataset[i] for i in (40, 3, 20)] == [expected[i] for i in (40, 3, 20)]

    def test_one_name_in_two_archives_is_two_samples(self, tmp_path):
        path = write(tmp_path / "a.tar", [member("a.x", b"1")])
        assert samples_of([path, path]) == 2 * [{"__key__": "a", "x": b"1"}]

    @pytest.mark.parametrize(
        "headers",
        [
            [block(size=b"\x80" + (5).to_bytes(11, "big"))],
            [block(size=b"          5 ")],
            [block(size=b"000000000005")],
            [pax(b"9 size=5\n"), block()],
            [pax(b"22 path=some/a.longer\n"), block(b"x", b"5".zfill(11) + b"\0")],
            [
                pax(b"20 path=first/a.txt\n"),
                pax(b"19 path=second.txt\n", b"9 size=5\n"),
                block(),
            ],
            [
                block(b"g", b"%011o\0" % 15, b"g") + padded(b"15 comment=any\n"),
                block(size=b"5".ljust(12)),
            ],
            [block(b"a.link", b"%011o\0" % 600, b"2"), block(size=b"5".ljust(12))],
        ],
        ids=["256", "spaces", "no NUL", "pax size", "pax path", "two", "global", "link"],
    )
    def test_headers_are_read_as_by_tarfile(self, tmp_path, headers):
        path = tmp_path / "a.tar"
        path.write_bytes(b"".join(headers) + padded(b"12345") + END)
        (sample,) = samples_of(path)
        with tarfile.open(path) as archive:
            info = archive.getmembers()[-1]
            key, _, name = info.name.partition(".")
            assert sample == {"__key__": key, name: archive.extractfile(info).read()}
        assert sample[name] == b"12345"

    def test_a_checksum_of_signed_bytes_is_accepted(self, tmp_path):
        header = bytearray(block("ü.txt".encode()))
        total = (
            int(np.frombuffer(header, np.int8).sum(dtype=int))
            - sum(header[148:156])
            + 8 * 32
        )
        header[148:156] = b"%06o\0 " % total
        (tmp_path / "a.tar").write_bytes(header + END)
        assert samples_of(tmp_path / "a.tar") == [{"__key__": "ü", "txt": b""}]

    def test_members_beyond_8_gib_are_found(self, tmp_path):
        path = tmp_path / "a.tar"
        with path.open("wb") as file:
            for name, size in (("big", 9 << 30), ("middle", 5 << 20), ("small", 3)):
                info, _ = member(f"{name}.bin")
                info.size = size
                file.write(info.tobuf(tarfile.GNU_FORMAT))
                file.seek(-(-size // 512) * 512, os.SEEK_CUR)
            file.write(END)
        dataset = TarDataset(path)
        assert [dataset[i]["__key__"] for i in (-2, -1)] == ["middle", "small"]
        assert dataset[-1]["bin"] == bytes(3)

    def test_an_archive_may_have_no_sample(self, tmp_path):
        assert samples_of(write(tmp_path / "a.tar", [])) == []


GOOD = block() + END
DAMAGED = {
    "gzip": (gzip.compress(GOOD), "is not a tar archive: it is compressed by gzip"),
    "zstd": (
        b"\x28\xb5\x2f\xfd" + bytes(600),
        "is not a tar archive: it is compressed by zstd",
    ),
    "text": (b"text" * 200, "is not a tar archive: it is a text"),
    "pointer": (POINTER, "is not a tar archive: it is a Git LFS pointer"),
    "page": (b"<html>" * 200, "is not a tar archive: it is a page of HTML"),
    "short": (GOOD[:9], "is cut short: it ends within a header"),
    "empty": (b"", "is not a tar archive: it is empty"),
    "cut header": (GOOD[:512] + GOOD[:100], "is cut short: it ends within a header"),
    "cut data": (
        block(size=b"%011o\0" % 600) + bytes(512),
        "is cut short: a member has 600 bytes, 512 are left",
    ),
    "checksum": (
        GOOD[:512] + b"x" + GOOD[1:],
        r"has an invalid header: .* \(at byte 512\)",
    ),
    "size": (block(size=b"12x".ljust(12)) + END, "is not a tar archive"),
    "negative": (block(size=b"\xff" * 12) + END, "is not a tar archive"),
    "minus": (block(size=b"-1".ljust(12)) + END, "is not a tar archive"),
    "huge": (block(size=b"\x80" + b"\xff" * 11) + END, "is cut short: a member has"),
    "sparse": (block(kind=b"S") + END, "has a sparse file, 'a.txt'"),
    "pax sparse": (pax(b"22 GNU.sparse.major=1\n") + GOOD, "has a sparse file"),
    "pax length": (pax(b"99 path=a\n") + GOOD, "has an invalid pax header"),
    "pax number": (pax(b"x path=a\n") + GOOD, "has an invalid pax header"),
    "pax zero": (pax(b"0 path=a\n") + GOOD, "has an invalid pax header"),
    "pax minus": (pax(b"-1 path=a\n") + GOOD, "has an invalid pax header"),
    "pax size": (
        pax(b"11 size=-5\n") + GOOD,
        "has a member of '-5' bytes",
    ),
    "pax huge": (
        pax(b"26 size=99999999999999999\n") + GOOD,
        "is cut short: a member has 9+ bytes",
    ),
    "extended": (
        block(size=b"77777777777\0", kind=b"L") + END,
        "has an extended header of 8589934591",
    ),
    "extended cut": (block(size=b"%011o\0" % 9999, kind=b"x") + END, "is cut short"),
    "extended last": (pax(b"10 path=a\n"), "ends behind the header"),
    "global size": (
        block(b"g", b"%011o\0" % 9, b"g") + padded(b"9 size=5\n") + GOOD,
        "gives all its members one name or size",
    ),
    "twice": (block() + GOOD, r"has two files 'txt' of the sample 'a'"),
    "case": (block(b"a.TXT") + GOOD, r"has two files 'txt' of the sample 'a'"),
    "reserved": (block(b"a.__key__") + END, "has two files '__key__'"),
}


class TestDamaged:
    @pytest.mark.parametrize("name", DAMAGED)
    def test_a_damaged_archive_is_refused(self, tmp_path, name):
        content, message = DAMAGED[name]
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(ValueError, match=f"^the archive .*a.tar' {message}"):
            TarDataset(tmp_path / "a.tar")
        assert os.listdir(tmp_path) == ["a.tar"]

    def test_an_archive_without_an_end_causes_a_warning(self, tmp_path):
        path = tmp_path / "a.tar"
        path.write_bytes(block())
        for _ in range(2):
            match = "a.tar' has no end-of-archive blocks"
            with pytest.warns(UserWarning, match=match) as warned:
                assert TarDataset(path)[0]["__key__"] == "a"
            assert warned[0].filename == __file__
        assert os.listdir(tmp_path) == ["a.tar"]

    def test_bytes_after_the_end_are_reported(self, tmp_path):
        path = tmp_path / "a.tar"
        path.write_bytes(GOOD + block(b"b.txt") + END)
        with pytest.warns(UserWarning, match="ends at byte 512, and other bytes follow"):
            assert len(TarDataset(path)) == 1

    @pytest.mark.parametrize("head", [b"", block()], ids=["all", "rest"])
    def test_zeros_in_the_place_of_a_download_are_reported(self, tmp_path, head):
        path = tmp_path / "a.tar"
        path.write_bytes(head)
        os.truncate(path, 2 << 20)
        with pytest.warns(UserWarning, match="it may be an interrupted download"):
            TarDataset(path)

    def test_a_missing_archive_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"directory: '.*missing\.tar'"):
            TarDataset(tmp_path / "missing.tar")


def saved(path):
    """Return the path of an archive's saved index."""
    return path.with_name(path.name + ".nvmeio-index")


@pytest.fixture
def walked(monkeypatch):
    """The archives whose headers were all read, instead of their saved index."""
    found = []

    class Noticed(_tar_index._Archive):
        def __init__(self, file):
            found.append(file.path)
            super().__init__(file)

    monkeypatch.setattr(_tar_index, "_Archive", Noticed)
    return found


class TestSavedIndex:
    def test_a_saved_index_is_used_the_next_time(self, shard, walked):
        expected = samples_of(shard)
        assert saved(shard).exists()
        assert samples_of(shard) == expected
        assert walked == [str(shard)]

    @pytest.mark.parametrize(
        "how", ["grown", "touched", "replaced", "copied", "another mode", "same moment"]
    )
    def test_the_index_is_made_again_when_the_archive_changes(self, shard, walked, how):
        before = samples_of(shard)
        stamp = shard.stat()
        if how == "grown":
            with tarfile.open(shard, "a") as archive:
                info, content = member("new.txt", b"new" * 5000)
                archive.addfile(info, io.BytesIO(content))
            before.append({"__key__": "new", "txt": content})
        elif how == "touched":
            os.utime(shard)
        elif how == "another mode":
            shard.chmod(0o600)
        elif how == "copied":
            shutil.copy2(shard, shard.with_name("other.tar"))
            os.replace(shard.with_name("other.tar"), shard)
        elif how == "replaced":
            other = shard.with_name("other.tar")
            make_shard(other, seed=7)
            os.replace(other, shard)
        else:
            # In place, in the moment in which the index was saved: nothing but bytes tell.
            content = bytearray(shard.read_bytes())
            content[:100] = b"spoiled".ljust(100)
            shard.write_bytes(content)
        if how != "touched":
            os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        if how == "same moment":
            # Reading the headers finds what the index would have hidden.
            with pytest.raises(ValueError, match="is not a tar archive"):
                TarDataset(shard)
            return
        found = samples_of(shard)
        assert (found == before) == (how != "replaced")
        again = how not in ("copied", "another mode")
        assert walked == [str(shard)] * (1 + again)
        assert found == samples_of(shard, index=False)

    def test_another_archive_of_the_same_size_and_time_is_indexed(self, tmp_path):
        paths = [tmp_path / name for name in ("first.tar", "second.tar")]
        for path, sizes in zip(paths, ((40, 60), (60, 40)), strict=True):
            with tarfile.open(path, "w") as archive:
                for number, size in enumerate(sizes):
                    info, content = member(f"{number}.txt", path.name.encode() * size)
                    archive.addfile(info, io.BytesIO(content))
            os.utime(path, (1e9, 1e9))
        assert paths[0].stat().st_size == paths[1].stat().st_size
        samples_of(paths[0])
        expected = samples_of(paths[1], index=False)
        os.replace(paths[1], paths[0])
        assert samples_of(paths[0]) == expected

    @pytest.mark.parametrize("there", [True, False], ids=["to a file", "dangling"])
    def test_a_symbolic_link_is_replaced(self, shard, tmp_path, there, walked):
        victim = tmp_path / "victim"
        if there:
            victim.write_text("precious")
        saved(shard).symlink_to(victim)
        expected = samples_of(shard)
        assert victim.exists() is there
        assert not there or victim.read_text() == "precious"
        assert not saved(shard).is_symlink()
        assert samples_of(shard) == expected
        assert walked == [str(shard)]

    def test_no_index_is_saved_unless_requested(self, shard):
        samples_of(shard, index=False)
        assert os.listdir(shard.parent) == [shard.name]

    def test_the_index_may_be_in_another_folder(self, shard, tmp_path, walked):
        """Archives of one name, size and time have indices of their own."""
        folder, other = tmp_path / "indices", tmp_path / "other" / shard.name
        folder.mkdir()
        other.parent.mkdir()
        make_shard(other, seed=7)
        for path in (shard, other):
            os.utime(path, (1e9, 1e9))
        assert shard.stat().st_size == other.stat().st_size
        expected = [samples_of(path, index=False) for path in (shard, other)]
        walked.clear()
        for _ in range(3):
            assert [samples_of(one, index=folder) for one in (shard, other)] == expected
        assert walked == [str(shard), str(other)]
        assert not saved(shard).exists()
        names = sorted(os.listdir(folder))
        assert len(names) == 2
        assert all(
            re.fullmatch(rf"{shard.name}\.[0-9a-f]{{16}}\.nvmeio-index", n) for n in names
        )

    def test_a_failure_to_save_the_index_is_logged(self, shard, caplog):
        saved(shard).mkdir()
        with caplog.at_level(logging.WARNING, "nvmeio"):
            assert len(samples_of(shard)) == 20
        assert "the index of an archive is not saved" in caplog.text

    @pytest.mark.parametrize(
        "damage",
        [
            *("cut", "noise", "empty", "pickle", "names", "missing", "dtype", "shape"),
            *("block", "largest", "size", "overlap", "order", "field", "first", "last"),
            *("key", "keys", "signed", "count", "wrap", "key wrap", "header"),
        ],
    )
    def test_a_hostile_index_is_not_used(self, shard, caplog, damage):
        expected = samples_of(shard)
        path = saved(shard)
        content, arrays = path.read_bytes(), load_file(path)
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        size = shard.stat().st_size
        arrays = {name: array.copy() for name, array in arrays.items()}
        changes = {
            "block": ("blocks", 3, size // 512 + 1),
            "largest": ("blocks", 3, 2**64 - 1),
            "size": ("sizes", 3, 2**63 - 1),
            "overlap": ("sizes", 3, arrays["sizes"][3] + 2000),
            "order": ("blocks", 3, 1),
            "field": ("fields", 3, 2),
            "first": ("firsts", 0, 1),
            "last": ("firsts", -1, 10**9),
            "key": ("letters", 4, 0),
        }
        # Steps that are all positive, if a difference is taken modulo 2**64.
        around = [2**63 - 1, 2**63 + 1, 2**64 - 1]
        if "wrap" in damage:
            name = "letters" if "key" in damage else "firsts"
            arrays[name] = arrays[name].astype(np.uint64)
            arrays[name][3:6] = around
        elif damage == "header":
            arrays["blocks"][0] = 0
        elif damage == "keys":
            arrays["keys"] = arrays["keys"].astype(np.uint16)
        elif damage == "signed":
            arrays["sizes"] = arrays["sizes"].astype(np.int64)
        elif damage in changes:
            name, place, value = changes[damage]
            arrays[name] = arrays[name].astype(np.uint64)
            arrays[name][place] = value
        elif damage == "names":
            metadata["names"] = '["jpg", 5]'
        elif damage == "missing":
            del arrays["sizes"]
        elif damage == "dtype":
            arrays["sizes"] = arrays["sizes"].astype(np.float64)
        elif damage == "shape":
            arrays["sizes"] = arrays["sizes"].reshape(1, -1)
        elif damage == "count":
            arrays["sizes"] = arrays["sizes"][:-1]
        save_file(arrays, path, metadata)
        other = {"cut": content[:-9], "noise": pattern(5000), "empty": b""}
        other["pickle"] = pickle.dumps(arrays)
        if damage in other:
            path.write_bytes(other[damage])
        with caplog.at_level(logging.WARNING, "nvmeio"):
            assert samples_of(shard) == expected
        assert f"the index {str(path)!r} is not used" in caplog.text
        again = load_file(path)
        path.write_bytes(content)
        for name, array in load_file(path).items():
            np.testing.assert_array_equal(again[name], array)

    def test_an_index_of_another_version_is_replaced(self, shard):
        expected = samples_of(shard)
        arrays = load_file(saved(shard))
        save_file(arrays, saved(shard), {"format": "nvmeio tar index 1"})
        assert samples_of(shard) == expected
        assert b"nvmeio tar index 4" in saved(shard).read_bytes()

    def test_every_header_is_compared(self, tmp_path):
        """As of an archive that was copied with its times, of other names."""
        path, other = tmp_path / "a.tar", tmp_path / "b.tar"
        for one, middle in ((path, "old"), (other, "new")):
            names = [f"{number}.txt" for number in range(300)]
            names[150] = f"{middle}.txt"
            write(one, [member(name, b"text", mtime=1) for name in names])
            os.utime(one, (1e9, 1e9))
        assert path.stat().st_size == other.stat().st_size
        assert samples_of(path)[150]["__key__"] == "old"
        os.replace(other, path)
        assert samples_of(path)[150]["__key__"] == "new"

    def test_files_of_no_sample_are_compared(self, tmp_path):
        """However large: with another name they may belong to one."""
        path, other = tmp_path / "a.tar", tmp_path / "b.tar"
        for one, name in ((path, "noext"), (other, "a.cls")):
            large = [(each, b"x" * 9000) for each in ("first", name, "last")]
            names = [("a.txt", b"a"), *large, ("b.txt", b"b")]
            write(one, [member(*each, mtime=1) for each in names])
            os.utime(one, (1e9, 1e9))
        assert "cls" not in samples_of(path)[0]
        os.replace(other, path)
        assert samples_of(path)[0]["cls"] == b"x" * 9000

    def test_a_file_added_in_the_padding_is_found(self, tmp_path):
        path = write(tmp_path / "a.tar", [member("a.txt", b"text")])
        before = path.stat()
        assert len(samples_of(path)) == 1
        with tarfile.open(path, "a") as archive:
            info, content = member("b.txt", b"text")
            archive.addfile(info, io.BytesIO(content))
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert len(samples_of(path)) == 2

    @pytest.mark.parametrize("device", [0, 1], ids=["here", "another machine"])
    def test_headers_are_compared_once(self, shard, walked, monkeypatch, device):
        """A network file system has another device number on each machine."""
        expected = samples_of(shard)
        assert walked == [str(shard)]
        compared, compare = [], _tar_index._headers_at
        monkeypatch.setattr(
            _tar_index, "_headers_at", lambda *args: compared.append(1) or compare(*args)
        )
        # The archive is not new any more.
        now = time.time_ns() + 10**10
        monkeypatch.setattr(time, "time_ns", lambda: now)
        assert samples_of(shard) == expected
        stamp = _tar_index.stamp_of
        monkeypatch.setattr(
            _tar_index,
            "stamp_of",
            lambda file: stamp(file)._replace(device=stamp(file).device + device),
        )
        assert samples_of(shard) == expected
        assert compared == [1]
        assert walked == [str(shard)]

    @pytest.mark.parametrize("moment", ["indexed", "opened"])
    def test_an_archive_that_is_replaced_meanwhile_is_refused(
        self, shard, monkeypatch, moment
    ):
        other = shard.with_name("other.tar")
        make_shard(other, seed=7)
        index_of, grouped = _tar.index_of, _tar_index._grouped
        if moment == "opened":

            def replacing(*args):
                found = index_of(*args)
                os.replace(other, shard)
                return found

            monkeypatch.setattr(_tar, "index_of", replacing)
        else:

            def rewriting(archive):
                found = grouped(archive)
                shard.write_bytes(other.read_bytes())
                return found

            monkeypatch.setattr(_tar_index, "_grouped", rewriting)
        words = r"replaced or changed|changed while it was indexed"
        with pytest.raises((OSError, ValueError), match=words):
            TarDataset(shard)


def write_many(path, samples, each):
    """Write samples of so many files, one of which is large; return what an index takes."""
    with path.open("wb") as file:
        file.write(block(b"large000.bin", b"%011o\0" % (5 << 30)))
        file.seek(5 << 30, os.SEEK_CUR)
        for number in range(samples - 1):
            # More names of files than one byte can number.
            for suffix in (b"%d.cls" % (number % 300), b"txt")[:each]:
                file.write(block(b"%08d.%s" % (number, suffix)))
        file.write(END)
    files = 1 + (samples - 1) * each
    return files, 24 * files + 8 * samples


def traced(make):
    """Call a function; return the result, the memory that it takes and that it took."""
    # What is imported once does not count.
    make()
    tracemalloc.start()
    try:
        made = make()
        return made, *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


class TestMemory:
    SAMPLES = 100_000

    @pytest.mark.parametrize("each", [1, 2])
    def test_an_index_takes_24_bytes_a_file_and_the_keys(self, tmp_path, each):
        path = tmp_path / "many.tar"
        _, expected = write_many(path, self.SAMPLES, each)
        # The second time from the saved index, because tracing makes a walk ten times as
        # slow.  Of two, so that the arrays are numpy's, which are traced.
        dataset, held, _ = traced(lambda: TarDataset([path, path]))
        assert len(dataset) == 2 * self.SAMPLES
        assert dataset[-1]["__key__"] == f"{self.SAMPLES - 2:08}"
        assert held < 2 * expected + 50_000

    @pytest.mark.parametrize("each", [1, 2])
    def test_an_index_is_made_without_a_python_object_for_a_sample(self, tmp_path, each):
        path = tmp_path / "many.tar"
        _, expected = write_many(path, self.SAMPLES // 10, each)
        dataset, held, peak = traced(lambda: TarDataset(path, index=False))
        assert len(dataset) == self.SAMPLES // 10
        assert held < expected + 50_000
        assert peak < 4 * expected + 50_000

    def test_an_archive_is_read_once(self, tmp_path, monkeypatch):
        """The number of steps is that of the files, and the reads are large."""
        path = tmp_path / "many.tar"
        files, _ = write_many(path, self.SAMPLES, 2)
        steps, moves = [], []
        read, move = _tar_index._Window.read, _tar_index._Window._move

        def counted(window, at, size):
            steps.append(at)
            return read(window, at, size)

        def moved(window, at, size):
            moves.append(at)
            move(window, at, size)

        monkeypatch.setattr(_tar_index._Window, "read", counted)
        monkeypatch.setattr(_tar_index._Window, "_move", moved)
        TarDataset(path, index=False)
        # Two more at the end of the archive.
        assert len(steps) == files + 2
        assert steps == sorted(steps)
        headers = path.stat().st_size - (5 << 30)
        # The large file is skipped, and a small read is behind it.
        assert len(moves) <= headers // (4 << 20) + 3


class TestLoaders:
    def test_batches_are_read_ahead(self, shards):
        paths, expected = shards
        stream = BatchStream(TarDataset(paths), [[3, 70], [40]])
        first, second = stream
        assert first["cls"] == [expected[3]["cls"], expected[70]["cls"]]
        assert second["__key__"] == [expected[40]["__key__"]]

    def test_a_transform_decodes(self, shards):
        paths, expected = shards
        dataset = TarDataset(paths, transform=lambda sample: int(sample["cls"]))
        assert dataset[5] == int(expected[5]["cls"])
        assert dataset.__getitems__([5, 6]) == [5, 6]

    def test_a_dataset_is_pickled_with_absolute_paths(self, shards, monkeypatch, tmp_path):
        paths, expected = shards
        monkeypatch.chdir(tmp_path)
        dataset = TarDataset([path.name for path in paths], index=False)
        monkeypatch.chdir("/")
        assert pickle.loads(pickle.dumps(dataset))[30] == expected[30]

    def test_a_copy_refuses_another_archive(self, shards):
        paths, expected = shards
        dataset, last = TarDataset(paths), paths[-1]
        assert dataset[-1]["__key__"] == expected[-1]["__key__"]
        # Another machine may have a copy of the archive, but not a different one.
        shutil.copy(last, last.with_suffix(".copy"))
        os.replace(last.with_suffix(".copy"), last)
        assert pickle.loads(pickle.dumps(dataset))[-1] == dataset[-1]
        with last.open("ab") as archive:
            archive.write(bytes(512))
        again = pickle.loads(pickle.dumps(dataset))
        assert again[0] == dataset[0]
        with pytest.raises(OSError, match="was replaced or changed since"):
            again[-1]
