"""nvmeio under the published Lightning Trainer, and an example under accelerate."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint

from docstring_examples import examples, run_example
from nvmeio._files import folders
from nvmeio.torch.lightning import CheckpointIO

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
    with pytest.raises(ValueError, match="a URL; save locally"):
        plugin.save_checkpoint({}, "s3://bucket/x")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        plugin.load_checkpoint(tmp_path / "x")
    plugin.save_checkpoint({"a": 1}, tmp_path / "deep" / "x")
    assert plugin.load_checkpoint(tmp_path / "deep" / "x") == {"a": 1}
    for path in (tmp_path / "deep" / "x", tmp_path / "deep", tmp_path / "nothing"):
        plugin.remove_checkpoint(path)
        assert not path.exists()


def test_new_folders_are_durable_too(tmp_path, monkeypatch):
    synced, sync = [], folders.sync_folder

    def note(folder):
        synced.append(str(folder))
        sync(folder)

    monkeypatch.setattr(folders, "sync_folder", note)
    CheckpointIO().save_checkpoint({"a": 1}, tmp_path / "new" / "deep" / "x")
    assert synced[:2] == [str(tmp_path), str(tmp_path / "new")]


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


def test_processes_of_accelerate_save_together(tmp_path):
    """Each has a part of the state: one its model, and each its random numbers."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", "2", EXAMPLE, "--folder", tmp_path, "--steps", "5"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["step-5"]
    assert {
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        "random_states_1.pkl",
    } <= {*os.listdir(tmp_path / "step-5")}


def test_a_checkpoint_is_loaded_to_the_cpu_as_a_trainer_expects(tmp_path, monkeypatch):
    """The Trainer passes no map_location, and the file may name another's device."""
    path = tmp_path / "last.ckpt"
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda _: "cuda:7")
        CheckpointIO().save_checkpoint({"weight": torch.ones(3)}, path)
    found = CheckpointIO().load_checkpoint(path, weights_only=None)
    assert found["weight"].device.type == "cpu"


@pytest.mark.parametrize("name", examples("lightning"))
def test_the_example_of_a_public_name_runs(name, tmp_path, monkeypatch):
    run_example(name, tmp_path, monkeypatch)
