"""``BatchStream``: read batches ahead without worker processes, and resume an epoch."""

import base64
import contextlib
import copy
import itertools
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    get_worker_info,
)
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from nvmeio._arguments.checks import flag, whole
from nvmeio._arrays.indexing import Positions
from nvmeio.torch.data._dataset import Flight, StoredDataset

__all__ = ["BatchStream"]


# Marks the end of a batch sampler, because a StopIteration from anything else is an error.
_END: Any = object()

_KEYS = ("batches", "checksum", "rank", "order", "rng_state", "generators")

# The attributes that determine the order of a sampler without random numbers of its own,
# such as DistributedSampler.
_ORDER = ("batch_size", "drop_last", "shuffle", "seed", "epoch", "num_replicas")


@dataclass(frozen=True)
class _Place:
    """How far an iteration has come, and the random states with which it began.

    These are torch's random state and those of the samplers' generators.  For a batch
    sampler with its own ``state_dict()``, ``sampler`` has that instead, as it was after the
    last batch.
    """

    batches: int
    # The checksum of the positions of these batches' samples, and the rank.
    checksum: int = 0
    rank: int = 0
    # The attributes of samplers that determine the order, to compare with other ranks.
    order: str = ""
    rng_state: Any = None
    generators: tuple[torch.Tensor, ...] = ()
    sampler: Any = None


