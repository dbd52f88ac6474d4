"""The error of the safetensors format."""

from typing import Any

from typing_extensions import Self

__all__ = ["SafetensorError"]


class SafetensorError(Exception):
    """A file, a tensor or an index does not follow the safetensors format.

    While nvmeio is installed in safetensors, errors are of a subclass that safetensors' own
    class is a base of too, so that ``except safetensors.SafetensorError`` catches them.

    Examples
    --------
    >>> nvmeio.write_file(bytes(4), "model.safetensors")
    4
    >>> try:
    ...     nvmeio.safetensors.safe_open("model.safetensors", "np")
    ... except nvmeio.safetensors.SafetensorError as error:
    ...     print(error)
    Error while deserializing header: header too small
    """

    # The subclass that is raised; install() sets it.
    _raised: "type[SafetensorError] | None" = None

    def __new__(cls, *args: Any) -> Self:
        """Make an error; of this class itself, one of the subclass that is raised."""
        raised: Any = cls
        if cls is SafetensorError and SafetensorError._raised is not None:
            raised = SafetensorError._raised
        made: Self = Exception.__new__(raised, *args)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as this class, which the other process may not have a subclass of."""
        return SafetensorError, self.args
