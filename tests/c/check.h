/* check.h -- what the C tests need: CHECK() what holds, SKIP() what cannot be tried
 * here.
 *
 * A test is a program: it exits with 0 when all holds, 1 at the first thing that does
 * not and 77 when it is skipped, with the place or the reason on standard error. */
#ifndef NVMEIO_TESTS_CHECK_H
#define NVMEIO_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__,           \
                    #condition);                                                       \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

#define SKIP(reason)                                                                   \
    do {                                                                               \
        fprintf(stderr, "skipped: %s\n", reason);                                      \
        exit(77);                                                                      \
    } while (0)

#endif
