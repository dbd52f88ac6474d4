"""Answer requests for rows of a feature file over a socket, in one event loop.

The script starts the service and some clients, which together ask 2,000 times for rows.
Some requests are cancelled by the client, and some time out in the service; both cancel the
reads.  All files are in a temporary folder, which is removed at the end.  The exit status
is 0 only if every row was the right one, nothing stayed in flight, and neither memory nor
descriptors leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import nvmeio
import nvmeio.aio

WIDTH = 128
# Rows per part, when the file is made.
CHUNK = 1 << 14
CLIENTS = 4
# How many requests a client has in flight.
AT_ONCE = 16
PATIENCE_S = 30.0

# A request has a number that the client chooses, its kind, the timeout in seconds, and how
# many row numbers (int64) follow. An answer has the same number, the result, and how many
# bytes follow.
ASKED = struct.Struct("<IBdI")
ANSWERED = struct.Struct("<IBI")
ASK, DROP = range(2)
FOUND, LATE, REFUSED = range(3)

Rows = npt.NDArray[np.int64]
Features = npt.NDArray[np.float32]


async def build(path: Path, count: int) -> None:
    """Make a file of random features. The first feature of a row is its number."""
    generator = np.random.default_rng(0)
    with nvmeio.ArrayFile.create(path, (count, WIDTH), "f4") as features:
        for begin in range(0, count, CHUNK):
            rows = np.arange(begin, min(begin + CHUNK, count))
            values = generator.standard_normal((len(rows), WIDTH), "f4")
            values[:, 0] = rows
            await nvmeio.aio.setitem(features, slice(begin, rows[-1] + 1), values)
        await nvmeio.aio.flush(features)


class Service:
    """Answers clients, many requests of each client at once."""

    def __init__(self, features: nvmeio.ArrayFile) -> None:
        self.features = features
        self.connections: list[Any] = []

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one client until it disconnects."""
        self.connections.append(asyncio.current_task())
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                number, kind, seconds, count = ASKED.unpack(
                    await reader.readexactly(ASKED.size)
                )
                if kind == DROP:
                    if number in tasks:
                        tasks[number].cancel()
                    continue
                rows = np.frombuffer(await reader.readexactly(8 * count), "<i8")
                task = asyncio.create_task(self.answer(writer, number, rows, seconds))
                tasks[number] = task
                task.add_done_callback(lambda _, number=number: tasks.pop(number))
        except asyncio.IncompleteReadError:
            # The client has disconnected and needs no more answers.
            for task in tasks.values():
                task.cancel()
        finally:
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            writer.close()

    async def answer(
        self, writer: asyncio.StreamWriter, number: int, rows: Rows, seconds: float
    ) -> None:
        """Answer one request, unless it is cancelled."""
        status, data = REFUSED, b""
        try:
            # Even after a timeout, this only ends when nothing writes to the memory any
            # more.
            request = self.features.prefetch(rows)
            found = await asyncio.wait_for(request.as_coroutine(), seconds)
            status, data = FOUND, found.tobytes()
        except asyncio.TimeoutError:
            status = LATE
        except IndexError:
            pass
        writer.write(ANSWERED.pack(number, status, len(data)) + data)
        await writer.drain()


class Client:
    """Sends many requests to a service at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.numbers = itertools.count()
        self.waiting: dict[int, asyncio.Future[tuple[int, bytes]]] = {}

    async def listen(self) -> None:
        """Pass on answers until the service disconnects."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await self.reader.readexactly(ANSWERED.size)
                number, status, nbytes = ANSWERED.unpack(head)
                data = await self.reader.readexactly(nbytes)
                # An answer may still come to a request that has just been cancelled.
                future = self.waiting.get(number)
                if future is not None and not future.done():
                    future.set_result((status, data))

    async def ask(self, rows: Rows, seconds: float) -> tuple[int, Features]:
        """Ask for rows, and return the result and the rows."""
        number = next(self.numbers)
        future = asyncio.get_running_loop().create_future()
        self.waiting[number] = future
        self.writer.write(ASKED.pack(number, ASK, seconds, len(rows)) + rows.tobytes())
        try:
            status, data = await future
        except asyncio.CancelledError:
            self.writer.write(ASKED.pack(number, DROP, 0, 0))
            raise
        finally:
            del self.waiting[number]
        return status, np.frombuffer(data, "f4").reshape(-1, WIDTH)


