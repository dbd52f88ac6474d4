"""Callbacks of what is done, each called once.

They are kept in a list that needs no lock: whoever calls one takes it out first.
"""

import logging

_log = logging.getLogger("nvmeio")


cdef int call_all(list callbacks, object argument) except -1:
    interruption = None
    while callbacks:
        try:
            fn = callbacks.pop(0)
        except IndexError:
            # Another thread was faster.
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
        # It was called, or is about to be.
        pass
    return 0
