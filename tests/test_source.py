"""Imports and includes go down only, and the C library neither prints nor exits.

A complaint names the file, the line and the remedy.  FOLDERS and C_LAYERS are the only list
of what may use what; a new file needs no entry unless it uses something from above.
"""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "nvmeio"
LIBRARY = ROOT / "src" / "libnvmeio"

# For each folder of the package, the folders that it may import and cimport.  "" stands
# for the modules in no folder, _libnvmeio for the C library as Cython sees it.
# Four files of _native/, which are listed here, are below the rest of it, so that
# _config/, _files/, _memory/ and _publish.names, which is below _config/, may use them.
FOLDERS = {
    "_libnvmeio": set(),
    "_arguments": set(),
    "_events": set(),
    "_native.settings": {"_libnvmeio", "_arguments"},
    "_native.descriptor": {"_arguments"},
    "_native.errors": {"_libnvmeio"},
    "_native.system_calls": {"_libnvmeio", "_native.errors"},
    "_files": {"_arguments", "_events", "_native.descriptor"},
    "_memory": {"_arguments", "_events", "_native.descriptor"},
    "_publish.names": {"_files", "_native.descriptor", "_native.system_calls"},
    "_config": {"_arguments", "_events", "_files", "_native.settings", "_publish.names"},
    "_native": {"_libnvmeio", "_arguments", "_events", "_files", "_memory", "_config"},
    "_publish": {"_arguments", "_events", "_files", "_native"},
    "_arrays": {"_arguments", "_files", "_memory", "_native"},
    "deepspeed": {
        *("_arguments", "_config", "_events", "_files", "_libnvmeio", "_native"),
        "_publish",
    },
    "": {
        *("_arguments", "_arrays", "_config", "_events", "_files", "_memory", "_native"),
        *("_libnvmeio", "_publish", "deepspeed"),
    },
    "_tensors": {"_arguments", "_arrays", "_files", "_memory", "_native"},
    "_streams": {"", "_arguments", "_files", "_memory", "_native"},
    "_safetensors": {
        *("", "_publish", "_streams", "_tensors"),
        *("_arguments", "_files", "_memory", "_native"),
    },
    "safetensors": {
        *("", "_publish", "_safetensors", "_streams", "_tensors"),
        *("_arguments", "_arrays", "_events", "_files", "_memory", "_native"),
    },
    "torch": {
        *("", "_publish", "_safetensors", "_streams", "_tensors"),
        *("checkpoint", "safetensors"),
        *("_arguments", "_arrays", "_events", "_files", "_memory", "_native"),
    },
    "checkpoint": {
        *("", "_publish", "_safetensors", "_streams", "_tensors"),
        *("_arguments", "_events", "_files", "_memory", "_native"),
    },
    "_cli": {
        *("", "checkpoint", "deepspeed", "safetensors"),
        *("_arguments", "_arrays", "_config", "_files", "_native", "_safetensors"),
        "_tensors",
    },
}

# The only places that may import a package that need not be installed, or start threads of
# OpenMP, and what to do instead.
ONLY_IN = {
    "torch": (
        (
            *("torch/*", "_cli/workloads.py", "safetensors/torch.py"),
            *("safetensors/_sharing.py", "_tensors/dtypes.py"),
        ),
        "move it to nvmeio/torch/",
    ),
    "deepspeed": (
        ("deepspeed/builders.py",),
        "use import_module() in a function of nvmeio/deepspeed/builders.py",
    ),
    "cython.parallel": (
        ("_native/copy.pyx",),
        "OpenMP hangs in forked children, so call the copies of nvmeio/_native/copy.pyx",
    ),
}

# What few modules may do, so that there is one scheme of temporary names, one clean-up and
# one reader of JSON; and what to do instead.
NOT_IN_PYTHON = {
    r"\bos\.(rename|renames|replace|link|symlink)\(|\bshutil\.(move|copy\w*)\(": (
        ("_publish/*", "_files/paths.py", "_native/*"),
        "call new_contents(), rename() or Unfinished of nvmeio/_publish/",
    ),
    r"\b(mkstemp|mkdtemp|NamedTemporaryFile|TemporaryDirectory)\b": (
        ("_cli/*",),
        "call temporary_name() or unnamed_file() of nvmeio/_publish/",
    ),
    # Text of nvmeio itself and of fio, and values of samples, which are the program's.
    r"\bjson\.loads?\((?!.*\bunique\))": (
        (
            *(
                "_arguments/*",
                "_config/*",
                "_cli/fio.py",
                "_native/*",
                "checkpoint/_stored.py",
            ),
            "torch/data/_mds_encodings.py",
        ),
        "call parse_json(), which refuses duplicate keys",
    ),
}

