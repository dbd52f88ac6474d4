"""Draw the steps of a case of the model from its seed, before any of them runs.

Plans depend on no file and no clock, so a seed always gives the same plan.  Sizes of files
assume that every step succeeds.
"""

import errno
from collections import Counter
from dataclasses import dataclass, field, replace

from filemodel.fences import KINDS
from helpers import MIB, PAGE

# How often a case of one cell of the matrix runs each kind of operation.
DECK = Counter(
    read=58,
    write=48,
    gather=24,
    scatter=18,
    fsync=14,
    cancel=20,
    drop=18,
    close=6,
    fork=4,
)
OPERATIONS = DECK.total()

# Random bytes; a write takes some of them.
NOISE_BYTES = 4 * MIB

# Size of the beginning of each file, where faults strike and transfers can meet them.
FIRM = 8 * PAGE

# Maximal size of a forked child's file.
CHILD_LIMIT = 32 * PAGE

SEAMS = (0, 512, PAGE, PAGE + 512, 2 * PAGE, 3 * PAGE, 4 * PAGE, 16 * PAGE, 17 * PAGE)
BESIDE = (-512, -64, -1, 0, 0, 0, 0, 0, 1, 7, 512)

# Steps before an operation; each key is the upper bound of its random numbers.
LOOKS = {0.25: "wait_one", 0.40: "poll", 0.46: "wait", 0.49: "check", 0.54: "reopen"}

WAYS = ("sync", "validate", "async", "async", "request", "request", "request")

# Faults of FUSE; a case sets each once.  Passing errors must not be noticed.
PASSING = (errno.EINTR, errno.EAGAIN)
REGIMES = (
    ("read", "error"),
    ("read", "error at"),
    ("write", "error"),
    ("write", "error at"),
    ("write", "full_at"),
    ("fsync", "error"),
    ("read", "short"),
    ("write", "short"),
    ("read", "delay_s"),
    ("write", "delay_s"),
    ("read", "passing"),
    ("write", "passing"),
)


@dataclass(frozen=True)
class Transfer:
    """A read or write, or a gather or scatter (`many`)."""

    op: str
    records: tuple  # of (offset in the file, place in memory, size)
    way: str
    file: str  # how it is named: "path", "fd" or "File"
    memory: tuple  # kind and residue
    race: bool  # whether it may be in flight together with overlapping transfers
    noise: int = 0  # offset of a write's bytes in the noise
    many: bool = False
    placed: bool = False  # whether the records' places in memory are passed
    max_gap: int = PAGE
    span: int = 0  # of the memory, in bytes

    @property
    def end(self):
        """The end of its range in the file; 0 if it moves nothing."""
        return max((offset + size for offset, _, size in self.records if size), default=0)


@dataclass(frozen=True)
class Step:
    """One step.  `counted` is the kind of operation that it counts as."""

    kind: str
    counted: str = ""
    transfer: Transfer | None = None
    word: str = ""
    share: float = 0.0  # chooses one of the transfers in flight
    file: str = "path"
    options: dict | None = None
    faults: dict | None = None
    steps: tuple = ()  # of a forked child, in a file of its own
    reads: tuple = ()  # of the parent's file


