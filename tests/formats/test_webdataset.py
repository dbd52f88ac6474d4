"""Read archives of webdataset and tarfile, and compare with webdataset's own reader."""

import io
import random
import tarfile

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
wds = pytest.importorskip("webdataset", reason="webdataset is not installed")

from nvmeio.torch import TarDataset  # noqa: E402

# Names on which the readers could differ: in the key, in what is left out, in the order.
NAMES = [
    *("a.jpg", "a.CLS", "b.jpg", "a.json", "f.o/o/c.seg.png", "f.o/o/c.x", "no-extension"),
    *("d.x", "d", "d.y", ".hidden", "g/.hidden", "./e.x", "./e.y", "e.x", "h..x", "i."),
    *("__m.n__", "__m__/a.x", "g/__m.n__", "__m__.json", "__", "line\nbreak.x", "ü.x"),
    *("k" * 90 + "/" + "l" * 90 + ".jpg", "m" * 150 + "/" + "n" * 90 + ".x.y", "/o.x"),
    *("p.x", "p.x y", "p. ", "q /r.x", "s.tar.gz/t", "u/v.w/x.y.z", "\udce4.x", "last.x"),
]


def their_samples(paths):
    """Return the samples of webdataset, without its second key for the path."""
    found = list(wds.WebDataset([str(path) for path in paths], shardshuffle=False))
    return [
        {name: value for name, value in sample.items() if name != "__local_path__"}
        for sample in found
    ]


def our_samples(paths):
    """Return all samples of archives, read as a batch."""
    dataset = TarDataset(paths)
    return dataset.__getitems__(range(len(dataset)))


def test_samples_equal_webdatasets(tmp_path):
    numbers = random.Random(0)
    with wds.ShardWriter(f"{tmp_path}/%06d.tar", maxcount=70, verbose=0) as writer:
        for number in range(200):
            image = numbers.randbytes(numbers.randrange(20_000))
            sample = {"__key__": f"folder.{number % 3}/{number:05}", "jpg": image}
            if number % 4:
                sample |= {"cls": number, "json": {"number": number}}
            if number % 7 == 0:
                sample |= {"seg.PNG": b"", "txt": "text"}
            writer.write(sample)
    paths = sorted(tmp_path.glob("*.tar"))
    assert len(paths) == 3
    expected = their_samples(paths)
    assert len(expected) == 200
    # The first time makes an index and saves it; the second time uses it.
    for _ in range(2):
        assert our_samples(paths) == expected
    dataset = TarDataset(paths)
    assert [dataset[index] for index in range(200)] == expected


@pytest.mark.parametrize("kind", ["ustar", "gnu", "pax"])
def test_file_names_are_split_as_webdataset_splits_them(tmp_path, kind):
    form, paths = getattr(tarfile, f"{kind.upper()}_FORMAT"), []
    # One archive for each name, because some are of one sample.
    for number, name in enumerate(NAMES):
        paths.append(tmp_path / f"{number:04}.tar")
        with tarfile.open(paths[-1], "w", format=form) as file:
            info = tarfile.TarInfo(name)
            info.size = 300 * number
            info.mtime = 0.5 if number % 2 and kind == "pax" else 1
            file.addfile(info, io.BytesIO(bytes([number]) * info.size))
            if number % 5 == 0:
                for type_ in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
                    info = tarfile.TarInfo(f"{name}.link")
                    info.type, info.linkname = (
                        type_,
                        "a.jpg" * 30 if kind != "ustar" else "a",
                    )
                    file.addfile(info)
    expected = their_samples(paths)
    assert len(expected) > 20
    assert our_samples(paths) == expected


def test_a_sample_of_which_webdataset_yields_parts_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for name in ("a.jpg", "b.jpg", "a.cls"):
            file.addfile(tarfile.TarInfo(name))
    assert [sample["__key__"] for sample in their_samples([path])] == ["a", "b", "a"]
    with pytest.raises(ValueError, match="sample 'a' at two places"):
        our_samples([path])


def test_archives_that_webdataset_refuses_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for name in ("a.jpg", "a.JPG"):
            file.addfile(tarfile.TarInfo(name))
    with pytest.raises(ValueError, match="duplicate file name"):
        their_samples([path])
    with pytest.raises(ValueError, match="has two files 'jpg'"):
        our_samples([path])


def test_webdatasets_decoder_works_as_a_transform(tmp_path):
    path = str(tmp_path / "a.tar")
    with wds.TarWriter(path) as writer:
        for number in range(3):
            writer.write({"__key__": str(number), "json": {"n": number}, "cls": number})
    decoder = wds.autodecode.default_decoder
    dataset = TarDataset(path, transform=decoder)
    expected = list(wds.WebDataset([path], shardshuffle=False).decode())
    for ours, theirs in zip(dataset.__getitems__(range(3)), expected, strict=True):
        assert (ours["json"], ours["cls"]) == (theirs["json"], theirs["cls"])
