"""Hostile headers of safetensors files, and a comparison with the safetensors package.

`difference()` reads a file with the package and with nvmeio, and returns how the results
differ.  `HOSTILE` has a file for each reason to accept or refuse one; `mutant()` makes a
random one.  tests/test_safetensors_header.py and tests/stress/test_headers.py use them.
"""

import hashlib
import os
import re
from pathlib import Path

import safetensors

from nvmeio.safetensors import _header
from nvmeio.safetensors._dtypes import BITS
from nvmeio.safetensors._errors import SafetensorError

FOUND = Path(__file__).resolve().parents[1] / "build" / "fuzz" / "found"
DATA = bytes(range(1, 5))
ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def file_of(header, data=DATA, *, length=None):
    """Return the bytes of a file, whatever its header says."""
    if isinstance(header, str):
        header = header.encode()
    claimed = len(header) if length is None else length
    return claimed.to_bytes(8, "little") + header + data


def entry_with(**fields):
    """Return a header of one tensor, `a`, with some of its fields replaced."""
    ordinary = {"dtype": '"F32"', "shape": "[1]", "data_offsets": "[0,4]"}
    inside = ",".join(f'"{key}":{value}' for key, value in (ordinary | fields).items())
    return f'{{"a":{{{inside}}}}}'


def nested(depth, text="1"):
    """Return nested arrays."""
    return "[" * depth + text + "]" * depth


DUPLICATE = '"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]'
EMPTY = '"z":{"dtype":"U8","shape":[0],"data_offsets":[%d,%d]}'

