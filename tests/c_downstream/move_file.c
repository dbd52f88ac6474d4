/* move_file.c -- what another project does: a program without Python that links
 * libnvmeio.a, writes a file of odd size and reads it back.
 *
 * usage: move_file PATH ENGINE; prints the version and the engine. */
#include <fcntl.h>
#include <nvmeio/nvmeio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 5 * 1024 * 1024 + 777 };

static int64_t transfer(struct nvmeio_handle *handle, struct nvmeio_file *file,
                        enum nvmeio_op op, void *address)
{
    struct nvmeio_transfer transfer = {
        .op = op, .file = file, .address = address, .size = SIZE};
    struct nvmeio_request *request;
    struct nvmeio_outcome outcome;
    int error = nvmeio_submit(handle, &transfer, &request);
    if (error)
        return error;
    error = nvmeio_request_wait(request, -1);
    if (!error)
        error = nvmeio_request_outcome(request, &outcome);
    nvmeio_request_release(request);
    return error ? error : outcome.result;
}

static int move(struct nvmeio_handle *handle, struct nvmeio_file *file,
                unsigned char *written, unsigned char *read)
{
    for (size_t i = 0; i < SIZE; i++)
        written[i] = (unsigned char)(i * 2654435761u >> 13);
    memset(read, 0, SIZE);
    if (transfer(handle, file, NVMEIO_OP_WRITE, written) != SIZE)
        return 4;
    if (transfer(handle, file, NVMEIO_OP_READ, read) != SIZE)
        return 5;
    if (memcmp(written, read, SIZE) != 0 || nvmeio_file_size(file) != SIZE)
        return 6;
    printf("%s %s\n", nvmeio_version(), nvmeio_handle_engine(handle));
    return 0;
}

int main(int argc, char **argv)
{
    struct nvmeio_config config;
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    if (argc != 3)
        return 1;
    nvmeio_config_default(&config);
    config.engine = argv[2];
    if (nvmeio_handle_open(&config, &handle))
        return 2;
    if (nvmeio_file_open(argv[1], O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO, &file))
        return 3;
    /* An address that no device takes as it is: the library has to find a way. */
    unsigned char *written = malloc(SIZE + 1);
    unsigned char *read = malloc(SIZE + 1);
    int status = written && read ? move(handle, file, written + 1, read + 1) : 7;
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
    free(written);
    free(read);
    return status;
}
