"""The house rules of CONTRIBUTING.md and the arrows of docs/design.md, read from the tree.

Every rule is a function from a file's path and text to the complaints about it.  One test
applies it to the tree, another shows on a bad snippet that it can fail.
"""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "nvmeio"
LIBRARY = ROOT / "src" / "libnvmeio"

C_FUNCTION_LINES_MAX = 60

# What a module of the package may import or cimport of the package; the arrows of
# docs/design.md, from the bottom up.
MAY_USE = {
    "_build": set(),
    "_core": set(),
    "_dlpack": set(),
    "_layout": set(),
    "_registry": set(),
    "_replacing": set(),
    "buffer": {"_core", "_dlpack", "_layout", "_registry"},
    "arguments": {"_core", "_types"},
    "settings": {"_core"},
    "copy": {
        "_core",
        "_dlpack",
        "_layout",
        "_registry",
        "arguments",
        "buffer",
        "settings",
    },
    "pool": {"_core", "arguments", "settings"},
    "_contract": set(),
    "_types": {"_build"},
    "memory": {"_registry", "arguments", "pool"},
    "_locked": {"_registry", "arguments", "memory", "pool"},
    "info": {"_build", "_core", "_types"},
    "file": {"_core", "_types", "arguments"},
    "outcome": {"_core", "file"},
    "callbacks": set(),
    "_listener": set(),
    "_asyncio": {"_listener"},
    "request": {
        "_asyncio",
        "_core",
        "arguments",
        "buffer",
        "callbacks",
        "file",
        "outcome",
    },
    "futures": {"_asyncio", "_listener", "arguments", "request"},
    "workers": {"_core", "info", "request", "settings"},
    "latencies": set(),
    "openfiles": {"_core", "arguments", "file", "workers", "request"},
    "staged": {"_core", "buffer", "callbacks", "file", "workers", "outcome", "request"},
    "records": {"_core", "arguments", "buffer", "file", "outcome", "request"},
    "many": {
        "_core",
        "arguments",
        "buffer",
        "copy",
        "file",
        "outcome",
        "records",
        "request",
    },
    "gather": {
        "_core",
        "_types",
        "arguments",
        "buffer",
        "copy",
        "file",
        "records",
        "request",
        "submitter",
    },
    "submitter": {
        "_core",
        "arguments",
        "buffer",
        "workers",
        "latencies",
        "many",
        "openfiles",
        "request",
        "staged",
    },
    "transfers": {"_contract", "_core", "arguments", "gather", "request", "submitter"},
    "_devices": {"_types"},
    "_values": {"arguments", "workers"},
    "profiles": {"_devices", "_replacing", "_types", "_values"},
    "_lookup": {"_devices", "_types", "profiles"},
    "_options": {"_lookup", "_types", "_values", "arguments", "info"},
    "handle": {"_locked", "_options", "file", "transfers"},
    "files": {"_types", "arguments", "buffer", "file", "handle", "pool", "request"},
    "_indexing": set(),
    "_npy": {"file", "memory"},
    "_elements": {"_npy", "_registry"},
    "npy_files": {
        "_elements",
        "_npy",
        "_registry",
        "_replacing",
        "_types",
        "arguments",
        "file",
        "files",
        "handle",
        "request",
        "memory",
    },
    "arrays": {
        "_elements",
        "_indexing",
        "_npy",
        "_registry",
        "_types",
        "arguments",
        "file",
        "files",
        "handle",
        "memory",
        "request",
    },
}
# The tops of the house, which may use everything: the package itself and its tools.
TOPS = {"__init__", "__main__", "cli", "deepspeed", "torch"}

# Which private headers a file of the C library may include: those of its own layer and of
# the layers below.
C_LAYERS = (
    {"fault", "fault_calls", "align", "fork", "system", "team", "pool", "pages", "file"}
    | {"records", "waiter", "eventfds", "thread"}
    | {"copy", "copy_kernels", "copy_steps", "copy_x86", "copy_neon"},
    {"engine", "fault_engine"}
    | {"engine_uring", "engine_libaio", "engine_threads", "engine_sync"},
    {"request"},
    {"transfer", "gather", "many", "block", "latency"},
    {"queue"},
    {"worker"},
    {"wait", "handle"},
)


