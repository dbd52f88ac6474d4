/* coverage.h -- included before everything else by `make coverage`: what a child of a
 * test has counted is not lost with it.  In the library it would stand before
 * fault_calls.h, and what that renames be declared by its old name alone. */
#if !defined(NVMEIO_TESTS_COVERAGE_H) && !defined(NVMEIO_HAVE_FAULTS)
#define NVMEIO_TESTS_COVERAGE_H

#include <unistd.h>

void __gcov_dump(void);

static inline _Noreturn void count_and_exit(int status)
{
    __gcov_dump();
    _exit(status);
}

#define _exit count_and_exit

#endif
