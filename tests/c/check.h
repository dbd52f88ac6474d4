/* check.h -- CHECK() and SKIP() for the C tests.
 *
 * A test is a program.  It exits with 0 if every CHECK() holds, 1 at the first that
 * does not, and 77 if it is skipped, with the place or the reason on standard error. */
#ifndef NVMEIO_TESTS_CHECK_H
#define NVMEIO_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            /* The drive of the log may be full. */                                    \
            if (fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__,       \
                        #condition) < 0)                                               \
                abort();                                                               \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

#define SKIP(reason)                                                                   \
    do {                                                                               \
        fprintf(stderr, "skipped: %s\n", reason);                                      \
        exit(77);                                                                      \
    } while (0)

#endif
