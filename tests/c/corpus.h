/* corpus.h -- run the fuzz target that was included before on every input of a folder,
 * without a fuzzer. */
#ifndef NVMEIO_TESTS_CORPUS_H
#define NVMEIO_TESTS_CORPUS_H

#include <dirent.h>
#include <stdint.h>

#include "check.h"

#define INPUT_BYTES_MAX 4096

static inline void replay_corpus(const char *folder)
{
    static uint8_t bytes[INPUT_BYTES_MAX];
    char path[512];
    unsigned count = 0;
    DIR *directory = opendir(folder);

    CHECK(directory);
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        FILE *file = fopen(path, "rb");
        CHECK(file);
        size_t size = fread(bytes, 1, sizeof(bytes), file);
        CHECK(size < sizeof(bytes) && feof(file));
        fclose(file);
        CHECK(LLVMFuzzerTestOneInput(bytes, size) == 0);
        count++;
    }
    closedir(directory);
    CHECK(count >= 10);
}

#endif
