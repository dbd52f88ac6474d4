# Apply the environment's settings.  Call it before the first copy, allocation or handle.
cdef int apply_settings() except -1

# Return the number of threads that OMP_NUM_THREADS allows; 0 if it sets no number.
cdef int threads_max() noexcept

cpdef dict kernels()

cpdef list selected_kernels()
