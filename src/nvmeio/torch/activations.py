"""Keep the tensors that the forward pass saves for the backward pass on a drive.

This module decides which tensors leave memory, rebuilds tensors from their bytes, and
checks that none was changed meanwhile.  slots.py moves the bytes.
"""

import contextlib
import itertools
import math
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from nvmeio._arguments.types import Path
from nvmeio._arguments.units import size_of
from nvmeio._files.paths import absolute
from nvmeio._memory.strides import c_strides
from nvmeio._native.interrupts import Finalizer
from nvmeio._tensors.memory import content_problem
from nvmeio.torch._bits import opaque
from nvmeio.torch._offload.slots import Slot, SlotFile, WeakStorage, memory_of

__all__ = ["save_on_disk"]

_T = TypeVar("_T")

# A tensor leaves memory with its whole storage, unless that is larger than the tensor by
# more than this factor.  The factor is larger for views with gaps, because often several of
# them fill the storage, as the results of chunk() along the last axis do.
_DENSE_RATIO, _GAPS_RATIO = 2, 8

# The alignment of torch's allocator.  With another one, kernels may sum in another order.
_ALIGNMENT = 64


def save_on_disk(
    folder: Path, *, min_bytes: int | str = "1MiB", memory: int | str = "1GiB"
) -> contextlib.AbstractContextManager[None]:
    """Keep tensors saved by the forward pass on a drive until the backward pass needs them.

    The counterpart of ``torch.autograd.graph.save_on_cpu``.  Tensors are written while the
    forward pass computes, and read ahead of the backward pass, the last one first.

    Parameters
    ----------
    folder : str, bytes or os.PathLike
        A folder on the drive.  The tensors are written to an unnamed file there.  It
        disappears with the context and the last graph that was made in it, and also if the
        process is killed.
    min_bytes : int or str, default "1MiB"
        Smaller tensors stay in memory.
    memory : int or str, default "1GiB"
        The limit in bytes for saved tensors in memory: those being written, kept for the
        coming backward pass, or read ahead.  The forward pass waits only when the limit is
        reached.

    Returns
    -------
    context manager
        Enter it for the forward pass of this thread.  The backward pass may run inside it
        or later, in any thread.  It can be entered again, in the next step or in another
        thread; each time it opens a new file.

    Raises
    ------
    OSError
        ``folder`` does not exist, is not a folder, or is not writable.  From the forward or
        backward pass: a tensor could not be written (ENOSPC, EIO) or read; has errno and
        the folder.
    RuntimeError
        From the backward pass, as without this context: a saved tensor was changed in
        place.  From ``torch.func.grad``, ``vjp``, ``jacrev`` and ``hessian``, which do not
        work inside the context.
    TypeError, ValueError
        An argument is of the wrong type or out of range.

    See Also
    --------
    torch.autograd.graph.save_on_cpu : The same with host memory.
    torch.utils.checkpoint.checkpoint : Recomputes instead of saving; can be combined.

    Notes
    -----
    Gradients are the same to the bit as without this context.  Values, shapes, strides,
    dtypes, and lazy conjugations and negations of saved tensors are preserved.

    These stay in memory: parameters, other leaves that require gradients, buffers, and
    views of all these; sparse, quantized and nested tensors; subclasses of torch.Tensor;
    the zeros of forward-mode differentiation, which have no memory.
    Buffers are found through the modules being called.  If ``forward`` of a module is
    called directly, its buffers are written like any tensor, which only costs time.

    Tensors of one storage are written together, and once as long as they do not change.  A
    step writes about as many bytes as the forward pass would keep in memory, and reads
    those for which ``memory`` has no room.

    If a tensor is changed in place after it was saved, the backward pass raises, as in
    torch; ``save_on_cpu`` does not notice this.  Changes through ``.data`` or numpy are not
    noticed; the backward pass may then get the values from before or after the change.

    A forked child writes nothing, and cannot use a graph that its parent has saved on disk.
    Of nested contexts, the innermost one is used.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU())
    >>> with nvmeio.torch.save_on_disk("."):
    ...     loss = model(torch.ones(1000, 100)).sum()
    >>> loss.backward()
    """
    # Absolute, because the program may change its folder before it enters the context.
    name = os.fsdecode(absolute(folder))
    return _SavingOnDisk(
        name, size_of("min_bytes", min_bytes, 0), size_of("memory", memory, 0)
    )


class _SavingOnDisk(contextlib.ContextDecorator, contextlib.AbstractContextManager[None]):
    """The result of ``save_on_disk()``; each entry enters a new ``_saving()``."""

    def __init__(self, folder: str, min_bytes: int, memory: int) -> None:
        self._options = folder, min_bytes, memory
        # A stack for each thread, because the hooks of torch belong to a thread, too.
        self._here = threading.local()

    def __enter__(self) -> None:
        context = _saving(*self._options)
        context.__enter__()
        self._here.entered = [*getattr(self._here, "entered", ()), context]

    def __exit__(self, *error: Any) -> None:
        self._here.entered.pop().__exit__(*error)


