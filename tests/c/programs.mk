# The C tests in FOLDER, which has libnvmeio.a already: scripts/build-c calls this.

CFLAGS_OF_TESTS := -std=gnu11 -D_GNU_SOURCE= -g -Wall -Wextra -Werror \
	-Iinclude -Isrc/libnvmeio -Itests/c $(FLAGS)

vpath %.c tests/c tests/c/faulty

# The library's record changes with the flags.
$(FOLDER)/%.o: %.c $(FOLDER)/build.json
	$(CC) $(CFLAGS_OF_TESTS) -MMD -MP -c $< -o $@

$(FOLDER)/%: $(FOLDER)/%.o $(FOLDER)/libnvmeio.a
	$(CC) $(FLAGS) $^ $(LIBRARIES) $(LDFLAGS) -o $@

.PRECIOUS: $(FOLDER)/%.o
-include $(wildcard $(FOLDER)/*.d)
