"""What is wrong with a checkpoint."""

__all__ = ["CheckpointError", "MovedError", "NoChecksumsError"]


class CheckpointError(Exception):
    """A checkpoint is damaged or incomplete; the message names the file."""


class MovedError(Exception):
    """A step was removed, or another took its place, while it was read."""


class NoChecksumsError(CheckpointError):
    """It was saved without checksums, so nobody can tell whether it is damaged."""
