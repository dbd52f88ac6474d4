"""Record what a program does with model files: bytes, tensors, and who moved the bytes."""

import contextlib
import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock


class Recorder:
    """Records what happens in a folder, in a form that two processes can compare."""

    def __init__(self, folder):
        self.folder = folder
        self.report = {"files": {}, "tensors": {}, "nbytes": {}, "values": {}}
        self.report |= {"computed": {}, "moved": {"saving": 0, "loading": 0}}

    def path(self, name):
        """Return a path below the folder; no file contains the folder's own name."""
        return str(self.folder / name)

    def new_folder(self, name):
        """Make a folder below the folder."""
        (self.folder / name).mkdir()
        return self.path(name)

    @contextlib.contextmanager
    def _moving(self, what):
        before = moved()
        yield
        self.report["moved"][what] += moved() - before

    def saving(self):
        """Count the bytes that are moved in a block that saves."""
        return self._moving("saving")

    def loading(self):
        """Count the bytes that are moved in a block that loads."""
        return self._moving("loading")

    def tensors(self, label, tensors):
        """Record names, dtypes, shapes and contents of loaded tensors."""
        for name, tensor in sorted(tensors.items()):
            self.report["tensors"][f"{label}/{name}"] = found = described(tensor)
            # Tied weights are loaded once.
            self.report["nbytes"][found[2]] = tensor.nbytes

    def value(self, label, value):
        """Record numbers that must be identical to the bit."""
        self.report["values"][label] = value

    def computed(self, label, tensor):
        """Record what a model computes.

        The order in which kernels add depends on the alignment of memory, and safetensors'
        maps are aligned as in the file.  So results may differ by 1e-7.
        """
        self.report["computed"][label] = tensor.detach().double().flatten().tolist()

    def files(self):
        """Record model files and their indices, after everything has been written."""
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if path.suffix == ".safetensors":
                self.report["files"][name] = parsed(path)
            elif path.name.endswith(".index.json"):
                self.report["files"][name] = path.read_text()
        return self.report


def parsed(path):
    """Return what a model file holds: its bytes, unless their order is random."""
    contents = path.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + length])
    data = hashlib.sha256(contents[8 + length :]).hexdigest()
    found = {"nbytes": len(contents), "header": header, "data": data}
    # safetensors orders several keys of metadata randomly, differently in each process.
    if len(header.get("__metadata__", {})) < 2:
        found["contents"] = hashlib.sha256(contents).hexdigest()
    return found


def described(tensor):
    """Return dtype, shape, and a digest of the contents."""
    import torch

    tensor = torch.as_tensor(tensor).detach().cpu().contiguous()
    contents = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(contents).hexdigest()
    return [str(tensor.dtype), list(tensor.shape), digest]


def moved():
    """Return how many bytes nvmeio has moved or mapped."""
    if "nvmeio" not in sys.modules:
        return 0
    import nvmeio
    from nvmeio._safetensors import file as _file

    if not isinstance(_file.FileMap, Mock):
        _file.FileMap = Mock(wraps=_file.FileMap)
    mapped = sum(call.args[1] for call in _file.FileMap.call_args_list)
    stats = nvmeio.default_handle().stats()
    ways = ("bytes_direct", "bytes_buffered", "bytes_bounced")
    return mapped + sum(stats[way] for way in ways)


def foreign():
    """Return the names in other packages that nvmeio has replaced."""
    from nvmeio.safetensors import _install

    mine = {id(each) for _, each in _install._pairs.values()}
    return [
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] != "nvmeio"
        for key, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in mine
    ]


def left_open():
    """Return the model files that are open."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(each) for each in folder.iterdir() if each.is_symlink()]
    return [link for link in links if ".safetensors" in link]


def play(scenarios, mode, folder):
    """Run all scenarios of an imported package, and write a report."""
    folder = Path(folder)
    if mode == "install":
        import nvmeio.safetensors

        nvmeio.safetensors.install()
    reports = {}
    for scenario in scenarios:
        name = scenario.__name__
        (folder / name).mkdir(parents=True)
        recorder = Recorder(folder / name)
        try:
            scenario(recorder)
        except Exception as error:
            error.add_note(f"in the scenario {name}")
            raise
        reports[name] = recorder.files()
    names = []
    if mode == "without":
        assert "nvmeio" not in sys.modules
    else:
        names = foreign()
        gc.collect()
        assert not left_open(), left_open()
        nvmeio = sys.modules["nvmeio"]
        nvmeio.safetensors.uninstall()
        assert not foreign()
    report = {"scenarios": reports, "names": names}
    (folder / "report.json").write_text(json.dumps(report))
