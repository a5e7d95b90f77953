"""Which processes of a job listen where, from /proc."""

import os
from pathlib import Path

LISTEN = "0A"


def listening(pids: list[int]) -> set[tuple[int, str]]:
    """(process, address in hexadecimal) of every listening TCP socket of these processes."""
    addresses: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN:
                addresses[words[9]] = words[1].partition(":")[0]
    found = set()
    for pid in pids:
        for inode in sockets_of(pid):
            if inode in addresses:
                found.add((pid, addresses[inode]))
    return found


def sockets_of(pid: int) -> list[str]:
    """The inodes of a process's sockets; none of one that has ended."""
    found = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            name = os.readlink(link)
            if name.startswith("socket:["):
                found.append(name[8:-1])
    except OSError:
        pass
    return found


def is_loopback(address: str) -> bool:
    """127.0.0.0/8, ::1 and ::ffff:127.0.0.0/104, as the kernel writes them (words are little-endian)."""
    if len(address) == 8:
        return address.endswith("7F")
    mapped = address[:24] == "0000000000000000FFFF0000" and address.endswith("7F")
    return mapped or address == "0" * 24 + "01000000"
