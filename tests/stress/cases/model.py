"""Random operations on a file, compared with a model of the file in memory."""

import contextlib
import errno
import os
import random
import sys
import warnings
import weakref

import numpy as np

import nvmeio
from filemodel import plans
from filemodel.inflight import InFlight
from filemodel.model import FileModel, World, end_of, number_of
from filemodel.plans import FIRM, Transfer
from filemodel.regimes import Regime
from helpers import MIB, PAGE
from workloads.common import report
from workloads.forks import fork, join

# FUSE takes 0.2 ms for each block.
LIMIT = {"fuse": 32 * PAGE}
LIMIT_ELSEWHERE = MIB // 2

# Values of NVMEIO_POOL_BYTES.  Small pools lack memory for some bounces: ENOMEM.
POOLS = ("", "", "", "2M", "5M")


def open_op(world, options):
    """Open DeepSpeed's op, with a handle of the engine under test."""
    world.figures["handles"] += 1
    return nvmeio.aio_handle(engine=world.engine, **options)


class Model(FileModel):
    """Runs the steps of a plan on a file, and checks it."""

    def __init__(self, world, path, op, limit, created=False):
        super().__init__(world, path, op, limit)
        self.stack = contextlib.ExitStack()
        self.make(created)

    def make(self, created):
        """Make the file again; one that an open created is preallocated."""
        world, first = self.world, None
        if created:
            first = nvmeio.File(self.path, "w", direct=world.direct and "auto")
        with open(self.path, "r+b" if created else "wb") as file:
            # FUSE caches sizes by name for a while.
            file.truncate(FIRM)
        world.noise[:FIRM].tofile(world.plain(self.path))
        self.content[:] = 0
        self.content[:FIRM] = world.noise[:FIRM]
        self.size = self.settled = FIRM
        self.open_files(first)

    def run(self, steps):
        """Run steps, and count the operations among them."""
        for number, step in enumerate(steps):
            try:
                getattr(self, step.kind)(step)
            except BaseException:
                sys.stderr.write(f"{self.path}, step {number}: {step}\n")
                raise
            if step.counted:
                self.world.figures[step.counted] += 1

    def finish(self):
        """Check everything, and remove the file."""
        self.settle()
        self.compare()
        self.stack.close()
        os.unlink(self.path)

    # Steps.

    def transfer(self, step):
        self.begin(step.transfer)

    def chosen(self, share):
        """Return one of the transfers in flight, or None."""
        requests = [flight for flight in self.in_flight if flight.request is not None]
        return requests[int(share * len(requests))] if requests else None

    def wait_one(self, step):
        flight = self.chosen(step.share)
        if flight is not None:
            self.ended(flight, end_of(flight.request))

    def poll(self, step):
        flight = self.chosen(step.share)
        if flight is not None and flight.request.done():
            self.ended(flight, end_of(flight.request))

    def wait(self, step):
        self.settle()

    def check(self, step):
        self.settle()
        self.compare()
        assert self.handle.pending == 0

    def cancel(self, step):
        flight = self.begin(step.transfer)
        if flight is None or step.word == "another":
            flight = self.chosen(step.share)
        if flight is not None:
            flight.cancelled |= flight.request.cancel()

    def drop(self, step):
        flight = self.begin(step.transfer)
        if flight is not None:
            self.in_flight.remove(flight)
            self.dropped.append(flight)
            flight.drop()

    def fsync(self, step):
        world = self.world
        transfer = Transfer("fsync", (), step.word, step.file, (), race=True)
        named = self.files[step.file]
        flight = InFlight(transfer, named, None, world.regimes(), world.regime)
        flight.lost = self.lost
        flight.doomed = bool(self.lost) and step.file == "File"
        flight.earlier = [
            other for other in self.in_flight if other.writes and other.request is not None
        ]
        if step.word == "request":
            flight.request = self.handle.submit_fsync(named)
            self.in_flight.append(flight)
            return
        try:
            self.handle.fsync(named)
        except OSError as error:
            self.ended(flight, error)
        else:
            self.ended(flight, None)

    def close(self, step):
        """Close the op, which drains its handle, and open another one."""
        self.world.count(self.handle)
        self.world.figures["closed over"] += len(self.in_flight) + len(self.dropped)
        tracked = [flight for flight in self.in_flight if flight.request is None]
        if step.word == "dropped" and not any(flight.errors() for flight in tracked):
            alive = weakref.ref(self.handle)
            self.op = None
            assert alive() is None
            self.end_tracked(lambda: None)
        elif step.word == "with":
            self.end_tracked(self.leave)
        else:
            self.end_tracked(self.op.close)
        for flight in list(self.in_flight):
            assert flight.request.done(), f"closed before it was done: {flight}"
            self.ended(flight, end_of(flight.request))
        self.end_dropped()
        self.op = open_op(self.world, step.options)

    def leave(self):
        with self.op:
            pass

    def open_files(self, first=None):
        """Open the file by descriptor and as a File; `first` is such a File."""
        # On FUSE a read probes O_DIRECT, and may meet a fault.
        demand = self.world.direct is True and self.world.regime is None
        direct = os.O_DIRECT if demand else 0
        fd = os.open(self.path, os.O_RDWR | direct)
        self.stack.callback(os.close, fd)
        mode = True if demand else self.world.direct and "auto"
        file = first or nvmeio.File(self.path, "r+", direct=mode)
        self.stack.enter_context(file)
        self.files = {"path": self.path, "fd": fd, "File": file}
        # An fsync that reports lost data is not taken back until the file is closed.
        self.lost = set()

    def reopen(self, step):
        """Open the file again for later steps; transfers in flight go on."""
        if step.word == "made anew":
            self.settle()
            self.stack.close()
            self.make(created=True)
        else:
            self.stack.close()
            self.open_files()

    # Children.

    def fork(self, step):
        self.world.figures["forked beside"] += len(self.in_flight) + len(self.dropped)
        child = fork(self.be_child, step)
        if step.word == "later":
            self.children.append(child)
        else:
            join(child)

    def be_child(self, step):
        """Use the inherited op and files, but not the transfers in flight."""
        self.inherited, self.in_flight = [*self.in_flight, *self.dropped], []
        self.dropped, self.children = [], []
        for flight in self.inherited:
            if flight.request is not None:
                # A request that was seen to be done stays done.
                number = number_of(flight.request.done)
                assert number == errno.EOWNERDEAD or flight.request.done()
                flight.request = None
        assert self.handle.pending == self.op.wait() == 0
        # Their errors are for the parent.
        self.world.warnings.clear()
        for transfer in step.reads if step.word == "at once" else ():
            # Transfers in flight in the parent never end here.
            if transfer.end <= self.settled and not self.is_in_the_way(transfer):
                self.begin(transfer)
        limit = plans.CHILD_LIMIT
        path = f"{self.path}-{os.getpid()}"
        own = Model(self.world, path, self.op, limit, created=step.share < 0.5)
        own.run(step.steps)
        own.finish()
        if step.share < 0.7:
            self.op.close()

    # Faults of FUSE.

    def faults(self, step):
        self.join_children()
        self.world.regime = Regime(step.faults)
        for flight in [*self.in_flight, *self.dropped]:
            flight.regimes.append(self.world.regime)
        self.world.control.set(**step.faults)

    def clear(self, step):
        """End the faults, which must have struck if a transfer had to meet them."""
        self.join_children()
        regime, self.world.regime = self.world.regime, None
        fired = self.world.control.fired()
        self.world.control.set()
        name = f"{regime.call}.{regime.kind}"
        assert fired.get(name, 0) > 0 or not regime.met, f"{name} has never struck"
        self.world.fired[name] += fired.get(name, 0)