def files(*patterns, top=ROOT):
    """Return the files that match, as paths relative to the root."""
    found = sorted({path for pattern in patterns for path in top.glob(pattern)})
    return [path.relative_to(ROOT) for path in found if "__pycache__" not in path.parts]


def tracked():
    """Return what git has or would take, this file apart, which names what it forbids."""
    patterns = (
        "*",
        "src/**/*",
        "include/**/*",
        "tests/**/*",
        "bench/*",
        "docs/*",
        "scripts/*",
    )
    paths = [path for path in files(*patterns) if (ROOT / path).is_file()]
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
        paths = [
            path
            for path in map(Path, listed.stdout.splitlines())
            if (ROOT / path).is_file()
        ]
    return [path for path in paths if path.name != Path(__file__).name]


def module_of(path):
    """Return a file's module, relative to the package: `torch/tensors.py` is torch."""
    return path.relative_to("src/nvmeio").with_suffix("").parts[0]


def imported_by(text):
    """Yield the line number and name of each module that Python or Cython code imports."""
    pattern = r"^\s*(?:from\s+([\w.]+)\s+c?import\s+\(?([\w, ]*)|c?import\s+([\w., ]+))"
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(pattern, line)
        if found is None:
            continue
        if found[1] == "nvmeio":
            yield from ((number, f"nvmeio.{name.strip()}") for name in found[2].split(","))
        elif found[1]:
            yield number, found[1]
        else:
            yield from (
                (number, part.split()[0]) for part in found[3].split(",") if part.strip()
            )


def breaks_layering(path, text):
    """A module uses what stands below it alone."""
    module = module_of(path)
    if module in TOPS:
        return
    for number, name in imported_by(text):
        top, _, rest = name.partition(".")
        used = rest.partition(".")[0]
        if top == "nvmeio" and used != module and used not in MAY_USE.get(module, set()):
            yield f"{number}: {module} must not use {name}"


def imports_torch(path, text):
    """torch is imported under torch/ alone, and where its memory is measured."""
    if module_of(path) == "torch" or path.parts[-3:] == ("cli", "measuring", "buffers.py"):
        return
    for number, name in imported_by(text):
        if name.partition(".")[0] == "torch":
            yield f"{number}: only nvmeio.torch imports torch"


def imports_deepspeed(path, text):
    """DeepSpeed is imported by install() alone, when it is called."""
    for number, name in imported_by(text):
        if name.partition(".")[0] == "deepspeed":
            yield f"{number}: DeepSpeed may not be there"


def loads_torch_part(path, text):
    """nvmeio.torch is loaded by the registry alone, on first use."""
    if module_of(path) in TOPS | {"_registry"}:
        return
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\bnvmeio\.torch\b", line) and "import" in line:
            yield f"{number}: only the registry loads nvmeio.torch"


def declares_c_functions(path, text):
    """_core.pyx is the only caller of C."""
    if path.name == "_core.pyx":
        return
    blocks = re.finditer(
        r'^( *)cdef extern from "nvmeio[^\n]*\n((?:\1 +[^\n]*\n|\s*\n)*)',
        text,
        re.MULTILINE,
    )
    for block in blocks:
        for line in block[2].splitlines():
            if re.search(r"\w\s*\([^)]*\)?.*$", line.partition("#")[0]):
                yield f"{line.strip()!r} is declared outside _core.pyx"


def joins_files(path, text):
    """Files are joined by cimports of names, not by include and not by cimport *."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*include\s+[\"']", line):
            yield f"{number}: include joins files"
        if re.search(r"\bc?import\s+\*", line):
            yield f"{number}: a star hides where names come from"


def opens_parallel_region(path, text):
    """copy.pyx has the only prange."""
    if path.name != "copy.pyx" and re.search(
        r"\bcython\.parallel\b|\bprange\b|openmp", text
    ):
        yield "only copy.pyx knows OpenMP"


def imports_relatively(path, text):
    """Imports are absolute."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*from\s+\.", line):
            yield f"{number}: a relative import"


