/* input.h -- numbers out of the bytes that libFuzzer invents.
 *
 * What is read past their end is 0, so every input means something. */
#ifndef NVMEIO_FUZZ_INPUT_H
#define NVMEIO_FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>

struct input {
    const uint8_t *next;
    size_t left;
};

/* A number of so many bytes, the lowest first. */
static inline uint64_t input_number(struct input *input, unsigned bytes)
{
    uint64_t number = 0;

    for (unsigned i = 0; i < bytes && input->left > 0; i++, input->left--)
        number |= (uint64_t)*input->next++ << (8 * i);
    return number;
}

/* From 0 to `most`, of one byte. */
static inline unsigned input_choice(struct input *input, unsigned most)
{
    return (unsigned)input_number(input, 1) % (most + 1);
}

/* Up to `most`; as often near 0 as beside a multiple of a page, or anywhere. */
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