# The name of a case, the file, and whether safetensors 0.8.0 accepts it.
HOSTILE = {
    "an ordinary one": (file_of(entry_with()), True),
    "spaces behind": (file_of(entry_with() + " " * 4000), True),
    "a newline and a tab behind": (file_of(entry_with() + "\r\n\t"), True),
    "whitespace before": (file_of(" \t\r\n" + entry_with()), True),
    "whitespace within": (file_of(entry_with().replace(":", " :\n ")), True),
    "a form feed before": (file_of("\f" + entry_with()), False),
    "a no-break space": (file_of(entry_with() + "\xa0"), False),
    "a byte order mark": (file_of("\ufeff" + entry_with()), False),
    "a null behind": (file_of(entry_with() + "\0"), False),
    "text behind": (file_of(entry_with() + "{}"), False),
    "nothing": (b"", False),
    "7 bytes": (b"1234567", False),
    "length 0": (file_of(""), False),
    "length over the limit": (file_of("{}", b"", length=100_000_001), False),
    "length at the limit": (file_of("{}", b"", length=100_000_000), False),
    "the largest length": (file_of("{}", b"", length=2**64 - 1), False),
    "one byte too few": (file_of("{}", b"", length=3), False),
    "no tensors": (file_of("{}", b""), True),
    "no tensors, but data": (file_of("{}"), False),
    "an array": (file_of("[]", b""), False),
    "null": (file_of("null", b""), False),
    "empty metadata": (file_of('{"__metadata__":{}}', b""), True),
    "null for metadata": (file_of('{"__metadata__":null}', b""), True),
    "metadata alone": (file_of('{"__metadata__":{"a":"b"}}', b""), True),
    "metadata last": (file_of(entry_with()[:-1] + ',"__metadata__":{"a":"b"}}'), True),
    "a key of metadata twice": (
        file_of('{"__metadata__":{"a":"b","a":"c"}}', b""),
        True,
    ),
    "metadata twice": (file_of('{"__metadata__":{},"__metadata__":{}}', b""), False),
    "null metadata twice": (
        file_of('{"__metadata__":null,"__metadata__":null}', b""),
        False,
    ),
    "metadata by an escape": (file_of(r'{"\u005f_metadata__":{"a":"b"}}', b""), True),
    "a number in metadata": (file_of('{"__metadata__":{"a":1}}', b""), False),
    "5000 digits in metadata": (file_of(f'{{"__metadata__":{{"a":{"1" * 5000}}}}}'), False),
    "null in metadata": (file_of('{"__metadata__":{"a":null}}', b""), False),
    "an array of metadata": (file_of('{"__metadata__":[]}', b""), False),
    "a tensor called so": (file_of(f'{{"__metadata__":{ENTRY}}}'), False),
    "a name twice": (file_of(f'{{"a":{ENTRY},"a":{ENTRY}}}'), True),
    "a name twice, once wrong": (
        file_of(f'{{"a":{ENTRY.replace("[1]", "[7]")},"a":{ENTRY}}}'),
        True,
    ),
    "a name twice, once no entry": (file_of(f'{{"a":1,"a":{ENTRY}}}'), False),
    "a field twice": (file_of(f'{{"a":{{{DUPLICATE}}}}}'), False),
    "a field too many": (file_of(entry_with(x='{"y":[null,true,-1.5e3,""]}')), True),
    "such a field twice": (file_of(entry_with(x='1,"x":{"y":1,"y":2}')), True),
    "an entry as an array": (file_of('{"a":["F32",[1],[0,4]]}'), True),
    "one too long": (file_of('{"a":["F32",[1],[0,4],0]}'), False),
    "one too short": (file_of('{"a":["F32",[1]]}'), False),
    "an entry of pairs": (
        file_of('{"a":[["dtype","F32"],["shape",[1]],["data_offsets",[0,4]]]}'),
        False,
    ),
    "no shape": (file_of('{"a":{"dtype":"F32","data_offsets":[0,4]}}'), False),
    "a dtype as an object": (file_of(entry_with(dtype='{"F32":null}')), True),
    "one of an object": (file_of(entry_with(dtype='{"F32":{}}')), False),
    "one of two": (file_of(entry_with(dtype='{"F32":null,"F32":null}')), False),
    "one of none": (file_of(entry_with(dtype="{}")), False),
    "a dtype as an array": (file_of(entry_with(dtype='["F32"]')), False),
    "a dtype as a number": (file_of(entry_with(dtype="17")), False),
    "a small dtype": (file_of(entry_with(dtype='"f32"')), False),
    "an unknown dtype": (file_of(entry_with(dtype='"F128"')), False),
    "an empty name": (file_of(f'{{"":{ENTRY}}}'), True),
    "a null in a name": (file_of(rf'{{"a\u0000":{ENTRY}}}'), True),
    "a raw null in a name": (file_of(f'{{"a\0":{ENTRY}}}'), False),
    "a raw newline in a name": (file_of(f'{{"a\n":{ENTRY}}}'), False),
    "a delete in a name": (file_of(f'{{"a\x7f":{ENTRY}}}'), True),
    "a pair of surrogates": (file_of(rf'{{"\ud83d\ude00":{ENTRY}}}'), True),
    "the first alone": (file_of(rf'{{"\ud83d":{ENTRY}}}'), False),
    "the second alone": (file_of(rf'{{"\ude00":{ENTRY}}}'), False),
    "the first twice": (file_of(rf'{{"\ud83d\ud83d\ude00":{ENTRY}}}'), False),
    "one in a value": (file_of(entry_with(x=r'"\uDFFF"')), False),
    "an escaped backslash and a u": (file_of(rf'{{"\\ud83d":{ENTRY}}}'), True),
    "three backslashes and a u": (file_of(rf'{{"\\\ud83d":{ENTRY}}}'), False),
    "an unknown escape": (file_of(rf'{{"\x":{ENTRY}}}'), False),
    "UTF-8 that is none": (file_of(b'{"\xff":1}'), False),
    "half a character": (file_of(b'{"a":"\xe2\x82', b""), False),
    "a surrogate in UTF-8": (file_of(b'{"a\xed\xa0\x80":1}', b""), False),
    "a float": (file_of(entry_with(shape="[1.0]")), False),
    "an exponent": (file_of(entry_with(shape="[1e0]")), False),
    "minus zero": (file_of(entry_with(data_offsets="[-0,4]")), False),
    "a leading zero": (file_of(entry_with(data_offsets="[00,4]")), False),
    "a plus": (file_of(entry_with(data_offsets="[+0,4]")), False),
    "a boolean": (file_of(entry_with(shape="[true]")), False),
    "a string": (file_of(entry_with(shape='["1"]')), False),
    "null for a shape": (file_of(entry_with(shape="null")), False),
    "a negative extent": (file_of(entry_with(shape="[-1]")), False),
    "another script's digit": (file_of(entry_with(shape="[\u0661]")), False),
    "three offsets": (file_of(entry_with(data_offsets="[0,4,4]")), False),
    "one offset": (file_of(entry_with(data_offsets="[0]")), False),
    "NaN": (file_of(entry_with(x="NaN")), False),
    "Infinity": (file_of(entry_with(x="-Infinity")), False),
    "minus zero elsewhere": (file_of(entry_with(x="[-0,-0.0]")), True),
    "too large a number": (file_of(entry_with(x="1e309")), False),
    "one that rounds to the largest": (
        file_of(entry_with(x="17976931348623158079e289")),
        False,
    ),
    "one with zeros behind": (file_of(entry_with(x="1.79769313486231580e308")), True),
    "400 digits": (file_of(entry_with(x="9" * 400)), False),
    "5000 digits after 0.": (file_of(entry_with(x=f"0.{'0' * 4999}1e5000")), True),
    "an exponent beyond 32 bits": (file_of(entry_with(x="1e99999999999")), False),
    "zero by it": (file_of(entry_with(x="0e99999999999")), True),
    "next to nothing": (file_of(entry_with(x="1e-99999999999")), True),
    "an extent of 2^64": (file_of(entry_with(shape=f"[{2**64}]")), False),
    "an extent of 2^64-1": (file_of(entry_with(shape=f"[{2**64 - 1}]")), False),
    "5000 digits": (file_of(entry_with(shape=f"[{'1' * 5000}]")), False),
    "overflow before 0": (
        file_of(entry_with(shape=f"[{2**63},2,0]", data_offsets="[0,0]"), b""),
        False,
    ),
    "overflow behind 0": (
        file_of(entry_with(shape=f"[0,{2**63},4]", data_offsets="[0,0]"), b""),
        True,
    ),
    "2^63 and 0": (
        file_of(entry_with(shape=f"[{2**63},0]", data_offsets="[0,0]"), b""),
        True,
    ),
    "a trailing comma": (file_of(f'{{"a":{ENTRY},}}'), False),
    "a comment": (file_of(f'{{"a":{ENTRY}/**/}}'), False),
    "single quotes": (file_of(f"{{'a':{ENTRY}}}"), False),
    "125 brackets in two": (file_of(entry_with(x=nested(125))), True),
    "126 brackets in two": (file_of(entry_with(x=nested(126))), False),
    "100,000 brackets": (file_of(entry_with(x=nested(100_000))), False),
    "1000 brackets side by side": (
        file_of(entry_with(x="[" + "[{}]," * 1000 + "1]")),
        True,
    ),
    "1000 brackets in a name": (
        file_of(f'{{"{"[" * 1000}\\"\\\\":{ENTRY},"__metadata__":{{"{{":"]"}}}}'),
        True,
    ),
    "1000 brackets in a string": (file_of(entry_with(x='"' + "[" * 1000 + '"')), True),
    "too long": (file_of(entry_with(), DATA + b"5"), False),
    "too short": (file_of(entry_with(), DATA[:3]), False),
    "a hole": (file_of(entry_with(data_offsets="[1,5]"), DATA + b"5"), False),
    "an overlap": (file_of(f'{{"a":{ENTRY},"b":{ENTRY}}}'), False),
    "an end before its begin": (file_of(entry_with(data_offsets="[4,0]")), False),
    "another size": (file_of(entry_with(shape="[2]")), False),
    "nothing before the rest": (file_of(f'{{{EMPTY % (0, 0)},"a":{ENTRY}}}'), True),
    "nothing behind the rest": (file_of(f'{{{EMPTY % (4, 4)},"a":{ENTRY}}}'), True),
    "nothing amid the rest": (file_of(f'{{{EMPTY % (2, 2)},"a":{ENTRY}}}'), False),
    "half a byte": (
        file_of(entry_with(dtype='"F4"', shape="[7]", data_offsets="[0,3]"), DATA[:3]),
        False,
    ),
    "whole bytes of F4": (file_of(entry_with(dtype='"F4"', shape="[2,4]")), True),
    "whole bytes of F6": (
        file_of(entry_with(dtype='"F6_E2M3"', shape="[4]", data_offsets="[0,3]"), b"123"),
        True,
    ),
}