# The layers of the C library above the lowest, from below.  A file that none of these
# patterns matches is in the lowest layer.
C_LAYERS = (
    {"engine", "engine_*"},
    {"request"},
    {"transfer", "gather", "many", "block", "slow", "latency"},
    {"queue"},
    {"worker"},
    {"handle", "wait"},
)
# What the C library must not contain, and what to do instead.
NOT_IN_C = {
    r"\b([vd]?f?printf|f?puts|putchar|perror|errx?|warnx?)\s*\(": (
        "the library prints nothing: return -errno, and let the caller report it"
    ),
    r"\b(abort|_*exit|_Exit)\s*\(": "the library ends no process: return -errno",
    r"#\s*include\s*[<\"](Python|structmember)\.h": (
        "the library knows no Python: move it to src/nvmeio/_native/"
    ),
    # pthread_cond_signal(3) of glibc 2.25 to 2.40 may wake no thread (bug 25847).
    r"\bpthread_cond_signal\b": "glibc may wake no thread by it: use nvmeio_waiter_wake()",
}


def layer_of(name):
    """Return the key of FOLDERS for a module, by its name below ``nvmeio.``."""
    parts = name.split(".")
    return next((key for key in (".".join(parts[:2]), parts[0]) if key in FOLDERS), "")


def name_of(path):
    """Return the name of a module below ``nvmeio.``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def modules():
    """Return the Python and Cython files of the package."""
    return sorted(path for path in PACKAGE.rglob("*.p*") if path.suffix in SUFFIXES)


SUFFIXES = {".py", ".pyx", ".pxd"}


def imports_in(text):
    """Yield the line number and name of each module that Python or Cython code imports."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        yield from imports_in_cython(text)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, module_of(each.name)) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                yield node.lineno, module_of(node.module, each.name)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            named = getattr(node.args[0], "value", None)
            if called in ("import_module", "__import__") and isinstance(named, str):
                yield node.lineno, module_of(named)


def imports_in_cython(text):
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
                yield number, module_of(*([found[1], first] if found[1] else [first]))


def module_of(module, name=None):
    """Return the imported module; a name imported from a folder may be one."""
    parts = module.split(".")
    if parts[0] != "nvmeio":
        return module
    if name is not None and any(
        PACKAGE.joinpath(*parts[1:], name).with_suffix(suffix).exists()
        for suffix in ("", *SUFFIXES)
    ):
        parts.append(name)
    folder = PACKAGE.joinpath(*parts[1:]).is_dir()
    return ".".join([*parts, "__init__"] if folder else parts)


def imports_of(path, text=None):
    """Yield the line number and name of what a module imports, unless only on demand."""
    text = path.read_text(encoding="utf-8") if text is None else text
    if path == PACKAGE / "__init__.py":
        # It imports public modules on first access, and for type checkers.
        lines = r"(?m)^( *)(.*import_module.*|from nvmeio import (\w+) as \3)$"
        text = re.sub(lines, r"\1pass", text)
    yield from imports_in(text)


def wrong_imports(path, text=None):
    """Yield a complaint for each import that goes up, or that belongs elsewhere."""
    own = "_cli" if path.stem == "__main__" else layer_of(name_of(path))
    place = path.relative_to(PACKAGE).as_posix()
    for number, name in imports_of(path, text):
        where = (
            f"{path.relative_to(ROOT)}:{number} imports {name.removesuffix('.__init__')}"
        )
        top, _, rest = name.partition(".")
        # A folder may use the modules of its own that FOLDERS places below it.
        used = {layer_of(rest), layer_of(rest).partition(".")[0]}
        if top == "nvmeio" and rest and not used & {own, *FOLDERS[own]}:
            yield (
                f"{where}, which is not below it; move the code up, or what it needs "
                f"into a folder in FOLDERS[{own!r}] of tests/test_source.py"
            )
        for package, (places, remedy) in ONLY_IN.items():
            wanted = f"{name}.".startswith(f"{package}.")
            if wanted and not any(fnmatch(place, each) for each in places):
                yield f"{where}; {remedy}"


def wrong_calls(path, text=None):
    """Yield a complaint for each call that belongs elsewhere."""
    text = path.read_text(encoding="utf-8") if text is None else text
    place = path.relative_to(PACKAGE).as_posix()
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, (places, remedy) in NOT_IN_PYTHON.items():
            found = re.search(pattern, line)
            if found and not any(fnmatch(place, each) for each in places):
                yield f"{path.relative_to(ROOT)}:{number} has {found[0]}; {remedy}"


def c_layer_of(name):
    """Return the layer of a C file, from 0, by its name without `_internal` and suffix."""
    stem = name.partition(".")[0].removesuffix("_internal")
    for layer, members in enumerate(C_LAYERS, 1):
        if any(fnmatch(stem, member) for member in members):
            return layer
    return 0


def wrong_in_c(path, text=None):
    """Yield a complaint for each wrong include or call of a C file."""
    text = path.read_text(encoding="utf-8") if text is None else text
    where = path.relative_to(ROOT)
    own = c_layer_of(path.name)
    # Blank comments and strings, but not the names of headers.
    code = re.sub(
        r'/\*.*?\*/|//[^\n]*|(?<!include )"(?:\\.|[^"\\\n])*"',
        lambda found: re.sub(r"[^\n]", " ", found[0]),
        text,
        flags=re.DOTALL,
    )
    for number, line in enumerate(code.splitlines(), 1):
        for pattern, remedy in NOT_IN_C.items():
            if found := re.search(pattern, line):
                yield f"{where}:{number} has {found[0].strip('( ')}; {remedy}"
        if found := re.search(r'#\s*include\s*"([^"]+)"', line):
            header = found[1]
            between = path.name.startswith("engine_") and header.startswith("engine_")
            if c_layer_of(header) > own or between:
                yield (
                    f"{where}:{number} includes {header}, which is not below it; move the "
                    "code up, or put the file into C_LAYERS of tests/test_source.py"
                )


