"""What a program did with model files: their bytes, the tensors, who moved the bytes."""

import contextlib
import gc
import hashlib
import json
import os
import sys
from pathlib import Path


class Recorder:
    """Notes what happens in a folder, in a form that two processes can compare."""

    def __init__(self, folder):
        self.folder = folder
        self.report = {"files": {}, "tensors": {}, "nbytes": {}, "values": {}}
        self.report |= {"computed": {}, "moved": {"saving": 0, "loading": 0}}

    def path(self, name):
        """Return a place below the folder, whose own name is in no file."""
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
        """Count what is moved in a block that saves."""
        return self._moving("saving")

    def loading(self):
        """Count what is moved in a block that loads."""
        return self._moving("loading")

    def tensors(self, label, tensors):
        """Note names, dtypes, shapes and contents of tensors that were loaded."""
        for name, tensor in sorted(tensors.items()):
            self.report["tensors"][f"{label}/{name}"] = found = described(tensor)
            # Tied weights are loaded once.
            self.report["nbytes"][found[2]] = tensor.nbytes

    def value(self, label, value):
        """Note numbers that must be the same to the bit."""
        self.report["values"][label] = value

    def computed(self, label, tensor):
        """Note what a model computes.

        Kernels add up in another order where memory is aligned otherwise, and safetensors'
        map is aligned as the file is: that makes 1e-7 in the end.
        """
        self.report["computed"][label] = tensor.detach().double().flatten().tolist()

    def files(self):
        """Note model files and their indices, when all has been written."""
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if path.suffix == ".safetensors":
                self.report["files"][name] = parsed(path)
            elif path.name.endswith(".index.json"):
                self.report["files"][name] = path.read_text()
        return self.report


def parsed(path):
    """Return what a model file holds: its bytes, where these are not by lot."""
    contents = path.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + length])
    data = hashlib.sha256(contents[8 + length :]).hexdigest()
    found = {"nbytes": len(contents), "header": header, "data": data}
    # safetensors draws the order of several keys by lot, in each process another.
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
    """Return how many bytes nvmeio has moved, by its handle and by that of cached files."""
    if "nvmeio" not in sys.modules:
        return 0
    import nvmeio
    from nvmeio.safetensors import _reading

    handles = [nvmeio.default_handle(), _reading._cached.get()]
    stats = [handle.stats() for handle in handles]
    ways = ("bytes_direct", "bytes_buffered", "bytes_bounced")
    return sum(each[way] for each in stats for way in ways)


def foreign():
    """Return the names in other packages that are nvmeio's stand-ins."""
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
    """Play all scenarios of a package, which was imported before, and write a report."""
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
