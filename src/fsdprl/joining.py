"""How the ranks find each other: torchrun's store says where the controller is, the rest is ours."""

import contextlib
import hashlib
import os
import resource
import secrets
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fsdprl.config import Flags
from fsdprl.errors import UserError
from fsdprl.liveness import Lifeline
from fsdprl.watch import Watch
from fsdprl.wire import TOKEN_BYTES, Line, Wire, decode, encode
from fsdprl.world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What ends a run cleanly: Ctrl-C, preemption, a batch system's warning, and a closed terminal."""
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment of the ranks that should not repeat what rank 0 says."""


@dataclass(frozen=True)
class Joining:
    """What a rank knows before it meets the others."""

    world: World
    flags: Flags
    recipe: Path
    seed: int

    def rendezvous(self) -> Any:
        """torchrun's store under keys that no earlier run or restart has used; a private one alone."""
        # Late: launch refuses bad flags before it pays for torch.
        from torch._C._distributed_c10d import HashStore, PrefixStore
        from torch.distributed.rendezvous import rendezvous

        if not self.world.torchrun:
            return HashStore()
        store, _, _ = next(iter(rendezvous("env://")))
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return PrefixStore(f"fsdprl/{run}/{self.world.restart}", store)

    def lead(self) -> tuple[Wire, Watch, threading.Thread]:
        """Rank 0: bind, tell the other ranks where, and serve in a second thread."""
        world, token = self.world, secrets.token_bytes(TOKEN_BYTES)
        address = "127.0.0.1" if world.local_size == world.size else own_address()
        raise_file_limit()
        store = self.rendezvous()
        watch = Watch(address, token, world, relaxed=self.flags.debug)
        wire = Wire(address, token, world.size)
        host, port = watch.address
        contact = {"host": host, "port": port, "endpoint": wire.endpoint, "token": token}
        contact |= {"pid": os.getpid(), "local_size": world.local_size}
        store.set("controller", encode(contact))

        def serve() -> None:
            try:
                self.serve(contact, store)
            except BaseException as error:  # before its lifeline could tell
                watch.fail_first_rank(error)

        server = threading.Thread(target=serve, name="serve", daemon=True)
        server.start()
        return wire, watch, server

    def follow(self) -> None:
        """Other ranks: serve. Until the lifeline is up, signals simply kill."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        warnings.simplefilter("ignore")
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        store = self.rendezvous()
        self.serve(decode(store.get("controller")), store)

    def serve(self, contact: Mapping[str, Any], store: Any) -> None:
        """Connect to the controller, and run verbs until it says shutdown."""
        rank = self.world.rank
        hello = {"rank": rank, "host": self.world.host, "pid": os.getpid()}
        lifeline = Lifeline(
            (contact["host"], contact["port"]),
            contact["token"],
            hello | {"files": fingerprint(self.recipe)},
            follow=rank != 0,
            controller_pid=contact["pid"] if 0 < rank < contact["local_size"] else None,
        )
        if rank != 0:
            listen(lambda *_: None)  # the controller decides; not SIG_IGN, which children inherit
            for number in SIGNALS:
                signal.siginterrupt(number, False)
        try:
            line = Line(contact["endpoint"], contact["token"], rank)
            # These import torch and transformers: by now the lifeline beats.
            from fsdprl.serve import serve
            from fsdprl.worker import Worker

            worker = Worker(self.world, seed=self.seed, debug=self.flags.debug, rendezvous=store)
            serve(worker, line, lifeline)
        except Exception as error:
            lifeline.failed(error)
            threading.Event().wait()


def listen(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Handle the signals that end a run; nohup's choice stays."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def fingerprint(recipe: Path) -> dict[str, str]:
    """sha256 of the recipe, of every module loaded from its folder (plug-ins), and of fsdprl."""
    package = Path(__file__).parent
    files = {recipe.name: [recipe], "the fsdprl package": sorted(package.rglob("*.py"))}
    for module in list(sys.modules.values()):
        file = Path(str(getattr(module, "__file__", "")))
        inside = file.is_relative_to(recipe.parent) and not file.is_relative_to(package)
        if file.suffix == ".py" and inside and "site-packages" not in file.parts:
            files[str(file.relative_to(recipe.parent))] = [file]
    return {name: _sha256(paths) for name, paths in files.items()}


def _sha256(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_same_files(watch: Watch) -> None:
    """Functions travel by name, so all ranks need the same source. UserError names who differs."""
    first = watch.peers[0]
    for peer in watch.peers.values():
        for name, digest in first.files.items():
            other = peer.files.get(name, digest)
            if other != digest:
                raise UserError(
                    f"{peer} has another version of {name} than {first} (sha256 {other[:12]}, "
                    f"not {digest[:12]}): copy the same files to every host"
                )


def own_address() -> str:
    """The address of this host that other hosts reach: that of the interface towards the master."""
    for target in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((target, 9))  # sends nothing: only asks for the route
            address = probe.getsockname()[0]
            if not address.startswith("127."):
                return address
    return socket.gethostbyname(socket.gethostname())


def raise_file_limit() -> None:
    """Two sockets a rank: for 512 ranks the usual soft limit of 1024 files is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
