"""Samples of containers' seccomp profiles, and how they apply to a process.

The samples have the structure of the real ones, and refuse the same calls of io_uring. They
allow every other call of this machine, so that Python can run under them.
"""

import ctypes
import json
import os
import platform
import re
import shutil
import struct
import subprocess

__all__ = ["container_report", "docker_profile", "install_program", "program_of"]

RINGS = ("io_uring_setup", "io_uring_enter", "io_uring_register")
# Docker's condition on the flags of clone(2): no new namespaces.
NAMESPACES = 0x7E020000
# Docker's names of architectures.
MACHINES = {"x86_64": ("amd64", "X86_64"), "aarch64": ("arm64", "AARCH64")}
# Offsets in struct seccomp_data (seccomp(2)): the call's number and its first argument.
NUMBER_AT, ARGUMENTS_AT = 0, 16
# Opcodes of classic BPF (linux/bpf_common.h).
LOAD, JUMP_IF_EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06
ACTIONS = {"SCMP_ACT_ALLOW": 0x7FFF0000, "SCMP_ACT_ERRNO": 0x00050000}


def syscall_numbers():
    """Return the numbers of the system calls by name, from the compiler's headers."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    macros = subprocess.run(
        [compiler, "-E", "-dM", "-"],
        input="#include <sys/syscall.h>\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.findall(r"^#define __NR_(\w+) (\d+)$", macros, re.MULTILINE)
    return {name: int(number) for name, number in found}


def docker_profile():
    """Return a profile with the structure of Docker's default, as text."""
    architecture, name = MACHINES[platform.machine()]
    special = {"clone", "clone3", "mbind", "personality", *RINGS}
    allowed = sorted(syscall_numbers().keys() - special)
    no_namespaces = {"index": 0, "value": NAMESPACES, "op": "SCMP_CMP_MASKED_EQ"}
    admin = {"caps": ["CAP_SYS_ADMIN"]}
    rules = [
        {"names": allowed, "action": "SCMP_ACT_ALLOW"},
        {
            "names": ["personality"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": 0xFFFFFFFF, "op": "SCMP_CMP_EQ"}],
        },
        {
            "names": ["clone", "clone3"],
            "action": "SCMP_ACT_ALLOW",
            "includes": admin,
        },
        {
            "names": ["clone"],
            "action": "SCMP_ACT_ALLOW",
            "args": [no_namespaces],
            "excludes": admin,
        },
        {
            "names": ["clone3"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": 38,
            "excludes": admin,
        },
        {
            "names": ["mbind"],
            "action": "SCMP_ACT_ALLOW",
            "includes": {"caps": ["CAP_SYS_NICE"]},
        },
        {
            "names": [*RINGS],
            "action": "SCMP_ACT_ALLOW",
            "includes": {"arches": [f"not-{architecture}"]},
        },
    ]
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "archMap": [{"architecture": f"SCMP_ARCH_{name}", "subArchitectures": []}],
        "syscalls": rules,
    }
    return json.dumps(profile)


def container_report():
    """Return `crictl inspect`'s report of a container with the runtime's default profile.

    Its profile follows the runtime specification: it has the rules for this container only,
    without conditions.
    """
    profile = json.loads(docker_profile())
    architectures = [entry["architecture"] for entry in profile.pop("archMap")]
    rules = [
        {key: rule[key] for key in ("names", "action", "errnoRet", "args") if key in rule}
        for rule in profile.pop("syscalls")
        if is_for_a_container(rule)
    ]
    profile |= {"architectures": architectures, "syscalls": rules}
    spec = {"ociVersion": "1.2.0", "linux": {"seccomp": profile}}
    return json.dumps({"status": {"state": "RUNNING"}, "info": {"runtimeSpec": spec}})


def is_for_a_container(rule):
    """Return whether Docker's rule applies here, without additional capabilities."""
    wanted, unwanted = rule.get("includes", {}), rule.get("excludes", {})
    architecture = MACHINES[platform.machine()][0]
    arches = wanted.get("arches", [architecture])
    return not wanted.get("caps") and architecture in arches and "arches" not in unwanted


def program_of(profile):
    """Return the BPF program that a container runtime makes of a profile."""
    numbers = syscall_numbers()
    lines = [(LOAD, 0, 0, NUMBER_AT)]
    for rule in profile["syscalls"]:
        if is_for_a_container(rule):
            answer = answer_of(rule["action"], rule.get("errnoRet", 1))
            for name in rule["names"]:
                if name in numbers:
                    lines += lines_of(numbers[name], rule.get("args", []), answer)
    refusal = answer_of(profile["defaultAction"], profile["defaultErrnoRet"])
    return [*lines, (RETURN, 0, 0, refusal)]


def answer_of(action, error):
    """Return the filter's return value for an action."""
    return ACTIONS[action] | (error if action == "SCMP_ACT_ERRNO" else 0)


def lines_of(number, arguments, answer):
    """Return the BPF lines for one system call, with its condition on the argument."""
    if not arguments:
        return [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, answer)]
    (wanted,) = arguments
    lines = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * wanted["index"])]
    value = wanted["value"]
    if wanted["op"] == "SCMP_CMP_MASKED_EQ":
        lines.append((AND, 0, 0, value))
        value = wanted.get("valueTwo", 0)
    lines += [(JUMP_IF_EQUAL, 0, 1, value), (RETURN, 0, 0, answer)]
    lines.append((LOAD, 0, 0, NUMBER_AT))
    return [(JUMP_IF_EQUAL, 0, len(lines), number), *lines]


def install_program(lines):
    """Filter the system calls of this process from now on; that cannot be undone."""
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    filters = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, mode_filter, ctypes.c_char_p(header), 0, 0) == 0