class _Memory:
    """A file in memory, with one content after the other."""

    def __init__(self):
        self._fd = os.memfd_create("nvmeio-headers")
        self._path = f"/proc/self/fd/{self._fd}"

    def open(self, content):
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, content, 0)
        return safetensors.safe_open(self._path, "np")


_memory = _Memory()


def read_by_safetensors(content):
    """Return the layout of a file by the safetensors package, or its error."""
    try:
        found = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        return None, str(error)
    tensors = {
        name: (each["dtype"], tuple(each["shape"]), bytes(each["data"]))
        for name, each in found
    }
    with _memory.open(content) as file:
        return (tensors, file.keys(), file.offset_keys(), file.metadata()), None


def read_by_nvmeio(content):
    """Return the layout of a file by nvmeio, or its error."""
    context = "Error while deserializing"
    try:
        length = _header.header_bytes(content[:8], len(content), context=context)
        header = content[8 : 8 + length]
        return _header.parse(header, len(content), context=context), None
    except SafetensorError as error:
        return None, str(error)


def kind_of(error):
    """Return an error without the position and the tensor, which may differ."""
    return re.sub(r"(invalid JSON in header:|invalid offset for tensor).*", r"\1", error)


def difference(content):
    """Return how the two readings of a file differ, or None."""
    theirs, their_error = read_by_safetensors(content)
    layout, error = read_by_nvmeio(content)
    if theirs is None or layout is None:
        for _ in range(64):
            if None in (error, their_error) or kind_of(error) == kind_of(their_error):
                break
            # safetensors checks two tensors at one offset in random order.
            _, their_error = read_by_safetensors(content)
        if theirs is layout and kind_of(error) == kind_of(their_error):
            return None
        return f"{error!r} instead of {their_error!r}"
    tensors, names, in_file, metadata = theirs
    data = content[layout.data_start :]
    ours = {
        each.name: (each.dtype, each.shape, data[each.begin : each.end])
        for each in layout.tensors
    }
    # safetensors orders empty tensors at one offset randomly.
    places = [(layout.by_name[name].begin, layout.by_name[name].end) for name in in_file]
    compared = {
        "tensors": (ours, tensors),
        "names": (layout.names, names),
        "order": ([(each.begin, each.end) for each in layout.tensors], places),
        "by_name": ([*layout.by_name.values()], [*layout.tensors]),
        "metadata": (layout.metadata, metadata),
        "data_bytes": (layout.data_bytes, len(data)),
    }
    for what, (one, other) in compared.items():
        if one != other:
            return f"{what}: {one} instead of {other}"
    header = content[8 : layout.data_start]
    quick = _header._ordinary(header.decode())
    if quick is not None and quick != _header._unusual(header, header.decode()):
        return f"the quick way: {quick}"
    return None