def try_cell(seed, folder, place, engine, direct, errors, control, forks):
    """Run the plan of a seed for one cell of the matrix; return counts."""
    rng = random.Random(f"{seed} {place} {engine} {direct}")
    noise = np.random.default_rng(seed).integers(0, 256, plans.NOISE_BYTES, np.uint8)
    limit = LIMIT.get(place, LIMIT_ELSEWHERE)
    path = os.path.join(folder, f"model-{os.getpid()}")
    if direct:
        with open(path, "wb"), nvmeio.File(path) as file:
            direct = True if file.direct else "auto"
        os.unlink(path)
    fuse = control is not None
    options, steps = plans.draw(rng, limit=limit, direct=direct, fuse=fuse)
    world = World(engine, direct, noise, errors, control)
    with warnings.catch_warnings(record=True) as world.warnings:
        warnings.simplefilter("always")
        op = open_op(world, options)
        model = Model(world, path, op, limit, created=rng.random() < 0.5)
        # Only the model has a reference, so that it can drop the op.
        del op
        model.run(step for step in steps if forks or step.kind != "fork")
        model.finish()
        world.count(model.handle)
        model.op.close()
    return {"figures": world.figures, "fired": world.fired, "direct": direct}


def random_operations(seed, folder, place, engine, errors=(), control=None, forks=True):
    """Run a case in both cells of a place and an engine; report counts.

    `errors` are names of errnos that the test build may return at any time.  `control` is
    the file that sets the faults of FUSE.  Without `forks` the same steps are drawn, but
    forks are not carried out.
    """
    pool = random.Random(f"{seed} {place} {engine}").choice(POOLS)
    if pool and not control:
        os.environ["NVMEIO_POOL_BYTES"] = pool
        errors = [*errors, "ENOMEM"]
    report(
        {
            name: try_cell(seed, folder, place, engine, direct, errors, control, forks)
            for name, direct in (("direct", True), ("buffered", False))
        }
    )