@dataclass
class Draw:
    """Draws steps; `size` is the file's, if every step succeeds."""

    rng: object
    limit: int
    direct: object  # True, "auto" if the file system has no O_DIRECT, or False
    fuse: bool
    size: int = FIRM
    steps: list = field(default_factory=list)

    def options(self):
        """Draw the options of a handle, except its engine."""
        rng = self.rng
        # On FUSE a read probes O_DIRECT; direct=True would fail if a fault struck that
        # read.
        demand = rng.random() < 0.5 and self.direct is True and not self.fuse
        return {
            "block_size": rng.choice([1, 2 * PAGE, 16 * PAGE, 16 * PAGE, MIB]),
            "queue_depth": rng.choice([1, 2, 5, 32, 128]),
            "single_submit": rng.random() < 0.3,
            "overlap_events": rng.random() < 0.5,
            "intra_op_parallelism": rng.choice([1, 1, 2, 3]),
            "bounce": rng.choice(["auto", "always", "never", "never"]),
            "direct": demand or (self.direct and "auto"),
        }

    def position(self, most):
        """Draw a number up to `most`: near a boundary of blocks, or anywhere."""
        if self.rng.random() < 0.6:
            near = self.rng.choice(SEAMS) + self.rng.choice(BESIDE)
            return min(max(0, near), most)
        return self.rng.randint(0, most)

    def length(self):
        """Draw a size; large ones are rare."""
        if self.rng.random() < 0.25:
            return self.rng.randint(0, self.limit >> self.rng.choice([0, 2, 4, 6]))
        return self.position(self.limit)

    def common(self, op, span):
        """Draw the arguments of every transfer."""
        rng = self.rng
        residue = rng.choice([0, 0, 1, 64, 512, 777, rng.randrange(PAGE)])
        return {
            "op": op,
            "file": rng.choice(["path", "fd", "File"]),
            "memory": (rng.choice(KINDS), residue),
            "race": rng.random() < 0.4,
            "noise": rng.randrange(NOISE_BYTES - span),
            "span": span,
        }

    def single(self, op, way, begin, size):
        """Draw the other arguments of a read or write."""
        common = self.common(op, size)
        if op == "write" and size:
            self.size = max(self.size, begin + size)
        return Transfer(records=((begin, 0, size),), way=way, **common)

    def read(self, way):
        """Draw a read; few go past the end."""
        begin, size = self.position(self.size), self.length()
        if self.rng.random() < 0.95:
            size = min(size, self.size - begin)
        return self.single("read", way, begin, size)

    def write(self, way):
        """Draw a write."""
        begin = self.position(self.limit)
        return self.single("write", way, begin, min(self.length(), self.limit - begin))

    def placing(self, pieces):
        """Draw places in memory for pieces of (offset, size): in order, or anywhere."""
        rng = self.rng
        placed = rng.random() < 0.5
        order = list(range(len(pieces)))
        if placed:
            rng.shuffle(order)
        places, end = [0] * len(pieces), 0
        for index in order:
            places[index] = end + (rng.choice([0, 0, 1, 64, 500]) if placed else 0)
            end = places[index] + pieces[index][1]
        records = tuple(
            (offset, place, size)
            for (offset, size), place in zip(pieces, places, strict=True)
        )
        return {"records": records, "placed": placed, "many": True}, end

    def gather(self, way):
        """Draw a gather, whose records may touch, overlap or be equal."""
        rng = self.rng
        unit = rng.choice([1, 64, 512, PAGE])
        longest = unit * rng.choice([1, 4, 16])
        within = rng.choice([2 * PAGE, self.size, self.size])
        pieces, room = [], self.limit
        for _ in range(rng.randrange(40)):
            offset = rng.randint(0, min(within, self.size)) // unit * unit
            size = rng.randint(0, longest) // unit * unit
            if pieces and rng.random() < 0.3:
                offset, size = rng.choice(pieces)
                offset += rng.choice([0, size, size, size // 2])
            size = min(size, self.size - offset, room)
            if size >= 0:
                pieces.append((offset, size))
                room -= size
        placing, span = self.placing(pieces)
        max_gap = rng.choice([0, 512, PAGE, 16 * PAGE])
        return Transfer(way=way, max_gap=max_gap, **placing, **self.common("read", span))

    def scatter(self, way):
        """Draw a scatter, whose records share no bytes."""
        rng = self.rng
        unit = rng.choice([1, 64, 512, PAGE])
        longest = unit * rng.choice([1, 4, 16])
        end = self.position(self.limit) // unit * unit
        pieces = []
        for _ in range(rng.randrange(40)):
            offset = end + rng.randint(0, 2) * unit * rng.choice([0, 1, 1, 9])
            end = offset + rng.randint(0, longest) // unit * unit
            if end > self.limit:
                break
            pieces.append((offset, end - offset))
        rng.shuffle(pieces)
        placing, span = self.placing(pieces)
        transfer = Transfer(way=way, **placing, **self.common("write", span))
        self.size = max(self.size, transfer.end)
        return transfer

    def any_transfer(self, way):
        """Draw a transfer of any kind."""
        draw = self.rng.choice([self.read, self.write, self.gather, self.scatter])
        return draw(way)

    def counted(self, kind):
        """Draw one operation."""
        rng = self.rng
        details = {"counted": kind, "share": rng.random()}
        if kind in ("read", "write"):
            details["transfer"] = getattr(self, kind)(rng.choice(WAYS))
        elif kind in ("gather", "scatter"):
            details["transfer"] = getattr(self, kind)(rng.choice(["sync", "request"]))
        elif kind in ("cancel", "drop"):
            transfer = self.any_transfer("request")
            if kind == "drop" and transfer.memory[0] == "pool":
                # It does not report when it is released.
                transfer = replace(transfer, memory=("back", 0))
            details["transfer"] = transfer
            details["word"] = rng.choice(["itself", "itself", "another"])
        elif kind == "fsync":
            details["word"] = rng.choice(["sync", "request", "request"])
            details["file"] = rng.choice(["path", "fd", "File"])
        elif kind == "close":
            details["word"] = rng.choice(["close", "with", "dropped"])
            details["options"] = self.options()
        else:
            details["word"] = rng.choice(["at once", "later"])
            details["steps"] = self.child_steps()
            details["reads"] = tuple(self.read("sync") for _ in range(3))
        name = "transfer" if kind in ("read", "write", "gather", "scatter") else kind
        return Step(name, **details)

    def child_steps(self):
        """Draw the steps of a forked child with a file of its own."""
        child = Draw(self.rng, CHILD_LIMIT, self.direct, self.fuse)
        for kind in self.rng.choices(["read", "write", "gather", "scatter", "fsync"], k=6):
            child.add(kind)
        return tuple(child.steps)

    def add(self, kind):
        """Add an operation, perhaps after a step that looks at transfers in flight."""
        if kind in ("close", "fork", "fsync"):
            # Put a transfer of many blocks in flight first, most of them direct, so that
            # the close, fork or fsync meets it.
            begin, size = self.rng.randrange(2, 4) * PAGE, self.limit // 2
            transfer = self.single("write", "request", begin, size)
            self.steps.append(Step("transfer", transfer=transfer))
            self.steps.append(self.counted(kind))
            return
        look = self.rng.random()
        for most, name in LOOKS.items():
            if look < most:
                word = ""
                if name == "reopen" and self.rng.random() < 0.5:
                    # So that it grows again.
                    word, self.size = "made anew", FIRM
                self.steps.append(Step(name, share=self.rng.random(), word=word))
                break
        self.steps.append(self.counted(kind))

    def regime(self, call, fault):
        """Draw faults of FUSE, and an operation that has to meet them."""
        rng = self.rng
        begin = rng.randint(0, 4 * PAGE)
        size = rng.randint(3 * PAGE, 4 * PAGE)
        at = rng.randrange(begin, begin + size)
        error = rng.choice([errno.EIO, errno.ENOSPC] if call == "write" else [errno.EIO])
        faults = {
            "error": {"error": error},
            "error at": {"error": error, "at": at},
            "full_at": {"full_at": at},
            "short": {"short": rng.choice([512, 1000, 3000]), "times": 20},
            "delay_s": {"delay_s": rng.choice([0.001, 0.003]), "times": 30},
            "passing": {"error": rng.choice(PASSING), "times": rng.randint(1, 4)},
        }[fault]
        if fault.startswith("error") and rng.random() < 0.4:
            faults["times"] = rng.randint(1, 3)
        self.steps.append(Step("faults", faults={call: faults}))
        way = rng.choice(["sync", "async", "request"])
        fsync = Step("fsync", word=rng.choice(["sync", "request"]), file="File")
        if call == "fsync":
            self.steps.append(replace(fsync, counted=call))
        elif (call, fault) == ("write", "delay_s"):
            # The fsync waits for it.
            transfer = self.single(call, "request", begin, size)
            self.steps += [Step("transfer", call, transfer=transfer), fsync]
        else:
            transfer = self.single(call, way, begin, size)
            self.steps.append(Step("transfer", call, transfer=transfer))
        self.steps.append(Step("wait"))

    def clear(self):
        """End the faults, with or without a look at the transfers in flight."""
        if self.rng.random() < 0.7:
            self.steps.append(Step("wait"))
        self.steps.append(Step("clear"))
        self.steps.append(Step("check"))


def draw(rng, *, limit, direct, fuse):
    """Draw the options of the first handle, and all steps of a case."""
    plan = Draw(rng, limit, direct, fuse)
    options = plan.options()
    regimes = list(REGIMES) if fuse else []
    rng.shuffle(regimes)
    deck = list((DECK - Counter(call for call, _ in regimes)).elements())
    rng.shuffle(deck)
    # Where there are faults, half of the operations run under them.
    share = len(deck) // (2 * len(regimes)) if regimes else len(deck)
    while deck:
        for kind in deck[:share]:
            plan.add(kind)
        del deck[:share]
        if regimes:
            plan.regime(*regimes.pop())
            for kind in deck[:share]:
                plan.add(kind)
            del deck[:share]
            plan.clear()
    plan.steps.append(Step("check"))
    return options, plan.steps
