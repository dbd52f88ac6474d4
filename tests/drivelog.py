"""The log of a drive, which ``drivefs.py`` writes and ``stress/drive.py`` reads.

An entry is a ``HEADER`` of offset and length followed by the bytes, or ``FLUSH``.
"""

import struct

HEADER = struct.Struct("<qq")
FLUSH = HEADER.pack(-1, 0)


def read_log(path):
    """Return the entries of a log: offset and bytes, or None for a flush."""
    text, at, entries = memoryview(path.read_bytes()), 0, []
    while at < len(text):
        offset, size = HEADER.unpack_from(text, at)
        at += HEADER.size + size
        entries.append(None if offset < 0 else (offset, text[at - size : at]))
    return entries
