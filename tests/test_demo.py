"""The demo runs, reports wrong bytes, and leaves nothing behind."""

import importlib.util
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nvmeio

torch = pytest.importorskip("torch", reason="torch is not installed")

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"
THREADS = torch.get_num_threads()


@pytest.fixture
def demo():
    """The demo as a module, so that tests can inject faults."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    before = signal.getsignal(signal.SIGTERM)
    spec.loader.exec_module(module)
    yield module
    signal.signal(signal.SIGTERM, before)
    torch.set_num_threads(THREADS)


def start(folder, megabytes):
    """Start the demo as a process."""
    return subprocess.Popen(
        [sys.executable, DEMO, "--size", str(megabytes)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_demo_shows_everything_in_one_screen(tmp_path):
    process = start(tmp_path, 5)
    printed, errors = process.communicate()
    assert process.returncode == 0, printed + errors
    assert len(printed.splitlines()) <= 30
    found = [" ".join(line.split()) for line in printed.splitlines()]
    with nvmeio.Handle() as handle:
        assert f"in use {handle.stats()['engine']}" in found
    for name, engine in nvmeio.engines().items():
        assert (
            f"{name} {'works' if engine['works'] else 'no: ' + engine['reason']}" in found
        )
    for call in ("nvmeio.load", "numpy.save", "nvmeio.safetensors.torch.load_file"):
        assert any(re.match(rf"{call} +\d+\.\d\d GB/s \[", line) for line in found)
    assert "every byte came back" in found
    assert "every tensor came back" in found
    assert "the parameters are the same, to the last bit" in found
    assert found[-1] == "All is well."
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_leaves_nothing_behind(tmp_path, number):
    process = start(tmp_path, 256)
    while not list(tmp_path.glob("*/array.npy")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("nvmeio.load", "every byte came back"),
        ("nvmeio.safetensors.torch.load_file", "every tensor came back"),
        ("nvmeio.checkpoint.Checkpointer.restore", "the parameters are the same"),
    ],
)
def test_a_changed_bit_is_reported(demo, tmp_path, capsys, monkeypatch, call, said):
    right = pkgutil.resolve_name(call)

    def wrong(*arguments):
        found = right(*arguments)
        changed = found
        while isinstance(changed, dict):
            changed = next(iter(changed.values()))
        torch.as_tensor(changed).view(-1).view(torch.uint8)[7] ^= 1
        return found

    monkeypatch.setattr(call, wrong)
    assert demo.main([str(tmp_path), "--size", "1"]) == 1
    printed = capsys.readouterr().out
    assert f"NOT SO: {said}" in printed
    assert printed.count("NOT SO") == 1
    assert printed.endswith("SOMETHING IS WRONG; see above.\n")
