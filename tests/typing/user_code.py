"""Code as users write it, for mypy and pyright in strict mode: `make lint`; not run."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import nvmeio
import nvmeio.aio
import nvmeio.futures
from nvmeio.checkpoint import Checkpointer, atomic_directory


def whole_files(folder: Path) -> npt.NDArray[np.float32]:
    weights = np.ones((1000, 1000), np.float32)
    count: int = nvmeio.write_file(weights, folder / "weights.bin", sync=True)
    nvmeio.read_into(weights[: count // 8000], folder / "weights.bin", offset=4000)
    nvmeio.save(folder / "weights.npy", weights)
    data: npt.NDArray[np.uint8] = nvmeio.read_file(str(folder / "weights.bin"))
    return data.view(np.float32)


def requests(paths: list[Path]) -> int:
    buffers = [nvmeio.empty(1 << 20, np.uint8) for _ in paths]
    with nvmeio.Handle(queue_depth=32, engine="auto", direct=True) as handle:
        started = [
            handle.submit_read(buffer, path)
            for buffer, path in zip(buffers, paths, strict=True)
        ]
        done, not_done = nvmeio.wait(started, timeout=10.0)
        for request in nvmeio.as_completed(not_done):
            request.add_done_callback(lambda request: print(request.result()))
        chained = handle.submit_write(buffers[0], "copy.bin", after=done)
        latencies = handle.latencies() - handle.latencies()
        print(handle.stats()["bytes_direct"], latencies.percentile_us(99.9))
        return chained.wait(timeout=1) + sum(request.wait() for request in started)


def first_of(requests: list[nvmeio.Request[int]]) -> int:
    done, pending = nvmeio.wait(requests, return_when="FIRST_COMPLETED")
    while pending:
        finished, pending = nvmeio.wait(pending, timeout=1)
        done |= finished
    completions: nvmeio.futures.Completions = nvmeio.as_completed(requests)
    last = next(completions).wait()
    print(last, next(nvmeio.as_completed(done)).wait().bit_length())
    return done.pop().wait()


def mixed(handle: nvmeio.Handle, array: nvmeio.ArrayFile) -> npt.NDArray[np.float32]:
    out = np.empty((2, 8), np.float32)
    reading = handle.submit_gather("rows.bin", [0, 4096], 32, out, result=out)
    plain = handle.submit_gather("rows.bin", [0, 4096], 32, out, after=reading)
    waited: nvmeio.futures.Waited = nvmeio.wait([reading, plain, array.prefetch(3)])
    print(len(waited.not_done), plain.wait() // 2)
    return reading.wait()


def written(array: nvmeio.ArrayFile) -> int:
    return array.submit_scatter([3], np.ones((1, 64))).wait()


def stream(file: nvmeio.File) -> int:
    values = np.empty(100, np.float32)
    file.writelines([values, b"end"])
    return file.write(values) + file.write(values[0]) + file.readinto(values)


def records(path: Path, offsets: npt.NDArray[np.int64]) -> bytes:
    out = bytearray(len(offsets) * 4096)
    try:
        with nvmeio.File(path, "r+", direct="auto") as file:
            nvmeio.default_handle().gather(file, offsets, 4096, out)
            nvmeio.default_handle().fsync(file, data_only=True)
            file.preallocate(file.size * 2)
    except nvmeio.GatherError as error:
        for index, number in error.failures:
            print(index, number, error.filename)
    except OSError as error:
        print(error.errno)
    return bytes(out)


def rows(path: Path) -> float:
    with nvmeio.ArrayFile.create(path, (1000, 64), np.float32, overwrite=True) as array:
        array[10:20] = 1.0
        array[[3, 1, 2]] = np.ones((3, 64))
        array.flush()
        shape: tuple[int, ...] = array.shape
        print(shape, array.nbytes)
    with nvmeio.ArrayFile(path) as array:
        return float(array[5].sum()) + float(array.gather([1, 2]).mean())


async def serve(path: Path) -> int:
    with nvmeio.Handle() as handle:
        first = await handle.submit_read(bytearray(100), path)
        both = await asyncio.gather(
            handle.submit_read(bytearray(100), path),
            handle.submit_read(bytearray(100), path),
        )
    with nvmeio.ArrayFile(path) as array:
        found = await array.prefetch([1, 2, 3])
    return first + sum(both) + len(found)


async def awaiting(requests: list[nvmeio.Request[int]]) -> int:
    total = 0
    async for request in nvmeio.as_completed(requests):
        total += await request
    first = await anext(nvmeio.as_completed(requests))
    return first.wait() + total


async def coroutines(path: Path) -> int:
    await nvmeio.aio.save(path, np.arange(12).reshape(4, 3))
    with nvmeio.ArrayFile(path) as array:
        rows = await nvmeio.aio.getitem(array, [0, 3])
    async with nvmeio.Handle() as handle:
        request = handle.submit_read(bytearray(4), path)
        task = asyncio.create_task(request.as_coroutine())
        return await task + len(rows) + len(await nvmeio.aio.read_file(path))


def checkpoints(folder: Path) -> int | None:
    with Checkpointer(folder, keep=3) as checkpointer:
        saving = checkpointer.save_async(1, {"weights": np.ones(3), "epoch": 1})
        print(saving.result().name, saving.staged.done())
        state = checkpointer.restore()
        print(state["epoch"])
        newest = checkpointer.latest()
    with atomic_directory(folder / "other", replace=True) as inside:
        nvmeio.save(inside / "a.npy", np.arange(3))
    return newest


def facts() -> str:
    nvmeio.show_config()
    limit: int = nvmeio.pool_stats()["bytes_limit"]
    works = nvmeio.engines()["io_uring"]["works"]
    return f"{nvmeio.__version__} {limit} {works} {nvmeio.show_config('dicts')['build']}"


def profile() -> dict[str, Any]:
    found = nvmeio.profiles.load_profile(".")
    return {} if found is None else found.both.options


def deepspeed() -> int:
    handle = nvmeio.aio_handle(1 << 20, 128, False, True, 1, errors="raise")
    handle.async_pread(np.empty(100), "swap.bin")
    return handle.wait()
