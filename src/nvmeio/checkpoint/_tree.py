"""A state as JSON: its nesting, without the tensors.

A value that JSON lacks is an object whose single key is its kind: {"tuple": [...]},
{"float": "nan"}.  A dict with only str keys is {"dict": {...}}, another dict is
{"items": [[0, ...], ...]}.  An OrderedDict with the attribute _metadata, as state_dict() of
a module returns it, is {"state_dict": [{"OrderedDict": ...}, metadata]}.  The JSON names no
code, so reading it runs none.
"""

import base64
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from nvmeio._memory.deferred import Deferred, DeferredState
from nvmeio._tensors.dtypes import torch_module
from nvmeio.checkpoint._errors import CheckpointError

__all__ = ["DEPTH_MAX", "Leaf", "decode", "encode", "name_of", "path_of", "plain"]
__all__ += ["has_text"]

# A limit, because Python's json recurses.
DEPTH_MAX = 100
# About 3,010 digits; Python converts at most 4,300 between int and str by default.
INTEGER_BITS_MAX = 10_000
# How many int keys of a dict may have the same hash.
ALIKE_MAX = 100
# How many names an error lists.
NAMES_MAX = 10

Key = str | int
Path = tuple[Key, ...]


class Leaf(NamedTuple):
    """A tensor or an array of a state, and its node in the tree, which the caller fills."""

    path: Path
    value: Any
    node: dict[str, Any]


def path_of(path: Iterable[Key]) -> str:
    """Return a path as a Python expression: state['model']['weight'][0]."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def name_of(path: Iterable[Key]) -> str:
    """Return a path as a name: model/weight/0; "~" and "/" in keys become ~0 and ~1."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path)


def encode(state: Any) -> tuple[Any, list[Leaf], list[DeferredState]]:
    """Return the tree of a state, its tensors in the order of the tree, and what defers.

    Raise TypeError or ValueError, with the path, for a value that cannot be saved.
    """
    encoder = _Encoder()
    return encoder.node(state, ()), encoder.leaves, encoder.deferred


