"""Check the tree against the rules of CONTRIBUTING.md and the arrows of docs/design.md.

A rule is a function from a file's path and text to complaints.  One test applies it to the
tree, another shows on a bad snippet that it can fail.
"""

import ast
import functools
import itertools
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from nvmeio._config.constants import LIMITS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "nvmeio"
LIBRARY = ROOT / "src" / "libnvmeio"

# For each folder of the package, the folders below that it may import and cimport from.  ""
# stands for the modules that users import, libnvmeio for the C library as Cython sees it.
FOLDERS = {
    "libnvmeio": set(),
    "_arguments": set(),
    "_events": set(),
    "_files": {"_arguments", "_events"},
    "_memory": {"_arguments", "_events"},
    "_config": {"_arguments", "_files"},
    "_native": {"libnvmeio", "_arguments", "_events", "_files", "_memory", "_config"},
    "_arrays": {"_arguments", "_memory", "_native"},
    "": {"_arguments", "_config", "_events", "_files", "_memory", "_native", "_arrays"},
    "safetensors": {"", "_arguments", "_events", "_files", "_memory", "_native"},
    "torch": {
        *("", "checkpoint", "safetensors"),
        *("_arguments", "_arrays", "_events", "_files", "_memory", "_native"),
    },
    "checkpoint": {
        *("", "safetensors"),
        *("_arguments", "_events", "_files", "_memory", "_native"),
    },
    "deepspeed": {"", "_arguments", "_config", "_native"},
    "_cli": {
        *("", "checkpoint", "safetensors"),
        *("_arguments", "_arrays", "_config", "_files", "_native"),
    },
}
# Special functions that a public module may have.
MODULES_MAX = 20


def files(*patterns, top=ROOT):
    """Return the files that match, as paths relative to the root."""
    found = sorted({path for pattern in patterns for path in top.glob(pattern)})
    return [path.relative_to(ROOT) for path in found if "__pycache__" not in path.parts]


def tracked():
    """Return the files that git tracks or would add, except this one."""
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


def folder_of(name):
    """Return the folder of a module, by its name below `nvmeio.`."""
    top = name.partition(".")[0]
    return top if top in FOLDERS else ""


def name_of(path):
    """Return the name of a module below `nvmeio.`."""
    parts = path.relative_to("src/nvmeio").with_suffix("").parts
    return ".".join(parts)


