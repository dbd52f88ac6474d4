"""Whether a pickle's objects can be made in linear time, found out without making any.

Tuples are hashed anew each time, so a few bytes that nest tuples in tuples twice each, as
the key of a dict, take years; and ints can be chosen that all have the same hash, so that
each is compared with all before it, and so can tuples of ints.  This follows what each
opcode does to the stack and to the memo, as in pickletools.py, and adds up how many parts
are visited when keys are hashed or compared, and by functions that hash what their
arguments contain, as set() does.
"""

from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memchr

cdef enum:
    # Parts that may be visited for each byte, and besides; torch's own files need 10.
    PER_BYTE = 1000
    BESIDES = 1000000
    # To compare two keys takes as long as to visit so many parts.
    PER_COMPARISON = 8
    # Of ints up to these sizes, only a few have the same hash.
    INT_BYTES = 9
    INT_DIGITS = 21

cdef extern from *:
    """
    #define MOST (UINT64_C(1) << 60)
    """
    # Where a sum stops growing; no number of an object.
    const uint64_t MOST

# The opcodes, with their names in pickletools.
cdef enum:
    MARK = 0x28
    EMPTY_TUPLE = 0x29
    STOP = 0x2e
    POP = 0x30
    POP_MARK = 0x31
    DUP = 0x32
    BINBYTES = 0x42
    SHORT_BINBYTES = 0x43
    FLOAT = 0x46
    BINFLOAT = 0x47
    INT = 0x49
    BININT = 0x4a
    BININT1 = 0x4b
    LONG = 0x4c
    BININT2 = 0x4d
    NONE = 0x4e
    PERSID = 0x50
    BINPERSID = 0x51
    REDUCE = 0x52
    STRING = 0x53
    BINSTRING = 0x54
    SHORT_BINSTRING = 0x55
    UNICODE = 0x56
    BINUNICODE = 0x58
    EMPTY_LIST = 0x5d
    APPEND = 0x61
    BUILD = 0x62
    GLOBAL = 0x63
    DICT = 0x64
    APPENDS = 0x65
    GET = 0x67
    BINGET = 0x68
    INST = 0x69
    LONG_BINGET = 0x6a
    LIST = 0x6c
    OBJ = 0x6f
    PUT = 0x70
    BINPUT = 0x71
    LONG_BINPUT = 0x72
    SETITEM = 0x73
    TUPLE = 0x74
    SETITEMS = 0x75
    EMPTY_DICT = 0x7d
    PROTO = 0x80
    NEWOBJ = 0x81
    EXT1 = 0x82
    EXT2 = 0x83
    EXT4 = 0x84
    TUPLE1 = 0x85
    TUPLE2 = 0x86
    TUPLE3 = 0x87
    NEWTRUE = 0x88
    NEWFALSE = 0x89
    LONG1 = 0x8a
    LONG4 = 0x8b
    SHORT_BINUNICODE = 0x8c
    BINUNICODE8 = 0x8d
    BINBYTES8 = 0x8e
    EMPTY_SET = 0x8f
    ADDITEMS = 0x90
    FROZENSET = 0x91
    NEWOBJ_EX = 0x92
    STACK_GLOBAL = 0x93
    MEMOIZE = 0x94
    FRAME = 0x95
    BYTEARRAY8 = 0x96
    NEXT_BUFFER = 0x97
    READONLY_BUFFER = 0x98

cdef struct Numbers:
    uint64_t *items
    size_t count
    size_t room

cdef struct Parts:
    uint64_t hashed  # what hash() visits: of a list or dict only itself
    uint64_t all     # the same, and what lists and dicts contain


cdef int put(Numbers *numbers, uint64_t value) except -1:
    cdef size_t room
    cdef uint64_t *items
    if numbers.count == numbers.room:
        room = 2 * numbers.room + 256
        items = <uint64_t *>realloc(numbers.items, room * sizeof(uint64_t))
        if items == NULL:
            raise MemoryError
        numbers.items, numbers.room = items, room
    numbers.items[numbers.count] = value
    numbers.count += 1
    return 0


cdef inline uint64_t capped(uint64_t value) noexcept:
    return value if value < MOST else MOST


