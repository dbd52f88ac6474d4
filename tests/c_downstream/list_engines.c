/* list_engines.c -- prints a line for each engine: its name, whether it was built, the
 * errno of trying it, and why it does not work. */
#include <nvmeio/nvmeio.h>
#include <stdio.h>

int main(void)
{
    struct nvmeio_engine_info info;

    for (unsigned i = 0; i < nvmeio_engine_count(); i++) {
        if (nvmeio_engine_probe(i, &info))
            return 1;
        printf("%s\t%d\t%d\t%s\n", info.name, info.built, -info.error, info.reason);
    }
    return 0;
}
