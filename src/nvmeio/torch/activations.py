"""What the forward pass saves for the backward pass, on the drive in between.

Here is decided what leaves memory, how a tensor is made of its bytes again, and that nobody
has changed it meanwhile; slots.py moves the bytes.
"""

import contextlib
import itertools
import math
import os
import sys
import types
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from nvmeio._arguments.checks import path_of
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import Path
from nvmeio._arguments.units import size_of
from nvmeio.torch._bits import opaque
from nvmeio.torch._offload.slots import Slot, SlotFile, memory_of

__all__ = ["save_on_disk"]

# A tensor leaves memory with all of its storage, which it would keep alive, unless that has
# more than so many times its bytes.  A view with gaps is often one of several that fill the
# storage, as those of chunk() along the last axis are.
_DENSE_RATIO, _GAPS_RATIO = 2, 8

# What torch's allocator gives.  Elsewhere kernels may sum up in another order.
_ALIGNMENT = 64


@suggesting
def save_on_disk(
    folder: Path, *, min_bytes: int | str = "1MiB", memory: int | str = "1GiB"
) -> contextlib.AbstractContextManager[None]:
    """Keep what the forward pass saves on a drive until the backward pass needs it.

    The counterpart of ``torch.autograd.graph.save_on_cpu``.  Tensors are written while the
    forward pass computes, and read ahead of the backward pass, last first.

    Parameters
    ----------
    folder : str, bytes or os.PathLike
        A folder on the drive.  A file without a name is made there, which goes when the
        context and the last graph that was made in it are gone, also if the process is
        killed.
    min_bytes : int or str, default "1MiB"
        Smaller tensors stay in memory.
    memory : int or str, default "1GiB"
        How many bytes of saved tensors may be in memory at once: being written, kept for a
        backward pass that is about to begin, or read ahead.  The forward pass waits only
        where more would be.

    Returns
    -------
    context manager
        For the forward pass of this thread, to be entered once.  The backward pass may run
        inside of it or later, in any thread.

    Raises
    ------
    OSError
        ``folder`` is missing, no folder, or not writable.  From the forward or the backward
        pass: a tensor could not be written (ENOSPC, EIO) or read; with errno and folder.
    RuntimeError
        From the backward pass, as torch itself raises it: a saved tensor was changed in
        place.  From ``torch.func.grad`` and its like, which do not work inside.
    TypeError, ValueError
        An argument is of the wrong type or out of its limits.

    See Also
    --------
    torch.autograd.graph.save_on_cpu : The same with memory of the host.
    torch.utils.checkpoint.checkpoint : Computes again in place of saving; may be combined.

    Notes
    -----
    Gradients are those without it, to the bit.  Values, shapes, strides, dtypes, and lazy
    conjugates and negations come back as they were.

    Parameters, other leaves that require gradients, buffers and views of all these stay in
    memory, as do sparse, quantized and nested tensors and subclasses of torch.Tensor.  A
    buffer is known by the modules that are being called; that of a module whose ``forward``
    is called directly goes to the drive as any tensor does, which costs time alone.

    Tensors of one storage leave together, and are written once as long as nobody changes
    them: a step writes about as many bytes as the forward pass would keep in memory, and
    reads those that ``memory`` has no room for.

    A tensor that is changed in place after it was saved is an error, as in torch itself;
    save_on_cpu does not notice.  Changes that torch does not count, through ``.data`` or
    numpy, are noticed by none; here the values from before or after them may come back.

    In a forked child nothing is written, and a graph that the parent has saved on disk
    cannot be used.  Of nested contexts the innermost one counts.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU())
    >>> with nvmeio.torch.save_on_disk("."):
    ...     loss = model(torch.ones(1000, 100)).sum()
    >>> loss.backward()
    """
    name = os.fsdecode(path_of(folder))
    return _saving(name, size_of("min_bytes", min_bytes, 0), size_of("memory", memory, 0))


@contextlib.contextmanager
def _saving(folder: str, min_bytes: int, memory: int) -> Iterator[None]:
    saver = _Saver(SlotFile(folder, memory), min_bytes)
    with saved_tensors_hooks(saver.pack, _unpack):
        try:
            yield
        except BaseException as error:
            # Ctrl-C, for one: the kernel has nothing of this program's memory then.
            saver.file.drain()
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                raise RuntimeError(
                    "torch.func.grad, vjp, jacrev and hessian do not work inside of "
                    "nvmeio.torch.save_on_disk(); use torch.autograd, or call them outside"
                ) from error
            raise


class _Kept:
    """A saved tensor that stays in memory."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # The tensor itself would be a circle, where it is its own node's result.
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> torch.Tensor:
        _check_version(self.tensor, self.version, self.tensor.shape, self.tensor.dtype)
        return self.tensor


class _Saved:
    """A saved tensor whose bytes are in a slot."""

    __slots__ = ("dtype", "file", "gaps", "lazy", "offset", "shape", "slot", "strides")

    def __init__(
        self, file: SlotFile, slot: Slot, tensor: torch.Tensor, offset: int, gaps: bool
    ) -> None:
        self.file, self.slot, self.offset, self.gaps = file, slot, offset, gaps
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.dtype = tensor.dtype
        self.lazy = tensor.is_conj(), tensor.is_neg()

    def __del__(self) -> None:
        self.file.drop(self.slot)

    def unpack(self) -> torch.Tensor:
        slot = self.slot
        with _plain():
            _check_version(slot.witness, slot.version, self.shape, self.dtype)
            data = self.file.read(slot)
            _check_version(slot.witness, slot.version, self.shape, self.dtype)
            if data.is_cuda:
                # It may have been allocated for another stream.
                data.record_stream(torch.cuda.current_stream(data.device))
            # It shares the counter, so that a second use notices changes by the first.
            tensor = slot.witness.detach()
            tensor.data = self._view(data)
        return tensor

    def _view(self, data: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the slot as the tensor that they are of."""
        start = (data.storage_offset() + self.offset) // self.dtype.itemsize
        if not self.gaps:
            view = _over(data, self.dtype, start, self.shape, self.strides)
        else:
            shape = _distinct(self.shape, self.strides)
            nbytes = _span(self.shape, self.strides) * self.dtype.itemsize
            memory = memory_of(nbytes, data.device, self.slot.lead)
            first = memory.storage_offset() // self.dtype.itemsize
            dense = _over(data, self.dtype, start, shape, _contiguous(shape))
            opaque(_over(memory, self.dtype, first, shape, self.strides)).copy_(
                opaque(dense)
            )
            view = _over(memory, self.dtype, first, self.shape, self.strides)
        conjugate, negative = self.lazy
        if conjugate:
            view = torch._conj(view)
        return torch._neg_view(view) if negative else view


