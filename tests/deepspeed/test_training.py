"""Training by ZeRO-3 with states and parameters on NVMe moves them with nvmeio.

DeepSpeed's CPU accelerator takes the same steps on the same numbers with offloading to
memory and to NVMe, so losses and parameters must be identical to the bit.
"""

import functools
import json
from pathlib import Path

import pytest
from deepspeed.accelerator import get_accelerator

from processes import rank_environment, run_python

STEPS = 4
TRAIN = Path(__file__).with_name("train.py")

# Bytes of the two swapped weights of 512 x 1024; the biases stay in memory.
WEIGHTS = 2 * 512 * 1024
BYTES = {"float32": 4, "bfloat16": 2}

# torch's Adam, and DeepSpeed's, which is compiled at its first use.  Each runs in one
# process, which trains once in memory.
KINDS = [
    pytest.param(*kind, marks=pytest.mark.xdist_group(kind[0]))
    for kind in (("float32", "Adam"), ("bfloat16", "DeepSpeedCPUAdam"))
]


def train(dtype, optimizer, nvmeio, **offload):
    """Train in a process of its own, and return its report."""
    arguments = {"dtype": dtype, "optimizer": optimizer, "steps": STEPS, "offload": offload}
    env = rank_environment() | {"NVMEIO_DEEPSPEED": nvmeio}
    return json.loads(run_python(TRAIN, json.dumps(arguments), env=env).splitlines()[-1])


@functools.cache
def trained_in_memory(dtype, optimizer):
    """Return the report of training without nvmeio and with states in memory."""
    return train(dtype, optimizer, nvmeio="0", offload_optimizer={"device": "cpu"})


def states_on(folder, pipelined):
    """Return DeepSpeed's configuration for states that are swapped."""
    return {
        "device": "nvme",
        "nvme_path": str(folder),
        "buffer_count": 8,
        "pipeline_read": pipelined,
        "pipeline_write": pipelined,
    }


def parameters_on(folder):
    """Return DeepSpeed's configuration for parameters that are swapped, all of them."""
    return {
        "device": "nvme",
        "nvme_path": str(folder),
        "buffer_count": 5,
        "buffer_size": WEIGHTS,
        "max_in_cpu": 0,
    }


def assert_trained_alike(report, expected):
    """Assert that losses and parameters equal those in memory; no two losses are equal."""
    assert report["losses"] == expected["losses"]
    assert report["digests"] == expected["digests"]
    assert len(set(report["losses"])) == STEPS


def bytes_of_states(folder):
    """Return how many bytes training moves to and from the files of states."""
    files = folder / "zero_stage_3/optimizer/rank0"
    gradients = {*files.glob("*_gradient_*")}
    states = {*files.glob("exp_avg*")}
    values = {*files.iterdir()} - states - gradients
    assert (len(values), len(states)) == (2, 4)
    # Until the first step makes states there are only values: written, read, written, read.
    # After that each step writes values and two states, which the next one reads; gradients
    # are written and read.
    value = sum(path.stat().st_size for path in values)
    gradient = sum(path.stat().st_size for path in gradients)
    return (4 + 3 + 6 * (STEPS - 1)) * value + 2 * STEPS * gradient


@pytest.mark.parametrize(("dtype", "optimizer"), KINDS)
@pytest.mark.parametrize("pipelined", [False, True])
def test_optimizer_states_on_nvme_train_as_in_memory(tmp_path, dtype, optimizer, pipelined):
    report = train(
        dtype, optimizer, nvmeio="1", offload_optimizer=states_on(tmp_path, pipelined)
    )
    assert_trained_alike(report, trained_in_memory(dtype, optimizer))
    assert sum(report["states"].values()) == bytes_of_states(tmp_path)
    assert len(report["states"]) == 1 + pipelined


@pytest.mark.parametrize(("dtype", "optimizer"), KINDS)
def test_parameters_and_states_on_nvme_train_as_in_memory(tmp_path, dtype, optimizer):
    # DeepSpeed 0.19.8, zero/partition_parameters.py: `dtype or float16 if ... else ...`.
    if dtype == "float32" and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed offloads bfloat16 alone where the CPU has no float16")
    report = train(
        dtype,
        optimizer,
        nvmeio="raise",
        offload_optimizer=states_on(tmp_path, pipelined=False),
        offload_param=parameters_on(tmp_path),
    )
    assert_trained_alike(report, trained_in_memory(dtype, optimizer))
    assert sum(report["states"].values()) == bytes_of_states(tmp_path)
    # Parameters are written when they are made, when the optimizer is made, and after each
    # step; they are read at least once for each forward and backward pass.
    parameters = WEIGHTS * BYTES[dtype]
    assert report["parameters"]["aio_write_handle"] == (2 + STEPS) * parameters
    assert report["parameters"]["aio_read_handle"] >= 2 * STEPS * parameters
