# The C tests in FOLDER, which has libnvmeio.a already: scripts/build-c calls this.

CFLAGS_OF_TESTS := -std=gnu11 -D_GNU_SOURCE= -g -Wall -Wextra -Werror \
	-Iinclude -Isrc/libnvmeio -Itests/c -Itests/faults $(FLAGS)

vpath %.c tests/c tests/c/faulty

# The library's record changes with the flags.
$(FOLDER)/%.o: %.c $(FOLDER)/build.json
	$(CC) $(CFLAGS_OF_TESTS) -MMD -MP -c $< -o $@

$(FOLDER)/%: $(FOLDER)/%.o $(FOLDER)/libnvmeio.a $(FOLDER)/build.json
	$(CC) $(FLAGS) $(filter-out %.json,$^) $(LIBRARIES) $(LDFLAGS) -o $@

# One that has moved is found by vpath, though an old list names its place.
tests/c/%.c: ;

.PRECIOUS: $(FOLDER)/%.o
-include $(wildcard $(FOLDER)/*.d)
