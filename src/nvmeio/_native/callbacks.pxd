# Call the callbacks of a list in order, and empty it.  An Exception is logged; any other
# BaseException is raised once all were called.  Several threads may do this at once.
cdef int call_all(list callbacks, object argument) except -1

# Remove a callback from the list, if it is still there.
cdef int forget(list callbacks, object fn) except -1