class _Saver:
    """The hook of one context, and what it has to remember."""

    def __init__(self, file: SlotFile, min_bytes: int) -> None:
        self.file = file
        self._min_bytes = min_bytes
        # The storages of parameters and buffers that have been met, by their addresses.
        # Those are not used again as long as there is a weak reference.
        self._staying: dict[int, StorageWeakRef] = {}
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def pack(self, tensor: torch.Tensor) -> _Kept | _Saved:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise RuntimeError(
                "nvmeio.torch.save_on_disk() does not work inside of a transform of "
                "torch.func; call it outside, or use torch.autograd"
            )
        # A Parameter is of a type of its own.
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.untyped_storage().nbytes() < self._min_bytes
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.is_quantized
            or self.file.forked
            or self._stays(tensor)
        ):
            return _Kept(tensor)
        with _plain():
            return self._save(tensor) or _Kept(tensor)

    def _save(self, tensor: torch.Tensor) -> _Saved | None:
        """Have the bytes of a tensor in a slot, or return None where they are too few."""
        storage = tensor.untyped_storage()
        origin = tensor.storage_offset() * tensor.itemsize
        shape, strides = tensor.shape, tensor.stride()
        if not tensor.numel():
            return None
        span = _span(shape, strides)
        # As part of what has left already any size is worth it.
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
            # Of views of other dtypes too the place must be whole elements.
            lead = storage.data_ptr() % _ALIGNMENT // 16 * 16
            slot = self.file.write(data, tensor, lead)
            return _Saved(self.file, slot, tensor, origin, False)
        # A small part: a copy, or all of the storage would stay.
        part = (origin, shape, strides, tensor.dtype)
        slot = self.file.find(part, tensor, nbytes)
        if slot is None:
            layout = (distinct, strides) if gaps else ((span,), (1,))
            source = _over(storage, tensor.dtype, tensor.storage_offset(), *layout)
            lead = tensor.data_ptr() % _ALIGNMENT // tensor.itemsize * tensor.itemsize
            data = memory_of(nbytes, tensor.device, lead)
            first = data.storage_offset() // tensor.itemsize
            dense = _over(data, tensor.dtype, first, layout[0], _contiguous(layout[0]))
            opaque(dense).copy_(opaque(source))
            slot = self.file.write(data, tensor, lead, part)
        return _Saved(self.file, slot, tensor, 0, gaps)

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a leaf to be trained, a buffer, or a view of one."""
        base = tensor._base if tensor._is_view() else tensor
        assert base is not None
        if isinstance(base, torch.nn.Parameter) or (base.requires_grad and base.is_leaf):
            return True
        # What was computed of parameters; buffers require none.
        if tensor.requires_grad:
            return False
        address = tensor.untyped_storage()._cdata
        if address not in self._staying:
            self._note_modules()
        return address in self._staying

    def _note_modules(self) -> None:
        """Remember the storages of the modules that are being called in this thread."""
        module = None
        for module in _modules_called():
            # It may have others than at its last call.
            self._note(module.parameters(recurse=False), module.buffers(recurse=False))
        # The outermost may use what those below it have without calling them.
        if module is not None and module not in self._seen:
            self._seen.add(module)
            self._note(module.parameters(), module.buffers())

    def _note(self, *several: Iterator[torch.Tensor]) -> None:
        for tensor in itertools.chain(*several):
            # Some subclasses have none, nor have parameters of lazy modules.
            with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._staying:
                    self._staying[storage._cdata] = StorageWeakRef(storage)


def _modules_called() -> Iterator[torch.nn.Module]:
    """Yield the modules that this thread is calling, the innermost first.

    Hooks of modules would tell them too, but a hook of all modules makes torch.compile warn
    and compile again.  The arguments of a call, which a look at its frame keeps alive, are
    alive as long as that anyway.
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
    """Raise what torch does where it has no hooks."""
    now = tensor._version
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: [{dtype} {list(shape)}] is at version {now}; expected "
            f"version {version} instead. Hint: enable anomaly detection to find the "
            "operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Handle tensors as what they are, whatever the caller's modes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C._DisableFuncTorch())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def _over(
    memory: torch.Tensor | torch.UntypedStorage,
    dtype: torch.dtype,
    start: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Make a tensor in the storage that another one has; `start` counts elements."""
    storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
    return torch.empty(0, dtype=dtype, device=memory.device).set_(
        storage, start, shape, strides
    )


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last one, both counted."""
    steps = zip(shape, strides, strict=True)
    return 1 + sum((extent - 1) * stride for extent, stride in steps)


def _distinct(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the shape without what expand() has repeated."""
    steps = zip(shape, strides, strict=True)
    return tuple(extent if stride else 1 for extent, stride in steps)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
