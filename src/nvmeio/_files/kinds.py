"""Tell what a folder is by the names of its files."""

import os
import re

__all__ = ["INDEX_END", "MANIFEST", "METADATA", "STEP", "TENSORS", "what_is_in"]

# The name of the folder of a step of a Checkpointer, and of two of its files.
STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"

# The file that describes a checkpoint of torch.distributed.checkpoint.
METADATA = ".metadata"
# How the name of the index of a model in several files ends.
INDEX_END = ".safetensors.index.json"

_NAMES_MAX = 3


def what_is_in(folder: str) -> str:
    """Say what a folder has, and which part of nvmeio reads that."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return "there is no such folder"
    except NotADirectoryError:
        return "it is not a folder"
    except OSError as error:
        return f"it cannot be listed: {error.strerror}"
    if METADATA in names:
        return (
            "it has a checkpoint of torch.distributed.checkpoint, which "
            "nvmeio.torch.dcp.FileSystemReader reads"
        )
    if MANIFEST in names and TENSORS in names:
        return "it is a step of a nvmeio.checkpoint.Checkpointer; pass the folder above it"
    if any(map(STEP.fullmatch, names)):
        return "it has steps of a nvmeio.checkpoint.Checkpointer"
    if any(name.endswith(".safetensors") for name in names):
        return (
            "it has model files, which nvmeio.safetensors and "
            "nvmeio.torch.dcp.HuggingFaceStorageReader read"
        )
    if any(name.endswith(".distcp") for name in names):
        return (
            "it has shards of torch.distributed.checkpoint but no .metadata, so the save "
            "was not completed"
        )
    some = ", ".join(names[:_NAMES_MAX])
    if len(names) > _NAMES_MAX:
        some += f" and {len(names) - _NAMES_MAX} more"
    return f"it has {some}" if names else "it is empty"
