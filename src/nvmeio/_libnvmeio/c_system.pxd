from libc.stdint cimport uint64_t


cdef extern from "nvmeio/system.h" nogil:
    unsigned cpu_count "nvmeio_cpu_count"()
    unsigned team_size "nvmeio_team_size"(unsigned wanted)
    uint64_t memory_bytes "nvmeio_memory_bytes"()
