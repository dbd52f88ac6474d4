"""Models whose weights are on a drive, computed on another device than the CPU."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
import nvmeio.safetensors.torch  # noqa: E402
import nvmeio.torch  # noqa: E402
from children import run_child  # noqa: E402
from helpers import since_torch  # noqa: E402

needs_fake_device = since_torch((2, 10), "backends in Python")


@needs_fake_device
def test_weights_are_copied_before_they_are_used(tmp_path):
    """Memory that a copy reads is not used again, and other streams wait for the copy."""
    assert run_child("compute_on_a_device", folder=str(tmp_path)).report == {
        "same": [True] * 3,
        "peak": True,
        "kept": True,
        "devices": ["privateuseone:0"],
        "done": ["copy", "record", "record_stream", "synchronize", "wait"],
    }


@needs_fake_device
@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_a_forked_child_may_drop_a_model(tmp_path, kind):
    """It leaves the reads and copies of the parent alone."""
    report = run_child("collect_in_a_forked_child", folder=str(tmp_path), kind=kind).report
    assert report == {"read ahead": True, "printed": "", "status": 0}


@pytest.mark.parametrize("device", ["cuda:99", "privateuseone", "meta"])
def test_a_device_that_cannot_compute_is_refused(tmp_path, device):
    model = torch.nn.Linear(3, 3)
    path = tmp_path / "model.safetensors"
    nvmeio.safetensors.torch.save_file(model.state_dict(), path)
    with pytest.raises(ValueError, match=f"execution_device is '{device}"):
        nvmeio.torch.disk_offload(model, path, memory="1MiB", execution_device=device)
    assert type(model.weight) is torch.nn.Parameter


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_results_on_a_gpu_are_the_same(tmp_path):
    layers = [torch.nn.Linear(512, 512, device="cuda") for _ in range(8)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    path = tmp_path / "model.safetensors"
    nvmeio.safetensors.torch.save_file(model.state_dict(), path)
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    expected = model(x)
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    nvmeio.torch.disk_offload(model, path, memory="6MiB", execution_device="cuda")
    for _ in range(5):
        found = model(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        assert torch.equal(x.grad, gradient)
        x.grad = None
    assert nvmeio.torch.disk_stats(model)["bytes_peak"] <= 6 << 20
