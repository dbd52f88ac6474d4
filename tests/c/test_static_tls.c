/* A program whose thread-local variables are larger than the stack of the library's
 * threads; glibc takes them from that stack. */
#include "transfer.h"

#ifndef TLS_KIB
#define TLS_KIB 300
#endif

static _Thread_local char locals[TLS_KIB << 10];

int main(void)
{
    enum { SIZE = 1 << 20 };
    const char *path, *engine;

    begin();
    memset(locals, 1, sizeof(locals));
    path = path_in(test_folder());
    make_file(path, SIZE, 1);
    FOR_EACH_ENGINE(engine)
    {
        struct nvmeio_config config = config_of(engine);
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
        struct guarded memory = guarded_new(SIZE, 1);

        CHECK(read_at(handle, file, memory.address, SIZE, 0).result == SIZE);
        CHECK(file_holds(path, memory.address, SIZE, 0));
        CHECK(write_at(handle, file, memory.address, SIZE, 1).result == SIZE);
        CHECK(file_holds(path, memory.address, SIZE, 1));
        guarded_free(&memory);
        nvmeio_file_release(file);
        nvmeio_handle_close(handle);
    }
    CHECK(locals[sizeof(locals) - 1] == 1);
    /* Again with a megabyte that the loader reserves without the library's knowledge.
     * */
    remove_files();
    if (!getenv("GLIBC_TUNABLES")) {
        CHECK(setenv("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=1048576", 1) ==
              0);
        execl("/proc/self/exe", "again", NULL);
        CHECK(false);
    }
    return 0;
}