class _Encoder:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.deferred: list[DeferredState] = []
        self.within: set[int] = set()
        torch = sys.modules.get("torch")
        self.tensor = () if torch is None else (torch.Tensor,)
        self.size = None if torch is None else torch.Size
        self.dtype = None if torch is None else torch.dtype
        self.device = None if torch is None else torch.device

    def node(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind is int:
            _require_bits(value, path)
        if kind is str and not _is_kept(value):
            words = "has a pair of surrogates, which JSON would merge into one character"
            raise ValueError(f"{path_of(path)} {words}: {value!r:.100}")
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": _float_text(value)}
        if kind is complex:
            return {"complex": [_float_text(value.real), _float_text(value.imag)]}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, (np.ndarray, Deferred, *self.tensor)):
            node: dict[str, Any] = {}
            self.leaves.append(Leaf(path, value, node))
            return node
        if (
            isinstance(value, np.generic)
            and kind is value.dtype.type
            and value.dtype.kind not in "OV"
            and has_text(value.dtype)
        ):
            return {"scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        if kind in (list, tuple, *_DICTS) or kind is self.size:
            return self._nested(value, kind, path)
        if isinstance(value, DeferredState):
            value._require_same()
            self.deferred.append(value)
            return self.node(value._tree(), path)
        if kind is self.dtype:
            return {"torch.dtype": str(value).removeprefix("torch.")}
        if kind is self.device:
            return {"torch.device": str(value)}
        raise TypeError(
            f"{path_of(path)} is of type {kind.__module__}.{kind.__qualname__}; a state "
            "may have dict, OrderedDict, Counter, list, tuple and torch.Size, with "
            "tensors, arrays, numbers, bool, str, bytes, torch.dtype, torch.device and None"
        )

    def _nested(self, value: Any, kind: type, path: Path) -> Any:
        if id(value) in self.within:
            raise ValueError(f"{path_of(path)} contains itself")
        if len(path) == DEPTH_MAX:
            raise ValueError(f"{path_of(path)} is nested deeper than {DEPTH_MAX} levels")
        self.within.add(id(value))
        found: Any
        if kind in _DICTS:
            found = self._items(value, path)
            if kind is not dict:
                found = {kind.__name__: found}
                others = vars(value).keys() - ({"_metadata"} if kind is OrderedDict else ())
                if others:
                    words = f"has the attribute {min(others)!r}, which would be lost"
                    raise TypeError(f"{path_of(path)} {words}")
            if kind is OrderedDict and "_metadata" in vars(value):
                metadata = vars(value)["_metadata"]
                found = {"state_dict": [found, self._metadata(metadata, path)]}
        else:
            found = [self.node(each, (*path, index)) for index, each in enumerate(value)]
            if kind is not list:
                found = {"tuple" if kind is tuple else "Size": found}
        self.within.remove(id(value))
        return found

    def _metadata(self, value: Any, path: Path) -> Any:
        before, below = len(self.leaves), (*path, "_metadata")
        node = self.node(value, below)
        if len(self.leaves) > before:
            raise TypeError(f"{path_of(below)}, an attribute, has a tensor or an array")
        return node

    def _items(self, value: dict[Any, Any], path: Path) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(
                    f"{path_of(path)} has a key of type {type(key).__qualname__}, "
                    f"{key!r}; keys are str or int"
                )
            if type(key) is int:
                _require_bits(key, path)
            elif not key.isascii():
                _require_unicode(key, path)
        if (problem := _hash_problem(value)) is not None:
            raise ValueError(f"{path_of(path)} {problem}")
        items = [(key, self.node(each, (*path, key))) for key, each in value.items()]
        if all(isinstance(key, str) for key in value):
            return {"dict": dict(items)}
        return {"items": [list(item) for item in items]}


def has_text(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is that of its text, such as "<f4", by which it is restored.

    The text of an extension's dtype may be that of another, or of none.
    """
    try:
        return bool(np.dtype(dtype.str) == dtype)
    except TypeError:
        return False


def _float_text(value: float) -> str:
    """Return a number as text; not every nan has the bits of the usual one."""
    bits = struct.pack(">d", value).hex()
    usual = struct.pack(">d", math.nan).hex()
    return repr(value) if value == value or bits == usual else f"nan:{bits}"


def _float_of(text: Any) -> float:
    """Return the number that a text is of."""
    if isinstance(text, str) and text.startswith("nan:"):
        bits = bytes.fromhex(text[4:])
        value = struct.unpack(">d", bits)[0] if len(bits) == 8 else 0.0
        if not math.isnan(value):
            raise ValueError
        return float(value)
    return float(text)


def _require_bits(value: int, path: Path) -> None:
    if value.bit_length() > INTEGER_BITS_MAX:
        words = f"has an int of {value.bit_length()} bits; {INTEGER_BITS_MAX} is the limit"
        raise ValueError(f"{path_of(path)} {words}")


def _hash_problem(keys: Iterable[Key]) -> str | None:
    """Say if many keys have the same hash: a dict of them takes quadratic time.

    Those of strings cannot be foreseen, and ints below 2**61 - 1 are their own.
    """
    large = Counter(hash(key) for key in keys if type(key) is int and key != hash(key))
    most = max(large.values(), default=0)
    if most <= ALIKE_MAX:
        return None
    return f"has {most} keys with the same hash; {ALIKE_MAX} is the limit"


def _is_kept(text: str) -> bool:
    """Return whether JSON preserves a string."""
    if text.isascii():
        return True
    code = "utf-16-le"
    return text.encode(code, "surrogatepass").decode(code, "surrogatepass") == text


def plain(tree: Any) -> Any:
    """Return a tree as ordinary JSON, where JSON can represent the value.

    Dicts with str keys become objects, and tuples arrays.  Others, such as {"float":
    "nan"}, stay as they are.
    """
    if isinstance(tree, list):
        return [plain(each) for each in tree]
    if not isinstance(tree, dict) or len(tree) != 1:
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict" and isinstance(content, dict):
        return {key: plain(each) for key, each in content.items()}
    if kind == "state_dict" and isinstance(content, list):
        return plain(content[0] if content else None)
    if kind in ("tuple", "Size", "OrderedDict", "Counter"):
        return plain(content)
    return {kind: plain(content)} if kind == "items" else tree


def _require_unicode(key: str, path: Path) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        words = f"{path_of(path)} has a key that is not valid Unicode: {key!r}"
        raise ValueError(words) from None


def decode(
    tree: Any,
    leaf: Callable[[dict[str, Any], Path], Any],
    *,
    names: Collection[str] | None = None,
) -> Any:
    """Return the state of a tree; raise CheckpointError if the tree is invalid.

    With `names`, return only the parts with these names, nested in the same dicts.
    """
    decoder = _Decoder(leaf)
    if names is None:
        return decoder.value(tree, ())
    wanted = _Names(names)
    found = decoder.value(tree, (), wanted)
    # A name below another wanted one was decoded with that one, and not marked as found.
    keys_of: dict[int, dict[str, Key]] = {}
    missing = [name for name in sorted(wanted.missing) if not _has(found, name, keys_of)]
    if missing:
        words = f"the checkpoint has nothing named {', '.join(missing)}"
        # Not by `leaf`, which has seen what is wanted.
        whole = _Decoder(lambda node, path: None).value(tree, ())
        raise KeyError(f"{words}; {_beside(whole, missing[0])}")
    return found


def _beside(state: Any, name: str) -> str:
    """Say which names a state has where the given one is missing."""
    above: list[str] = []
    for part in name.split("/"):
        keys = {name_of([key]): key for key in state} if isinstance(state, dict) else {}
        if part not in keys:
            break
        above.append(part)
        state = state[keys[part]]
    where = "/".join(above) or "its state"
    if not isinstance(state, dict):
        return f"{where} is not a dict"
    some = ", ".join(list(keys)[:NAMES_MAX]) or "nothing"
    more = len(keys) - NAMES_MAX
    return f"{where} has {some}" + (f" and {more} more" if more > 0 else "")


def _has(found: Any, name: str, keys_of: dict[int, dict[str, Key]]) -> bool:
    """Return whether nested dicts have a part with this name.

    `keys_of` keeps the keys of the dicts, by id, with their names.
    """
    for part in name.split("/"):
        if not isinstance(found, dict):
            return False
        keys = keys_of.get(id(found))
        if keys is None:
            keys = keys_of[id(found)] = {name_of([key]): key for key in found}
        if part not in keys:
            return False
        found = found[keys[part]]
    return True


class _Names:
    """The names of the wanted parts of a tree, such as model/weight."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)
        self.missing = set(self.names)
        self.above: set[str] = set()
        for name in self.names:
            keys = name.split("/")
            self.above.update("/".join(keys[:count]) for count in range(1, len(keys)))

    def __call__(self, path: Path) -> bool | None:
        """Return whether a part is wanted; None if only parts inside it may be."""
        name = name_of(path)
        if name in self.names:
            self.missing.discard(name)
            return True
        return None if name in self.above else False


class _Decoder:
    def __init__(self, leaf: Callable[[dict[str, Any], Path], Any]) -> None:
        self.leaf = leaf

    def value(self, node: Any, path: Path, wanted: _Names | None = None) -> Any:
        """Return the value of a node; with `wanted`, only the wanted parts."""
        if len(path) > DEPTH_MAX:
            raise self._wrong(path, f"is nested deeper than {DEPTH_MAX} levels")
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if isinstance(node, list):
            return self._list(node, path, wanted)
        if "tensor" in node or "array" in node:
            return self.leaf(node, path)
        if len(node) != 1:
            raise self._wrong(path, f"has {len(node)} keys instead of one, its kind")
        ((kind, content),) = node.items()
        make = None
        if kind in _KINDS:
            make = getattr(self, f"_{kind.replace('.', '_')}")
        if make is None:
            raise self._wrong(path, f"is of an unknown kind, {kind!r:.50}")
        if kind in _NESTED:
            return make(content, path, wanted)
        try:
            return make(content)
        except _INVALID:
            raise self._wrong(path, f"is not a valid {kind}") from None

    def _wrong(self, path: Path, words: str) -> CheckpointError:
        return CheckpointError(f"{path_of(path)} {words}")

    def _list(self, content: Any, path: Path, wanted: _Names | None) -> list[Any]:
        if not isinstance(content, list):
            raise self._wrong(path, "is not a list")
        if wanted is not None:
            raise KeyError(
                f"{path_of(path)} is a list, and names cannot select its items; name the "
                f"whole list, {name_of(path)!r}"
            )
        return [each for _, each in self._chosen(enumerate(content), path, wanted)]

    def _chosen(
        self, items: Iterable[tuple[Any, Any]], path: Path, wanted: _Names | None
    ) -> Iterable[tuple[Any, Any]]:
        for key, each in items:
            below = (*path, key)
            choice = True if wanted is None else wanted(below)
            if choice:
                yield key, self.value(each, below)
            elif choice is None:
                yield key, self.value(each, below, wanted)

    def _tuple(self, content: Any, path: Path, wanted: _Names | None) -> tuple[Any, ...]:
        return tuple(self._list(content, path, wanted))

    def _Size(self, content: Any, path: Path, wanted: _Names | None) -> Any:  # noqa: N802
        extents = self._list(content, path, wanted)
        if not all(type(extent) is int and 0 <= extent < 1 << 63 for extent in extents):
            raise self._wrong(path, "is not a valid torch.Size")
        return torch_module().Size(extents)

    def _dict(self, content: Any, path: Path, wanted: _Names | None) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise self._wrong(path, "is not a dict")
        return dict(self._chosen(content.items(), path, wanted))

    def _items(self, content: Any, path: Path, wanted: _Names | None) -> dict[Key, Any]:
        for item in content if isinstance(content, list) else [None]:
            if not (
                isinstance(item, list) and len(item) == 2 and type(item[0]) in (int, str)
            ):
                raise self._wrong(path, "has invalid items")
        if (problem := _hash_problem(key for key, _ in content)) is not None:
            raise self._wrong(path, problem)
        pairs = dict(content)
        if len(pairs) < len(content):
            raise self._wrong(path, "has a key twice")
        return dict(self._chosen(pairs.items(), path, wanted))

    def _OrderedDict(  # noqa: N802
        self, content: Any, path: Path, wanted: _Names | None
    ) -> OrderedDict[Key, Any]:
        return OrderedDict(self._dict_of(content, path, wanted))

    def _Counter(  # noqa: N802
        self, content: Any, path: Path, wanted: _Names | None
    ) -> Counter[Key]:
        return Counter(self._dict_of(content, path, wanted))

    def _state_dict(
        self, content: Any, path: Path, wanted: _Names | None
    ) -> OrderedDict[Key, Any]:
        below = (*path, "_metadata")

        def refused(node: Any, path: Path) -> Any:
            raise self._wrong(path, "is a tensor or an array")

        if not isinstance(content, list) or len(content) != 2:
            raise self._wrong(path, "is not a state_dict")
        found = self.value(content[0], path, wanted)
        if type(found) is not OrderedDict:
            raise self._wrong(path, "is not a state_dict")
        vars(found)["_metadata"] = _Decoder(refused).value(content[1], below)
        return found

    def _dict_of(self, content: Any, path: Path, wanted: _Names | None) -> dict[Key, Any]:
        if not isinstance(content, dict) or content.keys() not in ({"dict"}, {"items"}):
            raise self._wrong(path, "is not a dict")
        found: dict[Key, Any] = self.value(content, path, wanted)
        return found

    def _float(self, content: Any) -> float:
        if content not in ("nan", "inf", "-inf") and not content.startswith("nan:"):
            raise ValueError
        return _float_of(content)

    def _complex(self, content: Any) -> complex:
        real, imag = content
        return complex(_float_of(real), _float_of(imag))

    def _bytes(self, content: Any) -> bytes:
        return base64.b64decode(content, validate=True)

    def _torch_dtype(self, content: Any) -> Any:
        torch = torch_module()
        # getattr() would import torch's lazy modules.
        found = vars(torch).get(content)
        if not isinstance(found, torch.dtype):
            raise ValueError
        return found

    def _torch_device(self, content: Any) -> Any:
        if not isinstance(content, str):
            raise ValueError
        return torch_module().device(content)

    def _scalar(self, content: Any) -> Any:
        name, text = content
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError
        dtype = np.dtype(name)
        if dtype.kind in "OV":
            raise ValueError
        if not dtype.itemsize:
            return dtype.type()
        (value,) = np.frombuffer(raw := base64.b64decode(text, validate=True), dtype)
        # numpy takes zeros at the end for padding.
        if dtype.kind == "S":
            return dtype.type(raw)
        if dtype.kind == "U":
            code = "utf-32-be" if np.dtype(name).byteorder == ">" else "utf-32-le"
            return dtype.type(raw.decode(code, "surrogatepass"))
        return value


# Counter is included because torch's scheduler MultiStepLR has one in its state.
_DICTS = (dict, OrderedDict, Counter)
_NESTED = ("tuple", "Size", "dict", "items", "OrderedDict", "Counter", "state_dict")
# What making a value of another content raises.  numpy raises SyntaxError for a dtype.
_INVALID = (AttributeError, OverflowError, RuntimeError, SyntaxError, TypeError, ValueError)
_KINDS = (*_NESTED, "float", "complex", "bytes", "scalar", "torch.dtype", "torch.device")
