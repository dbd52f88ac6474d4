"""Embeddings whose tables stay on a drive, and of which rows are read."""

import copy
import errno
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import nvmeio.safetensors.torch as st
import nvmeio.torch
from helpers import MIB, fork
from nvmeio.safetensors import SafetensorError
from nvmeio.torch._weights import rows

ROWS, COLUMNS, PARTS = 600, 16, 12


def numbers_of(seed, count=ROWS * PARTS):
    """Return numbers of rows, the small ones more often."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (4, 37), generator=generator) ** 3 // count**2


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def table(request, tmp_path):
    """A table in parts, in two files with an index, and as a tensor."""
    torch.manual_seed(0)
    parts = {
        f"table.shard_{number}.weight": torch.randn(ROWS, COLUMNS).to(request.param)
        for number in range(PARTS)
    }
    names = sorted(parts)
    places = {name: f"{number % 2}.safetensors" for number, name in enumerate(names)}
    for place in set(places.values()):
        there = {name: parts[name] for name in names if places[name] == place}
        st.save_file({"another": torch.zeros(3), **there}, tmp_path / place)
    text = json.dumps({"weight_map": places})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    whole = [parts[f"table.shard_{number}.weight"].float() for number in range(PARTS)]
    return tmp_path, torch.cat(whole)


@pytest.mark.parametrize("memory", [0, "16KiB", "1MiB"])
def test_rows_are_those_of_the_table(table, memory):
    path, whole = table
    found = nvmeio.torch.DiskEmbedding(path, "table.shard_*.weight", memory=memory)
    assert (found.num_embeddings, found.embedding_dim) == whole.shape == found.weight.shape
    for seed in range(40):
        ids = numbers_of(seed)
        if seed % 3 == 1:
            found.prefetch(ids)
        elif seed % 3 == 2:
            found.prefetch(numbers_of(seed + 1))
        rows = found(ids)
        assert rows.dtype == found.weight.dtype
        assert torch.equal(rows.float(), whole[ids])
        assert torch.equal(nn.functional.embedding(ids, found.weight).float(), whole[ids])
    assert torch.equal(found(torch.tensor(5)).float(), whole[5])
    assert found(torch.empty(0, 3, dtype=torch.int32)).shape == (0, 3, COLUMNS)
    stats = found.stats()
    assert stats["bytes_used"] <= {0: 0, "16KiB": 1 << 14}.get(memory, MIB)
    if memory == "1MiB":
        # Each row was read once.
        used = torch.cat([numbers_of(seed) for seed in range(41)]).unique()
        row_bytes = COLUMNS * found.weight.dtype.itemsize
        assert stats["bytes_read"] <= (len(used) + 1) * row_bytes


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, 4)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float8_e8m0fnu])
def test_values_are_multiplied_by_scales(tmp_path, shape, kind):
    torch.manual_seed(0)
    values = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    scales = (torch.rand(shape) + 0.5).to(kind)
    st.save_file({"values": values, "scales": scales}, tmp_path / "table.safetensors")
    found = nvmeio.torch.DiskEmbedding(
        tmp_path, "values", scales="scales", dtype=torch.bfloat16
    )
    parts = values.float().view(ROWS, shape[1] if shape[1:] else 1, -1)
    expected = (parts * scales.float().view(ROWS, -1, 1)).view(ROWS, COLUMNS).bfloat16()
    ids = numbers_of(0, ROWS)
    for _ in range(2):
        assert torch.equal(found(ids), expected[ids])


def test_a_single_row_of_any_width_is_multiplied_by_its_scale(tmp_path):
    values, scales = torch.randn(ROWS, 7).bfloat16(), torch.rand(ROWS)
    st.save_file({"values": values, "scales": scales}, tmp_path / "table.safetensors")
    found = nvmeio.torch.DiskEmbedding(tmp_path, "values", scales="scales")
    assert torch.equal(found(torch.tensor(5)), values[5].float() * scales[5])


def test_bad_arguments_are_refused(tmp_path):
    path = tmp_path / "table.safetensors"
    st.save_file(
        {
            "a": torch.zeros(4, 6),
            "b": torch.zeros(4, 3),
            "c": torch.zeros(4),
            "e": torch.zeros(()),
            "f": torch.zeros(4, 0),
        },
        path,
    )
    for words, names, options in (
        ("no tensor 'd'", "d", {}),
        (r"no tensor 'd\.\*'", "d.*", {}),
        ("several dtypes or widths", ["a", "b"], {}),
        (r"shape \(4,\)", "c", {}),
        (r"shape \(\); it must have rows", "e", {}),
        (r"shape \(4, 0\); its rows are empty", "f", {}),
        (r"where n divides 3", "b", {"scales": "a"}),
        ("memory", "a", {"memory": "much"}),
    ):
        with pytest.raises(ValueError, match=words):
            nvmeio.torch.DiskEmbedding(path, names, **options)
    found = nvmeio.torch.DiskEmbedding(path, "a")
    for call in (found, found.prefetch):
        with pytest.raises(IndexError, match=r"row 4 is out of range: a has 4"):
            call(torch.tensor([1, 4]))
        with pytest.raises(IndexError, match="row -1"):
            call(torch.tensor([-1]))
        with pytest.raises(TypeError, match="float32"):
            call(torch.tensor([1.0]))
        with pytest.raises(TypeError, match="rows are a list; they must be a tensor"):
            call([1])
    with pytest.raises(RuntimeError, match="only its rows"):
        found.weight.sum()
    with pytest.raises((AttributeError, KeyError)):
        found.weight = nn.Parameter(torch.ones(4, 6))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(found)
    assert copy.deepcopy(nn.Sequential(found))[0] is found
    assert str(found) == "DiskEmbedding(4, 6, dtype=torch.float32)"
    assert found.state_dict() == {}


def test_a_table_of_integers_is_converted(tmp_path):
    """To the dtype that was asked for; with scales by default to float32."""
    values = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)
    scales = torch.rand(ROWS)
    st.save_file({"values": values, "scales": scales}, tmp_path / "table.safetensors")
    ids = numbers_of(0, ROWS)
    expected = (values.float() * scales[:, None])[ids]
    found = nvmeio.torch.DiskEmbedding(tmp_path, "values", scales="scales")
    assert torch.equal(found(ids), expected)
    found = nvmeio.torch.DiskEmbedding(tmp_path, "values", dtype=torch.float16)
    assert torch.equal(found(ids), values[ids].half())


@pytest.mark.parametrize("change", ["cut", "rewritten"])
def test_a_file_that_changes_gives_an_error(tmp_path, change):
    path = tmp_path / "table.safetensors"
    st.save_file({"a": torch.ones(1000, 64)}, path)
    found = nvmeio.torch.DiskEmbedding(path, "a")
    found(torch.tensor([1]))
    if change == "cut":
        os.truncate(path, 3000)
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    for _ in range(2):
        with pytest.raises((OSError, SafetensorError), match="a cannot be read") as caught:
            found(torch.tensor([999]))
        assert str(path) in str(caught.value)
    found.prefetch(torch.tensor([998]))
    with pytest.raises((OSError, SafetensorError), match="a cannot be read"):
        found(torch.tensor([998]))


def test_a_prefetch_that_fails_is_read_again(tmp_path, monkeypatch):
    path = tmp_path / "table.safetensors"
    whole = torch.randn(ROWS, COLUMNS)
    st.save_file({"a": whole}, path)
    found = nvmeio.torch.DiskEmbedding(path, "a", memory="1MiB")
    wait = rows._Reading.wait

    def failing(self, weight):
        monkeypatch.setattr(rows._Reading, "wait", wait)
        raise OSError(errno.EIO, "once", str(path))

    found.prefetch(torch.tensor([5]))
    monkeypatch.setattr(rows._Reading, "wait", failing)
    for _ in range(2):
        assert torch.equal(found(torch.tensor([5, 6])), whole[5:7])


def test_a_forked_child_refuses(tmp_path):
    path = tmp_path / "table.safetensors"
    st.save_file({"a": torch.ones(4, 4)}, path)
    found = nvmeio.torch.DiskEmbedding(path, "a")

    def refused():
        with pytest.raises(RuntimeError, match="a forked child cannot read it"):
            found(torch.tensor([1]))

    assert os.waitpid(fork(refused), 0)[1] == 0


def test_threads_share_a_table(tmp_path):
    path = tmp_path / "table.safetensors"
    whole = torch.randn(ROWS, COLUMNS)
    st.save_file({"a": whole}, path)
    found = nvmeio.torch.DiskEmbedding(path, "a", memory="8KiB")
    wrong = []

    def use(seed):
        for turn in range(30):
            ids = numbers_of(seed * 100 + turn, ROWS)
            found.prefetch(numbers_of(seed * 100 + turn + 1, ROWS))
            if not torch.equal(found(ids), whole[ids]):
                wrong.append(ids)

    threads = [threading.Thread(target=use, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_reads_rows_of_an_embedding(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 64))
    path = tmp_path / "model.safetensors"
    st.save_file(model.state_dict(), path)
    ids = numbers_of(0, 5000)
    expected = model(ids).detach()
    whole = model[0].weight.detach().clone()
    nvmeio.torch.disk_offload(model, path, memory="2MiB", tables="0")
    for _ in range(2):
        assert torch.equal(model(ids), expected)
        assert torch.equal(model[0].weight[ids[0]], whole[ids[0]])
    assert torch.equal(model[0].weight[7], whole[7])
    with pytest.raises(RuntimeError, match=r"cannot be changed by aten\.zero_"):
        model[0].weight[7].zero_()
    stats = nvmeio.torch.disk_stats(model)
    assert stats["row_misses"] == len({7, *ids.flatten().tolist()})
    assert stats["bytes_peak"] <= 2 * MIB
    nvmeio.torch.remove_disk_offload(model)
    assert torch.equal(model[0].weight, whole)
    for words, tables in (
        ("no such module", "3"),
        ("'1', a Linear", ["0", "1"]),
    ):
        with pytest.raises(ValueError, match=words):
            nvmeio.torch.disk_offload(model, path, memory="1MiB", tables=tables)


def test_a_table_of_50_gb_needs_little_memory(tmp_path, control_group):
    """In a control group of 1 GiB, with torch."""
    path = tmp_path / "table.safetensors"
    rows, columns = 156_250_000, 160
    size = 2 * rows * columns
    header = {"t": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + size)
        os.pwrite(file.fileno(), b"\x80\x3f" * columns, 8 + len(text) + size - 2 * columns)
    code = """
        import sys
        import torch
        import nvmeio.torch

        table = nvmeio.torch.DiskEmbedding(sys.argv[1], "t", memory="256MiB")
        rows = table.num_embeddings
        for seed in range(20):
            torch.manual_seed(seed)
            ids = torch.randint(0, rows - 1, (4, 1024))
            ids[0, 0] = rows - 1
            found = table(ids)
            assert bool((found[0, 0] == 1).all())
            assert not bool(found[1:].any())
        print(table.stats()["misses"])
    """
    limits = {"memory.limit_in_bytes": 1 << 30}, {"memory.max": 1 << 30}
    prefix = control_group("memory", *limits)
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(code), path],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 75_000
