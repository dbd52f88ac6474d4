/* coverage.h -- included before everything else by `make coverage`, so that the counts
 * of a test's children are not lost.  Not in the library, where it would come before
 * fault_calls.h and declare functions under their old names only. */
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
