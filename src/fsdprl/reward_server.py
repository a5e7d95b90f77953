"""The far side of grading.py: a clean fork server, and the reward processes that it forks.

The server is a fresh interpreter without threads, process groups or accelerators. It imports a
reward's module once, so that a reward process, or its replacement after a kill, starts in
milliseconds. Messages are msgpack over socket pairs that only the parent and the child hold.
"""

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import importlib.util
import os
import random
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec

from fsdprl.errors import UserError
from fsdprl.functions import FunctionRef, resolve
from fsdprl.reward_calls import Outcome, grade_chunk, in_order
from fsdprl.sample import Sample

RECIPE_MODULE = "fsdprl_recipe"
"""Name under which the recipe runs here: its `if __name__ == "__main__"` stays false."""

_HEADER = struct.Struct("<I")
_warm: set[Any] = set()


class Recipe(msgspec.Struct):
    """Where the parent's `__main__` came from: `python FILE` or `python -m MODULE`."""

    path: str = ""
    module: str = ""


class Order(msgspec.Struct):
    """To the server. fork: make a reward process on the socket that comes along; load: import a
    function's module; end: kill a process and tell how it died."""

    verb: str
    pid: int = 0
    ref: FunctionRef | None = None
    recipe: Recipe | None = None


class Answer(msgspec.Struct):
    """From the server: the new process's id or the ended one's exit code, or what went wrong."""

    code: int = 0
    error: str = ""


class Job(msgspec.Struct):
    """To a reward process: a chunk of samples."""

    ref: FunctionRef
    samples: list[Sample]
    timeout_s: float


_order = msgspec.msgpack.Decoder(Order)
_answer = msgspec.msgpack.Decoder(Answer)
_job = msgspec.msgpack.Decoder(Job)
_encode = msgspec.msgpack.Encoder().encode


def send(sock: socket.socket, message: Any) -> None:
    """Write one framed message."""
    payload = _encode(message)
    sock.sendall(_HEADER.pack(len(payload)) + payload)


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """Read one framed message; EOFError when the other side is gone."""
    (length,) = _HEADER.unpack(_exactly(sock, _HEADER.size))
    return decoder.decode(_exactly(sock, length))


def ask(sock: socket.socket, order: Order, pass_fd: int | None = None) -> Answer:
    """Give the server an order and wait for its answer. EOFError or OSError if it is gone."""
    payload = _encode(order)
    header = _HEADER.pack(len(payload))
    if pass_fd is None:
        sock.sendall(header)
    else:
        socket.send_fds(sock, [header], [pass_fd])
    sock.sendall(payload)
    return receive(sock, _answer)


def split_frames(buffer: bytearray) -> list[bytes]:
    """Take the whole messages off the front of a receive buffer."""
    frames, start = [], 0
    while len(buffer) - start >= _HEADER.size:
        end = start + _HEADER.size + _HEADER.unpack_from(buffer, start)[0]
        if end > len(buffer):
            break
        frames.append(bytes(buffer[start + _HEADER.size : end]))
        start = end
    del buffer[:start]
    return frames


def serve(control_fd: int, parent: int) -> None:
    """The server's life: obey orders until the parent is gone, then take the children along."""
    _die_with(parent)
    faulthandler.enable()
    # Ctrl-C and SIGTERM to the whole job are the rank's to handle; a handler that does nothing,
    # because SIG_IGN would be inherited by programs that a reward starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _do_nothing)
    control = socket.socket(fileno=control_fd)
    children: set[int] = set()
    try:
        while True:
            header, fds, _, _ = socket.recv_fds(control, _HEADER.size, 1)
            if not header:
                return
            header += _exactly(control, _HEADER.size - len(header))
            order = _order.decode(_exactly(control, _HEADER.unpack(header)[0]))
            if order.verb == "fork":
                answer = Answer(code=_fork(control, fds[0]))
                children.add(answer.code)
            elif order.verb == "end":
                answer = Answer(code=_end(order.pid))
                children.discard(order.pid)
            else:
                answer = _load(order)
            send(control, answer)
    except (EOFError, OSError):
        return
    finally:
        for pid in children:
            _end(pid)


def _fork(control: socket.socket, fd: int) -> int:
    server = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(fd)
        # Both sides set the group, so that it exists whoever runs first.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        _die_with(server)
        control.close()
        random.seed()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # out of memory, this process goes before the rank
        _work(socket.socket(fileno=fd))
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)  # the server's stack below must not unwind here


def _work(sock: socket.socket) -> None:
    """A reward process: grade chunks until the parent closes the socket."""

    def emit(outcome: Outcome) -> None:
        send(sock, outcome)

    while True:
        try:
            job: Job = receive(sock, _job)
        except EOFError:
            return
        try:
            fn = _find(job.ref)
        except Exception:
            emit(Outcome(0, "unusable", text=traceback.format_exc().rstrip()))
            continue
        emit(Outcome(0, "ready", text="in order" if in_order(fn) else "together"))
        grade_chunk(fn, job.samples, emit, timeout_s=job.timeout_s)


def _load(order: Order) -> Answer:
    """Import the function's module here, so that every process forked later has it."""
    assert order.ref is not None
    try:
        if order.ref.module == "__main__":
            _load_recipe(order.recipe or Recipe())
        _find(order.ref)
    except UserError as error:
        return Answer(error=str(error))
    except (Exception, SystemExit):
        return Answer(error=traceback.format_exc().rstrip())
    return Answer()


def _find(ref: FunctionRef) -> Callable[..., Any]:
    """The function, warmed up once in this process or in the server before it was forked."""
    found = resolve(ref)
    bare: Any = found
    while isinstance(bare, functools.partial):
        bare = bare.func
    if bare not in _warm:
        getattr(bare, "warm_up", _do_nothing)()
        _warm.add(bare)
    return found


def _load_recipe(recipe: Recipe) -> None:
    """Run the parent's main file as a module, and let `__main__` mean it, as multiprocessing does."""
    if RECIPE_MODULE in sys.modules:
        return
    if recipe.module:
        module: ModuleType = importlib.import_module(recipe.module)
    elif recipe.path:
        spec = importlib.util.spec_from_file_location(RECIPE_MODULE, recipe.path)
        if spec is None or spec.loader is None:
            raise UserError(
                f"{recipe.path}: a recipe must be a .py file for its rewards to be found"
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[RECIPE_MODULE] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[RECIPE_MODULE]
            raise
    else:
        raise UserError("a reward function must be defined in a file, not typed at a prompt")
    sys.modules[RECIPE_MODULE] = sys.modules["__main__"] = module


def _end(pid: int) -> int:
    """Kill a process with everything it started; its exit code, negative for a signal."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere EOF must do)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _exactly(sock: socket.socket, size: int) -> bytes:
    chunks = []
    while size:
        chunk = sock.recv(min(size, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _do_nothing(*_: Any) -> None:
    pass