def imported_by(text):
    """Yield the line number and name of each module that Python or Cython code imports."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        yield from imported_by_cython(text)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, modules_in(each.name)) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                yield node.lineno, modules_in(node.module, each.name)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            named = getattr(node.args[0], "value", None)
            if called in ("import_module", "__import__") and isinstance(named, str):
                yield node.lineno, modules_in(named)


def imported_by_cython(text):
    """Yield the imports of Cython code, which Python cannot parse."""
    text = re.sub(r"#.*", "", text)
    text = re.sub(r"\\\n", "  ", text)
    text = re.sub(r"\([\w\s,]*\)", lambda found: " ".join(found[0].split()), text)
    pattern = (
        r"^[^\"'\n]*?(?:\bfrom\s+([\w.]+)\s+c?import\s+\(?\s*([\w*, ]*)"
        r"|(?:^|[:;])\s*c?import\s+([\w., ]+))"
    )
    for found in re.finditer(pattern, text, re.MULTILINE):
        number = text.count("\n", 0, found.start()) + 1
        for name in re.split(r"\s*,\s*", (found[2] or found[3] or "").strip()):
            if name:
                first = name.split()[0]
                yield (
                    number,
                    modules_in(found[1], first) if found[1] else modules_in(first),
                )


def modules_in(module, name=None):
    """Return the imported modules; names imported from a folder may be modules."""
    parts = module.split(".")
    if parts[0] != "nvmeio":
        return module
    if name is not None and any(
        (PACKAGE.joinpath(*parts[1:], name).with_suffix(suffix)).exists()
        for suffix in ("", ".py", ".pyx", ".pxd")
    ):
        parts.append(name)
    folder = PACKAGE.joinpath(*parts[1:]).is_dir()
    return ".".join([*parts, "__init__"] if folder else parts)


def always_run(path, text):
    """Blank what imports modules of the package on demand, or for type checkers only."""
    if name_of(path) != "__init__":
        return text
    lines = r"(?m)^( *)(.*import_module.*|from nvmeio import (\w+) as \3)$"
    return re.sub(lines, r"\1pass", text)


def breaks_layering(path, text):
    """A folder uses only folders below it."""
    own = folder_of(name_of(path))
    if path.name == "__main__.py":
        return
    for number, name in imported_by(always_run(path, text)):
        top, _, rest = name.partition(".")
        used = folder_of(rest)
        if top == "nvmeio" and rest and used != own and used not in FOLDERS[own]:
            yield f"{number}: {own or 'a public module'} must not use {name}"


def imports_torch(path, text):
    """torch is imported only under torch/, in parts of safetensors and by bench."""
    places = {"_cli/workloads.py"}
    places |= {f"safetensors/{name}.py" for name in ("torch", "_sharing", "_dtypes")}
    if folder_of(name_of(path)) == "torch" or "/".join(path.parts[-2:]) in places:
        return
    for number, name in imported_by(text):
        if name.partition(".")[0] == "torch":
            yield f"{number}: only nvmeio.torch imports torch"


def imports_deepspeed(path, text):
    """DeepSpeed is imported only by install(), when it is called."""
    for number, name in imported_by(text):
        called = "import_module" in text.splitlines()[number - 1]
        if name.partition(".")[0] == "deepspeed" and not (
            called and path.name == "builders.py"
        ):
            yield f"{number}: DeepSpeed may not be there"


def loads_torch_part(path, text):
    """nvmeio.torch is loaded only on first use, by the function given to the registry."""
    if folder_of(name_of(path)) in ("torch", "deepspeed", "_cli"):
        return
    if name_of(path) == "__init__":
        return
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\bnvmeio\.torch\b", line) and "import" in line:
            yield f"{number}: only the package loads nvmeio.torch"


def declares_c_functions(path, text):
    """Only libnvmeio.pxd declares functions of the C library."""
    if path.name == "libnvmeio.pxd":
        return
    for found in re.finditer(r"^ *cdef extern from [\"<]nvmeio.*", text, re.MULTILINE):
        yield f"{found[0].strip()!r} is not in libnvmeio.pxd"


def joins_files(path, text):
    """Cython files cimport names, without include and cimport *."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*include\s+[\"']", line):
            yield f"{number}: include joins files"
        if re.search(r"\bc?import\s+\*", line):
            yield f"{number}: a star hides where names come from"


def opens_parallel_region(path, text):
    """Only copy.pyx has a prange."""
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
    if folder_of(name_of(path)) == "_cli":
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
    """The C library neither prints nor ends the process."""
    pattern = r"\b([vdf]*printf|f?puts|putchar|perror|abort|_*exit|_Exit|errx?|warnx?)\s*\("
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        found = re.search(pattern, line)
        if found:
            yield f"{number}: {found[1]}() in the library"


def knows_python(path, text):
    """The C library does not know Python."""
    if re.search(r'#\s*include\s*[<"](Python|structmember)\.h', text):
        yield "Python.h in the C library"


def picture():
    """Return the rows of docs/design.md that imports go down, the lowest first."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"what an arrow leads to:\n\n```text\n(.*?)```", text, re.DOTALL)
    return re.sub(r"\n +->", " ->", found).splitlines()[::-1]


def stages(row):
    """Return the names between the arrows of a row, the lowest first."""
    return [{*re.findall(r"[\w*]+", part)} - {"c", "h"} for part in row.split("->")][::-1]


# Which private headers a file of the C library may include: those of its own layer and of
# the layers below, by the names of docs/design.md.
LOWEST, ENGINES, ABOVE = (stages(row) for row in picture() if re.search(r"\.c\b", row))
C_LAYERS = (*LOWEST, ENGINES[-1], *ABOVE[1:])


def layer_of(name):
    """Return the layer of a C file, by its name without `_internal` and suffix."""
    stem = name.partition(".")[0].removesuffix("_internal")
    for layer, members in enumerate(C_LAYERS):
        if any(fnmatch(stem, member) for member in members):
            return layer
    return None


def includes_upward(path, text):
    """A C file includes only private headers of its own layer and of those below."""
    own = layer_of(path.name)
    if own is None:
        yield f"{path.name} has no layer: name it in docs/design.md"
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
    """Copies between bounces and callers use the library's kernels."""
    if layer_of(path.name) in HANDLE_LAYERS:
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"\bmem(cpy|move)\(", line):
                yield f"{number}: {line.strip()}"


