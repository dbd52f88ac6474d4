/* coverage.h -- included before everything else by `make coverage`: what a child has
 * counted is not lost with it. */
#ifndef NVMEIO_TESTS_COVERAGE_H
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
