"""Batches ahead of time, without worker processes."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from nvmeio._arguments.checks import whole
from nvmeio._arguments.keywords import suggesting
from nvmeio.torch.data._stored import Flight, Stored

__all__ = ["BatchStream"]


class BatchStream:
    """Batches of a dataset, of which the next are on their way: no worker processes.

    Parameters
    ----------
    dataset : ArrayDataset or TokenDataset
        Or a ``torch.utils.data.Subset`` of one.
    sampler : iterable of sequences of int
        The indices of each batch, as ``torch.utils.data.BatchSampler`` gives them.  A
        generator gives them to one iteration only.
    depth : int, default 2
        How many batches are being read while the program has one, 1 or more.

    Raises
    ------
    TypeError
        The dataset is of another kind; the batch sampler is not iterable; ``depth`` is no
        integer.
    ValueError
        ``depth`` is less than 1.

    Notes
    -----
    Each iteration goes through the sampler once and yields, for each batch, what a
    DataLoader with the default collate would.  Without a transform, the tensors of an
    ArrayDataset are those that were read into; tokens are converted once.  Transforms run
    in the thread that iterates.  What goes wrong with a batch, or in the sampler, is raised
    where that batch would come, and ends the iteration.
    An iteration that is abandoned or closed waits until nothing of it is in flight.

    For distributed training, a ``DistributedSampler`` inside of the ``BatchSampler`` gives
    each rank its part; its ``set_epoch`` is still the program's to call.

    Examples
    --------
    >>> import torch
    >>> nvmeio.save("rows.npy", np.arange(12.0).reshape(4, 3))
    >>> dataset = nvmeio.torch.ArrayDataset("rows.npy")
    >>> for batch in nvmeio.torch.BatchStream(dataset, [[0, 2], [1, 3]]):
    ...     print(batch[:, 0])
    tensor([0., 6.], dtype=torch.float64)
    tensor([3., 9.], dtype=torch.float64)
    """

    @suggesting
    def __init__(
        self,
        dataset: Stored | Subset[Any],
        sampler: Iterable[Sequence[int]],
        depth: int = 2,
    ) -> None:
        if not isinstance(sampler, Iterable):
            raise TypeError(
                f"the batch sampler is {sampler!r}; it must be iterable, such as a "
                "torch.utils.data.BatchSampler"
            )
        self.dataset = dataset
        self.sampler = sampler
        self.depth = whole("depth", depth, 1, 2**63 - 1)
        self._stored = _stored_below(dataset)

    def __len__(self) -> int:
        if not isinstance(self.sampler, Sized):
            raise TypeError("the batch sampler has no length")
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.sampler)
        ahead: deque[Flight | Exception] = deque()
        more = True
        try:
            while True:
                # The first is the one that comes next.
                while more and len(ahead) <= self.depth:
                    try:
                        ahead.append(self._begin(next(batches)))
                    except StopIteration:
                        more = False
                    except Exception as error:
                        ahead.append(error)
                        more = False
                if not ahead:
                    return
                if isinstance(ahead[0], Exception):
                    raise ahead[0]
                batch = self._stored.batch(ahead[0])
                ahead.popleft()
                yield batch
        finally:
            for flight in ahead:
                if isinstance(flight, Flight):
                    flight.abandon()

    def _begin(self, indices: Any) -> Flight:
        """Start reading a batch."""
        if not isinstance(indices, Sequence | np.ndarray | torch.Tensor):
            raise TypeError(
                f"the batch sampler gave {indices!r}, not the indices of a batch; a "
                "sampler of single indices goes into a torch.utils.data.BatchSampler"
            )
        dataset = self.dataset
        while isinstance(dataset, Subset):
            indices = [dataset.indices[index] for index in indices]
            dataset = dataset.dataset
        return self._stored.begin(self._stored._rows(indices))


def _stored_below(dataset: Any) -> Stored:
    """Return the dataset that subsets are of."""
    found = dataset
    while isinstance(found, Subset):
        found = found.dataset
    if not isinstance(found, Stored):
        raise TypeError(
            f"the dataset is of type {type(dataset).__qualname__}; a stream reads an "
            "ArrayDataset or a TokenDataset, or a Subset of one"
        )
    return found
