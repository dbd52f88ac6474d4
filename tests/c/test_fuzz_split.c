/* The inputs that libFuzzer has kept for this target, in a place without libFuzzer. */
#include "../fuzz/fuzz_split.c"

#include "corpus.h"

int main(void)
{
    replay_corpus("tests/fuzz/corpus/split");
    return 0;
}