def wakes_one_by_condition(path, text):
    """A semaphore or a futex wakes one of several threads.

    pthread_cond_signal(3) of glibc 2.25 to 2.40 may wake none (bug 25847).
    """
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        if "pthread_cond_signal" in line:
            yield f"{number}: {line.strip()}"


def leaves_work(path, text):
    """Open work is an issue, not a comment."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(r"\b(TODO|FIXME|XXX)\b", line)
        if found:
            yield f"{number}: {found[1]}"


def names_a_machine(path, text):
    """The tree has no path of one machine."""
    pattern = r"(?<![\w.])/(?:work|farm|root|opt/nvenv|home/\w+)(?:/\w+)+"
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(pattern, line)
        if found:
            yield f"{number}: {found[0]}"


def is_generated(path, text):
    """Products of the build are not committed."""
    made = path.suffix in {".so", ".o", ".a", ".pyc"} or path.parts[0] in {"build", "dist"}
    if made or (path.suffix == ".c" and path.parts[:2] == ("src", "nvmeio")):
        yield "is made by the build"


def draws_without_seed(path, text):
    """A stress test draws all its random numbers from its seed."""
    if path.name == "conftest.py":  # this file draws the seeds
        return
    seeded = r'(?:Random|default_rng)\(["\w\[]'
    pattern = rf"\brandom\.(?!{seeded})\w+|\b(?:urandom|uuid|secrets)\b|\bhash\("
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(pattern, line)
        if found:
            yield f"{number}: {found[0]} is drawn from no seed"


def asks_for_the_process(path, text):
    """C detects a fork, and _events/forks.py reports it."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"getpid\(\)\s*[!=]=|[!=]=\s*os\.getpid\(", line):
            yield f"{number}: {line.strip()}"


def words_errors(path, text):
    """Only errors.pyx makes an exception of an errno of the library."""
    # Other code names an errno itself, or passes on that of an exception.
    pattern = (
        r"\bstrerror\(|Error\(\s*-|\bOSError\(\s*(?!\w+\.errno\b|(?:errno\.)?E[A-Z])\w"
    )
    if path.name != "errors.pyx":
        for found in re.finditer(pattern, text):
            yield f"{text.count(chr(10), 0, found.start()) + 1}: {found[0]}"


def lacks_all(path, text):
    """A public Python module has __all__."""
    if name_of(path).startswith("_"):
        return
    body = ast.parse(text).body
    if len(body) == 1 and ast.get_docstring(ast.Module(body, [])) is not None:
        # A folder of modules, with only a docstring.
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


@functools.cache
def public_names():
    """Return the names that the public modules of the package list."""
    names = set()
    for path in files(*PYTHON):
        if not re.search(r"/_(?!_)", str(path)):
            found = re.findall(
                r"^__all__.*?= (\[.*?\])", (ROOT / path).read_text(), re.M | re.S
            )
            names |= {name for each in found for name in ast.literal_eval(each)}
    return names


def documents_in_sections(path, text):
    """Only docstrings for users have sections of numpydoc; others are short."""
    public = public_names()
    owner = method = ""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(
            r"( *)(?:async def|def|class|c(?:p?def)) (?:.*? )??(\w+)[(:]", line
        )
        if found:
            method = found[2]
            owner = owner if found[1] else method
        hidden = re.match(r"_(?!_)", method) or owner not in public
        if hidden and re.match(r" +-{4,}$", line):
            yield f"{number}: {owner}, {method} is private"


def imports_underscore(path, text):
    """Docs, examples and embedding programs import only public names."""
    names = r"(?:\([\w\s,]*?|[\w ,]*?)\b_[a-z]\w*"
    pattern = rf"\bnvmeio(?:\.\w+)*\._[a-z]\w*|\bfrom\s+nvmeio[\w.]*\s+c?import\s*{names}"
    for found in re.finditer(pattern, text):
        yield f"{text.count(chr(10), 0, found.start()) + 1}: {found[0]}"


def leaves_fences_open(path, text):
    """A fence ends before the next one begins."""
    begun = False
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r" *```", line):
            if begun and line.strip() != "```":
                yield f"{number}: {line} within a fence"
            begun = not begun
    if begun:
        yield "the last fence has no end"


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
    asks_for_the_process: (*CYTHON, *PYTHON),
    words_errors: CYTHON,
    lacks_all: PYTHON,
    documents_in_sections: (*PYX, *PYTHON),
    imports_underscore: ("docs/*.md", "README.md", "examples/**/*.py"),
    leaves_fences_open: ("*.md", "docs/*.md", "bench/*.md", "src/libnvmeio/*.md"),
    draws_without_seed: ("tests/stress/**/*.py",),
    calls_what_prints_or_exits: C,
    knows_python: (*C, "include/nvmeio/*.h"),
    includes_upward: C,
    copies_by_itself: C,
    wakes_one_by_condition: C,
}
TREE_RULES = (leaves_work, names_a_machine, is_generated)