class BatchStream(IterableDataset[Any]):  # type: ignore[misc]  # mypy sees no types of torch
    """Iterate over batches of a dataset, and read the next ones ahead, without workers.

    Parameters
    ----------
    dataset : ArrayDataset, TokenDataset or another dataset of nvmeio.torch
        The dataset, or a ``torch.utils.data.Subset`` of one.
    batch_sampler : iterable of sequences of int
        The indices of each batch, as ``torch.utils.data.BatchSampler`` yields them.  A
        generator can be iterated over only once.
    depth : int, default 2
        How many batches to read ahead of the current one; at least 1.
    pin_memory : bool, default False
        Copy each batch to pinned memory of torch, as a DataLoader does, so that copies to a
        GPU with ``non_blocking=True`` are asynchronous.  Without CUDA, the stream warns and
        uses ordinary memory.
    collate_fn : callable, optional
        A function that makes a batch from the list of its samples, as for a DataLoader.  By
        default the result is that of ``torch.utils.data.default_collate``.

    Raises
    ------
    TypeError
        The dataset is of another kind; the batch sampler is not iterable; ``collate_fn`` is
        not callable; or ``depth`` is not an integer.
    ValueError
        ``depth`` is less than 1.

    Notes
    -----
    Each iteration runs through the batch sampler once, and yields the same batches as a
    DataLoader.  Transforms and ``collate_fn`` run in the iterating thread.  Without them,
    the batches of an ArrayDataset are not copied, and tokens are converted once.

    An error in a batch or in the batch sampler is raised in place of that batch, and ends
    the iteration.  An iteration that is abandoned or closed waits for its reads to end.

    For distributed training, use a ``DistributedSampler`` inside the ``BatchSampler``, so
    that each rank gets its part.  Call its ``set_epoch`` as usual.

    ``state_dict()`` and ``load_state_dict()`` continue an epoch with the next batch, and so
    does a ``StatefulDataLoader(stream, batch_size=None)`` of torchdata.  More than one
    worker raises RuntimeError, because each would yield every batch.

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

    def __init__(
        self,
        dataset: StoredDataset | Subset[Any],
        batch_sampler: Iterable[Sequence[int]],
        depth: int = 2,
        *,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not isinstance(batch_sampler, Iterable):
            raise TypeError(
                f"the batch sampler is {batch_sampler!r}; it must be iterable, such as a "
                "torch.utils.data.BatchSampler"
            )
        if not (collate_fn is None or callable(collate_fn)):
            raise TypeError(f"collate_fn is {collate_fn!r}; it must be callable")
        self.dataset = dataset
        self.batch_sampler: Any = batch_sampler
        self.depth = whole("depth", depth, 1, 2**63 - 1)
        self.pin_memory = flag("pin_memory", pin_memory)
        self.collate_fn = collate_fn
        self._stored = _stored_below(dataset)
        # The place of the last iteration that was begun; None between two iterations.
        self._place: _Place | None = None
        self._loaded = False
        self._current: object = None
        # The description of the data, made on first need.
        self._found: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<nvmeio.torch.BatchStream of {self.dataset!r}, depth={self.depth}>"

    def __len__(self) -> int:
        if not isinstance(self.batch_sampler, Sized):
            raise TypeError("the batch sampler has no length")
        return len(self.batch_sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the last iteration has come.

        Returns
        -------
        dict
            Integers, strings and tensors, a few KiB, which ``torch.save`` and other
            checkpoints can save; and the batch sampler's own state, if it has
            ``state_dict()``.

        Raises
        ------
        OSError, ValueError
            The data cannot be read, or the dataset is closed; only from the first call.

        Notes
        -----
        Only batches that were yielded count, not those that are being read.  After the last
        batch the epoch is still in progress, with no batch left; it ends with the loop.
        May be called from any thread.

        Resuming needs the same order of batches.  A batch sampler with ``state_dict()`` and
        ``load_state_dict()`` restores it itself.  For others the state has the random
        states at the beginning of the epoch: torch's global one, and that of each sampler's
        ``generator``.  They are base64, so that the state is plain JSON, if the sampler's
        own is.

        Examples
        --------
        >>> nvmeio.save("rows.npy", np.arange(12.0).reshape(4, 3))
        >>> dataset = nvmeio.torch.ArrayDataset("rows.npy")
        >>> stream = nvmeio.torch.BatchStream(dataset, [[0, 2], [1, 3]])
        >>> for batch in stream:
        ...     state = stream.state_dict()
        ...     break
        >>> resumed = nvmeio.torch.BatchStream(dataset, [[0, 2], [1, 3]])
        >>> resumed.load_state_dict(state)
        >>> [batch[:, 0].tolist() for batch in resumed]
        [[3.0, 9.0]]
        """
        place = self._place or self._beginning()
        found: dict[str, Any] = {"batches": place.batches}
        if _has_state(self.batch_sampler):
            found["sampler"] = place.sampler
        else:
            found["checksum"] = place.checksum
            found["rank"] = place.rank
            found["order"] = place.order
            found["rng_state"] = _text_of(place.rng_state)
            found["generators"] = list(map(_text_of, place.generators))
        return copy.deepcopy({**found, "dataset": self._contents()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue from a saved state.

        Parameters
        ----------
        state_dict : dict
            A result of ``state_dict()``, from any process.

        Raises
        ------
        TypeError
            The state is not a dict.
        ValueError
            The state is not that of a stream with this kind of batch sampler; or it is from
            another rank whose sampler draws its own random numbers; or from other data.
        OSError
            The data cannot be read.

        Notes
        -----
        The next iteration skips the batches that were already yielded, without reading
        them.  It raises ValueError if they differ from before: the dataset, batch size,
        number of ranks, seed and ``set_epoch`` must be the same.  All ranks may load the
        state of one rank if the order depends only on seed and epoch, as with a
        ``DistributedSampler``, and if the lengths of the samplers and of the dataset, or of
        its ``Subset``, are those of that rank.

        The data are compared by the dataset's shape and dtype, and by the first 4 KiB of 64
        samples spread over it (of all, if there are fewer).  Other samples, transforms and
        the location of the files are not compared.  To continue with data that were changed
        on purpose, remove ``"dataset"`` from the state.

        An iteration in progress continues, but ``state_dict()`` no longer describes it.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict is {state_dict!r}; it must be a dict")
        keys = ("batches", "sampler") if _has_state(self.batch_sampler) else _KEYS
        state = dict(state_dict)
        contents = state.pop("dataset", _END)
        if set(state) != set(keys):
            raise ValueError(
                f"the state has {sorted(state_dict)}; that of this batch sampler has "
                f"{sorted((*keys, 'dataset'))}"
            )
        place = _Place(**copy.deepcopy(state))
        whole("batches", place.batches, 0, 2**63 - 1)
        if not _has_state(self.batch_sampler):
            first, *others = map(_numbers_of, (place.rng_state, *(place.generators or ())))
            place = replace(place, rng_state=first, generators=tuple(others))
        self._check_generators(place)
        if contents is not _END:
            self._check_contents(contents)
        self._place, self._loaded, self._current = place, True, None

    def __iter__(self) -> Iterator[Any]:
        _check_worker()
        pin = self.pin_memory and _can_pin()
        taken = self._place if self._loaded else None
        batches, taken = self._begun() if taken is None else self._resumed(taken)
        current = self._current = object()
        self._place, self._loaded = taken, False
        ahead: deque[tuple[Flight | Exception, _Place]] = deque()
        flight: Flight | Exception | None = None
        more = True
        try:
            while True:
                # The first is the one that comes next.
                while more and len(ahead) <= self.depth:
                    try:
                        indices = next(batches, _END)
                        if indices is _END:
                            more = False
                            break
                        rows = self._rows(indices)
                        taken = self._after(taken, rows)
                        ahead.append((self._stored._begin(rows), taken))
                    except Exception as error:
                        ahead.append((error, taken))
                        more = False
                if not ahead:
                    break
                flight, place = ahead[0]
                if isinstance(flight, Exception):
                    raise flight
                if self.collate_fn is None:
                    batch = self._stored._batch(flight)
                else:
                    batch = self.collate_fn(self._stored._samples_of(flight))
                ahead.popleft()
                if pin:
                    batch = pinned(batch)
                if self._current is current:
                    self._place = place
                yield batch
                # The next one is read only now, and the program may have freed this one.
                del batch
                flight = None
            if self._current is current:
                self._place = None
        finally:
            for flight, _ in ahead:
                if isinstance(flight, Flight):
                    flight.abandon()
            # An error's traceback holds this frame.  If the frame held the error, the files
            # would stay open until the garbage collector runs.
            ahead.clear()
            flight = None

    def _rows(self, indices: Any) -> Positions:
        """Return the positions in the stored dataset of a batch's samples."""
        if not isinstance(indices, Sequence | np.ndarray | torch.Tensor):
            raise TypeError(
                f"the batch sampler gave {indices!r}, not the indices of a batch; a "
                "sampler of single indices goes into a torch.utils.data.BatchSampler"
            )
        dataset = self.dataset
        while isinstance(dataset, Subset):
            indices = [dataset.indices[index] for index in indices]
            dataset = dataset.dataset
        return self._stored._batch_rows(indices)

    # The place of an iteration.

    def _beginning(self) -> _Place:
        """Return the place at the beginning of an epoch that starts now."""
        if _has_state(self.batch_sampler):
            return _Place(0, sampler=self._sampler_state())
        return _Place(
            0,
            rank=_rank_of(self.batch_sampler),
            order=self._order(),
            rng_state=torch.get_rng_state(),
            generators=tuple(one.get_state() for one in _generators_of(self.batch_sampler)),
        )

    def _order(self) -> str:
        """Return what determines the order, except the rank, as text."""
        found = []
        for one in _samplers_of(self.batch_sampler):
            values = {name: getattr(one, name, None) for name in _ORDER}
            values["length"] = _length_of(one)
            found += [f"{n} {int(v)}" for n, v in values.items() if isinstance(v, int)]
        return ", ".join([*found, f"samples {len(self.dataset)}"])

    def _begun(self) -> tuple[Iterator[Any], _Place]:
        """Begin an epoch: return its batches, and the place before the first one."""
        place = self._beginning()
        return iter(self.batch_sampler), place

    def _resumed(self, place: _Place) -> tuple[Iterator[Any], _Place]:
        """Continue an epoch: return the remaining batches, and the place before them."""
        if _has_state(self.batch_sampler):
            self.batch_sampler.load_state_dict(copy.deepcopy(place.sampler))
            return iter(self.batch_sampler), place
        for one, state in zip(
            _generators_of(self.batch_sampler), place.generators, strict=True
        ):
            # The state may be on another device, because of torch.load's map_location.
            one.set_state(state.cpu())
        if place.batches == 0:
            return self._begun()
        # The program's own random numbers go on as if nothing had been skipped.
        rng_state = torch.get_rng_state()
        torch.set_rng_state(place.rng_state.cpu())
        try:
            here = replace(
                place,
                batches=0,
                checksum=0,
                rank=_rank_of(self.batch_sampler),
                order=self._order(),
            )
            batches = iter(self.batch_sampler)
            for indices in itertools.islice(batches, place.batches):
                here = self._after(here, self._rows(indices))
        finally:
            torch.set_rng_state(rng_state)
        wrong = "gives other samples now"
        if here.batches < place.batches:
            wrong = f"gives only {here.batches}"
        elif here.rank != place.rank and here.order != place.order:
            wrong = f"has {here.order}, and had {place.order}"
        elif here.rank != place.rank or here.checksum == place.checksum:
            return batches, here
        raise ValueError(
            f"the epoch cannot continue after batch {place.batches}: the batch sampler "
            f"{wrong}.  Its dataset, batch size, number of ranks, seed and "
            "epoch must be as before"
        )

    def _after(self, place: _Place, rows: Positions) -> _Place:
        """Return the place after one more batch."""
        if _has_state(self.batch_sampler):
            return _Place(place.batches + 1, sampler=self._sampler_state())
        checksum = zlib.crc32(np.ascontiguousarray(rows).data, place.checksum)
        return replace(place, batches=place.batches + 1, checksum=checksum)

    def _sampler_state(self) -> Any:
        """Return a copy of the batch sampler's own state."""
        return copy.deepcopy(self.batch_sampler.state_dict())

    def _contents(self) -> dict[str, Any]:
        """Return a description of the data, independent of their location."""
        if self._found is None:
            self._found = self._stored._contents()
        return self._found

    def _check_contents(self, before: Any) -> None:
        """Refuse a state of other data."""
        now = self._contents()
        if not isinstance(before, dict) or set(before) != set(now):
            raise ValueError(
                f"the state's 'dataset' is {before!r:.100}; it must be a dict of "
                f"{sorted(now)}"
            )
        changes = [
            f"the {name} was {before[name]} and is {now[name]}"
            for name in ("shape", "dtype")
            if before[name] != now[name]
        ]
        if not changes and before != now:
            changes = ["the contents of the samples differ"]
        if changes:
            raise ValueError(
                f"the state is of other data: {', '.join(changes)}; to continue with these "
                "all the same, remove 'dataset' from the state"
            )

    def _check_generators(self, place: _Place) -> None:
        """Raise ValueError for a state of another sampler or rank."""
        found = _generators_of(self.batch_sampler)
        if len(found) != len(place.generators):
            raise ValueError(
                f"the state has {len(place.generators)} generators of samplers; the batch "
                f"sampler has {len(found)}: make the sampler as it was made for the state, "
                "with its `generator=`"
            )
        rank = _rank_of(self.batch_sampler)
        if rank == place.rank:
            return
        # What was skipped cannot be compared, so its order must be known otherwise.
        for one in _samplers_of(self.batch_sampler):
            if not _is_repeatable(one):
                raise ValueError(
                    f"the state is of rank {place.rank}, and this is rank {rank}, whose "
                    f"{type(one).__qualname__} may draw numbers of its own: it has no seed "
                    "and epoch; save the state of each rank"
                )


def _samplers_of(batch_sampler: Any) -> list[Any]:
    """Return a batch sampler and the samplers inside it."""
    found = [batch_sampler]
    for one in found:
        for name in ("batch_sampler", "sampler"):
            inner = getattr(one, name, None)
            if inner is not None and all(inner is not other for other in found):
                found.append(inner)
    return found


def _text_of(numbers: torch.Tensor) -> str:
    """Return a random state as text, which every format of states can hold."""
    return base64.b64encode(numbers.numpy().tobytes()).decode()


def _numbers_of(value: Any) -> torch.Tensor:
    """Return the random state of a text, or of a tensor, as states had before."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            decoded = bytearray(base64.b64decode(value, validate=True))
            return torch.frombuffer(decoded, dtype=torch.uint8)
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"the state has {value!r:.100} for random numbers")
    return value


def _generators_of(batch_sampler: Any) -> list[torch.Generator]:
    """Return the random generators of a batch sampler and the samplers inside it."""
    drawn = (getattr(one, "generator", None) for one in _samplers_of(batch_sampler))
    return [one for one in drawn if isinstance(one, torch.Generator)]


def _is_repeatable(sampler: Any) -> bool:
    """Return whether a sampler's order depends on seed, epoch and the samplers in it."""
    if hasattr(sampler, "generator"):
        return False
    known = type(sampler) in (BatchSampler, SequentialSampler, list, tuple, range)
    return known or all(
        isinstance(getattr(sampler, n, None), int) for n in ("seed", "epoch")
    )


def _rank_of(batch_sampler: Any) -> int:
    """Return the rank of a sampler; if it has none, that of this process."""
    for one in _samplers_of(batch_sampler):
        rank = getattr(one, "rank", None)
        if isinstance(rank, int):
            return rank
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if there else 0


def _length_of(sampler: Any) -> int | None:
    """Return the length of a sampler; None if it has none."""
    # Also of a BatchSampler of a sampler without a length.
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(sampler)
    return None


def _has_state(batch_sampler: Any) -> bool:
    """Return whether a batch sampler saves and loads its own state."""
    return all(
        callable(getattr(batch_sampler, name, None))
        for name in ("state_dict", "load_state_dict")
    )


def _check_worker() -> None:
    """Raise RuntimeError in one of several workers, which would all yield every batch."""
    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise RuntimeError(
            f"each of {worker.num_workers} workers would give every batch of a "
            "BatchStream; it reads ahead without any: pass num_workers=0"
        )


def _can_pin() -> bool:
    """Return whether torch can pin memory; warn if not."""
    if torch.cuda.is_available():
        return True
    warnings.warn(
        "pin_memory is True, and there is no CUDA device; batches are in ordinary memory",
        stacklevel=3,
    )
    return False


def _stored_below(dataset: Any) -> StoredDataset:
    """Return the stored dataset below any Subsets."""
    found = dataset
    while isinstance(found, Subset):
        _refuse_override(found, Subset)
        found = found.dataset
    if not isinstance(found, StoredDataset):
        raise TypeError(
            f"the dataset is of type {type(dataset).__qualname__}; a stream reads the "
            "datasets of nvmeio.torch, and Subsets of them"
        )
    _refuse_override(found, StoredDataset)
    return found


def _refuse_override(dataset: Any, kind: type[Any]) -> None:
    """Raise TypeError for a dataset that overrides methods which a stream does not call."""
    for name in ("__getitem__", "__getitems__") if kind is Subset else ("__getitems__",):
        if getattr(type(dataset), name) is not getattr(kind, name):
            raise TypeError(
                f"{type(dataset).__qualname__} has a {name} of its own, which batches of a "
                "stream do not come through; pass a transform or a collate_fn instead"
            )
