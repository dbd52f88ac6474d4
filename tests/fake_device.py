"""A device of torch in ordinary memory, whose copies end when the test says so.

Operations compute at once.  A copy to the device without waiting reads its source only
when an operation uses the result, or somebody waits; its event is done only after that.
"""

import contextlib
import ctypes

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["DEVICE", "FakeTensor", "copying", "log", "on_stream", "use"]

DEVICE = torch.device("privateuseone", 0)
aten = torch.ops.aten

# What was done: ("copy", bytes), ("record", stream), ("wait", stream), ("record_stream",
# stream) and ("synchronize",).
log = []
# The copies that have not ended, with the addresses that they read.
copying = []
_streams = [0]


class Copy:
    """A copy of ordinary memory, which nobody else keeps."""

    def __init__(self, target, source):
        self.target = target
        self.address, self.nbytes = source.data_ptr(), source.nbytes
        copying.append(self)
        log.append(("copy", self.nbytes))

    def end(self):
        if self in copying:
            copying.remove(self)
            ctypes.memmove(self.target.data_ptr(), self.address, self.nbytes)


class Stream:
    """A stream, known by its number."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number

    def __hash__(self):
        return self.number

    def wait_event(self, event):
        log.append(("wait", self.number))


class Event:
    """What is done once the copies before it have ended."""

    def record(self, stream):
        self.copies = list(copying)
        log.append(("record", stream.number))

    def query(self):
        return not any(each in copying for each in self.copies)

    def synchronize(self):
        log.append(("synchronize",))
        for each in self.copies:
            each.end()


class Module:
    """What torch.cuda is for CUDA."""

    Event = Event

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def current_stream(self, device=None):
        return Stream(_streams[-1])


class FakeTensor(torch.Tensor):
    """A tensor of the device, with its values in ordinary memory."""

    @staticmethod
    def __new__(cls, held):
        found = torch._C._acc.create_empty_tensor(tuple(held.shape), held.dtype)
        found.__class__ = cls
        return found

    def __init__(self, held):
        self.held = held

    def detach(self):
        # Torch's own makes a tensor of another class.
        return FakeTensor(self.held)

    def record_stream(self, stream):
        log.append(("record_stream", stream.number))


@contextlib.contextmanager
def on_stream(number):
    """Do what follows on another stream."""
    _streams.append(number)
    try:
        yield
    finally:
        _streams.pop()


def _there(value):
    if isinstance(value, FakeTensor):
        for each in list(copying):
            if each.target.untyped_storage().data_ptr() == (
                value.held.untyped_storage().data_ptr()
            ):
                each.end()
        return value.held
    if isinstance(value, (list, tuple)):
        return type(value)(map(_there, value))
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _here(value):
    if isinstance(value, torch.Tensor):
        return FakeTensor(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_here, value))
    return value


def _compute(operation, *args, **kwargs):
    """Carry out an operation on the values."""
    if operation is aten._copy_from.default:
        source, target, *_ = args
        if isinstance(source, FakeTensor):
            target.copy_(_there(source))
        elif args[2:] and args[2]:
            Copy(target.held, source)
        else:
            target.held.copy_(source)
        return target
    options = {name: _there(each) for name, each in kwargs.items()}
    return _here(operation(*map(_there, args), **options))


def use():
    """Let torch have the device; return it.  Once in a process."""
    _setup_privateuseone_for_python_backend(backend_module=Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_compute, "PrivateUse1")
    return library
