"""``python -m nvmeio``, the same as the command ``nvmeio``.

Python imports the package before this module, and until then Ctrl-C raises a
KeyboardInterrupt with a traceback.  The script ``nvmeio`` handles it from its first line.
"""

import sys

from _nvmeio_command import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
