# Call what is in the list, in order, and empty it.  Errors are logged; what is no Exception
# is raised when all were called.  Several threads may do so at once.
cdef int call_all(list callbacks, object argument) except -1

# Take a callback out of the list, if it is still there.
cdef int forget(list callbacks, object fn) except -1
