"""What is wrong with a checkpoint."""

__all__ = ["CheckpointError"]


class CheckpointError(Exception):
    """A checkpoint is damaged or incomplete; the message names the file."""
