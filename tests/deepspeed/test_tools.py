"""DeepSpeed's tools for NVMe run end to end, and their bytes go through nvmeio.

They are real processes that get nvmeio only by NVMEIO_DEEPSPEED.  In them and their
children recording/sitecustomize.py records what each handle moves.

Of ds_io's engines, only aio_handle works in DeepSpeed 0.19, with any op: aio_basic
transfers and then slices a float; torch_io and torch_fastio lack the parameter for the
loop's number.
"""

import json
import os
import sys
from pathlib import Path

import pytest

import nvmeio.deepspeed
from helpers import MIB, pattern
from processes import run, run_well

TOOLS = Path(sys.executable).parent
RECORDING = Path(__file__).with_name("recording")

# Three MiB in blocks of 128 KiB.
SIZE = 3 * MIB
LOOPS = 3
OPTIONS = ("--io_size=3M", "--block_size=128K", "--queue_depth=8", "--loops=2")


class Recorder:
    """The environment of a tool, and the bytes that its processes moved with nvmeio."""

    def __init__(self, folder):
        self.folder = folder
        paths = filter(None, [str(RECORDING), os.environ.get("PYTHONPATH")])
        self.env = {
            "NVMEIO_DEEPSPEED": "1",
            "NVMEIO_RECORDS": str(folder),
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def bytes_of_processes(self):
        """Return how many bytes the handles of each process have moved, sorted."""
        return sorted(self._bytes_of(path) for path in self.folder.iterdir())

    def _bytes_of(self, path):
        # The last line of a handle counts; each call of a function has a line of its own.
        latest = {}
        for number, line in enumerate(path.read_text().splitlines()):
            record = json.loads(line)
            latest[record["handle"] or -number] = record["bytes"]
        return sum(latest.values())


@pytest.fixture
def recorder(tmp_path):
    """A recorder with a folder for its records."""
    (tmp_path / "records").mkdir()
    return Recorder(tmp_path / "records")


@pytest.fixture
def nvme(tmp_path):
    """A folder that a tool uses as its drive."""
    (tmp_path / "nvme").mkdir()
    return tmp_path / "nvme"


def ds_io(nvme, *options):
    """Return the command that runs ds_io."""
    return (TOOLS / "ds_io", f"--folder={nvme}", *OPTIONS, *options)


def file_of(nvme, op, number, loop="_0"):
    """Return the path of a file that the tool makes or reads."""
    return nvme / f"_aio_{op}_{SIZE}.pt.{number}{loop}"


@pytest.mark.parametrize(
    "options",
    [
        ("--io_parallel=3", "--single_submit", "--sequential_requests"),
        ("--use_accelerator_pin_memory",),
    ],
    ids=["pinned", "not pinned"],
)
def test_ds_io_writes_in_several_processes(recorder, nvme, options):
    printed = run_well(
        *ds_io(nvme, "--multi_process=2", "--validate", *options), env=recorder.env
    )
    assert "E2E Write Speed" in printed
    assert {path.stat().st_size for path in nvme.iterdir()} == {SIZE}
    assert {*nvme.iterdir()} == {file_of(nvme, "write", number) for number in range(2)}
    assert recorder.bytes_of_processes() == [LOOPS * SIZE] * 2


def test_ds_io_writes_another_file_in_each_loop(recorder, nvme):
    run_well(*ds_io(nvme, "--different_file_each_iteration"), env=recorder.env)
    expected = {file_of(nvme, "write", 0, f"_{loop}") for loop in range(LOOPS)}
    assert {*nvme.iterdir()} == expected
    assert len({path.read_bytes() for path in expected}) == 1
    assert recorder.bytes_of_processes() == [LOOPS * SIZE]


def test_ds_io_reads_in_several_processes(recorder, nvme):
    contents = {file_of(nvme, "read", n): pattern(SIZE, n) for n in range(2)}
    for path, content in contents.items():
        path.write_bytes(content)
    # The tool checks no status: only an exception ends it when it read wrong bytes.
    env = recorder.env | {"NVMEIO_DEEPSPEED": "raise"}
    printed = run_well(*ds_io(nvme, "--read", "--multi_process=2", "--validate"), env=env)
    assert "E2E Read Speed" in printed
    assert all(path.read_bytes() == content for path, content in contents.items())
    assert recorder.bytes_of_processes() == [LOOPS * SIZE] * 2


def test_aio_basic_transfers_before_the_tools_own_failure(recorder, nvme):
    done = run(*ds_io(nvme, "--engine=aio_basic"), env=recorder.env)
    assert done.returncode == 1
    assert "TypeError: 'float' object is not subscriptable" in done.stderr
    content = file_of(nvme, "write", 0, "").read_bytes()
    # Random bytes below 128.
    assert len(content) == SIZE
    assert set(content) == set(range(128))
    assert recorder.bytes_of_processes() == [LOOPS * SIZE]


def test_torch_fastio_fails_by_the_tools_own_fault(recorder, nvme):
    done = run(*ds_io(nvme, "--engine=torch_fastio"), env=recorder.env)
    assert done.returncode == 1
    assert "TypeError: Torch_FastIO_Engine.write() takes 3 positional" in done.stderr


def test_torch_io_fails_without_nvmeio(nvme):
    done = run(*ds_io(nvme, "--engine=torch_io"), env={"NVMEIO_DEEPSPEED": "0"})
    assert done.returncode == 1
    assert "TypeError: TorchIO_Engine.write() takes 3 positional" in done.stderr


def test_the_result_of_ds_nvme_tune_configures_a_handle(recorder, nvme, tmp_path):
    sweep = tmp_path / "sweep.json"
    sweep.write_text(
        json.dumps({"block_size": ["128K"], "queue_depth": [4, 8], "single_submit": [True]})
    )
    printed = run_well(
        TOOLS / "ds_nvme_tune",
        f"--nvme_dir={nvme}",
        f"--sweep_config={sweep}",
        f"--log_dir={tmp_path / 'logs'}",
        "--io_size=3M",
        env=recorder.env,
    )
    # Two configurations, read and written; one loop and the one before that warms up.
    assert recorder.bytes_of_processes() == [2 * SIZE] * 4
    tuned = json.loads(printed[printed.index("{") :])
    assert tuned["aio"]["num_threads"] == 1
    assert tuned["aio"]["single_submit"] == "true"

    with pytest.warns(UserWarning, match="in quotes|num_threads") as warned:
        arguments = nvmeio.deepspeed.aio_config(tuned)
    assert len(warned) == 3
    handle = nvmeio.deepspeed.aio_handle(**arguments)
    assert handle.get_block_size() == 128 << 10
    assert handle.get_queue_depth() in (4, 8)
    assert handle.get_single_submit() is True
    assert handle.get_overlap_events() is True
    assert handle.get_intra_op_parallelism() == 1