def prints(path, text):
    """Nothing goes to stdout from a library call."""
    if module_of(path) == "cli":
        return
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*print\s*\(", line):
            yield f"{number}: a library does not print"


def without_comments(text):
    """Blank the comments and strings of C, keeping its lines."""
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"'
    return re.sub(
        pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.DOTALL
    )


def calls_what_prints_or_exits(path, text):
    """The C library neither prints nor ends the process.

    A test build that cannot make the faults that it was told to make does both.
    """
    if path.name == "fault.c":
        return
    pattern = r"\b([vdf]*printf|f?puts|putchar|perror|abort|_*exit|_Exit|errx?|warnx?)\s*\("
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        found = re.search(pattern, line)
        if found:
            yield f"{number}: {found[1]}() in the library"


def knows_python(path, text):
    """The C library does not know Python."""
    if re.search(r'#\s*include\s*[<"](Python|structmember)\.h', text):
        yield "Python.h in the C library"


def c_functions(text):
    """Yield the line number and the length of each function, by the braces in column 0."""
    start = None
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        if line.startswith("{"):
            start = number
        elif line.startswith("}") and start is not None:
            yield start, number - start + 1
            start = None


def has_long_function(path, text):
    """A C function fits a screen."""
    for number, length in c_functions(text):
        if length > C_FUNCTION_LINES_MAX:
            yield f"{number}: {length} lines, {C_FUNCTION_LINES_MAX} are allowed"


def layer_of(name):
    """Return the layer of a C file, by its name without `_internal` and suffix."""
    stem = name.partition(".")[0].removesuffix("_internal")
    for layer, members in enumerate(C_LAYERS):
        if stem in members:
            return layer
    return None


def includes_upward(path, text):
    """A C file includes private headers of its own layer and of those below."""
    own = layer_of(path.name)
    if own is None:
        yield f"{path.name} has no layer: name it in C_LAYERS and in docs/design.md"
        return
    for header in re.findall(r'#\s*include\s*"([^"]+)"', text):
        used = layer_of(header)
        if used is None:
            yield f"includes {header}, which has no layer"
        elif used > own:
            yield f"includes {header}, which stands above it"
        elif path.name.startswith("engine_") and header.startswith("engine_"):
            yield f"includes {header}: engines do not know each other"


HANDLE_LAYERS = range(C_LAYERS.index({"request"}), len(C_LAYERS))


def copies_by_itself(path, text):
    """What is between bounces and callers is copied by the library's kernels."""
    if layer_of(path.name) in HANDLE_LAYERS:
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"\bmem(cpy|move)\(", line):
                yield f"{number}: {line.strip()}"


def wakes_one_by_condition(path, text):
    """One thread of several is woken by a semaphore or a futex.

    pthread_cond_signal(3) of glibc 2.25 to 2.40 may wake none (bug 25847).
    """
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        if "pthread_cond_signal" in line:
            yield f"{number}: {line.strip()}"


