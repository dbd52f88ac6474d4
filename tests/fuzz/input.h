/* input.h -- numbers from libFuzzer's bytes.
 *
 * Numbers past the end are 0, so every input is valid. */
#ifndef NVMEIO_FUZZ_INPUT_H
#define NVMEIO_FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>

struct input {
    const uint8_t *next;
    size_t left;
};

/* A number of `bytes` bytes, in little-endian order. */
static inline uint64_t input_number(struct input *input, unsigned bytes)
{
    uint64_t number = 0;

    for (unsigned i = 0; i < bytes && input->left > 0; i++, input->left--)
        number |= (uint64_t)*input->next++ << (8 * i);
    return number;
}

/* A number from 0 to `most`, from one byte. */
static inline unsigned input_choice(struct input *input, unsigned most)
{
    return (unsigned)input_number(input, 1) % (most + 1);
}

/* A number up to `most`: near 0, near a multiple of a page, or anywhere. */
static inline uint64_t input_size(struct input *input, uint64_t most)
{
    static const unsigned widths[] = {1, 2, 4, 8};
    unsigned choice = input_choice(input, 7);
    uint64_t number = input_number(input, widths[choice / 2]);

    if (choice % 2)
        number = number * 4096 + input_choice(input, 2) - 1;
    return most == UINT64_MAX ? number : number % (most + 1);
}

#endif
