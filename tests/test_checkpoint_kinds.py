"""Errors name the kind of checkpoint that a folder has, if it is another one."""

import sys

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nvmeio.checkpoint import Checkpointer
from nvmeio.torch.dcp import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

STATE = {"a": torch.ones(4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one checkpoint of each kind."""
    top = tmp_path_factory.mktemp("kinds")
    (top / "empty").mkdir()
    (top / "others").mkdir()
    for name in "abcde":
        (top / "others" / name).touch()
    dcp.save(STATE, storage_writer=FileSystemWriter(top / "dcp"), no_dist=True)
    dcp.save(STATE, storage_writer=FileSystemWriter(top / "half"), no_dist=True)
    (top / "half" / ".metadata").unlink()
    writer = HuggingFaceStorageWriter(str(top / "models"))
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    with Checkpointer(top / "steps") as saver:
        saver.save(3, STATE)
    (top / "file").touch()
    (top / "link").symlink_to("nowhere")
    return top


WORDS = {
    "missing": "there is no such folder",
    "empty": "it is empty",
    "others": "it has a, b, c and 2 more",
    "dcp": r"nvmeio\.torch\.dcp\.FileSystemReader reads",
    "half": "the save was not completed",
    "models": r"nvmeio\.torch\.dcp\.HuggingFaceStorageReader read",
    "steps": r"it has steps of a nvmeio\.checkpoint\.Checkpointer",
    "steps/step-3": "pass the folder above it",
    "file": "it is not a folder",
    "link": "it is a symbolic link to 'nowhere', which does not exist",
}


@pytest.mark.parametrize("step", [None, 3])
def test_a_checkpointer_names_what_has_the_name_of_a_step(tmp_path, step):
    writer = FileSystemWriter(tmp_path / "step-3")
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    with pytest.raises(FileNotFoundError, match=WORDS["dcp"]):
        Checkpointer(tmp_path).restore(step)


@pytest.mark.parametrize("name", sorted(WORDS.keys() - {"steps", "file"}))
def test_a_checkpointer_names_the_kind_of_another_folder(folder, name):
    # Nobody knows whether there is a checkpoint behind a link that leads nowhere.
    kind = OSError if name == "link" else FileNotFoundError
    with pytest.raises(kind, match=WORDS[name]):
        Checkpointer(folder / name).restore()


@pytest.mark.parametrize(
    ("reader", "own"),
    [
        (FileSystemReader, {"dcp"}),
        # The tensors of a step are a valid model file.
        (HuggingFaceStorageReader, {"models", "steps/step-3"}),
    ],
)
@pytest.mark.parametrize("name", WORDS)
def test_loaders_name_the_kind_of_another_folder(folder, reader, own, name):
    state = {"a": torch.zeros(4)}

    def load():
        dcp.load(state, storage_reader=reader(str(folder / name)), no_dist=True)

    if name in own:
        load()
        assert torch.equal(state["a"], STATE["a"])
        return
    with pytest.raises(CheckpointException, match=WORDS[name]):
        load()


def test_a_step_with_dtypes_of_torch_is_verified_without_torch(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": 1}, metadata={"dtype": torch.float32})
        monkeypatch.setitem(sys.modules, "torch", None)
        checkpointer.verify(1)
        with pytest.raises(ModuleNotFoundError, match=r"install it$"):
            checkpointer.metadata(1)
