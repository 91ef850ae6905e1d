"""Python processes that start as forks of one that has imported torch and the package, which is
most of the CPU time of a short process.

    tests (adopt orphans)
      └── zygote           imports, then waits
            └── forks twice; the one in between ends, so that the tests adopt the process

A process starts so only where the environment is the zygote's; any other starts as ever.  Whether
a process finds its imports and its environment is shown where nobody asks for a warm start.
"""

import ctypes
import fcntl
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any

MODULES = frozenset({"paceline.llm.rank_process"})  # a command `python -m` of them starts warm
_OF_A_TEST = "PYTEST_CURRENT_TEST"  # the environment's only part that no process reads
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_MOST_FDS = 4096


@contextmanager
def warm_starts() -> Iterator[type[subprocess.Popen]]:
    """A `Popen` that starts MODULES warm; its zygote starts with the first of them."""
    zygotes: list[_Zygote] = []

    def zygote() -> _Zygote:
        if not zygotes:
            zygotes.append(_Zygote())
        return zygotes[0]

    try:
        yield _popen_of(zygote)
    finally:
        for each in zygotes:
            each.close()


def _popen_of(zygote: "Callable[[], _Zygote]") -> type[subprocess.Popen]:
    cold_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    names = signature(cold_start)

    class WarmPopen(subprocess.Popen):
        def _execute_child(self, *args: Any) -> None:
            asked = names.bind(self, *args).arguments
            command = list(map(str, asked["args"]))
            is_ours = command[:2] == [sys.executable, "-m"] and command[2] in MODULES
            if not is_ours or asked["env"] is not None or not zygote().is_of(os.environ):
                cold_start(self, *args)
                return
            pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            fds = {number: number if fd == -1 else fd for number, fd in enumerate(pipes)}
            fds |= {fd: fd for fd in asked["pass_fds"]}
            self.pid = zygote().start(command[2:], fds, is_leader=asked["start_new_session"])
            self._child_created = True
            both_ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[name] for name in both_ends))

    return WarmPopen


class _Zygote:
    """Owns the process that is forked."""

    def __init__(self) -> None:
        self._environment = _environment(os.environ)
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, str(Path(__file__)), str(fd)]
            self._process = subprocess.Popen(command, pass_fds=(fd,), start_new_session=True)

    def is_of(self, environment: Mapping[str, str]) -> bool:
        return self._environment == _environment(environment)

    def start(self, words: list[str], fds: Mapping[int, int], *, is_leader: bool) -> int:
        """The id of a process that runs a module, a child of this one.  words: the module and its
        arguments; fds: the number of each there -> here; is_leader: of a session of its own."""
        asked = {"words": words, "cwd": os.getcwd(), "fds": list(fds), "is_leader": is_leader}
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        assert prctl(_ADOPT_ORPHANS, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
        try:
            socket.send_fds(self._end, [json.dumps(asked).encode()], list(fds.values()))
            return int(self._end.recv(64))
        finally:
            prctl(_ADOPT_ORPHANS, 0, 0, 0, 0)

    def close(self) -> None:
        self._end.close()
        self._process.wait()


def _environment(of: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in of.items() if name != _OF_A_TEST}


def _next_words(end: socket.socket) -> list[str]:
    """The zygote's life.  Returns in each process that it starts, with what that runs."""
    while True:
        data, fds, _, _ = socket.recv_fds(end, 1 << 17, 16)
        if not data:
            sys.exit()
        (told, tell), (gate, open_gate) = os.pipe(), os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(tell, b"%d" % child)
                os._exit(0)
            os.read(gate, 1)  # it has been adopted
            end.detach()  # its number may soon be another file's
            return _take_over(json.loads(data), fds)
        os.waitpid(between, 0)
        end.send(os.read(told, 64))
        os.write(open_gate, b"\0")
        for fd in (*fds, told, tell, gate, open_gate):
            os.close(fd)


def _take_over(asked: Mapping[str, Any], fds: list[int]) -> list[str]:
    """Be the process that is asked for: its files, its session, its folder."""
    out_of_the_way = [fcntl.fcntl(fd, fcntl.F_DUPFD, _MOST_FDS // 2) for fd in fds]
    for fd, number in zip(out_of_the_way, asked["fds"], strict=True):
        os.dup2(fd, number)
    for number in {*range(3, _MOST_FDS)} - {*asked["fds"]}:
        with suppress(OSError):
            os.close(number)
    if asked["is_leader"]:
        os.setsid()
    os.chdir(asked["cwd"])
    sys.path[0] = asked["cwd"]
    words: list[str] = asked["words"]
    return words


if __name__ == "__main__":
    import paceline.llm.ranks  # with torch, and nearly all that a rank runs

    assert paceline.llm.ranks
    gc.collect()
    gc.freeze()
    sys.argv = _next_words(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
