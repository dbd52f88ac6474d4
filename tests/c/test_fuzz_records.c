/* The inputs that libFuzzer has kept for this target, in a place without libFuzzer. */
#include "../fuzz/fuzz_records.c"

#include "corpus.h"

int main(void)
{
    replay_corpus("tests/fuzz/corpus/records");
    return 0;
}
