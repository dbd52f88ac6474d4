"""Predict which weights are used next, from the order in which they were used before."""

import bisect
from collections.abc import Iterator, Sequence

__all__ = ["Order"]


class Order:
    """The uses so far, and the place in them that is like the present.

    A use is a number of a weight. After two uses, one after the other, those that followed
    the same two the last time are expected again, and after the present use the same ones
    once more. So the layers of a forward pass are expected in their order, and those of a
    backward pass in reverse.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        # Before the first pass: the order of the modules.
        self._uses = list(dict.fromkeys(expected))
        self._limit = max(4096, 16 * len(self._uses))
        self._like: int | None = None  # the place of the use that is like the last one
        self._index()

    def _index(self) -> None:
        self._places: dict[int, list[int]] = {}
        self._pairs: dict[tuple[int, int], int] = {}
        for place, number in enumerate(self._uses):
            self._places.setdefault(number, []).append(place)
            if place:
                self._pairs[self._uses[place - 1], number] = place

    def mend(self) -> None:
        """Make the places true again after use() was interrupted."""
        self._like = None
        self._index()

    def use(self, number: int) -> None:
        """Note a use; several of one weight in a row count once."""
        uses = self._uses
        if self._like is not None and uses[-1] == number:
            return
        if len(uses) > self._limit:
            self._forget()
            uses = self._uses
        # The last use is expected to be followed by what followed the one like it.
        last = None if self._like is None else uses[-1]
        like = self._like
        if like is not None and uses[like + 1] == number:
            found: int | None = like + 1
        else:
            found = None if last is None else self._pairs.get((last, number))
            if found is None and number in self._places:
                found = self._places[number][-1]
        place = len(uses)
        uses.append(number)
        self._places.setdefault(number, []).append(place)
        if last is not None:
            self._pairs[last, number] = place
        # A use that is like no other has nothing to follow: expect all from the start.
        self._like = -1 if found is None else found

    def _forget(self) -> None:
        """Keep the newer half, and at least what is expected."""
        begin = len(self._uses) // 2
        if self._like is not None:
            begin = min(begin, max(self._like, 0))
        if begin == 0:
            self._limit *= 2
            return
        self._uses = self._uses[begin:]
        if self._like is not None:
            self._like -= begin
        self._index()

    def expected(self) -> Iterator[int]:
        """Yield what is used next, in order, up to the present use once more."""
        for place in range(self._next(), len(self._uses)):
            yield self._uses[place]

    def distance(self, number: int) -> int | None:
        """Return how many uses come before the next one of a weight; None if unknown."""
        begin = self._next()
        places = self._places.get(number, ())
        found = bisect.bisect_left(places, begin)
        return places[found] - begin if found < len(places) else None

    def farthest(self) -> Iterator[int]:
        """Yield the expected weights by their next use, the last one first."""
        begin = self._next()
        for place in range(len(self._uses) - 1, begin - 1, -1):
            number = self._uses[place]
            places = self._places[number]
            if places[bisect.bisect_left(places, begin)] == place:
                yield number

    def _next(self) -> int:
        return 0 if self._like is None else self._like + 1
