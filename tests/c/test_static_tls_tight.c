/* The same with variables that nearly fill the former stack size: threads started, and
 * then overflowed it. */
#define TLS_KIB 244
#include "test_static_tls.c"