@contextlib.contextmanager
def _saving(folder: str, min_bytes: int, memory: int) -> Iterator[None]:
    saver = _Saver(SlotFile(folder, memory), min_bytes)
    with saved_tensors_hooks(saver.pack, _unpack):
        try:
            yield
        except BaseException as error:
            # After Ctrl-C, for example, the kernel must not use the program's memory.
            saver.file.drain()
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                raise RuntimeError(
                    "torch.func.grad, vjp, jacrev and hessian do not work inside "
                    "nvmeio.torch.save_on_disk(); use torch.autograd, or call them outside"
                ) from error
            raise


class _Kept:
    """A saved tensor that stays in memory."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached, because a result of its own graph node would be a reference cycle.
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> torch.Tensor:
        # Nested tensors have no shape.
        tensor = self.tensor
        shape = torch.Size() if tensor.is_nested else tensor.shape
        _check_version(tensor, self.version, shape, tensor.dtype)
        return tensor


class _Saved:
    """A saved tensor whose bytes are in a slot."""

    __slots__ = (
        *("dtype", "file", "finalizer", "gaps", "lazy", "offset", "shape"),
        *("slot", "strides"),
    )

    def __init__(
        self, file: SlotFile, slot: Slot, tensor: torch.Tensor, offset: int, gaps: bool
    ) -> None:
        self.file, self.slot, self.offset, self.gaps = file, slot, offset, gaps
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.dtype = tensor.dtype
        self.lazy = tensor.is_conj(), tensor.is_neg()
        self.finalizer = Finalizer(file.drop, slot)

    def unpack(self) -> torch.Tensor:
        return _plainly(self._unpack)

    def _unpack(self) -> torch.Tensor:
        slot = self.slot
        _check_version(slot.witness, slot.version, self.shape, self.dtype)
        data = self.file.read(slot)
        _check_version(slot.witness, slot.version, self.shape, self.dtype)
        if data.is_cuda:
            # It may have been allocated on another stream.
            data.record_stream(torch.cuda.current_stream(data.device))
        # It shares the version counter, so that a second use notices changes by the first
        # one.
        tensor = slot.witness.detach()
        tensor.data = self._view(data)
        return tensor

    def _view(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the bytes of the slot belong to."""
        start = (data.storage_offset() + self.offset) // self.dtype.itemsize
        if not self.gaps:
            view = _over(data, self.dtype, start, self.shape, self.strides)
        else:
            shape = _distinct(self.shape, self.strides)
            nbytes = _span(self.shape, self.strides) * self.dtype.itemsize
            memory = memory_of(nbytes, data.device, self.slot.lead)
            first = memory.storage_offset() // self.dtype.itemsize
            dense = _over(data, self.dtype, start, shape, c_strides(shape))
            opaque(_over(memory, self.dtype, first, shape, self.strides)).copy_(
                opaque(dense)
            )
            view = _over(memory, self.dtype, first, self.shape, self.strides)
        conjugate, negative = self.lazy
        if conjugate:
            view = torch._conj(view)
        return torch._neg_view(view) if negative else view


