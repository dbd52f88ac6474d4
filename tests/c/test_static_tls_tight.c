/* The same with variables that nearly fill what was once the whole stack: threads
 * started and ran over its end. */
#define TLS_KIB 244
#include "test_static_tls.c"
