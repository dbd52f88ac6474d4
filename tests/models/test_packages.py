"""Packages that use safetensors behave the same with nvmeio as without.

Each package runs its scenarios in three processes: without nvmeio, with install() after
its import, and with NVMEIO_SAFETENSORS=1.  Nothing is downloaded.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_S = 600

# The scenarios of each package, defined in with_*.py.
SCENARIOS = {
    "transformers": (
        *("sharded_with_an_index", "tied_weights", "bfloat16"),
        *("device_map_with_offload_to_disk", "one_file"),
        "a_larger_model_that_several_threads_load",
        *("saved_over_a_file_that_was_loaded", "another_dtype_than_saved"),
        *("weights_that_are_missing_or_of_another_size", "renamed_weights"),
        *("checkpoint_and_resume_of_trainer", "best_model_of_trainer"),
    ),
    "accelerate": (
        *("state_of_a_training", "shards_and_dispatch_with_offload_to_disk"),
        *("tied_weights_in_a_state", "one_file_and_dispatch", "shards_into_a_model"),
        "offload_of_a_whole_model",
    ),
    "diffusers": (
        *("pipeline", "shards", "shards_that_several_threads_load"),
        *("variant_of_another_dtype", "all_at_once", "training_state"),
    ),
    "hub": (
        *("a_model", "shards", "shards_into_a_model", "a_model_that_saves_itself"),
        *("tensors_that_were_loaded_are_saved_again", "a_distributed_checkpoint"),
    ),
}
NAMES = {"hub": "huggingface_hub"}

# torch's writer gets the bytes from safetensors and writes them itself; accelerate offloads
# into files of numpy.
SAVED_OTHERWISE = {"a_distributed_checkpoint"}
LOADED_OTHERWISE = {"offload_of_a_whole_model"}

# Modules in which nvmeio must replace names; a package that takes them from elsewhere would
# run without nvmeio.
IMPORTED = {
    "transformers": {
        "safetensors.torch.load_file",
        "transformers.integrations.accelerate.safe_open",
        "transformers.modeling_utils.safe_open",
        "transformers.modeling_utils.safe_save_file",
    },
    "accelerate": {
        "accelerate.checkpointing.load_model",
        "accelerate.utils.modeling.safe_load_file",
        "accelerate.utils.modeling.safe_open",
        "accelerate.utils.offload.safe_open",
        "accelerate.utils.other.safe_save_file",
    },
    "diffusers": {"safetensors.torch.save_file", "safetensors.torch.load_file"},
    "hub": {"safetensors.safe_open", "safetensors.torch.save_file"},
}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # Sums by several threads are not identical to the bit each time.
    "OMP_NUM_THREADS": "1",
    # oneDNN uses AMX for bfloat16 if the processor reports it, and dies of SIGILL in
    # virtual machines that report AMX but do not allow it.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
}
VARIABLES = {"without": {}, "install": {}, "variable": {"NVMEIO_SAFETENSORS": "1"}}

CASES = [(package, name) for package, names in SCENARIOS.items() for name in names]


@pytest.fixture(scope="session")
def play(tmp_path_factory):
    """Return a function that runs a package's scenarios once, and returns the report."""

    @cache
    def played(package, mode):
        if importlib.util.find_spec(NAMES.get(package, package)) is None:
            pytest.skip(f"{NAMES.get(package, package)} is not installed")
        folder = tmp_path_factory.mktemp(f"{package}-{mode}")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("NVMEIO_")}
        environment = inherited | ENVIRONMENT | VARIABLES[mode] | {"HF_HOME": str(folder)}
        done = subprocess.run(
            [sys.executable, HERE / f"with_{package}.py", mode, folder],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
        return json.loads((folder / "report.json").read_text())

    return played


@pytest.mark.parametrize("mode", ["variable", "install"])
@pytest.mark.parametrize(("package", "scenario"), CASES)
def test_results_with_nvmeio_are_identical_to_the_bit(play, package, scenario, mode):
    theirs = play(package, "without")["scenarios"][scenario]
    ours = play(package, mode)["scenarios"][scenario]
    assert ours["files"] == theirs["files"]
    assert ours["tensors"] == theirs["tensors"]
    assert ours["values"] == theirs["values"]
    assert ours["computed"].keys() == theirs["computed"].keys()
    for label, numbers in theirs["computed"].items():
        pairs = zip(ours["computed"][label], numbers, strict=True)
        assert all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in pairs), label
    assert theirs["files"]
    assert theirs["tensors"] or theirs["computed"]
    assert theirs["moved"] == {"saving": 0, "loading": 0}
    if scenario not in SAVED_OTHERWISE:
        saved = sum(file["nbytes"] for file in models(theirs))
        assert ours["moved"]["saving"] >= saved > 0
    if scenario not in LOADED_OTHERWISE:
        assert ours["moved"]["loading"] >= sum(theirs["nbytes"].values()) > 0


def models(report):
    """Return the records of model files, without their indices."""
    return [file for file in report["files"].values() if not isinstance(file, str)]


@pytest.mark.parametrize("mode", ["variable", "install"])
@pytest.mark.parametrize("package", SCENARIOS)
def test_nvmeio_replaces_names_in_the_packages_modules(play, package, mode):
    """After uninstall() none of them has; the process itself has checked that."""
    assert IMPORTED[package] <= set(play(package, mode)["names"])
    assert play(package, "without")["names"] == []


@pytest.mark.parametrize("package", SCENARIOS)
def test_every_scenario_is_compared(play, package):
    assert set(play(package, "without")["scenarios"]) == set(SCENARIOS[package])