def keep(content):
    """Keep a file that the two read differently, and return its path."""
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"safetensors-{hashlib.sha256(content).hexdigest()[:16]}"
    path.write_bytes(content)
    return path


class Pairs(list):
    """A JSON object in which a name may come twice."""


NAMES = ("a", "b", "layer.0.weight", "é", "😀", "", "a[0]", "x\\y", 'q"q', "\x00", "\x7f")
NUMBERS = (
    *("0", "1", "2", "4", "8", "-0", "-1", "1.0", "1e0", "0e9", "01", "+1", "1.", ".5"),
    *("18446744073709551615", "18446744073709551616", "9223372036854775808"),
    *("2305843009213693952", "4611686018427387904", "999999999999999999"),
    *("1000000000000000000", "1" * 25, "9" * 309, "7" * 4400, "1e308", "1e309", "-1e309"),
    *("1.7976931348623157e308", "1.7976931348623159e308", "NaN", "Infinity", "-Infinity"),
    *("true", "false", "null", '"1"', "[]", "{}", "[0]", '"F32"', "\u0661"),
)
TOKENS = (
    *("{", "}", "[", "]", ",", ":", '"', "\\", "\\\\", '\\"', "\\u0000", "\\ud83d"),
    *(
        "\\ude00",
        "\\\\ude00",
        "\\ud83d\\ude00",
        "\\uD83D",
        "\\u00e9",
        "\\x",
        "\\/",
        "\\u12",
        "/**/",
    ),
    *(" ", "\n", "\t", "\r", "\f", "\v", "\0", "\x1f", "\x7f", "\xa0", "\ufeff", "\u2028"),
    *("null", "true", '"__metadata__"', '"a":', '"dtype"', '"shape":[1],', *NUMBERS),
)
BYTES = (b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xc0\x80")


def random_entries(rng):
    """Return contiguous entries, and how many bytes they take."""
    entries = Pairs()
    start = 0
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5))):
        dtype = rng.choice([*BITS])
        shape = [rng.choice((0, 1, 1, 2, 3, 4, 8)) for _ in range(rng.randrange(4))]
        bits = BITS[dtype]
        for extent in shape:
            bits *= extent
        if bits % 8:
            shape.append(8 if bits % 2 else 4)
            bits *= shape[-1]
        name = rng.choice(NAMES) + rng.choice(("", "", str(rng.randrange(100))))
        offsets = [str(start), str(start + bits // 8)]
        extents = [*map(str, shape)]
        fields = Pairs(
            [("dtype", f'"{dtype}"'), ("shape", extents), ("data_offsets", offsets)]
        )
        entries.append((name, fields))
        start += bits // 8
    return entries, start


def random_json(rng, depth=3):
    """Return random JSON, as raw text."""
    drawn = rng.randrange(8 if depth else 4)
    if drawn < 3:
        return rng.choice(NUMBERS)
    if drawn == 3:
        return f'"{rng.choice(TOKENS)}"'
    inside = [random_json(rng, depth - 1) for _ in range(rng.randrange(3))]
    if drawn < 6:
        return "[" + ",".join(inside) + "]"
    return "{" + ",".join(f'"{rng.choice("ab")}":{each}' for each in inside) + "}"


def random_number(rng):
    """Return a number near one of the limits."""
    if rng.random() < 0.6:
        return rng.choice(NUMBERS)
    if rng.random() < 0.5:
        return str(rng.choice((2**63, 2**64, 2**61, 10**18)) + rng.randrange(-2, 3))
    digits = "17976931348623157" + "".join(rng.choices("0123456789", k=rng.randrange(9)))
    point = rng.randrange(1, len(digits))
    exponent = 309 - point + rng.randrange(-1, 2)
    dot = rng.choice((f"{digits[:point]}.{digits[point:]}e{exponent}", digits))
    return dot if "." in dot else f"{digits}e{309 - len(digits) + rng.randrange(-1, 2)}"


def edit(rng, entries, metadata):
    """Change a random part of a header; return the metadata."""
    drawn = rng.randrange(14)
    if drawn == 0:
        value = rng.choice(("null", "[]", '""', Pairs([("a", random_json(rng))])))
        return [*metadata, ("__metadata__", value)]
    if drawn == 1:
        text = rng.choice(("[" * 200, "]}" * 90, "{" * 130, "é", r"\ud83d\ude00"))
        return [("__metadata__", Pairs([(rng.choice(NAMES), f'"{text}"')]))]
    if not entries:
        return metadata
    place = rng.randrange(len(entries))
    name, fields = entries[place]
    if not isinstance(fields, Pairs) or not fields:
        return metadata
    at = rng.randrange(len(fields))
    key, value = fields[at]
    if drawn == 2:
        other = Pairs(fields) if rng.random() < 0.7 else random_json(rng)
        entries.insert(rng.randrange(len(entries) + 1), (name, other))
    elif drawn == 3:
        again = value if rng.random() < 0.5 else random_json(rng)
        fields.insert(rng.randrange(len(fields) + 1), (key, again))
    elif drawn == 4:
        fields[at] = (rng.choice((key, key.upper(), "x", "\\u0064type")), value)
    elif drawn == 5:
        entries[place] = (name, [value for _, value in fields])
        if rng.random() < 0.3:
            entries[place][1].append("0")
    elif drawn == 6:
        null = rng.choice(("null", "null", "{}", "1"))
        changed = {"dtype": Pairs([(rng.choice([*BITS]), null)])}
        fields[at] = (key, changed.get(key, random_json(rng)))
    elif drawn == 7:
        fields.append((rng.choice(("x", "a", "")), random_json(rng)))
    elif drawn == 8:
        depth = rng.randrange(120, 132)
        brackets = rng.choice(("[]", '{"":1}'))
        deep = brackets[:-1].rstrip("1") * depth + "1" + brackets[-1] * depth
        fields.append(("x", deep))
    elif drawn == 9:
        entries[place] = (rng.choice((*NAMES, "__metadata__")), fields)
    elif drawn == 10:
        rng.shuffle(rng.choice((fields, entries)))
    elif type(value) is list and value:
        number = rng.randrange(len(value))
        if drawn == 11:
            value[number] = random_number(rng)
        elif drawn == 12 and value[number].isascii() and value[number].isdecimal():
            value[number] = str(max(int(value[number][:18]) + rng.choice((-1, 1)), 0))
        else:
            value.insert(number, value.pop(rng.randrange(len(value))))
    elif drawn < 13:
        fields[at] = (key, f'"{rng.choice([*BITS, "f32", "F128"])}"')
    else:
        del fields[at]
    return metadata


def quoted(text, rng):
    """Return a string of JSON."""
    if rng.random() < 0.1:
        return '"' + "".join(_escaped(character) for character in text) + '"'
    for character in '\\"\x00':
        text = text.replace(character, _escaped(character))
    return f'"{text}"'


def _escaped(character):
    """Return a character as \\uXXXX, or as a surrogate pair if it needs two."""
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def text_of(value, rng, gap):
    """Return JSON of pairs, lists and raw text."""
    if isinstance(value, Pairs):
        inside = [
            f"{quoted(key, rng)}:{gap}{text_of(each, rng, gap)}" for key, each in value
        ]
        return "{" + f",{gap}".join(inside) + "}"
    if isinstance(value, list):
        return "[" + f",{gap}".join(text_of(each, rng, gap) for each in value) + "]"
    return value


def scramble(rng, header):
    """Change random bytes of a header."""
    header = bytearray(header)
    drawn = rng.randrange(6)
    at = rng.randrange(len(header) + 1)
    if drawn == 0 and at < len(header):
        header[at] ^= 1 << rng.randrange(8)
    elif drawn == 1:
        header[at:at] = rng.choice(TOKENS).encode()
    elif drawn == 2:
        del header[at : at + rng.choice((1, 1, 2, 9))]
    elif drawn == 3:
        header[at:at] = header[at : at + rng.randrange(1, 60)]
    elif drawn == 4:
        header[at:at] = rng.choice(BYTES)
    else:
        # Replace a token by another one.
        spots = [*re.finditer(rb'-?\d+|"[^"]*"|[][{}:,]', header)]
        if spots:
            spot = rng.choice(spots)
            header[spot.start() : spot.end()] = rng.choice(TOKENS).encode()
    return bytes(header)


def mutant(rng):
    """Return a valid file, or one that was valid before a random change."""
    entries, size = random_entries(rng)
    metadata = []
    if rng.random() < 0.3:
        items = Pairs((rng.choice(NAMES), '"v"') for _ in range(rng.randrange(3)))
        metadata = [("__metadata__", items)]
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2))):
        metadata = edit(rng, entries, metadata)
    whole = Pairs([*metadata, *entries])
    header = text_of(whole, rng, rng.choice(("", "", "", " ", "\n"))).encode()
    for _ in range(rng.choice((0, 0, 0, 0, 1, 2))):
        header = scramble(rng, header)
    if rng.random() < 0.1:
        header = rng.choice((b" ", b"\n", b"\t\r", b"\0", b"\xef\xbb\xbf")) + header
    if rng.random() < 0.3:
        header += rng.choice((b" " * (-len(header) % 8), b"\n\t", b"\r", b"\0", b"x"))
    length = None
    data = rng.randbytes(size)
    drawn = rng.randrange(20)
    if drawn == 0:
        data = data + b"x" if rng.random() < 0.5 else data[:-1]
    elif drawn == 1:
        length = max(len(header) + rng.choice((-1, 1, -8, 8, 10**8, 2**40)), 0)
    content = file_of(header, data, length=length)
    return content[: rng.randrange(len(content))] if drawn == 2 else content