cdef class _Walk:
    """The stack and the memo; each object is a number, and has so many parts."""

    cdef const uint8_t *text
    cdef bint by_fields
    cdef size_t at, size, remembered
    # Of each object: its parts, whether it is itself a part, and whether it is a tuple or
    # what a function returned, so that its hash can be chosen.
    cdef Numbers hashed, all, contained, chosen
    cdef Numbers stack, marks, memo
    # What was added to objects that were already parts: nothing above them counts it.
    cdef uint64_t late_objects, late_parts
    cdef uint64_t large  # the number of large ints
    cdef uint64_t alike  # the number of keys whose hash can be chosen
    cdef uint64_t total

    def __dealloc__(self):
        free(self.hashed.items)
        free(self.all.items)
        free(self.contained.items)
        free(self.chosen.items)
        free(self.stack.items)
        free(self.marks.items)
        free(self.memo.items)

    cdef int push(self, uint64_t hashed, uint64_t all, bint chosen=False) except -1:
        put(&self.stack, self.all.count)
        put(&self.hashed, capped(hashed))
        put(&self.all, capped(all))
        put(&self.contained, False)
        put(&self.chosen, chosen)
        return 0

    cdef int push_atom(self) except -1:
        return self.push(1, 1)

    cdef int push_text(self, uint64_t size, uint64_t most) except -1:
        """Push what is of so many bytes, and may be an int: a large one if above `most`."""
        # Hashes of large numbers are not kept.
        cdef uint64_t parts = 1 + size // 8
        if size > most:
            parts += self.large
            self.large += 1
        return self.push(parts, parts)

    cdef int pop(self, size_t count, Parts *found, size_t step=1) except -1:
        """Remove the top objects, which become parts; with a step, hash each first one."""
        cdef size_t first, index, each
        found.hashed = found.all = 0
        if count > self.stack.count:
            raise EOFError
        first = self.stack.count - count
        for index in range(count):
            each = self.stack.items[first + index]
            if index % step == 0:
                found.hashed = capped(found.hashed + self.hashed.items[each])
            found.all = capped(found.all + self.all.items[each])
            self.contained.items[each] = True
        self.stack.count = first
        return 0

    cdef int drop(self, size_t count) except -1:
        """Remove the top objects, which become parts of nothing."""
        if count > self.stack.count:
            raise EOFError
        self.stack.count -= count
        return 0

    cdef int push_tuple(self, size_t count) except -1:
        """Replace the top objects by a tuple of them."""
        cdef Parts parts
        self.pop(count, &parts)
        return self.push(1 + parts.hashed, 1 + parts.all, True)

    cdef int push_list(self, size_t count) except -1:
        cdef Parts parts
        self.pop(count, &parts)
        return self.push(1, 1 + parts.all)

    cdef int visit(self, uint64_t parts) noexcept:
        self.total = capped(self.total + parts)
        return 0

    cdef int pop_keys(self, size_t count, size_t step, Parts *found) except -1:
        """Remove the top objects, of which each first one of a step is hashed as a key."""
        cdef size_t index
        self.pop(count, found, step)
        self.visit(found.hashed)
        if self.by_fields:
            # What was removed is still there, above the top.
            for index in range(self.stack.count, self.stack.count + count, step):
                if self.chosen.items[self.stack.items[index]]:
                    self.visit(PER_COMPARISON * self.alike)
                    self.alike += 1
        return 0

    cdef size_t above_mark(self) except? 0:
        """Remove the newest mark, and return how many objects are above it."""
        if self.marks.count == 0:
            raise EOFError
        self.marks.count -= 1
        if self.marks.items[self.marks.count] > self.stack.count:
            raise EOFError
        return self.stack.count - self.marks.items[self.marks.count]

    cdef int add_to_top(self, size_t count, size_t hash_each) except -1:
        """Move the top objects into the one below; hash each n-th, or with 0 none."""
        cdef Parts parts
        cdef uint64_t top
        if hash_each:
            self.pop_keys(count, hash_each, &parts)
        else:
            self.pop(count, &parts)
        if self.stack.count == 0:
            raise EOFError
        top = self.stack.items[self.stack.count - 1]
        self.all.items[top] = capped(self.all.items[top] + parts.all)
        if self.contained.items[top]:
            self.late_objects += count
            self.late_parts = capped(self.late_parts + parts.all - count)
        return 0

    cdef int build(self) except -1:
        """Give the object below the top one its state, which is hashed with it or not."""
        cdef Parts parts
        cdef uint64_t top
        self.pop(1, &parts)
        if self.stack.count == 0:
            raise EOFError
        top = self.stack.items[self.stack.count - 1]
        if self.by_fields:
            if self.contained.items[top]:
                raise ValueError("it gives an object a state after others contain it")
            self.hashed.items[top] = capped(self.hashed.items[top] + parts.all)
            self.all.items[top] = capped(self.all.items[top] + parts.all)
        return 0

    cdef int call(self, size_t count, bint chosen=True) except -1:
        """Replace a function and its arguments by the result, which may hash them."""
        cdef Parts parts
        cdef uint64_t visited
        self.pop(count, &parts)
        visited = parts.all
        if self.late_parts:
            visited = visited * (1 + self.late_parts) if visited < MOST // (
                1 + self.late_parts
            ) else MOST
        self.visit(visited + self.late_objects)
        return self.push(1 + parts.all, 1 + parts.all, chosen)

    cdef int remember(self, uint64_t index) except -1:
        if index > self.size:
            raise ValueError(f"it has {self.size} bytes, and remembers {index} objects")
        if self.stack.count == 0:
            raise EOFError
        while self.memo.count <= index:
            put(&self.memo, MOST)
        self.remembered += self.memo.items[index] == MOST
        self.memo.items[index] = self.stack.items[self.stack.count - 1]
        return 0

    cdef int recall(self, uint64_t index) except -1:
        if index >= self.memo.count or self.memo.items[index] == MOST:
            raise EOFError
        return put(&self.stack, self.memo.items[index])

    cdef uint64_t number(self, int width) except? 0:
        """Return an unsigned number of the text, and step over it."""
        cdef uint64_t found = 0
        cdef int index
        if self.size - self.at < <size_t>width:
            raise EOFError
        for index in range(width):
            found |= <uint64_t>self.text[self.at + index] << (8 * index)
        self.at += width
        return found

    cdef uint64_t skip(self, uint64_t nbytes) except? 0:
        if nbytes > self.size - self.at:
            raise EOFError
        self.at += nbytes
        return nbytes

    cdef size_t line(self) except? 0:
        """Step over a line; return where it begins."""
        cdef size_t begin = self.at
        cdef const void *end = memchr(self.text + begin, b"\n", self.size - begin)
        if end == NULL:
            raise EOFError
        self.at = <size_t>(<const uint8_t *>end - self.text) + 1
        return begin

    cdef uint64_t decimal(self) except? 0:
        cdef uint64_t found = 0
        cdef size_t index, begin = self.line()
        cdef int digit
        for index in range(begin, self.at - 1):
            digit = self.text[index] - 0x30
            if not 0 <= digit <= 9:
                raise ValueError("it names a remembered object by other than a number")
            found = capped(10 * found + <uint64_t>digit)
        return found

    cdef bint step(self) except -1:
        """Follow one opcode; return False at the end."""
        cdef uint8_t code = self.number(1)
        cdef size_t count
        cdef uint64_t index
        cdef Parts members
        if code == STOP:
            return False
        elif code in (BININT1, SHORT_BINBYTES, SHORT_BINUNICODE, SHORT_BINSTRING):
            index = self.number(1)
            self.push_text(0 if code == BININT1 else self.skip(index), MOST)
        elif code in (NONE, NEWTRUE, NEWFALSE):
            self.push_atom()
        elif code in (EMPTY_TUPLE, EMPTY_LIST, EMPTY_DICT, EMPTY_SET):
            self.push_atom()
        elif code == BININT2:
            self.skip(2)
            self.push_atom()
        elif code == BININT:
            self.skip(4)
            self.push_atom()
        elif code in (BINUNICODE, BINBYTES, BINSTRING):
            self.push_text(self.skip(self.number(4)), MOST)
        elif code in (BINUNICODE8, BINBYTES8, BYTEARRAY8):
            index = self.number(8)
            # CPython allocates a bytearray before it reads, whatever length it claims.
            if code == BYTEARRAY8 and index > self.size - self.at:
                raise ValueError(
                    f"it was truncated: a bytearray has {index} bytes, and "
                    f"{self.size - self.at} are left"
                )
            self.push_text(self.skip(index), MOST)
        elif code == BINFLOAT:
            self.skip(8)
            self.push_atom()
        elif code in (LONG1, LONG4):
            self.push_text(
                self.skip(self.number(1 if code == LONG1 else 4)), INT_BYTES
            )
        elif code in (INT, LONG):
            index = self.line()
            self.push_text(self.at - index, INT_DIGITS)
        elif code in (FLOAT, STRING, UNICODE):
            index = self.line()
            self.push_text(self.at - index, MOST)
        elif code == BINGET:
            self.recall(self.number(1))
        elif code == LONG_BINGET:
            self.recall(self.number(4))
        elif code == GET:
            self.recall(self.decimal())
        elif code == BINPUT:
            self.remember(self.number(1))
        elif code == LONG_BINPUT:
            self.remember(self.number(4))
        elif code == PUT:
            self.remember(self.decimal())
        elif code == MEMOIZE:
            self.remember(self.remembered)
        elif code == MARK:
            put(&self.marks, self.stack.count)
        elif code == POP:
            # Also of a mark, as Python does.
            count = self.marks.count
            if count and self.marks.items[count - 1] == self.stack.count:
                self.marks.count -= 1
            else:
                self.drop(1)
        elif code == POP_MARK:
            self.drop(self.above_mark())
        elif code == DUP:
            if self.stack.count == 0:
                raise EOFError
            put(&self.stack, self.stack.items[self.stack.count - 1])
        elif code in (TUPLE1, TUPLE2, TUPLE3):
            self.push_tuple(code - TUPLE1 + 1)
        elif code == TUPLE:
            self.push_tuple(self.above_mark())
        elif code == LIST:
            self.push_list(self.above_mark())
        elif code == DICT:
            self.pop_keys(self.above_mark(), 2, &members)
            self.push(1, 1 + members.all)
        elif code == FROZENSET:
            self.pop_keys(self.above_mark(), 1, &members)
            self.push(1 + members.hashed, 1 + members.all, True)
        elif code == APPEND:
            self.add_to_top(1, 0)
        elif code == APPENDS:
            self.add_to_top(self.above_mark(), 0)
        elif code == SETITEM:
            self.add_to_top(2, 2)
        elif code == SETITEMS:
            self.add_to_top(self.above_mark(), 2)
        elif code == ADDITEMS:
            self.add_to_top(self.above_mark(), 1)
        elif code == BUILD:
            self.build()
        elif code in (REDUCE, NEWOBJ):
            self.call(2, code == REDUCE)
        elif code == NEWOBJ_EX:
            self.call(3, False)
        elif code == OBJ:
            self.call(self.above_mark())
        elif code == INST:
            self.line()
            self.line()
            self.call(self.above_mark())
        elif code == GLOBAL:
            self.line()
            self.line()
            self.push_atom()
        elif code == STACK_GLOBAL:
            self.drop(2)
            self.push_atom()
        elif code == PERSID:
            self.line()
            self.push_atom()
        elif code == BINPERSID:
            self.call(1)
        elif code in (EXT1, EXT2, EXT4):
            self.skip(1 << (code - EXT1))
            self.push_atom()
        elif code == PROTO:
            self.skip(1)
        elif code == FRAME:
            self.skip(8)
        elif code == NEXT_BUFFER:
            self.push_atom()
        elif code != READONLY_BUFFER:
            raise EOFError
        return True


def require_linear(bytes text not None, *, bint by_fields) -> None:
    """Raise ValueError for a pickle that takes far more time than its size to load.

    With `by_fields`, objects are hashed by the state that they are given, as frozen
    dataclasses are, but not so that it can be chosen, and many tuples are refused as keys;
    otherwise by their identity.  Nothing is raised for an invalid pickle,
    which the unpickler refuses.
    """
    cdef _Walk walk = _Walk()
    walk.text, walk.size, walk.by_fields = text, len(text), by_fields
    try:
        while walk.step():
            pass
    except EOFError:
        pass
    if walk.total > <uint64_t>PER_BYTE * walk.size + BESIDES:
        raise ValueError(
            f"it has {walk.size} bytes, and its keys and arguments have more than "
            f"{PER_BYTE} parts for each: it nests tuples in tuples, or has many ints or "
            "tuples that may have the same hash"
        )
