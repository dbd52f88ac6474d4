"""The states of an offloaded optimizer, as mappings and pairs that read on demand."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from nvmeio._memory.deferred import Deferred, DeferredState

__all__ = ["State", "StateItems", "States", "unpacked"]

State = dict[str, Any]


class States(Mapping[torch.Tensor, State]):
    """The states of all parameters; each is read on lookup."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: torch.Tensor) -> State:
        self._optimizer._require_usable()
        if param in self._optimizer._others:
            other: State = self._optimizer._others[param]
            return other
        if param not in self._optimizer._records:
            if param in self._optimizer._pieces:
                # As in torch, for a parameter that was never updated.
                return {}
            what = type(param).__qualname__
            if isinstance(param, torch.Tensor):
                what = f"tensor of shape {tuple(param.shape)}"
            raise KeyError(
                f"a {what} is not a parameter of this optimizer, which has "
                f"{len(self._optimizer._pieces)}"
            )
        found: State = self._optimizer._load(param)
        return found

    def __setitem__(self, param: torch.Tensor, state: State) -> None:
        self._optimizer._replace(param, state)

    def __contains__(self, param: object) -> bool:
        return param in self._optimizer._records or param in self._optimizer._others

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self._optimizer._records
        yield from self._optimizer._others

    def __len__(self) -> int:
        return len(self._optimizer._records) + len(self._optimizer._others)

    def items(self) -> Any:
        """Return all parameters and their states, read at the same time."""
        optimizer = self._optimizer
        optimizer._require_usable()
        records = optimizer._records
        wanted = [
            (optimizer._pieces[param], record.moved) for param, record in records.items()
        ]
        found = optimizer._store.load_all(wanted)
        states = [
            (param, optimizer._merged(record, moved))
            for (param, record), moved in zip(records.items(), found, strict=True)
        ]
        return [*states, *optimizer._others.items()]


class StateItems(DeferredState):
    """An iterable over the options and states of an offloaded optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._changes = optimizer, optimizer._changes
        shell = optimizer._shell()
        shell.param_groups = groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        self._numbers = {param: number for number, param in enumerate(params)}
        self._groups = Optimizer.state_dict(shell)["param_groups"]

    def _tree(self) -> dict[str, Any]:
        numbers, optimizer = self._numbers, self._optimizer
        states = {
            number: self._state_of(param)
            for param, number in numbers.items()
            if param in optimizer._records
        }
        others = {numbers.get(key, key): each for key, each in optimizer._others.items()}
        return {"state": states | others, "param_groups": self._groups}

    def _state_of(self, param: torch.Tensor) -> State:
        record = self._optimizer._records[param]
        pieces = self._optimizer._pieces[param]

        def deferred(name: str) -> Deferred:
            def load() -> torch.Tensor:
                self._require_same()
                found = self._optimizer._store.load(pieces, [name])[name]
                # A step of another thread may have begun during the read.
                self._require_same()
                return found

            first = pieces[0]
            stride = first.layouts[name].stride if first.is_whole else first.stride
            shape = tuple(param.shape)
            return Deferred(first.layouts[name].dtype, shape, stride, load)

        moved = {name: deferred(name) for name in record.moved}
        merged: State = self._optimizer._merged(record, moved)
        return merged

    def _require_same(self) -> None:
        self._optimizer._require_usable()
        if self._optimizer._changes != self._changes:
            raise RuntimeError(
                "the states have changed since state_items(); wait until they are saved "
                "before the next step: with save_async(stage=False), for `staged`"
            )

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self._require_same()
        tree = self._tree()
        yield "param_groups", tree["param_groups"]
        for index, state in tree["state"].items():
            for name, value in state.items():
                self._require_same()
                is_there = not isinstance(value, Deferred)
                yield f"state/{index}/{name}", value if is_there else value.load()


def unpacked(
    state_dict: Any,
) -> tuple[Any, Iterable[tuple[Any, Any]], dict[str, Any] | None]:
    """Return the groups and states of pairs, or the dict, for load_state_dict()."""
    if isinstance(state_dict, StateItems):
        state_dict = iter(state_dict)
    if isinstance(state_dict, Mapping):
        if not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("state_dict has no 'state', or no 'param_groups'")
        return None, (), dict(state_dict)
    if not isinstance(state_dict, Iterable):
        raise TypeError(
            f"state_dict is of type {type(state_dict).__qualname__}; it must be a dict, or "
            "pairs as state_items() yields them"
        )
    pairs = iter(state_dict)
    first, groups = next(pairs, (None, None))
    if first != "param_groups":
        raise ValueError(f"the first pair is named {first!r}; it must be 'param_groups'")
    return groups, _by_parameter(pairs), None


def _by_parameter(pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[int, State]]:
    """Yield each parameter's index and states, from pairs that are grouped by parameter."""
    current = -1
    before: set[int] = set()
    state: State = {}
    for name, value in pairs:
        parts = name.split("/", 2)
        if len(parts) != 3 or parts[0] != "state" or not parts[1].isdecimal():
            raise ValueError(f"a pair is named {name!r}; it must be like 'state/0/exp_avg'")
        if int(parts[1]) != current and state:
            yield current, state
            before.add(current)
            state = {}
        current = int(parts[1])
        if current in before:
            raise ValueError(
                f"the pair {name!r} comes after pairs of another parameter; the pairs of "
                "one parameter must be together"
            )
        state[parts[2]] = value
    if state:
        yield current, state