# Files that break each rule.
BAD = [
    (breaks_layering, "src/nvmeio/_native/buffer.pyx", "from nvmeio.files cimport x\n"),
    (
        breaks_layering,
        "src/nvmeio/_native/request.pyx",
        "cimport nvmeio._arrays.elements\n",
    ),
    (
        breaks_layering,
        "src/nvmeio/_config/options.py",
        "from nvmeio._native.info import x\n",
    ),
    (breaks_layering, "src/nvmeio/libnvmeio.pxd", "from nvmeio._native.pool cimport x\n"),
    (breaks_layering, "src/nvmeio/newcomer.py", "from nvmeio.torch import x\n"),
    (breaks_layering, "src/nvmeio/_arguments/checks.py", "import nvmeio\n"),
    (breaks_layering, "src/nvmeio/_arguments/checks.py", "__import__('nvmeio.files')\n"),
    (
        breaks_layering,
        "src/nvmeio/_arguments/checks.py",
        "import importlib\nimportlib.import_module('nvmeio.files')\n",
    ),
    (
        breaks_layering,
        "src/nvmeio/_arguments/checks.py",
        "if True: from nvmeio import \\\n    files\n",
    ),
    (
        breaks_layering,
        "src/nvmeio/_config/newcomer.pyx",
        "cdef int x\nif True: from nvmeio._native cimport (  # all of it\n    pool)\n",
    ),
    (breaks_layering, "src/nvmeio/_config/newcomer.pyx", "cdef int x\nimport nvmeio\n"),
    (asks_for_the_process, "src/nvmeio/files.py", "if os.getpid() != self.process:\n"),
    (words_errors, "src/nvmeio/_native/file.pyx", "raise OSError(-result, words)\n"),
    (words_errors, "src/nvmeio/_native/file.pyx", "raise OSError(\n    number, words)\n"),
    (breaks_layering, "src/nvmeio/_cli/tune.py", 'import_module("nvmeio.torch")\n'),
    (
        breaks_layering,
        "src/nvmeio/_events/caller.py",
        "from nvmeio import (\n    files,\n    arrays,\n)\n",
    ),
    (imports_torch, "src/nvmeio/_native/buffer.pyx", "def f():\n    import torch\n"),
    (imports_torch, "src/nvmeio/deepspeed/op.py", "from torch import Tensor\n"),
    (imports_deepspeed, "src/nvmeio/deepspeed/builders.py", "import deepspeed.ops\n"),
    (loads_torch_part, "src/nvmeio/_native/buffer.pyx", "    import nvmeio.torch\n"),
    (
        declares_c_functions,
        "src/nvmeio/_native/pool.pyx",
        'cdef extern from "nvmeio/pool.h":\n    void free "nvmeio_pool_free"(void *a)\n',
    ),
    (joins_files, "src/nvmeio/_native/handle.pyx", 'include "request.pyx"\n'),
    (joins_files, "src/nvmeio/_native/handle.pyx", "from nvmeio.libnvmeio cimport *\n"),
    (
        opens_parallel_region,
        "src/nvmeio/_native/pool.pyx",
        "from cython.parallel cimport prange\n",
    ),
    (imports_relatively, "src/nvmeio/files.py", "from .handle import aio_handle\n"),
    (prints, "src/nvmeio/files.py", "def f():\n    print('done')\n"),
    (lacks_all, "src/nvmeio/files.py", "def read_file(path):\n    pass\n"),
    (
        documents_in_sections,
        "src/nvmeio/_cli/cp.py",
        'def run(options):\n    """Copy.\n\n    Parameters\n    ----------\n',
    ),
    (
        documents_in_sections,
        "src/nvmeio/_native/pool.pyx",
        'cpdef PoolMemory new_pinned(int n):\n    """Get memory.\n\n    Notes\n    -----\n',
    ),
    (
        documents_in_sections,
        "src/nvmeio/_native/handle.pyx",
        'cdef class Handle:\n    def _drain(self):\n        """Raises\n        ------\n',
    ),
    (imports_underscore, "docs/embedding.md", "from nvmeio._native cimport pool\n"),
    (imports_underscore, "docs/quickstart.md", "h = nvmeio._config.options.chosen()\n"),
    (
        imports_underscore,
        "examples/demo.py",
        "from nvmeio import (\n    empty,\n    _cli)\n",
    ),
    (imports_underscore, "examples/demo.py", "from nvmeio.torch import empty, _bits\n"),
    (leaves_fences_open, "CONTRIBUTING.md", "```c\nint x;\n```cython\nx\n```\n"),
    (leaves_fences_open, "CONTRIBUTING.md", "```c\nint x;\n"),
    (draws_without_seed, "tests/stress/cases/drops.py", "more = random.Random()\n"),
    (draws_without_seed, "tests/stress/cases/soak.py", "step = random.choice(STEPS)\n"),
    (draws_without_seed, "tests/stress/places.py", "rng = np.random.default_rng()\n"),
    (draws_without_seed, "tests/stress/places.py", "seed = hash(name)\n"),
    (calls_what_prints_or_exits, "src/libnvmeio/pool.c", 'fprintf(stderr, "no\\n");\n'),
    (calls_what_prints_or_exits, "src/libnvmeio/pool.c", "    abort();\n"),
    (knows_python, "src/libnvmeio/pool.c", "#include <Python.h>\n"),
    (includes_upward, "src/libnvmeio/align.c", '#include "engine.h"\n'),
    (includes_upward, "src/libnvmeio/engine.c", '#include "handle_internal.h"\n'),
    (includes_upward, "src/libnvmeio/engine_sync.c", '#include "engine_uring.h"\n'),
    (includes_upward, "src/libnvmeio/newcomer.c", ""),
    (copies_by_itself, "src/libnvmeio/request.c", "    memcpy(bounce, memory, wanted);\n"),
    (wakes_one_by_condition, "src/libnvmeio/worker.c", "    pthread_cond_signal(&work);\n"),
    (leaves_work, "src/nvmeio/files.py", "# TODO: later\n"),
    (names_a_machine, "docs/design.md", "see /root/notes/design.md\n"),
    (is_generated, "src/nvmeio/libnvmeio.c", ""),
    (is_generated, "build/lib/nvmeio/libnvmeio.so", ""),
]
# Near misses, about which a rule must not complain.
GOOD = [
    (
        documents_in_sections,
        "src/nvmeio/_native/handle.pyx",
        'cdef class Handle:\n    def read(self):\n        """Raises\n        ------\n',
    ),
    (imports_underscore, "examples/demo.py", "from nvmeio import empty\n_size = 1\n"),
    (draws_without_seed, "tests/stress/places.py", 'rng = random.Random(f"{seed}")\n'),
    (draws_without_seed, "tests/stress/places.py", "at_once = self.rng.random() < 0.5\n"),
    (
        breaks_layering,
        "src/nvmeio/_native/staged.pyx",
        "from nvmeio._native.request cimport Request\n",
    ),
    (words_errors, "src/nvmeio/_native/file.pyx", "raise OSError(errno.EIO, words)\n"),
    (words_errors, "src/nvmeio/_native/file.pyx", "raise OSError(error.errno, words)\n"),
    (imports_torch, "src/nvmeio/torch/_tensors.py", "import torch\n"),
    (imports_deepspeed, "src/nvmeio/__init__.py", "from nvmeio import deepspeed\n"),
    (
        declares_c_functions,
        "src/nvmeio/libnvmeio.pxd",
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
    """Return a rule's complaints about files of the tree."""
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
def test_a_rule_finds_what_breaks_it(rule, path, text):
    assert list(rule(Path(path), text))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_a_rule_leaves_its_near_misses_alone(rule, path, text):
    assert list(rule(Path(path), text)) == []


def test_every_rule_has_a_file_that_breaks_it():
    assert {*RULES, *TREE_RULES} == {rule for rule, _, _ in BAD}


def test_every_folder_has_a_layer():
    top = PACKAGE.glob("*/__init__.py")
    assert {path.parent.name for path in top} == FOLDERS.keys() - {"", "libnvmeio"}


def test_folders_have_no_cycle():
    placed = set()
    while len(placed) < len(FOLDERS):
        free = {name for name, used in FOLDERS.items() if used <= placed} - placed
        assert free, f"a circle among {FOLDERS.keys() - placed}"
        placed |= free


def test_folders_use_only_folders_below_them_in_the_picture():
    below = set()
    for row in picture():
        here = {
            name for name in FOLDERS if name and re.search(rf"(?<!\w){name}(/|\.so)", row)
        }
        here |= {""} if "files.py" in row else set()
        assert not here & below, f"{here & below} stand in two rows"
        for name in here:
            assert FOLDERS[name] <= below, f"{name!r} uses {FOLDERS[name] - below}"
        below |= here
    assert below == FOLDERS.keys()


def test_native_modules_use_only_modules_that_an_arrow_leads_to():
    native = {path.stem for path in files("src/nvmeio/_native/*.p*x*")}
    (row,) = [row for row in picture() if "_native/" in row]
    below = set()
    for here in stages(row.partition("_native/")[2]):
        for path in files(*(f"src/nvmeio/_native/{name}.p*x*" for name in here)):
            text = (ROOT / path).read_text(encoding="utf-8")
            used = {name.removeprefix("nvmeio._native.") for _, name in imported_by(text)}
            used = (used & native) - {path.stem}
            assert used <= below, f"{path} uses {used - below}"
        below |= here
    assert below == native


def test_the_c_library_has_the_layers_of_the_picture():
    assert (ENGINES[0], ABOVE[0]) == ({"engine"}, {"engine"})
    stems = {path.stem.removesuffix("_internal") for path in files(*C)}
    shown = [*itertools.chain(*C_LAYERS)]
    assert all(any(fnmatch(each, name) for each in stems) for name in shown), shown
    assert all(sum(fnmatch(each, name) for name in shown) == 1 for each in stems)


def imports_of(path):
    """Return the modules of the package that one imports or cimports, by their names."""
    known = {name_of(path) for path in files(*PYX, *PYTHON)}
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {
        name.removeprefix("nvmeio.") for _, name in imported_by(always_run(path, text))
    }
    return found & known - {name_of(path)}


def test_modules_have_no_import_cycle():
    graph = {name_of(path): imports_of(path) for path in files(*PYX, *PYTHON)}
    placed = set()
    while len(placed) < len(graph):
        free = {name for name, used in graph.items() if used <= placed} - placed
        assert free, f"a circle among {sorted(graph.keys() - placed)}"
        placed |= free


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from nvmeio.torch import _tensors\n", "nvmeio.torch._tensors"),
        ("from nvmeio.torch import empty\n", "nvmeio.torch.__init__"),
        ("from nvmeio.checkpoint import Checkpointer\n", "nvmeio.checkpoint.__init__"),
        ("cdef x\nfrom nvmeio._native cimport pool\n", "nvmeio._native.pool"),
    ],
)
def test_a_folder_is_a_module_too(text, name):
    assert [found for _, found in imported_by(text)] == [name]