class _Saver:
    """The pack hook of one context, and its state."""

    def __init__(self, file: SlotFile, min_bytes: int) -> None:
        self.file = file
        self._min_bytes = min_bytes
        # The known storages of parameters and buffers, by address.  An address is not used
        # again as long as its weak reference exists.
        self._staying: dict[int, WeakStorage] = {}
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def pack(self, tensor: torch.Tensor) -> _Kept | _Saved:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise RuntimeError(
                "nvmeio.torch.save_on_disk() does not work inside a transform of "
                "torch.func; call it outside, or use torch.autograd"
            )
        # The type also excludes Parameters.
        if (
            type(tensor) is not torch.Tensor
            or content_problem(tensor)
            or tensor.untyped_storage().nbytes() < self._min_bytes
            or tensor.device.type not in ("cpu", "cuda")
            or self.file.forked
            or self._stays(tensor)
        ):
            return _Kept(tensor)
        return _plainly(lambda: self._save(tensor) or _Kept(tensor))

    def _save(self, tensor: torch.Tensor) -> _Saved | None:
        """Write a tensor to a slot, or return None if it is too small."""
        storage = tensor.untyped_storage()
        origin = tensor.storage_offset() * tensor.itemsize
        shape, strides = tensor.shape, tensor.stride()
        if not tensor.numel():
            return None
        span = _span(shape, strides)
        # If the storage was written already, any size is worth it.
        slot = self.file.find(None, tensor, origin + span * tensor.itemsize)
        if slot is not None:
            return _Saved(self.file, slot, tensor, origin, False)
        distinct = _distinct(shape, strides)
        gaps = span > math.prod(distinct)
        nbytes = (math.prod(distinct) if gaps else span) * tensor.itemsize
        if nbytes < self._min_bytes:
            return None
        if storage.nbytes() <= nbytes * (_GAPS_RATIO if gaps else _DENSE_RATIO):
            data = _over(storage, torch.uint8, 0, (storage.nbytes(),), (1,))
            # A multiple of 16, so that views of every dtype have whole elements.
            lead = storage.data_ptr() % _ALIGNMENT // 16 * 16
            slot = self.file.write(data, tensor, lead)
            return _Saved(self.file, slot, tensor, origin, False)
        # A small part of its storage: write a copy of it, not the whole storage.
        part = (origin, shape, strides, tensor.dtype)
        slot = self.file.find(part, tensor, nbytes)
        if slot is None:
            layout = (distinct, strides) if gaps else ((span,), (1,))
            source = _over(storage, tensor.dtype, tensor.storage_offset(), *layout)
            lead = tensor.data_ptr() % _ALIGNMENT // tensor.itemsize * tensor.itemsize
            data = memory_of(nbytes, tensor.device, lead)
            first = data.storage_offset() // tensor.itemsize
            dense = _over(data, tensor.dtype, first, layout[0], c_strides(layout[0]))
            opaque(dense).copy_(opaque(source))
            slot = self.file.write(data, tensor, lead, part)
        return _Saved(self.file, slot, tensor, 0, gaps)

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a trainable leaf, a buffer, or a view of one."""
        base = tensor._base if tensor._is_view() else tensor
        assert base is not None
        if isinstance(base, torch.nn.Parameter) or (base.requires_grad and base.is_leaf):
            return True
        # Computed from parameters, so not a buffer: those require no gradient.
        if tensor.requires_grad:
            return False
        address = tensor.untyped_storage()._cdata
        if address not in self._staying:
            self._note_modules()
        return address in self._staying

    def _note_modules(self) -> None:
        """Remember the storages of the modules that this thread is calling."""
        module = None
        for module in _modules_called():
            # Every time, because it may have other storages than at its last call.
            self._note(module.parameters(recurse=False), module.buffers(recurse=False))
        # The outermost module may use the parameters of inner ones without calling them.
        if module is not None and module not in self._seen:
            self._seen.add(module)
            self._note(module.parameters(), module.buffers())

    def _note(self, *several: Iterator[torch.Tensor]) -> None:
        for tensor in itertools.chain(*several):
            # Some subclasses, and parameters of lazy modules, have no storage.
            with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._staying:
                    self._staying[storage._cdata] = WeakStorage(storage)


def _modules_called() -> Iterator[torch.nn.Module]:
    """Yield the modules that this thread is calling, the innermost first.

    A global module hook would find them too, but it makes torch.compile warn and recompile.
    Looking at a frame keeps the call's arguments alive, but only as long as the call lasts.
    """
    call = getattr(torch.nn.Module._wrapped_call_impl, "__code__", None)
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is call:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _unpack(packed: _Kept | _Saved) -> torch.Tensor:
    return packed.unpack()


def _check_version(
    tensor: torch.Tensor, version: int, shape: torch.Size, dtype: torch.dtype
) -> None:
    """Raise torch's error for a tensor that was changed in place, as without hooks."""
    now = tensor._version
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: [{dtype} {list(shape)}] is at version {now}; expected "
            f"version {version} instead. Hint: enable anomaly detection to find the "
            "operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def _plainly(function: Callable[[], _T]) -> _T:
    """Call a function without the caller's modes of torch: operations do what they say.

    With context managers in Python, such as torch.no_grad(), Ctrl-C could come when they
    have changed a mode, and before the block is entered.
    """
    modes = torch._C._len_torch_dispatch_stack()
    with (
        torch._C._DisableFuncTorch(),
        _disable_current_modes() if modes else contextlib.nullcontext(),
        torch._C.DisableTorchFunctionSubclass(),
        # At its end it sets the mode of gradients, too.
        torch._C._InferenceMode(False),
    ):
        torch._C._set_grad_enabled(False)
        return function()


def _over(
    memory: torch.Tensor | torch.UntypedStorage,
    dtype: torch.dtype,
    start: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Make a tensor over the storage of another one; `start` counts elements."""
    storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
    return torch.empty(0, dtype=dtype, device=memory.device).set_(
        storage, start, shape, strides
    )


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements of memory from the first to the last one, inclusive."""
    steps = zip(shape, strides, strict=True)
    return 1 + sum((extent - 1) * stride for extent, stride in steps)


def _distinct(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the shape with 1 for each dimension that expand() has repeated."""
    steps = zip(shape, strides, strict=True)
    return tuple(extent if stride else 1 for extent, stride in steps)
