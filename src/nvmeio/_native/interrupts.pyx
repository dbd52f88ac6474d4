"""What Python code cannot do without a place where a signal handler may raise."""

import threading

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF

cdef extern from "Python.h":
    int Py_AddPendingCall(int (*function)(void *) except -1, void *argument)


cdef int raise_now(void *argument) except -1:
    error = <object>argument
    Py_DECREF(error)
    raise error


def call_if_free(lock, function):
    """Call a function with a lock, unless that is taken; return whether it was called.

    In Python code, Ctrl-C may come when the lock is taken and nothing releases it yet.
    """
    if not lock.acquire(blocking=False):
        return False
    try:
        function()
    finally:
        lock.release()
    return True


@cython.final
cdef class Noted:
    """Calls a function, and notes what it raises, or a signal handler meanwhile.

    In Python code, Ctrl-C may come before a try block is entered.
    """

    cdef object function
    cdef list errors

    def __init__(self, function, list errors):
        self.function, self.errors = function, errors

    def __call__(self, *arguments):
        if self.function is None:
            return memoryview(arguments[0]).nbytes
        try:
            return self.function(*arguments)
        except BaseException as error:
            self.errors.append(error)
            raise

    def end(self):
        """From now on, write nothing, and say that it was written."""
        self.function = None


# A cycle collector would empty the attributes before __dealloc__ runs.
@cython.final
@cython.no_gc_clear
cdef class Finalizer:
    """Calls a function when it is deleted, for example with the object that has it.

    What a signal handler raises in a __del__ of Python code is printed and goes nowhere, so
    Ctrl-C would be lost.  Here the main thread raises it as soon as it goes on.
    """

    cdef object function
    cdef tuple arguments

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def detach(self):
        """Call nothing any more."""
        self.function, self.arguments = None, ()

    def __dealloc__(self):
        if self.function is None:
            return
        try:
            self.function(*self.arguments)
        except BaseException as error:
            # Only the main thread calls signal handlers.
            if threading.current_thread() is not threading.main_thread():
                raise
            Py_INCREF(error)
            if Py_AddPendingCall(raise_now, <void *>error) != 0:
                Py_DECREF(error)
                raise