def test_the_folder_of_users_modules_is_short():
    modules = [
        path
        for path in PACKAGE.iterdir()
        if path.suffix in {".py", ".pyx", ".pxd", ".pyi"} and not path.stem.startswith("_")
    ]
    assert 0 < len(modules) <= MODULES_MAX


def test_private_names_have_an_underscore_and_cython_has_one_folder():
    assert {path.parent for path in files(*PYX)} == {Path("src/nvmeio/_native")}
    for path in PACKAGE.iterdir():
        private = path.name.startswith("_") and not path.name.startswith("__")
        assert not (private and path.is_file()), path.name


def test_a_native_module_has_a_stub_exactly_if_python_imports_it():
    stubs = {name_of(path) for path in files("src/nvmeio/**/*.pyi")}
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in files(*PYTHON)]
    used = {name.removeprefix("nvmeio.") for text in texts for _, name in imported_by(text)}
    assert stubs == used & {name_of(path) for path in files(*PYX)}


def test_a_native_module_has_a_pxd_exactly_if_another_cimports_it():
    declared = {name_of(path) for path in files("src/nvmeio/_native/*.pxd")}
    used = set()
    for path in files(*CYTHON):
        text = re.sub(
            r"\bfrom [\w.]+ import\b", "", (ROOT / path).read_text(encoding="utf-8")
        )
        found = {name.removeprefix("nvmeio.") for _, name in imported_by_cython(text)}
        used |= found - {name_of(path)}
    assert declared == {name for name in used if name.startswith("_native.")}