def test_imports_go_down_only():
    found = [wrong for path in modules() for wrong in wrong_imports(path)]
    assert not found, "\n".join(found)


def test_the_c_library_includes_downward_and_neither_prints_nor_exits():
    paths = [*LIBRARY.glob("*.[ch]"), *ROOT.glob("include/nvmeio/*.h")]
    assert len(paths) > 40
    found = [wrong for path in sorted(paths) for wrong in wrong_in_c(path)]
    assert not found, "\n".join(found)


def test_files_are_renamed_and_json_is_read_in_few_places():
    found = [wrong for path in modules() for wrong in wrong_calls(path)]
    assert not found, "\n".join(found)
    (found,) = wrong_calls(PACKAGE / "torch/new.py", "\nos.replace(part, whole)\n")
    assert "torch/new.py:2 has os.replace(; call new_contents()" in found


def test_packages_leave_each_others_private_modules_alone():
    found = []
    for path in modules():
        own = layer_of(name_of(path))
        for _, name in imports_of(path):
            _, top, *rest = name.split(".") if name.startswith("nvmeio.") else ("", "")
            private = [each for each in rest if re.match("_[a-z]", each)]
            if private and not top.startswith("_") and top != own:
                found.append(f"{path.relative_to(ROOT)} imports {name}")
    assert len(set(found)) <= 4, "\n".join(found)


def test_every_folder_has_a_layer():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    missing = folders - FOLDERS.keys()
    assert not missing, f"add {missing} to FOLDERS of tests/test_source.py"
    gone = {name for name in FOLDERS if name and "." not in name} - folders - {"_libnvmeio"}
    assert not gone, f"remove {gone} from FOLDERS of tests/test_source.py"


def assert_no_cycle(uses, remedy):
    """Assert that something can be placed on what is placed already, until all is."""
    placed = set()
    while len(placed) < len(uses):
        free = {name for name, used in uses.items() if used <= placed} - placed
        assert free, f"a cycle among {sorted(uses.keys() - placed)}; {remedy}"
        placed |= free


def test_no_imports_form_a_cycle():
    assert_no_cycle(FOLDERS, "remove one of these from the others' sets in FOLDERS")
    names = {name_of(path) for path in modules()}
    uses = {name: set() for name in names}
    for path in modules():
        found = {name.removeprefix("nvmeio.") for _, name in imports_of(path)}
        uses[name_of(path)] |= found & names - {name_of(path)}
    assert_no_cycle(uses, "move what several of them need into a module below them")


@pytest.mark.parametrize(
    ("place", "text", "words"),
    [
        (
            "_memory/new.py",
            "from nvmeio import (\n    files)\n",
            "new.py:1 imports nvmeio.fi",
        ),
        ("_memory/new.py", "if 1: from nvmeio import \\\n    files\n", "nvmeio.files"),
        ("_memory/new.py", "import_module('nvmeio.torch')\n", "nvmeio.torch, which is not"),
        ("_memory/new.pyx", "cdef x\ncimport nvmeio._native.pool\n", "new.pyx:2 imports"),
        ("_memory/new.pyx", "cdef x\nfrom nvmeio._native cimport (a,\n pool)", "._native"),
        (
            "files.py",
            "def f():\n    import torch.cuda\n",
            "files.py:2 imports torch.cuda; mo",
        ),
        ("_native/pool.pyx", "cdef x\nfrom cython.parallel cimport prange", "pool.pyx:2"),
        ("torch/new.py", "import torch, numpy\nfrom nvmeio.checkpoint import x\n", None),
        ("_native/new.pyx", "cdef x\nfrom nvmeio._native.pool cimport y\n", None),
    ],
)
def test_a_complaint_names_the_import_and_the_remedy(place, text, words):
    found = [*wrong_imports(PACKAGE / place, text)]
    assert (words in found[0]) if words else (found == [])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("new.c", '\n#include "queue.h"\n', "new.c:2 includes queue.h, which is not below"),
        ("engine_new.c", '#include "engine_uring.h"\n', "engine_new.c:1 includes"),
        ("new.c", "#include <Python.h>\n", "move it to src/nvmeio/_native/"),
        ("new.c", 'printf("%d", 1);\n', "new.c:1 has printf; the library prints nothing"),
        ("new.c", "    abort();\n", "new.c:1 has abort; the library ends no process"),
        ("new.c", '/* never\n abort() */ snprintf(a, 9, "puts()");\n', None),
        ("queue.c", '#include "request_internal.h"\n#include "new.h"\n', None),
    ],
)
def test_a_complaint_names_the_line_of_c_and_the_remedy(name, text, words):
    found = [*wrong_in_c(LIBRARY / name, text)]
    assert (words in found[0]) if words else (found == [])
