"""nvmeio under the published Lightning Trainer and torch_checkpointing."""

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("torch_checkpointing")

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_checkpointing import CheckpointManager

from docstring_examples import examples, run_example
from nvmeio._files import folders
from nvmeio.torch import torch_checkpointing
from nvmeio.torch.lightning import CheckpointIO
from nvmeio.torch.torch_checkpointing import Storage, StorageConfig

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_accelerate.py"


class Line(lightning.LightningModule):
    """A model of one layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 8)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(folder, epochs, plugins, resumed=None):
    """Train, and return the model and the path of its last checkpoint."""
    lightning.seed_everything(3, verbose=False)
    keeper = ModelCheckpoint(
        dirpath=folder, save_last=True, every_n_epochs=1, save_top_k=-1
    )
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keeper],
        plugins=plugins,
    )
    model = Line()
    data = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data, ckpt_path=resumed)
    return model, keeper.last_model_path


def test_a_trainer_saves_and_resumes_with_nvmeio(tmp_path):
    _, last = trained(tmp_path / "ours", 2, [CheckpointIO()])
    assert torch.load(last, weights_only=False)["epoch"] == 1
    assert not [name for name in os.listdir(tmp_path / "ours") if "tmp" in name]
    resumed, _ = trained(tmp_path / "more", 4, [CheckpointIO()], last)
    straight, theirs = trained(tmp_path / "straight", 4, [])
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])
    # Each also reads the other's files.
    found = CheckpointIO().load_checkpoint(theirs, weights_only=False)
    assert torch.equal(found["state_dict"]["layer.weight"], straight.layer.weight)
    trained(tmp_path / "back", 3, [], last)


def test_remote_paths_are_refused_and_local_paths_need_no_folder(tmp_path):
    plugin = CheckpointIO()
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "x", storage_options={"a": 1})
    with pytest.raises(ValueError, match="is not a local file"):
        plugin.save_checkpoint({}, "s3://bucket/x")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        plugin.load_checkpoint(tmp_path / "x")
    plugin.save_checkpoint({"a": 1}, tmp_path / "deep" / "x")
    assert plugin.load_checkpoint(tmp_path / "deep" / "x") == {"a": 1}
    for path in (tmp_path / "deep" / "x", tmp_path / "deep", tmp_path / "nothing"):
        plugin.remove_checkpoint(path)
        assert not path.exists()


@pytest.mark.parametrize("kind", ["Lightning", "torch_checkpointing", "one folder"])
def test_new_folders_are_durable_too(tmp_path, monkeypatch, kind):
    synced, sync = [], folders.sync_folder

    def note(folder):
        synced.append(str(folder))
        sync(folder)

    monkeypatch.setattr(folders, "sync_folder", note)
    monkeypatch.setattr(torch_checkpointing, "sync_folder", note)
    if kind == "Lightning":
        CheckpointIO().save_checkpoint({"a": 1}, tmp_path / "new" / "deep" / "x")
        assert synced[:2] == [str(tmp_path), str(tmp_path / "new")]
    elif kind == "torch_checkpointing":
        Storage().mkdir(tmp_path / "new" / "deep")
        assert synced == [str(tmp_path), str(tmp_path / "new")]
    else:
        Storage().mkdir(tmp_path / "new", recursive=False)
        assert synced == [str(tmp_path)]


@pytest.mark.parametrize("way", ["with_sync_save", "with_async_save"])
def test_torch_checkpointing_saves_and_loads_with_nvmeio(tmp_path, way):
    config = getattr(CheckpointManager.Config, way)()
    config.storage_config = StorageConfig()
    manager = CheckpointManager(config)
    torch.manual_seed(1)
    state = {"weights": torch.randn(600, 700), "bias": torch.randn(5)}
    try:
        saved = manager.save(str(tmp_path / "step-1"), {"model": state, "step": 7})
        if saved is not None:
            saved.result()
        into = {"model": {name: torch.zeros_like(each) for name, each in state.items()}}
        found = manager.load(str(tmp_path / "step-1"), into={**into, "step": 0})
    finally:
        manager.close()
    for name, tensor in state.items():
        assert torch.equal(found["model"][name], tensor)
    assert found["step"] == 7


def test_the_storage_keeps_the_table_of_renames(tmp_path):
    storage = StorageConfig().create_storage()
    assert isinstance(storage, Storage)

    def folder(name, *files):
        storage.mkdir(tmp_path / name)
        for each in files:
            storage.write(tmp_path / name / each, b"of " + name.encode())
        return tmp_path / name

    storage.rename(folder("a", "x"), tmp_path / "new", is_directory=True)
    assert storage.read(tmp_path / "new" / "x") == b"of a"
    storage.rename(folder("b", "x"), folder("empty"), is_directory=True)
    assert storage.ls(tmp_path / "empty") == ["x"]
    storage.write(tmp_path / "file", b"file")
    for source, target, number in (
        (folder("c", "x"), folder("d", "y"), errno.ENOTEMPTY),
        (folder("e", "x"), tmp_path / "file", errno.ENOTDIR),
        (tmp_path / "file", folder("f"), errno.EISDIR),
    ):
        with pytest.raises(FileExistsError) as refused:
            storage.rename(source, target)
        assert refused.value.errno == number
        assert storage.exists(source)
    with storage.stream_write(tmp_path / "other") as stream:
        stream.write(b"12345" * 300_000)
    storage.rename(tmp_path / "other", tmp_path / "file")
    assert storage.getsize(tmp_path / "file") == 1_500_000
    with storage.stream_read(tmp_path / "file") as stream:
        assert stream.read(7) == b"1234512"
    storage.delete(tmp_path / "file")
    storage.rmdir(tmp_path / "d")
    with pytest.raises(FileNotFoundError):
        storage.getsize(tmp_path / "file")
    assert not storage.isdir(tmp_path / "d")


def test_accelerate_resumes_where_it_stopped(tmp_path):
    def last_line(folder, steps):
        words = [
            sys.executable,
            EXAMPLE,
            "--folder",
            tmp_path / folder,
            "--steps",
            str(steps),
        ]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    straight = last_line("straight", 20)
    assert last_line("resumed", 10) != straight
    assert last_line("resumed", 20) == straight
    assert sorted(os.listdir(tmp_path / "resumed")) == [
        f"step-{step}" for step in (10, 15, 20, 5)
    ]


@pytest.mark.parametrize("name", examples("lightning") + examples("torch_checkpointing"))
def test_the_example_of_a_public_name_runs(name, tmp_path, monkeypatch):
    run_example(name, tmp_path, monkeypatch)