def test_the_public_cimport_has_only_declarations():
    text = (PACKAGE / "libnvmeio.pxd").read_text(encoding="utf-8")
    begun = {line for line in text.splitlines() if re.match(r"\w", line)}
    assert {line.partition('"')[0] for line in begun if "cimport" not in line} == {
        "cdef extern from "
    }
    assert not re.search(r"\binline\b|\bcdef class\b", text)


def test_the_limits_equal_those_of_the_c_headers():
    text = (ROOT / "include" / "nvmeio" / "base.h").read_text(encoding="utf-8")
    found = re.findall(r"#define NVMEIO_(BLOCK_BYTES|QUEUE_DEPTH|WORKERS)_MAX (.+)", text)
    values = {
        name: eval(value.partition("/*")[0].replace("u", "")) for name, value in found
    }
    assert values == {
        "BLOCK_BYTES": LIMITS["block_size"],
        "QUEUE_DEPTH": LIMITS["queue_depth"],
        "WORKERS": LIMITS["workers"],
    }


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


def test_the_design_page_names_exactly_the_existing_files():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tree = text.split("## Tree")[1].split("\n```\n")[0]
    named = {*re.findall(r"\b_*\w+\.(?:pyx|py|c|pxd|pyi)\b", tree)}
    there = {path.name for path in [*tracked(), Path(__file__)]}
    assert named <= there, named - there
    ours = {path.name for path in files(*PYX, *PYTHON)} - {"__init__.py"}
    assert ours <= named, ours - named


