"""The filter: its numbers are the kernel's, and its jumps end where they should."""

from __future__ import annotations

import functools
import os
import re
import struct
from pathlib import Path

import pytest

from rollouts.sandboxes import seccomp

NUMBERS = {
    **seccomp._ALWAYS,
    **seccomp._ALONE,
    "socket": seccomp._SOCKET,
    "clone": seccomp._CLONE,
    "clone3": seccomp._CLONE3,
    "prlimit64": seccomp._PRLIMIT,
    "kill": seccomp._KILL,
    "tgkill": seccomp._TGKILL,
    "fcntl": seccomp._FCNTL,
    "ioctl": seccomp._IOCTL,
    **seccomp._OF_A_PROCESS,
    **{name: numbers for name, (_, numbers) in seccomp._OF_PROCESSES.items()},
}


@pytest.mark.parametrize(
    ("column", "header"), [(0, "*/asm/unistd_64.h"), (1, "asm-generic/unistd.h"), (2, "*/asm/unistd_32.h")]
)
def test_numbers_are_the_kernels(column: int, header: str) -> None:
    """As its headers have them, where they are installed."""
    path = next(Path("/usr/include").glob(header), None)
    if path is None:
        pytest.skip(f"no {header} here")
    found = re.findall(r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
    known = {name: int(number) for name, number in found}
    ours = {name: numbers[column] for name, numbers in NUMBERS.items() if len(numbers) > column}
    assert {name: number for name, number in ours.items() if known.get(name, number) != number} == {}
    assert len(known.keys() & ours.keys()) > (40 if column < 2 else 6)


def run(program: bytes, machine: int, number: int, argument: int = 0, second: int = 0) -> int:
    """The answer of a filter, by the kernel's rules for the few steps that ours has."""
    steps = list(struct.iter_unpack("=HBBI", program))
    place, value = 0, 0
    while True:
        code, yes, no, operand = steps[place]
        place += 1
        if code == seccomp._RETURN:
            return operand
        if code == seccomp._LOAD:
            value = {0: number, 4: machine, 16: argument, 24: second}[operand]
            continue
        if code == seccomp._AND:
            value &= operand
            continue
        true = {
            seccomp._EQUAL: value == operand,
            seccomp._AT_LEAST: value >= operand,
            seccomp._ANY_BIT: bool(value & operand),
        }[code]
        place += yes if true else no


PASS, NO, KILL = seccomp._ALLOW, seccomp._ERROR | 1, seccomp._KILL_PROCESS


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("alone", [True, False])
def test_what_is_refused_and_what_is_not(machine: str, alone: bool) -> None:
    """On both machines, call by call."""
    column = list(seccomp._ARCHITECTURES).index(machine)
    architecture = seccomp._ARCHITECTURES[machine]
    program = seccomp._program(column, architecture, alone)

    def verdict(name: str, argument: int = 0, second: int = 0) -> int:
        return run(program, architecture, NUMBERS[name][column], argument, second)

    for name in seccomp._ALWAYS:
        assert NUMBERS[name][column] < 0 or verdict(name) == NO, name
    for name in seccomp._ALONE:
        assert NUMBERS[name][column] < 0 or verdict(name) == (NO if alone else PASS), name
    assert [verdict("socket", family) for family in (1, 2, 10, 16, 40)] == (
        [NO] * 5 if alone else [PASS] * 3 + [NO] * 2
    )
    assert verdict("clone", 0x00010F00) == PASS
    assert verdict("clone", 0x10000011) == NO
    assert verdict("clone", 17) == (NO if alone else PASS)
    assert verdict("clone3") == seccomp._ERROR | 38
    for name in ("kill", "tgkill"):
        assert (verdict(name, os.getpid()), verdict(name, 1)) == (PASS, NO if alone else PASS)
    assert (verdict("prlimit64", 0), verdict("prlimit64", 7)) == (PASS, NO if alone else PASS)
    owner, signal, owner_ex, duplicate = 8, 10, 15, 0
    assert [verdict("fcntl", 5, command) for command in (owner, signal, owner_ex, duplicate)] == [NO] * 3 + [PASS]
    assert [verdict("ioctl", 5, request) for request in (0x8901, 0x8902, 0x5413)] == [NO] * 2 + [PASS]
    assert run(program, architecture, 63 if column else 0) == PASS  # read
    assert run(program, 0x40000003, 4) == KILL  # another machine
    if machine == "x86_64":
        assert run(program, architecture, 0x40000000 | 41) == KILL


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_no_call_changes_the_first_process(machine: str) -> None:
    """Also with the numbers of the 32-bit programs of the machine; the same calls for others are not touched."""
    program, column = seccomp._protection(machine), list(seccomp._ARCHITECTURES).index(machine)
    kinds = [(seccomp._ARCHITECTURES[machine], column, 0), (seccomp._ALSO[machine], column + 2, 0)]
    if machine == "x86_64":
        kinds.append((kinds[0][0], column, 0x40000000))  # x32
    for architecture, number, bit in kinds:
        for numbers in seccomp._OF_A_PROCESS.values():
            said = [run(program, architecture, numbers[number] | bit, process, 7) for process in (1, 0, 2, 1 << 16)]
            assert said == [NO, PASS, PASS, PASS]
        for of_user, numbers in seccomp._OF_PROCESSES.values():
            call = functools.partial(run, program, architecture, numbers[number] | bit)
            assert [call(0, 1), call(0, 0), call(0, 2), call(of_user, 0), call(of_user, 7)] == [NO, PASS, PASS, NO, NO]
        assert run(program, architecture, (63 if number == 1 else 3) | bit, 1) == PASS


@pytest.mark.parametrize("name", ["sem", "shm", "msg", "inotify_", "fanotify_"])
def test_what_outlives_or_watches_is_refused(name: str) -> None:
    """Hardening 19: semaphores, shared memory and queues outlive their process; watches name the files of others."""
    calls = {"sem": "get op ctl timedop", "shm": "get at ctl", "msg": "get snd rcv ctl"}
    calls |= {"inotify_": "init init1 add_watch", "fanotify_": "init mark"}
    assert {f"{name}{call}" for call in calls[name].split()} <= seccomp._ALWAYS.keys()
