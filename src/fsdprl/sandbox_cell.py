"""The inside of sandbox.py: run by path as `python -I -S sandbox_cell.py JSON`, never imported with the rest.

It takes itself out of the machine (namespaces for mounts, processes, network, IPC and host name), builds a root of
read-only system folders and one small writable /tmp, gives up every privilege, and runs the program under limits.
Standard library only. Linux only; `{"jail": false}` keeps the limits and leaves out everything else.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
SPACES = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1, 2, 4, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Set up, report `ready` (or why not) on the status pipe, run, and end as the program ended."""
    asked = json.loads(sys.argv[1])
    status = os.fdopen(asked["status"], "w")
    with os.fdopen(asked["program"], encoding="utf-8") as file:
        program = file.read()
    try:
        if asked["jail"]:
            _leave()
        pid = os.fork()
        if pid == 0:
            _init(asked, program, status)
    except OSError as error:
        status.write(f"{error}")
        status.close()
        os._exit(125)
    status.close()
    os._exit(_wait(pid))


def _leave() -> None:
    """New namespaces; as root directly, else (or where root may not) within a user namespace."""
    if os.geteuid() == 0 and _libc.unshare(SPACES) == 0:
        return
    uid, gid = os.geteuid(), os.getegid()
    _checked(_libc.unshare(SPACES | NEWUSER), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {uid} 1"),
        ("gid_map", f"{NOBODY} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _init(asked: dict, program: str, status: object) -> None:
    """Process 1 of the cell: when it ends, the kernel ends all others in it."""
    try:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        folder = asked["folder"]
        if asked["jail"]:
            _new_root(asked)
            folder = "/tmp"
        os.chdir(folder)
        path = os.path.join(folder, "main.py")
        with open(path, "w", encoding="utf-8") as file:
            file.write(program)
        if asked["jail"] and os.geteuid() == 0:
            os.chmod(path, 0o644)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        pid = os.fork()
        if pid == 0:
            _limit(asked)
            status.write("ready")  # type: ignore[attr-defined]
            status.flush()  # type: ignore[attr-defined]
            os.set_inheritable(status.fileno(), False)  # type: ignore[attr-defined]
            environment = {
                "PATH": "/usr/bin:/bin",
                "HOME": folder,
                "LANG": "C.UTF-8",
                "TMPDIR": folder,
            }
            os.execve(asked["python"], [asked["python"], "-I", "-B", path], environment)
    except (OSError, ValueError) as error:
        status.write(f"{error}")  # type: ignore[attr-defined]
        status.flush()  # type: ignore[attr-defined]
        os._exit(125)
    status.close()  # type: ignore[attr-defined]
    os._exit(_wait(pid))


def _new_root(asked: dict) -> None:
    """A root with the system's programs read-only, this interpreter, three devices, /proc of this cell, and /tmp."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    root = asked["folder"]
    options = f"size={asked['disk_bytes']},nr_inodes=4096,mode=755"
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for place in dict.fromkeys(["/usr", "/lib", "/lib64", "/bin", asked["prefix"]]):
        if os.path.islink(place):
            os.symlink(os.readlink(place), root + place)
        elif os.path.isdir(place) and not os.path.isdir(root + place):
            os.makedirs(root + place)
            _mount(place, root + place, None, MS_BIND | MS_REC)
            flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV
            _mount(None, root + place, None, flags)
    os.mkdir(root + "/dev")
    for device in ("null", "zero", "urandom"):
        with open(f"{root}/dev/{device}", "w"):
            pass
        _mount(f"/dev/{device}", f"{root}/dev/{device}", None, MS_BIND)
    for name, mode in (("proc", 0o555), ("tmp", 0o777)):
        os.mkdir(f"{root}/{name}")
        os.chmod(f"{root}/{name}", mode)
    _mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
    os.chdir(root)
    number = PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"no sandbox for {platform.machine()}")
    _checked(_libc.syscall(number, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def _limit(asked: dict) -> None:
    """Most memory, processor seconds, file size, processes and open files. No core dumps."""
    for what, most in (
        (resource.RLIMIT_AS, asked["memory_bytes"]),
        (resource.RLIMIT_CPU, asked["cpu_s"]),
        (resource.RLIMIT_FSIZE, asked["disk_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, asked["processes"])] if asked["jail"] else []),
    ):
        resource.setrlimit(what, (most, most))


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [
        text.encode() if text is not None else None for text in (source, target, kind, options)
    ]
    done = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _checked(done, f"mount {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _wait(pid: int) -> int:
    """The exit code of this child, 128 + N for signal N; others that end meanwhile are reaped."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
