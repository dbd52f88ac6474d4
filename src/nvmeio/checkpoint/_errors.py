"""The errors of checkpoints."""

import errno

__all__ = [
    "CallbackError",
    "CheckpointError",
    "GoneError",
    "MovedError",
    "NotDamagedError",
    "OtherError",
    "is_lost",
]


class CheckpointError(Exception):
    """A checkpoint is damaged or incomplete; the message names the file.

    Examples
    --------
    >>> checkpointer = nvmeio.checkpoint.Checkpointer("run")
    >>> folder = checkpointer.save(100, {"weights": np.arange(1000)})
    >>> nvmeio.write_file(bytes(100), "run/step-100/tensors.safetensors")
    100
    >>> try:
    ...     checkpointer.restore(100)
    ... except nvmeio.checkpoint.CheckpointError as error:
    ...     print("damaged")
    damaged
    >>> checkpointer.close()
    """

    # Tracebacks show this public name.
    __module__ = "nvmeio.checkpoint"


class GoneError(Exception):
    """A step does not exist; callers see a FileNotFoundError instead."""


class MovedError(Exception):
    """A step was removed or replaced while it was read."""


class CallbackError(Exception):
    """A function of the caller has raised; says nothing about the step."""

    def __init__(self, of_callback: Exception) -> None:
        super().__init__(str(of_callback))
        self.of_callback = of_callback


class NotDamagedError(CheckpointError):
    """The step may be intact, but cannot be read or checked as asked.

    So no older step and no copy may silently replace it.
    """


class OtherError(NotDamagedError):
    """The step is another save than the one that all ranks have agreed on."""


# Errors that mean that the data is lost, not that the system is busy or misconfigured.
# ENXIO is what open(2) returns for a socket in the place of a file.
_LOST = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.ENXIO)


def is_lost(error: Exception) -> bool:
    """Return whether an error means that a step is damaged or gone."""
    if isinstance(error, OSError):
        return error.errno in _LOST
    return not isinstance(error, (NotDamagedError, CallbackError))