class Load:
    """The clients' requests, and the answers."""

    def __init__(self, count: int, rows: int) -> None:
        self.count, self.rows = count, rows
        self.random = random.Random(0)
        self.ended = Counter[str]()
        self.latencies: list[float] = []
        self.wrong = 0

    async def ask(self, client: Client, index: int) -> None:
        """Ask once. One in 10 is cancelled; one in 20 is too large for its timeout."""
        is_large = index % 20 == 5
        count = 64 * self.rows if is_large else self.rows
        rows = np.array(self.random.choices(range(self.count), k=count), np.int64)
        seconds = 1e-6 if is_large else PATIENCE_S
        begin = time.perf_counter()
        task = asyncio.create_task(client.ask(rows, seconds))
        if index % 10 == 0:
            await asyncio.sleep(self.random.random() * 1e-3)
            task.cancel()
        try:
            status, features = await task
        except asyncio.CancelledError:
            self.ended["cancelled"] += 1
            return
        if status == LATE:
            self.ended["out of time"] += 1
            return
        self.ended["answered"] += 1
        self.latencies.append(time.perf_counter() - begin)
        right = status == FOUND and np.array_equal(features[:, 0], rows)
        self.wrong += not right

    async def run(self, host: str, port: int, requests: int) -> None:
        """Start the clients, each of which sends several requests at once."""
        indices = iter(range(requests))

        async def ask_on(client: Client) -> None:
            for index in indices:
                await self.ask(client, index)

        clients = [
            Client(*await asyncio.open_connection(host, port)) for _ in range(CLIENTS)
        ]
        listening = [asyncio.create_task(client.listen()) for client in clients]
        await asyncio.gather(*(ask_on(client) for client in clients * AT_ONCE))
        for client in clients:
            client.writer.close()
        await asyncio.gather(*listening, *(each.writer.wait_closed() for each in clients))


async def try_service(path: Path, count: int, requests: int, rows: int) -> bool:
    """Serve a file to clients, and return whether every answer was right."""
    load = Load(count, rows)
    async with nvmeio.Handle() as handle:
        with nvmeio.ArrayFile(path, handle=handle) as features:
            service = Service(features)
            server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            begin = time.perf_counter()
            await load.run(host, port, requests)
            seconds = time.perf_counter() - begin
            server.close()
            await server.wait_closed()
            await asyncio.gather(*service.connections)
            pending = handle.pending
    print("   " + ", ".join(f"{load.ended[each]} {each}" for each in sorted(load.ended)))
    answered = len(load.latencies) * rows
    print(f"   {answered} rows of {4 * WIDTH} bytes, {answered / seconds:.0f} rows/s")
    for q in (50, 99, 100):
        print(f"   {q} % within {np.percentile(load.latencies, q) * 1e3:.2f} ms")
    if pending:
        print(f"   {pending} REQUESTS ARE IN FLIGHT")
    return not load.wrong and not pending and sum(load.ended.values()) == requests


def in_use() -> tuple[int, int]:
    """Return how many bytes of the pool are in use, and how many descriptors."""
    gc.collect()
    return nvmeio.pool_stats()["bytes_used"], len(os.listdir("/proc/self/fd"))


def main(arguments: list[str] | None = None) -> int:
    """Build the file, serve it, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--count", type=int, default=200_000, help="rows of the file (200000)"
    )
    parser.add_argument(
        "--requests", type=int, default=2000, help="number of requests (2000)"
    )
    parser.add_argument("--rows", type=int, default=64, help="rows per request (64)")
    options = parser.parse_args(arguments)
    for name in ("count", "requests", "rows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; at least one is needed")
    with tempfile.TemporaryDirectory(prefix="nvmeio-service-", dir=".") as folder:
        path = Path(folder) / "features.npy"
        asyncio.run(build(path, options.count))
        print(f"   features of {path.stat().st_size / (1 << 20):.0f} MiB")
        nvmeio.default_handle().close()
        before = in_use()
        right = asyncio.run(
            try_service(path, options.count, options.requests, options.rows)
        )
        left = in_use()
    print("every row was the right one" if right else "NOT ALL WENT WELL")
    print("nothing is left" if left == before else f"LEFT: {left}, BEFORE: {before}")
    return 0 if right and left == before else 1


if __name__ == "__main__":
    sys.exit(main())