def leaves_work(path, text):
    """What is left to do is an issue, not a comment."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(r"\b(TODO|FIXME|XXX)\b", line)
        if found:
            yield f"{number}: {found[1]}"


def names_a_machine(path, text):
    """No path of one machine is in the tree."""
    pattern = r"(?<![\w.])/(?:work|farm|root|opt/nvenv|home/\w+)(?:/\w+)+"
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(pattern, line)
        if found:
            yield f"{number}: {found[0]}"


def is_generated(path, text):
    """What the build makes is not committed."""
    made = path.suffix in {".so", ".o", ".a", ".pyc"} or path.parts[0] in {"build", "dist"}
    if made or (path.suffix == ".c" and path.parts[:2] == ("src", "nvmeio")):
        yield "is made by the build"


def draws_without_seed(path, text):
    """A stress test draws all its random numbers from its seed."""
    if path.name == "conftest.py":  # which draws the seeds
        return
    seeded = r'(?:Random|default_rng)\(["\w\[]'
    pattern = rf"\brandom\.(?!{seeded})\w+|\b(?:urandom|uuid|secrets)\b|\bhash\("
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(pattern, line)
        if found:
            yield f"{number}: {found[0]} is drawn from no seed"


def lacks_all(path, text):
    """A public Python module says what it gives."""
    if module_of(path).startswith("_") and path.name != "__init__.py":
        return
    body = ast.parse(text).body
    if len(body) == 1 and ast.get_docstring(ast.Module(body, [])) is not None:
        # A folder of modules, and what they are for.
        return
    assigned = [
        target.id
        for node in body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    if "__all__" not in assigned:
        yield "has no __all__"


PYX = ("src/nvmeio/**/*.pyx",)
CYTHON = (*PYX, "src/nvmeio/**/*.pxd")
PYTHON = ("src/nvmeio/**/*.py",)
C = ("src/libnvmeio/*.c", "src/libnvmeio/*.h")

RULES = {
    breaks_layering: (*CYTHON, *PYTHON),
    imports_torch: (*CYTHON, *PYTHON),
    imports_deepspeed: (*CYTHON, *PYTHON),
    loads_torch_part: (*CYTHON, *PYTHON),
    declares_c_functions: CYTHON,
    joins_files: (*CYTHON, *PYTHON),
    opens_parallel_region: CYTHON,
    imports_relatively: (*CYTHON, *PYTHON),
    prints: (*CYTHON, *PYTHON),
    lacks_all: PYTHON,
    draws_without_seed: ("tests/stress/**/*.py",),
    calls_what_prints_or_exits: C,
    knows_python: (*C, "include/nvmeio/*.h"),
    has_long_function: C,
    includes_upward: C,
    copies_by_itself: C,
    wakes_one_by_condition: C,
}
TREE_RULES = (leaves_work, names_a_machine, is_generated)

LONG_FUNCTION = "static int f(void)\n{\n" + "    g();\n" * 60 + "}\n"
# For each rule, files that break it.
BAD = [
    (breaks_layering, "src/nvmeio/buffer.pyx", "from nvmeio.handle cimport aio_handle\n"),
    (breaks_layering, "src/nvmeio/request.pyx", "cimport nvmeio.handle\n"),
    (breaks_layering, "src/nvmeio/pool.pyx", "from nvmeio import handle\n"),
    (breaks_layering, "src/nvmeio/_core.pxd", "from nvmeio.pool cimport x\n"),
    (breaks_layering, "src/nvmeio/newcomer.py", "from nvmeio._core import x\n"),
    (imports_torch, "src/nvmeio/buffer.pyx", "def f():\n    import torch\n"),
    (imports_torch, "src/nvmeio/deepspeed/op.py", "from torch import Tensor\n"),
    (imports_deepspeed, "src/nvmeio/deepspeed/builders.py", "import deepspeed.ops\n"),
    (loads_torch_part, "src/nvmeio/buffer.pyx", "    import nvmeio.torch\n"),
    (
        declares_c_functions,
        "src/nvmeio/pool.pyx",
        'cdef extern from "nvmeio/pool.h" nogil:\n    void nvmeio_pool_free(void *a)\n',
    ),
    (joins_files, "src/nvmeio/handle.pyx", 'include "request.pyx"\n'),
    (joins_files, "src/nvmeio/handle.pyx", "from nvmeio._core cimport *\n"),
    (opens_parallel_region, "src/nvmeio/pool.pyx", "from cython.parallel cimport prange\n"),
    (imports_relatively, "src/nvmeio/files.py", "from .handle import aio_handle\n"),
    (prints, "src/nvmeio/files.py", "def f():\n    print('done')\n"),
    (lacks_all, "src/nvmeio/files.py", "def read_file(path):\n    pass\n"),
    (draws_without_seed, "tests/stress/trials/drops.py", "more = random.Random()\n"),
    (draws_without_seed, "tests/stress/trials/soak.py", "step = random.choice(STEPS)\n"),
    (draws_without_seed, "tests/stress/places.py", "rng = np.random.default_rng()\n"),
    (draws_without_seed, "tests/stress/places.py", "seed = hash(name)\n"),
    (calls_what_prints_or_exits, "src/libnvmeio/pool.c", 'fprintf(stderr, "no\\n");\n'),
    (calls_what_prints_or_exits, "src/libnvmeio/pool.c", "    abort();\n"),
    (knows_python, "src/libnvmeio/pool.c", "#include <Python.h>\n"),
    (has_long_function, "src/libnvmeio/pool.c", LONG_FUNCTION),
    (includes_upward, "src/libnvmeio/align.c", '#include "engine.h"\n'),
    (includes_upward, "src/libnvmeio/engine.c", '#include "handle_internal.h"\n'),
    (includes_upward, "src/libnvmeio/engine_sync.c", '#include "engine_uring.h"\n'),
    (includes_upward, "src/libnvmeio/newcomer.c", ""),
    (copies_by_itself, "src/libnvmeio/request.c", "    memcpy(bounce, lent, wanted);\n"),
    (wakes_one_by_condition, "src/libnvmeio/worker.c", "    pthread_cond_signal(&work);\n"),
    (leaves_work, "src/nvmeio/files.py", "# TODO: later\n"),
    (names_a_machine, "docs/design.md", "see /root/notes/design.md\n"),
    (is_generated, "src/nvmeio/_core.c", ""),
    (is_generated, "build/lib/nvmeio/_core.so", ""),
]
# Near misses, which a rule must not complain about.
GOOD = [
    (draws_without_seed, "tests/stress/places.py", 'rng = random.Random(f"{seed}")\n'),
    (draws_without_seed, "tests/stress/places.py", "at_once = self.rng.random() < 0.5\n"),
    (breaks_layering, "src/nvmeio/staged.pyx", "from nvmeio.request cimport Request\n"),
    (imports_torch, "src/nvmeio/torch/tensors.py", "import torch\n"),
    (imports_deepspeed, "src/nvmeio/__init__.py", "from nvmeio import deepspeed\n"),
    (
        declares_c_functions,
        "src/nvmeio/pool.pyx",
        'cdef extern from "nvmeio/pool.h" nogil:\n    size_t NVMEIO_POOL_ALIGN\n',
    ),
    (calls_what_prints_or_exits, "src/libnvmeio/pool.c", "snprintf(reason, 9, name);\n"),
    (calls_what_prints_or_exits, "src/libnvmeio/pool.c", "/* never abort() */\n"),
    (includes_upward, "src/libnvmeio/engine_sync.c", '#include "engine.h"\n'),
    (copies_by_itself, "src/libnvmeio/copy.c", "    memcpy(target, source, size);\n"),
    (wakes_one_by_condition, "src/libnvmeio/wait.c", "    pthread_cond_broadcast(&n);\n"),
]


def sentence(rule):
    """Return a rule's sentence as the name of its test."""
    return rule.__doc__.strip().rstrip(".")


