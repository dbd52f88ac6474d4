"""The errors of checkpoints."""

__all__ = ["CheckpointError", "GoneError", "MovedError", "NotDamagedError"]


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


class NotDamagedError(CheckpointError):
    """The step may be intact, but cannot be read or checked as asked.

    So no older step and no copy may silently replace it.
    """