# Pages in which maintainers look something up.
PAGES = (
    *("CONTRIBUTING.md", "docs/design.md", "docs/decisions.md"),
    "src/libnvmeio/README.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_files_named_on_pages_for_maintainers_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    text = text.replace("tests/test_x.py tests src/nvmeio/x", "").replace("Python.h", "")
    names = re.findall(
        r"(?<![\w./<>*-])((?:[\w-]+/)*[\w-]+\.(?:py\w?|pxd|c|h|md|toml))\b", text
    )
    there = [f"/{path}" for path in [*tracked(), Path("tests", Path(__file__).name)]]
    assert names
    assert [
        name for name in names if not any(path.endswith(f"/{name}") for path in there)
    ] == []


def test_the_design_page_can_be_read_in_15_minutes():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert 0 < len(text.split()) <= 15 * 270


def test_the_targets_listed_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = {*" ".join(re.findall(r"^([\w -]+):", rules, re.MULTILINE)).split()}
    listed = {*re.findall(r"`make ([\w-]+)", text)}
    assert listed <= made, listed - made
    patches = len(files("tests/mutants/*.patch"))
    assert f"plants the {patches} faults" in text


def test_one_read_passes_at_most_16_files():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    drawn = text.split("## One asynchronous read")[1].split("```")[1]
    # The picture also shows errors.pyx, for a failing read.
    passed = {*re.findall(r"\w+\.(?:pyx|c)\b", drawn)} - {"errors.pyx"}
    assert 10 < len(passed) <= 16
    assert f"These are {len(passed)} files" in text


def test_the_page_of_the_library_names_its_files():
    text = (ROOT / "src" / "libnvmeio" / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| file \| its job \|\n(.*?)\n\n", text, re.DOTALL)
    named = {*re.findall(r"`([\w*]+\.c)`", table)}
    stems = {path.name for path in files("src/libnvmeio/*.c")}
    assert all(any(fnmatch(name, each) for each in named) for name in stems), stems
    assert all(any(fnmatch(name, each) for name in stems) for each in named), named
