# Make the settings of the environment, before the first copy, allocation or handle.
cdef int apply_settings() except -1

# How many threads OMP_NUM_THREADS allows; 0: it says nothing.
cdef int threads_max() noexcept

cpdef dict kernels()

cpdef list selected_kernels()
