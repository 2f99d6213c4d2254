"""Seccomp filters: one denies system calls that untrusted Python does not need, one protects process 1 of a namespace.

Invariant: an unknown machine gets no filter; for untrusted Python, system calls of another architecture kill the
process. A denied call fails with ``EPERM``, so the program continues.

The filters are written by hand (sixty lines) because no maintained Python binding of libseccomp exists.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from rollouts.sandboxes.kernel import MACHINES

__all__ = ["forbid_syscalls", "protect_first_process"]

_ABSENT = -1

_ALWAYS: dict[str, tuple[int, int]] = {
    # other processes, and the kernel itself
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "iopl": (172, _ABSENT),
    "ioperm": (173, _ABSENT),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # bypasses of the limits: io_uring, and memory outside the address space
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    # objects of System V, which outlive the process and belong to the machine
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    # watches, which report names of files that others make
    "inotify_init": (253, _ABSENT),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
}

_ALONE: dict[str, tuple[int, int]] = {
    # without namespaces: no other processes, no change of group, no file attributes (Landlock does not check them)
    "fork": (57, _ABSENT),
    "vfork": (58, _ABSENT),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "chmod": (90, _ABSENT),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, _ABSENT),
    "lchown": (94, _ABSENT),
    "fchownat": (260, 54),
    "utime": (132, _ABSENT),
    "utimes": (235, _ABSENT),
    "futimesat": (261, _ABSENT),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
}

_SOCKET, _CLONE, _CLONE3, _PRLIMIT, _KILL, _TGKILL = (41, 198), (56, 220), (435, 435), (302, 261), (62, 129), (234, 131)
_FCNTL, _IOCTL = (72, 25), (16, 29)
_SET_OWNER = {_FCNTL: (8, 10, 15), _IOCTL: (0x8901, 0x8902)}
"""F_SETOWN, F_SETSIG and F_SETOWN_EX; FIOSETOWN and SIOCSPGRP. They make the kernel send a signal to any process."""
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_NEW_NAMESPACE, _THREAD = 0x7E020000, 0x00010000

_OF_A_PROCESS: dict[str, tuple[int, int, int, int]] = {
    "prlimit64": (302, 261, 340, 369),
    "sched_setaffinity": (203, 122, 241, 241),
    "sched_setattr": (314, 274, 351, 380),
    "sched_setparam": (142, 118, 154, 154),
    "sched_setscheduler": (144, 119, 156, 156),
}
"""Calls that change the process of the first argument, of the same user; for x86_64, aarch64, i386 and arm."""
_OF_PROCESSES: dict[str, tuple[int, tuple[int, int, int, int]]] = {
    "setpriority": (2, (141, 140, 97, 97)),
    "ioprio_set": (3, (251, 30, 289, 314)),
}
"""Such calls with the process in the second argument, and the value of the first that means all of a user."""
_ALSO = {"x86_64": 0x40000003, "aarch64": 0x40000028}
"""The 32-bit architecture of a machine, whose numbers are two columns further."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _ERROR, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE = 0, 4
_PR_SET_SECCOMP, _FILTER = 22, 2


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


_PASS = _step(_RETURN, _ALLOW)
_REFUSE = _step(_RETURN, _ERROR | errno.EPERM)


def _when(number: int, *steps: bytes) -> bytes:
    """``steps`` for one system call; they end in a return."""
    return b"" if number == _ABSENT else _step(_EQUAL, number, no=len(steps)) + b"".join(steps)


def _argument(index: int) -> bytes:
    return _step(_LOAD, 16 + 8 * index)  # the lower 32 bits on a little-endian machine


