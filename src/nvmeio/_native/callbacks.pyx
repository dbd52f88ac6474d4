"""Call completion callbacks, each exactly once.

The list needs no lock: a thread pops a callback before it calls it.
"""

import logging

_log = logging.getLogger("nvmeio")


cdef int call_all(list callbacks, object argument) except -1:
    interruption = None
    while callbacks:
        try:
            fn = callbacks.pop(0)
        except IndexError:
            # Another thread took the last one.
            break
        try:
            fn(argument)
        except Exception:
            _log.exception("a callback of %r has failed", argument)
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption
    return 0


cdef int forget(list callbacks, object fn) except -1:
    try:
        callbacks.remove(fn)
    except ValueError:
        # It was called already, or a thread is about to call it.
        pass
    return 0
