"""Move tensors on a device through pinned host memory, piece by piece.

This module copies the pieces.  The request decides when, so that the file's pieces are in
flight while another one crosses the bus.
"""

import torch

from nvmeio._tensors.memory import flat_bytes
from nvmeio.torch._bits import copy_bits, opaque

__all__ = ["DeviceStaging"]

# Large enough for the full speed of bus and drive, small enough that little memory is
# pinned.
_PIECE_BYTES = 16 << 20
_SLOTS = 4


class DeviceStaging:
    """The bytes of one tensor on a device, cut into pieces.

    Piece ``i`` and piece ``i + slots`` share host memory.  Fetch the second one, or read
    into it, only after the first one was written or delivered.  A request uses this object
    from one thread at a time.  Copies run on the stream that was current at construction,
    release the GIL, and are complete when the call returns.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        writable: bool,
        *,
        piece_bytes: int = _PIECE_BYTES,
        slots: int = _SLOTS,
    ) -> None:
        self._target = tensor.detach()
        self._strided = not tensor.is_contiguous()
        if writable and self._strided:
            dense = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        else:
            dense = opaque(self._target.resolve_conj().resolve_neg()).contiguous()
        self._dense = dense
        # The tensor's own, if its memory is used after this.
        shared = writable or dense.data_ptr() == tensor.data_ptr()
        self.storage = tensor.untyped_storage() if shared else None
        self._bytes = flat_bytes(dense)
        nbytes = self._bytes.numel()
        # The offset and size of each piece in bytes; empty for an empty tensor.
        self.pieces = [
            (offset, min(piece_bytes, nbytes - offset))
            for offset in range(0, nbytes, piece_bytes)
        ]
        self.slots = slots
        pin = tensor.device.type == "cuda"
        # The caller's stream, because another thread may move the pieces.
        self._stream = torch.cuda.current_stream(tensor.device) if pin else None
        self._memory = [
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
            for _, size in self.pieces[:slots]
        ]

    def host(self, index: int) -> torch.Tensor:
        """Return the host memory of a piece, to read the file into."""
        _, nbytes = self.pieces[index]
        return self._memory[index % self.slots][:nbytes]

    def fetch(self, index: int) -> torch.Tensor:
        """Copy a piece from the device, and return it, to be written to the file."""
        offset, nbytes = self.pieces[index]
        memory = self.host(index)
        with torch.cuda.stream(self._stream):
            copy_bits(memory, self._bytes[offset : offset + nbytes])
        return memory

    def deliver(self, index: int) -> None:
        """Copy a piece to the device, after it was read from the file."""
        offset, nbytes = self.pieces[index]
        with torch.cuda.stream(self._stream):
            copy_bits(self._bytes[offset : offset + nbytes], self.host(index))

    def finish(self) -> None:
        """Complete a read after all pieces were delivered."""
        if self._strided:
            with torch.cuda.stream(self._stream):
                copy_bits(self._target, self._dense)
