"""Offload optimizer states to files; they are in memory only while they are updated."""

import contextlib
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from typing_extensions import Self

from nvmeio._arguments.types import Path
from nvmeio._arguments.units import size_of
from nvmeio._memory.heap import give_back
from nvmeio.torch._offload.kinds import (
    KEPT,
    refuse,
    refuse_options,
    states_of,
    temporary_copies,
)
from nvmeio.torch._offload.plan import (
    Budget,
    Piece,
    Segment,
    StateLayout,
    Window,
    flat,
    is_ordered_as,
    segments_of,
    windows_of,
)
from nvmeio.torch._offload.states import State, StateItems, States, unpacked
from nvmeio.torch._offload.store import Part, Store, View, parts_of

__all__ = ["OffloadedOptimizer", "offload"]

MEMORY_MIN = 8 << 20
# After updating this many bytes, return the heap's free memory to the system.  What torch
# frees is between other blocks, so the heap would grow with each window.
FREED_BYTES = 16 << 20


def offload(
    optimizer: Optimizer, folder: Path, *, memory: int | str = "1GiB"
) -> "OffloadedOptimizer":
    """Keep the states of an optimizer in files, and in memory only while they are updated.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad or Adamax, in any form
        (``foreach``, ``fused`` or neither).  Its existing states move to the files.  From
        now on use the returned optimizer instead; the ``step()`` of this one raises.
    folder : str, bytes or os.PathLike
        The folder of the files, on a local drive; created if it does not exist.  Each
        optimizer needs its own folder.
    memory : int or str, default "1GiB"
        The limit for the memory that a step uses for states and torch's temporary copies:
        bytes, or a text such as ``"512MiB"``; at least 8 MiB.  The units K, M, G and T,
        with or without B or iB, are powers of 1024.

    Returns
    -------
    OffloadedOptimizer
        An optimizer whose updates are the same to the last bit; in half precision, a few
        elements of a parameter that must be split may differ in it, and more with SGD's
        ``foreach=True`` when some parameters get their first gradient later than others.

    Raises
    ------
    TypeError
        The optimizer is of another class or a subclass; or a parameter is a DTensor, or
        another tensor that wraps tensors.
    ValueError
        ``differentiable`` or ``capturable`` is set; a parameter appears twice; a parameter
        needs more than ``memory`` and cannot be split; or the optimizer is offloaded
        already.
    BlockingIOError
        Another optimizer, of this or another process, has its states in this folder.
    OSError
        The states cannot be written.  The message for ENOSPC says how many bytes are needed
        and free.

    Notes
    -----
    While ``step()`` updates some parameters, it reads the states of the next ones and
    writes those of the previous ones.  Each step reads and writes all states of parameters
    with gradients once, which matters for the endurance of the drive.  Parameters and
    gradients stay in memory.

    The files are temporary.  They are removed when the optimizer is closed or garbage
    collected, or Python exits; only the small ``.nvmeio-offload-lock`` stays.  If the
    process is killed, all stay until the next ``offload()`` to the same folder.  To keep
    the states, save ``state_dict()`` or ``state_items()``.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(100, 100)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> optimizer = nvmeio.torch.offload(optimizer, "states", memory="64MiB")
    >>> model(torch.ones(100)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.close()
    """
    return OffloadedOptimizer(optimizer, folder, memory=memory)


