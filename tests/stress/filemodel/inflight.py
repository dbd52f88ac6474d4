"""A transfer in flight: what it may and must do to its memory and its file."""

import os
from dataclasses import dataclass, field

import numpy as np

from filemodel.fences import Memory
from filemodel.plans import Transfer
from helpers import Guarded


def overlap(begin, end, other_begin, other_end):
    """Return the intersection of two ranges, which may be empty."""
    return max(begin, other_begin), min(end, other_end)


@dataclass(eq=False)
class InFlight:
    """A transfer or fsync that was submitted, and what is known of it."""

    transfer: Transfer
    named: object  # path, descriptor or File
    memory: Memory | None
    regimes: list  # faults that were in force at some time while it was in flight
    born: object = None  # the faults that were in force from the beginning
    before: list = field(default_factory=list)  # what a write's records replace
    others: list = field(default_factory=list)  # (offset, bytes) that a read may see too
    earlier: list = field(default_factory=list)  # what an fsync waits for
    lost: set = field(default_factory=set)  # errnos that fsyncs of the open File reported
    doomed: bool = False  # an fsync of that File, after one of them
    request: object = None
    cancelled: bool = False
    failed: tuple = ()  # indices of records that did not land completely
    verdict: str = "the memory was not released"  # on memory that was dropped

    def __post_init__(self):
        """Note the path in errors; by then the descriptor may be closed."""
        if isinstance(self.named, int):
            self.path = os.readlink(f"/proc/self/fd/{self.named}")
        else:
            self.path = getattr(self.named, "path", self.named)

    @property
    def writes(self):
        return self.transfer.op == "write"

    def meets(self, transfer):
        """Return whether this and another transfer share bytes of the file."""
        mine, theirs = np.array(self.transfer.records), np.array(transfer.records)
        if not (len(mine) and len(theirs)):
            return False
        begin = np.maximum(mine[:, None, 0], theirs[:, 0])
        end = np.minimum(mine[:, None, 0] + mine[:, None, 2], theirs[:, 0] + theirs[:, 2])
        return bool((begin < end).any())

    def calls(self, index):
        """Return the calls for one record, as (call, begin, end)."""
        begin, _, size = self.transfer.records[index]
        found = [(self.transfer.op, begin, begin + size)]
        if self.transfer.way == "validate":
            found.append(("read", begin, begin + size))
        return found

    def all_calls(self):
        """Return the calls for all records."""
        if self.transfer.op == "fsync":
            return [("fsync", 0, 0)]
        indices = range(len(self.transfer.records))
        return [call for index in indices for call in self.calls(index)]

    def errors(self, calls=None):
        """Return the errnos with which it, or these calls, may fail."""
        calls = self.all_calls() if calls is None else calls
        return {
            regime.error
            for regime in self.regimes
            if any(regime.may_fail(*call) for call in calls)
        } | self.lost

    def must_fail(self, regime, calls=None):
        """Return whether it had to fail, now that it has ended under these faults."""
        calls = self.all_calls() if calls is None else calls
        lasted = regime is not None and self.born is regime
        return lasted and any(regime.must_fail(*call) for call in calls)

    def note(self, regime, error=None):
        """Record that the faults struck, if they had to and it did not fail before."""
        if regime is None or self.born is not regime or self.cancelled:
            return
        if error is None or error.errno == regime.error:
            regime.met |= any(regime.meets(*call) for call in self.all_calls())

    def neighbours(self):
        """Return for each record the indices of the records that may fail with it.

        Records that touch in the file are written together, so they fail together.
        """
        records = self.transfer.records
        if not self.writes:
            return [{index} for index in range(len(records))]
        found, run, end = [set() for _ in records], set(), -1
        # Empty records are not written, and part no others.
        filled = [index for index, (_, _, size) in enumerate(records) if size]
        for index in sorted(filled, key=lambda index: records[index][0]):
            offset, _, size = records[index]
            if offset != end:
                run = set()
            run.add(index)
            found[index] = run
            end = offset + size
        return found

    def accept(self, error, regime):
        """Assert that an error is a possible one, and note which records failed."""
        assert error.filename == self.path, f"{error!r} of {self}"
        failures = getattr(error, "failures", None)
        everything = range(len(self.transfer.records))
        if failures is None:
            assert error.errno in self.errors(), f"{error!r} of {self}"
            self.failed = tuple(everything)
            return
        neighbours, told = self.neighbours(), dict(failures)
        for index, number in told.items():
            calls = [call for near in neighbours[index] for call in self.calls(near)]
            assert number in self.errors(calls), f"record {index}: {error!r} of {self}"
        for index in everything:
            forced = self.must_fail(regime, self.calls(index))
            assert index in told or not forced, f"record {index} is missing: {error!r}"
        self.failed = tuple(told)

    def look(self, whole):
        """Return what is wrong with the memory, or nothing.

        Each byte of a failed record may be as before.  A read that raced with writes may
        have seen them or not.
        """
        right = whole == self.memory.expected_whole
        if right.all():
            return ""
        buffer, fine = whole[self.memory.part], right[self.memory.part]
        records = self.transfer.records
        for index in self.failed if self.transfer.op == "read" else ():
            _, place, size = records[index]
            fine[place : place + size] |= buffer[place : place + size] == Guarded.CANARY
        for offset, content in self.others:
            for begin, place, size in records:
                low, high = overlap(begin, begin + size, offset, offset + len(content))
                if low < high:
                    part = slice(place + low - begin, place + high - begin)
                    fine[part] |= buffer[part] == content[low - offset : high - offset]
        wrong = np.flatnonzero(~right)
        if not len(wrong):
            return ""
        return (
            f"{len(wrong)} bytes are wrong, {wrong[0]} to {wrong[-1]} of {len(whole)}, of "
            f"which {self.memory.part} were borrowed; {whole[wrong[:8]]} in place of "
            f"{self.memory.expected_whole[wrong[:8]]}"
        )

    def drop(self):
        """Drop memory and request; check the memory when the last reference goes."""

        def parting(whole):
            if self.errors():
                self.failed = tuple(range(len(self.transfer.records)))
            self.verdict = self.look(whole)

        self.request = None
        self.memory.leave(parting)