def complaints(rule, paths):
    """Return what a rule says about files of the tree."""
    found = []
    for path in paths:
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            text = ""
        found += [f"{path}: {complaint}" for complaint in rule(path, text)]
    return found


@pytest.mark.parametrize("rule", RULES, ids=sentence)
def test_the_sources_keep_the_rule(rule):
    paths = files(*RULES[rule])
    assert paths, "the rule applies to no file"
    assert complaints(rule, paths) == []


@pytest.mark.parametrize("rule", TREE_RULES, ids=sentence)
def test_the_whole_tree_keeps_the_rule(rule):
    assert complaints(rule, tracked()) == []


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_rule_sees_what_breaks_it(rule, path, text):
    assert list(rule(Path(path), text))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_a_rule_leaves_its_near_misses_alone(rule, path, text):
    assert list(rule(Path(path), text)) == []


def test_every_rule_has_a_file_that_breaks_it():
    assert {*RULES, *TREE_RULES} == {rule for rule, _, _ in BAD}


def test_every_module_has_its_place_in_the_layers():
    modules = {module_of(path) for path in files(*CYTHON, *PYTHON)}
    assert modules <= MAY_USE.keys() | TOPS


def test_the_layers_are_free_of_cycles():
    placed = set()
    while len(placed) < len(MAY_USE):
        free = {name for name, used in MAY_USE.items() if used <= placed} - placed
        assert free, f"a cycle among {MAY_USE.keys() - placed}"
        placed |= free


def test_every_cython_module_has_a_stub():
    modules = [path for path in files(*PYX) if path.stem != "_core"]
    assert [
        path for path in modules if not (ROOT / path).with_suffix(".pyi").exists()
    ] == []


def test_the_readme_has_exactly_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"^ *make +([\w-]+) *$", text, re.MULTILINE))) == [
        "demo",
        "test",
    ]


def test_the_free_threading_promise_waits_for_a_run_of_the_suite():
    texts = [
        (ROOT / path).read_text(encoding="utf-8") for path in files(*CYTHON, "setup.py")
    ]
    assert not any("freethreading_compatible" in text for text in texts)
