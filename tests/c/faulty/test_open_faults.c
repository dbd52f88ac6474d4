/* Opening a handle while no thread can start, for whichever worker, is an error, and
 * chooses no lesser engine. */
#include "fault.h"
#include "transfer.h"

int main(void)
{
    enum { WORKERS = 3 };
    struct nvmeio_config config = config_of("auto");
    struct nvmeio_handle *handle;
    char fault[20];

    begin();
    config.workers = WORKERS;
    for (unsigned worker = 1; worker <= WORKERS; worker++) {
        snprintf(fault, sizeof(fault), "threads@%u", worker);
        nvmeio_fault_configure(fault);
        CHECK(nvmeio_handle_open(&config, &handle) == -EAGAIN);
        CHECK(nvmeio_fault_fired(NVMEIO_FAULT_THREADS) == 1);
        nvmeio_fault_configure("");
        CHECK(nvmeio_handle_open(&config, &handle) == 0);
        CHECK(strcmp(nvmeio_handle_engine(handle), engine_at(0)) == 0);
        nvmeio_handle_close(handle);
    }
    return 0;
}