def _is_of_torch(error: BaseException) -> bool:
    """Return whether torch has raised an error, and not a signal handler meanwhile."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module: str = frame.f_globals.get("__name__", "")
    return isinstance(error, Exception) and module.startswith("torch.")


class _Record:
    """The states of a parameter that are in memory, and the names of all its states."""

    def __init__(self, kept: State, names: Sequence[str]) -> None:
        self.kept, self.names = kept, tuple(names)

    @property
    def moved(self) -> list[str]:
        """The names of the states that are in files."""
        return [name for name in self.names if name not in self.kept]


class OffloadedOptimizer(Optimizer):  # type: ignore[misc]  # torch is Any to mypy
    """An optimizer whose states are in files, as ``offload()`` returns it.

    Use it like the original, inner optimizer in training loops, and with schedulers,
    GradScaler and checkpoints.  ``param_groups`` and ``defaults`` are those of the inner
    optimizer.  Hooks registered on either one are called once per step.

    Parameters
    ----------
    optimizer, folder, memory
        As for ``offload()``.

    Attributes
    ----------
    inner : torch.optim.Optimizer
        The optimizer that was passed to ``offload()``.
    memory : int
        The limit in bytes that was passed to ``offload()``.

    Notes
    -----
    ``state[parameter]`` reads a copy from the files; changing the copy has no effect.
    Assign to ``state[parameter]`` to write states.  If a step fails half-way, some
    parameters and states are updated and others are not; then every call raises until
    ``load_state_dict()`` has succeeded.  The optimizer cannot be copied or pickled, and a
    forked child cannot use it.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(100, 100)
    >>> optimizer = nvmeio.torch.offload(torch.optim.AdamW(model.parameters()), "states")
    >>> isinstance(optimizer, nvmeio.torch.OffloadedOptimizer)
    True
    >>> model(torch.ones(100)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.close()
    """

    def __init__(
        self, optimizer: Optimizer, folder: Path, *, memory: int | str = "1GiB"
    ) -> None:
        # torch's __init__ is not called, because groups and states are the inner one's.
        refuse(optimizer)
        other = getattr(optimizer, "_offloaded", lambda: None)()
        if other is not None and other._store.close.alive:
            raise ValueError(
                f"optimizer is offloaded to {other.folder!r} already; use the "
                "optimizer that offload() returned, or close it first"
            )
        self.inner = optimizer
        self.memory = size_of("memory", memory, MEMORY_MIN)
        for name in _HOOKS:
            setattr(self, name, getattr(optimizer, name))
        self._patch_step_function()
        self._records: dict[torch.Tensor, _Record] = {}
        self._pieces: dict[torch.Tensor, list[Piece]] = {}
        self._segments: list[list[Segment]] = []
        self._windows: list[Window] = []
        self._seen: list[Any] = []
        self._unsplit: set[torch.Tensor] = set()
        self._others: State = {}
        # The names of states that are about to be written, and need space before.
        self._coming: dict[torch.Tensor, list[str]] = {}
        self._steps = self._changes = self._freed = 0
        self._failed = ""
        # Raises any ValueError and TypeError before a file is created.
        self._segments_for(range(len(self.param_groups)))
        self._store = Store(folder)
        try:
            self._take_states()
        except BaseException:
            self._store.close()
            raise
        self._close_inner()

    # The attributes of torch's optimizers.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups and their options: the inner optimizer's own list."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's default options."""
        defaults: dict[str, Any] = self.inner.defaults
        return defaults

    @property
    def state(self) -> States:
        """The states by parameter; each is read from the files when it is looked up."""
        return States(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether step() unscales gradients itself, as fused optimizers do."""
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    @property
    def folder(self) -> str:
        """The folder of the files."""
        return self._store.folder

    @property
    def nbytes(self) -> int:
        """The size of the files, in bytes."""
        return self._store.nbytes

    @property
    def waited(self) -> float:
        """How long all steps together have waited for the drive, in seconds.

        For one step, subtract two values.
        """
        return self._store.waited

    def __repr__(self) -> str:
        return f"Offloaded to {self.folder!r}: {self.inner!r}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, and create the file of its states.

        Parameters
        ----------
        param_group : dict
            As for ``torch.optim.Optimizer.add_param_group``.

        Raises
        ------
        TypeError, ValueError
            As in torch; or a parameter is too large for ``memory`` and cannot be split.
        OSError
            The file cannot be created, or the drive is full.
        """
        self._require_usable()
        type(self.inner).add_param_group(self.inner, param_group)
        try:
            self._plan()
        except BaseException:
            self.param_groups.pop()
            raise

    # Steps.

    # Not compiled: while tracing, torch's optimizers use the foreach form, which needs more
    # memory, and each window would be compiled separately.
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, and their states in the files.

        Parameters
        ----------
        closure : callable, optional
            A function that computes the loss and the gradients.  It is called once.

        Returns
        -------
        Any
            The result of `closure`, or None.

        Raises
        ------
        RuntimeError
            A gradient is sparse, or has another dtype than its parameter; an earlier step
            failed; or another program has changed the files.
        OSError
            States cannot be read or written.  If parameters were updated already, every
            call raises until ``load_state_dict()`` has succeeded.
        """
        self._require_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active, unlike = self._with_gradients()
        before = self._unsplit
        try:
            self._unsplit = before | unlike
            self._plan()
        except BaseException:
            # The next gradients may allow the split.
            self._unsplit = before
            raise
        self._steps += 1
        updated = 0

        def update(window: Window, view: View) -> None:
            nonlocal updated
            first = not updated
            if first:
                self._store.require_lock()
            # From here on, an error leaves the step half done.
            updated += 1
            self._failed = f"step {self._steps} goes on"
            self._changes += 1
            self._update(window, view, active, first)

        windows = [
            window
            for window in self._windows
            if any(piece.param in active for piece in window.pieces())
        ]
        try:
            self._store.walk(windows, lambda piece: piece.param in active, update)
        except BaseException:
            if self._failed:
                self._failed = f"step {self._steps} has failed half-way"
            raise
        self._failed = ""
        # A scheduler that was made with the inner optimizer checks this.
        self.inner._opt_called = True
        return loss

    def _with_gradients(self) -> tuple[set[torch.Tensor], set[torch.Tensor]]:
        """Return the parameters with gradients, and those that cannot be split."""
        active, unlike = set(), set()
        for number, group in enumerate(self.param_groups):
            refuse_options(group, number)
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                where = f"a gradient of shape {tuple(param.shape)} (group {number})"
                if grad.layout != torch.strided:
                    words = "offload() supports only dense gradients"
                    raise RuntimeError(f"{where} is sparse ({grad.layout}); {words}")
                if grad.dtype != param.dtype:
                    raise RuntimeError(
                        f"{where} has the dtype {grad.dtype}, but the parameter has "
                        f"{param.dtype}; both must be the same"
                    )
                pieces = self._pieces.get(param, ())
                if len(pieces) > 1 and not is_ordered_as(grad, param):
                    unlike.add(param)
                active.add(param)
        return active, unlike

    def _update(
        self, window: Window, view: View, active: set[torch.Tensor], first: bool
    ) -> None:
        """Let the inner optimizer's step() update the parameters of a window.

        If torch refuses the first before it updates a parameter, the step has not begun.
        """
        worker = self._shell()
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                setattr(worker, name, getattr(self, name))
        updated: list[tuple[Piece, torch.Tensor]] = []
        for segment, _ in window.segments:
            params = []
            for piece in segment.pieces:
                if piece.param in active:
                    param = piece.param if piece.is_whole else _part_of(piece)
                    params.append(param)
                    updated.append((piece, param))
                    if found := self._state_in(piece, view, first):
                        worker.state[param] = found
            if params:
                group = self.param_groups[segment.group]
                worker.param_groups.append({**group, "params": params})
        # The unwrapped step(), because its hooks run once per step, not once per window.
        versions = [param._version for _, param in updated]
        try:
            type(self.inner).step.__wrapped__(worker)
        except BaseException as error:
            # The states of the window are not written, and those that are kept are copies.
            same = versions == [param._version for _, param in updated]
            # Fused kernels do not count versions.  One of them does all of a group, and
            # is refused before it begins.
            if any(group.get("fused") for group in worker.param_groups):
                kinds = {(param.dtype, param.device) for _, param in updated}
                alone = len(worker.param_groups) == len(kinds) == 1
                same = same and alone and _is_of_torch(error)
            if first and same:
                self._failed = ""
            raise
        for piece, param in updated:
            self._freed += piece.state_bytes
            self._keep(piece, worker.state.pop(param, {}), view)
        if self._freed >= FREED_BYTES:
            self._freed = 0
            give_back()

    def _shell(self) -> Any:
        """Make an optimizer like the inner one, without parameters, states and hooks."""
        shell = object.__new__(type(self.inner))
        shell.__dict__.update(self.inner.__dict__)
        for name in ("step", *_REFUSED):
            shell.__dict__.pop(name, None)
        for name in _HOOKS:
            setattr(shell, name, {})
        shell.state = defaultdict(dict)
        shell.param_groups = []
        return shell

    def _state_in(self, piece: Piece, view: View, first: bool) -> State:
        """Return the states of a piece; those from files are views of the window.

        Those of the first window can be dropped: none is that of the record.
        """
        record = self._records.get(piece.param)
        if record is None:
            return {}
        found: State = {}
        for name in record.names:
            if name in record.kept:
                value = record.kept[name]
                # Cloned for each part, because all parts must begin with the same value.
                is_own = not isinstance(value, torch.Tensor) or (
                    piece.is_whole and not first
                )
                found[name] = value if is_own else value.clone()
            else:
                found[name] = view(piece, name, piece.layouts[name]).to(piece.param.device)
        return found

    def _keep(self, piece: Piece, state: State, view: View) -> None:
        """Store the states of a piece after its update."""
        kept: State = {}
        for name, value in state.items():
            if name in KEPT or not isinstance(value, torch.Tensor):
                kept[name] = value
                continue
            self._require_fit(piece, name, value.nbytes == piece.state_bytes)
            stride = torch.empty_like(value, device="meta").stride()
            layout = StateLayout(value.dtype, value.shape, stride)
            target = view(piece, name, layout)
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
            piece.layouts[name] = layout
        if state and piece.end == piece.param.numel():
            self._records[piece.param] = _Record(kept, list(state))

    def _make_places(self, param: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
        """Lay out a group again if states have no place, such as those of other options.

        torch keeps states that the options do not use any more.
        """
        piece = self._pieces[param][0]
        self._require_fits(piece, states)
        if states.keys() <= set(piece.names):
            return
        try:
            self._coming = {param: list(states)}
            self._follow_groups()
        finally:
            self._coming = {}

    def _require_fits(self, piece: Piece, states: dict[str, torch.Tensor]) -> None:
        param = piece.param
        for name, value in states.items():
            fits = value.shape == param.shape and value.nbytes == param.nbytes
            self._require_fit(piece, name, fits)

    def _require_fit(self, piece: Piece, name: str, fits: bool) -> None:
        if not fits:
            raise ValueError(
                f"{type(self.inner).__qualname__} has a state {name!r} of parameter "
                f"{piece.index} that does not fit the parameter's shape and dtype"
            )

    # The plan.

    def _plan(self) -> None:
        """Follow the groups, and take the states of parameters that are new in them."""
        self._follow_groups()
        # States of parameters that were in no group until now.
        if came := [param for param in self._others if param in self._pieces]:
            self._changes += 1
            self._put((param, self._others[param]) for param in came)
            for param in came:
                del self._others[param]

    def _follow_groups(self) -> None:
        """Lay out the files again for groups that have changed, and move their states."""
        seen = [self._fingerprint_of(group) for group in self.param_groups]
        if seen != self._seen:
            self._lay_out(seen)

    def _lay_out(self, seen: list[Any]) -> None:
        """Create new files for groups that have changed, and move their states."""
        self._refuse_twice()
        count = len(seen)
        changed = [i for i in range(count) if self._seen[i : i + 1] != [seen[i]]]
        segments = self._segments_for(changed)
        # Remove files that an earlier call, ended by Ctrl-C, has left.
        self._store.keep(self._segments)
        pieces: dict[torch.Tensor, list[Piece]] = defaultdict(list)

        def states() -> Iterator[Part]:
            # In the layout that they had when they were written.
            for param, record in self._records.items():
                if param in pieces:
                    old, new = self._pieces[param], pieces[param]
                    for name in record.moved:
                        same = old[0].layouts[name].dtype.itemsize == param.itemsize
                        fits = same and old[0].shape == param.shape
                        self._require_fit(new[0], name, fits)
                    yield from self._store.moved(old, new, record.moved)

        try:
            for number, made in segments.items():
                self._store.make_file(number, made)
                for segment in made:
                    for piece in segment.pieces:
                        pieces[piece.param].append(piece)
            self._store.put(states())
            kept = self._segments[:count] + [[]] * (count - len(self._segments))
            now = [segments.get(i, kept[i]) for i in range(count)]
            every = [segment for made in now for segment in made]
            placed: dict[torch.Tensor, list[Piece]] = defaultdict(list)
            for segment in every:
                for piece in segment.pieces:
                    placed[piece.param].append(piece)
            windows = windows_of(
                every, [self._budget(group) for group in self.param_groups]
            )
        except BaseException:
            self._store.keep(self._segments)
            raise
        self._changes += 1
        # In one statement without calls, so that Ctrl-C comes before or after it.
        self._segments, self._pieces, self._windows, self._seen = now, placed, windows, seen
        for gone in self._records.keys() - placed.keys():
            del self._records[gone]
        self._unsplit &= placed.keys()
        self._store.keep(now)

    def _fingerprint_of(self, group: dict[str, Any]) -> Any:
        """Return everything that the layout of a group depends on."""
        names = self._names(group)
        params = group["params"]
        forms = [(id(p), p.shape, p.stride(), p.dtype, p.device) for p in params]
        return names, self._budget(group), forms, [p in self._unsplit for p in params]

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the states that need space: for the group's options, now and before."""
        names = states_of(type(self.inner), group)
        more: set[str] = set()
        for param in group["params"]:
            if (record := self._records.get(param)) is not None:
                more.update(record.moved)
            more.update(self._coming.get(param, ()))
        # Sorted, so that the layout stays when coming states have come.
        return (*names, *sorted(more.difference(names)))

    def _budget(self, group: dict[str, Any]) -> Budget:
        params = group["params"]
        if not params:
            return Budget(self.memory, 0, False)
        return Budget(self.memory, *temporary_copies(group, params[0]))

    def _segments_for(self, numbers: Iterable[int]) -> dict[int, list[Segment]]:
        """Lay out some groups; raise ValueError for a parameter that does not fit."""
        found: dict[int, list[Segment]] = {}
        index, chosen = 0, set(numbers)
        for number, group in enumerate(self.param_groups):
            refuse_options(group, number)
            params = group["params"]
            if number in chosen:
                parts = [
                    (param, index + i, param not in self._unsplit)
                    for i, param in enumerate(params)
                ]
                names = self._names(group)
                found[number] = segments_of(number, parts, names, self._budget(group))
            index += len(params)
        return found

    def _refuse_twice(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        if len(params) > len(set(params)):
            raise ValueError(
                "a parameter appears twice in the optimizer's groups; remove one of them"
            )

    # States in and out.

    def _take_states(self) -> None:
        """Move the existing states of the inner optimizer to the files."""
        self._others = dict(self.inner.state)
        self._plan()
        # An error before this line leaves the optimizer unchanged.
        self.inner.state.clear()

    def _put(self, states: Iterable[tuple[torch.Tensor, State]]) -> None:
        """Write the states of parameters to the files."""
        left = iter(states)
        following = next(left, None)

        def parts() -> Iterator[Part]:
            nonlocal following
            while following is not None:
                param, state = following
                kept, moved = _sorted_out(state)
                pieces = self._pieces[param]
                self._require_fits(pieces[0], moved)
                if not moved.keys() <= set(pieces[0].names):
                    # The files are laid out again once nothing is being written to them.
                    return
                yield from parts_of(pieces, moved)
                if state:
                    self._records[param] = _Record(kept, list(state))
                following = next(left, None)

        while following is not None:
            param, state = following
            self._make_places(param, _sorted_out(state)[1])
            self._store.put(parts())

    def _replace(self, param: Any, state: State) -> None:
        """Replace the states of a parameter; keep those of one that is in no group."""
        self._require_usable()
        self._plan()
        if param not in self._pieces:
            self._others[param] = state
            return
        self._make_places(param, _sorted_out(state)[1])
        with self._changing("an assignment to state"):
            self._put([(param, state)])
            if not state:
                self._records.pop(param, None)

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Refuse other uses while states are replaced; and for good if that fails."""
        self._failed = f"{what} goes on"
        self._changes += 1
        try:
            yield
        except BaseException:
            self._failed = f"{what} has failed half-way"
            raise
        self._failed = ""

    def _load(self, param: torch.Tensor) -> State:
        """Return a copy of the states of a parameter."""
        record = self._records[param]
        return self._merged(record, self._store.load(self._pieces[param], record.moved))

    @staticmethod
    def _merged(record: _Record, moved: Mapping[str, Any]) -> State:
        kept = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in record.kept.items()
        }
        return {name: moved[name] if name in moved else kept[name] for name in record.names}

    def state_dict(self) -> dict[str, Any]:
        """Return all states and options, as torch's optimizers do.

        Returns
        -------
        dict
            A copy in memory, which any optimizer of the inner one's class can load.  It
            needs memory for all states; ``state_items()`` does not.

        Raises
        ------
        RuntimeError
            A step failed half-way.
        OSError
            The states cannot be read.
        """
        self._require_usable()
        found: dict[str, Any] = super().state_dict()
        return found

    def state_items(self) -> StateItems:
        """Return an iterable over all options and states, each read when its turn comes.

        The hooks of ``state_dict()`` are not called.

        Returns
        -------
        StateItems
            An iterable of pairs: first ``("param_groups", groups)``, then each state, such
            as ``("state/0/exp_avg", tensor)``.  ``load_state_dict()`` accepts it.
            ``nvmeio.checkpoint.Checkpointer`` can save it as part of a state, and restores
            it as the dict that ``state_dict()`` would have returned.

        Raises
        ------
        RuntimeError
            A step failed half-way; or, during iteration, the states have changed since.

        Examples
        --------
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(100))
        >>> momentum = torch.optim.SGD([weight], momentum=0.9)
        >>> optimizer = nvmeio.torch.offload(momentum, "states")
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> [path for path, value in optimizer.state_items()]
        ['param_groups', 'state/0/momentum_buffer']
        >>> optimizer.close()
        """
        self._require_usable()
        return StateItems(self)

    def load_state_dict(self, state_dict: Any) -> None:
        """Replace all states and options.

        Parameters
        ----------
        state_dict : dict, or iterable of pairs
            The result of ``state_dict()`` or ``state_items()``, of an offloaded or an
            ordinary optimizer of the same class.  ``state_dict["state"]`` may be a mapping
            that loads the states of a parameter on lookup.  The pairs of one parameter must
            be together.  Pre-hooks are called only with a dict, not with pairs.

        Raises
        ------
        TypeError, ValueError
            The groups do not match, or have options that ``offload()`` refuses; nothing was
            changed.  Or a state does not fit its parameter; then load states again.
        OSError
            The states cannot be written; then load states again.
        """
        self._require_process()
        if isinstance(state_dict, StateItems) and state_dict._optimizer is self:
            raise ValueError(
                "state_dict is this optimizer's own state_items(), whose files would be "
                "replaced while they are read; these states are loaded already"
            )
        groups, state, found = unpacked(state_dict)
        if found is not None:
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                result = hook(self, found)
                found = found if result is None else result
            groups, state = found["param_groups"], found["state"].items()
        # torch's method checks the groups, and completes their options.
        shell = self._shell()
        shell.param_groups = self.param_groups
        Optimizer.load_state_dict(shell, {"state": {}, "param_groups": groups})
        for number, group in enumerate(shell.param_groups):
            refuse_options(group, number)
        ids = [each for group in groups for each in group["params"]]
        params = [param for group in shell.param_groups for param in group["params"]]
        options = [
            (group, saved)
            for group, saved in zip(shell.param_groups, groups, strict=True)
            for _ in group["params"]
        ]
        by_id = {each: index for index, each in enumerate(ids)}
        self._store.require_lock()

        def states() -> Iterator[tuple[torch.Tensor, State]]:
            for key, value in state:
                if key not in by_id:
                    self._others[key] = value
                    continue
                index = by_id[key]
                yield params[index], self._cast(params[index], key, value, *options[index])

        with self._changing("load_state_dict()"):
            self._records.clear()
            self._others = {}
            self.inner.param_groups = shell.param_groups
            # Drop the old files first, because the drive may not have room for both.
            self._seen, self._pieces = [], {}
            self._segments = []
            self._plan()
            self._put(states())
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _cast(
        self, param: torch.Tensor, key: Any, value: Any, group: State, saved: State
    ) -> State:
        """Convert a parameter's states to the dtypes and devices that torch uses."""
        shell = self._shell()
        shell.param_groups = [{**group, "params": [param]}]
        one = {name: option for name, option in saved.items() if name != "param_names"}
        found = {"state": {key: value}, "param_groups": [{**one, "params": [key]}]}
        Optimizer.load_state_dict(shell, found)
        state: State = shell.state[param]
        return state

    # The end.

    def close(self) -> None:
        """Remove the files; states that were not saved are lost.  Idempotent."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_usable(self) -> None:
        self._require_process()
        if self._failed:
            raise RuntimeError(
                f"{self._failed}: parameters and states may be of two steps; load both "
                "from a checkpoint, the states with load_state_dict()"
            )

    def _require_process(self) -> None:
        if not self._store.close.alive:
            raise ValueError("the optimizer is closed")
        if not self._store.is_ours:
            raise RuntimeError(
                "the optimizer belongs to the parent process; a forked child cannot use it"
            )

    def _close_inner(self) -> None:
        """Make the inner optimizer refuse calls that create states outside the files."""
        inner: Any = self.inner

        def refused(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(
                "the states of this optimizer are on disk; use the optimizer that "
                "offload() returned"
            )

        # Without this mark, a scheduler made with the inner optimizer would wrap this
        # function as if it were a method.
        refused._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        inner._offloaded = weakref.ref(self)
        for name in ("step", *_REFUSED):
            setattr(inner, name, refused)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "an offloaded optimizer cannot be copied; copy its state_dict() instead"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an offloaded optimizer cannot be pickled or copied; use its state_dict()"
        )


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_REFUSED = ("add_param_group", "load_state_dict", "state_dict")


def _sorted_out(state: State) -> tuple[State, dict[str, torch.Tensor]]:
    """Split states into copies of those that stay in memory, and those for the files."""
    kept, moved = {}, {}
    for name, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and name not in KEPT:
            moved[name] = value
        else:
            kept[name] = value.clone() if is_tensor else value
    return kept, moved


def _part_of(piece: Piece) -> torch.Tensor:
    """Return a part of a parameter, with its part of the gradient."""
    part = flat(piece.param)[piece.begin : piece.end]
    assert piece.param.grad is not None
    part.grad = flat(piece.param.grad)[piece.begin : piece.end]
    return part
