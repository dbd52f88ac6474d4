"""The demo runs, reports different bytes, and leaves nothing behind."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nvmeio

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("sklearn")

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"
SIZE = (5 << 20) + 1


@pytest.fixture
def demo():
    """The demo as a module, so that tests can inject faults."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
        del sys.modules["demo"]


def start(folder, size):
    """Start the demo as a process."""
    return subprocess.Popen(
        [sys.executable, DEMO, "--size", str(size)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_demo_verifies_that_every_byte_came_back(tmp_path):
    process = start(tmp_path, SIZE)
    printed, errors = process.communicate()
    assert process.returncode == 0, printed + errors
    assert f"2. A round trip of {SIZE} bytes" in printed
    found = [" ".join(line.split()) for line in printed.splitlines()]
    with nvmeio.Handle() as handle:
        assert f"chosen {handle.stats()['engine']}" in found
    for name, engine in nvmeio.engines().items():
        works = "works" if engine["works"] else f"no: {engine['reason']}"
        assert f"engine {name} {works}" in found
    speed = r"\d+\.\d\d GB/s \[\d+\.\d\d-\d+\.\d\d\]"
    for side in ("nvmeio", "numpy"):
        assert any(re.fullmatch(f"{side} writes {speed}", line) for line in found)
        delivered = r"; the device delivered \d+ bytes or more"
        assert any(re.fullmatch(f"{side} reads {speed}{delivered}", line) for line in found)
    assert "verified every byte came back" in found
    assert "parameters bit-identical" in found
    assert found[-1] == "all is well"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=lambda n: n
)
def test_a_signal_leaves_nothing_behind(tmp_path, number, status):
    process = start(tmp_path, 256 << 20)
    while not list(tmp_path.glob("*/tensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    printed, errors = process.communicate()
    assert process.returncode == status, printed + errors
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == []


def test_a_different_byte_is_reported(demo, tmp_path, capsys, monkeypatch):
    read = demo.read_with_nvmeio

    def read_wrongly(path, into):
        read(path, into)[0].view(demo.torch.int32)[7] ^= 1
        return into

    monkeypatch.setattr(demo, "read_with_nvmeio", read_wrongly)
    assert demo.main([str(tmp_path), "--size", "1M"]) == 1
    printed = capsys.readouterr().out
    assert "NO: bytes differ" in printed
    assert "NOT bit-identical" not in printed


def test_a_different_state_is_reported(demo, tmp_path, capsys, monkeypatch):
    swap_in = demo.SwappedState.swap_in

    def swap_in_wrongly(state):
        swap_in(state)
        state.memory[7] += 1

    monkeypatch.setattr(demo.SwappedState, "swap_in", swap_in_wrongly)
    assert demo.main([str(tmp_path), "--size", "1M"]) == 1
    printed = capsys.readouterr().out
    assert "every byte came back" in printed
    assert "NOT bit-identical" in printed


def test_a_missing_folder_is_reported(demo, tmp_path, capsys):
    assert demo.main([str(tmp_path / "missing")]) == 1
    assert "No such file or directory" in capsys.readouterr().err
