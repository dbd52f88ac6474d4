"""The options that say how files are read and written, which several commands have."""

from nvmeio.arguments import LIMITS
from nvmeio.cli.arguments import Parser, number, size
from nvmeio.workers import ENGINES

__all__ = ["add_options"]


def add_options(
    parser: Parser, block_size: int | None = None, queue_depth: int | None = None
) -> None:
    """Add engine, block_size, queue_depth, and direct, which is as for ``aio_handle``.

    Parameters
    ----------
    parser : Parser
        Of a command.
    block_size, queue_depth : int, optional
        What counts where they are not given; None for what a handle makes of that, for
        which the environment has a say.
    """
    group = parser.add_argument_group("how files are read and written")
    group.add_argument(
        "--engine", choices=ENGINES, default="auto", help="default: the best that works"
    )
    group.add_argument(
        "--block-size",
        type=size,
        default=block_size,
        metavar="SIZE",
        help="of one I/O (default: 1M)",
    )
    group.add_argument(
        "--queue-depth",
        type=number(1, LIMITS["queue_depth"]),
        default=queue_depth,
        metavar="N",
        help="how many blocks are in flight at most (default: 128)",
    )
    way = group.add_mutually_exclusive_group()
    way.add_argument(
        "--direct",
        action="store_true",
        dest="direct",
        default="auto",
        help="O_DIRECT, and fail without it (default: where the file system has it)",
    )
    way.add_argument(
        "--buffered",
        action="store_false",
        dest="direct",
        default="auto",
        help="through the page cache",
    )
