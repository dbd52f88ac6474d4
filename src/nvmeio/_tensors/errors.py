"""The error of the safetensors format."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SafetensorError", "note"]


def note(error: BaseException, text: str) -> None:
    """Add a note to an error; before Python 3.11 no traceback shows it."""
    # As BaseException.add_note does, which is new in 3.11.
    vars(error).setdefault("__notes__", []).append(text)


class SafetensorError(Exception):
    """A file, a tensor or an index is invalid in the safetensors format.

    Notes
    -----
    After ``nvmeio.safetensors.install()``, the errors are also instances of
    ``safetensors.SafetensorError``, so that existing ``except`` clauses catch them.

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

    # Tracebacks show this public name.
    __module__ = "nvmeio.safetensors"

    # The subclass that is raised; install() sets it.
    _raised: "type[SafetensorError] | None" = None

    def __new__(cls, *args: Any) -> "Self":
        """Make an error, or for this class one of the subclass that install() has set."""
        raised: Any = cls
        if cls is SafetensorError and SafetensorError._raised is not None:
            raised = SafetensorError._raised
        made: Self = Exception.__new__(raised, *args)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as this class, because another process may not have the subclass."""
        # With the notes, which say what an unreadable file is.
        return SafetensorError, self.args, vars(self) or None