def _program(column: int, architecture: int, alone: bool) -> bytes:
    me = os.getpid()
    steps = _step(_LOAD, _ARCHITECTURE) + _step(_EQUAL, architecture, yes=1) + _step(_RETURN, _KILL_PROCESS)
    steps += _step(_LOAD, _NUMBER)
    if architecture == _ARCHITECTURES["x86_64"]:  # the x32 ABI
        steps += _step(_AT_LEAST, 0x40000000, no=1) + _step(_RETURN, _KILL_PROCESS)
    for numbers in (_ALWAYS | _ALONE if alone else _ALWAYS).values():
        steps += _when(numbers[column], _REFUSE)
    steps += _when(
        _CLONE3[column], _step(_RETURN, _ERROR | errno.ENOSYS)
    )  # a filter cannot read its flags; clone's it can
    for call, requests in _SET_OWNER.items():
        owners = [_step(_EQUAL, request, yes=len(requests) - 1 - i) for i, request in enumerate(requests[:-1])]
        steps += _when(call[column], _argument(1), *owners, _step(_EQUAL, requests[-1], no=1), _REFUSE, _PASS)
    if alone:
        steps += _when(_SOCKET[column], _REFUSE)
        steps += _when(_CLONE[column], _argument(0), _step(_ANY_BIT, _THREAD, no=1), _PASS, _REFUSE)
        steps += _when(_PRLIMIT[column], _argument(0), _step(_EQUAL, 0, no=1), _PASS, _REFUSE)
        for call in (_KILL, _TGKILL):
            steps += _when(call[column], _argument(0), _step(_EQUAL, me, no=1), _PASS, _REFUSE)
    else:
        families = [_step(_EQUAL, family, yes=3 - i) for i, family in enumerate((_AF_UNIX, _AF_INET))]
        last = _step(_EQUAL, _AF_INET6, yes=1)
        steps += _when(_SOCKET[column], _argument(0), *families, last, _REFUSE, _PASS)
        steps += _when(_CLONE[column], _argument(0), _step(_ANY_BIT, _NEW_NAMESPACE, no=1), _REFUSE, _PASS)
    return steps + _PASS


def forbid_syscalls(*, alone: bool) -> bool:
    """Install the filter for this process and its children. Requires ``no_new_privileges``.

    Args:
        alone: without namespaces: also deny new processes, sockets, and signals to other processes.

    Returns:
        Whether the filter is installed; ``False`` on an unknown machine.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return False
    return _install(_program(MACHINES[machine], _ARCHITECTURES[machine], alone))


def protect_first_process() -> None:
    """Deny this process and its children to change the limits and the priority of process 1 of their namespace.

    The kernel allows it to every process of the same user. Requires ``no_new_privileges``.

    Raises:
        OSError: the machine is not known, or its kernel has no filters.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES or not _install(_protection(machine)):
        raise OSError(f"process 1 cannot be protected: no seccomp filter on {machine}")


def _protection(machine: str) -> bytes:
    column = MACHINES[machine]
    wide, narrow = (_calls_of_the_first(each) for each in (column, column + 2))
    steps = _step(_LOAD, _ARCHITECTURE) + _step(_EQUAL, _ALSO[machine], no=1 + len(narrow) // 8)
    steps += _step(_LOAD, _NUMBER) + narrow
    if machine == "x86_64":  # the x32 ABI has the same numbers, with a bit
        return steps + _step(_LOAD, _NUMBER) + _step(_AND, 0xFFFFFFFF ^ 0x40000000) + wide
    return steps + _step(_LOAD, _NUMBER) + wide


def _calls_of_the_first(column: int) -> bytes:
    steps = b""
    for numbers in _OF_A_PROCESS.values():
        steps += _when(numbers[column], _argument(0), _step(_EQUAL, 1, no=1), _REFUSE, _PASS)
    for of_user, numbers in _OF_PROCESSES.values():
        is_user = _step(_EQUAL, of_user, yes=2)
        steps += _when(numbers[column], _argument(0), is_user, _argument(1), _step(_EQUAL, 1, no=1), _REFUSE, _PASS)
    return steps + _PASS


def _install(program: bytes) -> bool:
    steps = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    filter_program = Program(len(program) // 8, ctypes.addressof(steps))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(filter_program), 0, 0) == 0)
