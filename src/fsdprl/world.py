"""What torchrun's environment says about this process. No torch."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from fsdprl.errors import UserError


@dataclass(frozen=True)
class World:
    """This process among all ranks of the job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    host: str = ""
    restart: int = 0
    """Times torchrun has restarted the job; store keys carry it, so that none is met twice."""
    torchrun: bool = False
    """Whether an agent started this process; without one the job is this single process."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "World":
        """Read torchrun's variables; one rank when there are none.

        Raises UserError if RANK is set without the variables that must come with it.
        """
        host = socket.gethostname()
        if "RANK" not in env:
            return cls(host=host)
        try:
            return cls(
                rank=int(env["RANK"]),
                size=int(env["WORLD_SIZE"]),
                local_rank=int(env["LOCAL_RANK"]),
                local_size=int(env["LOCAL_WORLD_SIZE"]),
                node_rank=int(env.get("GROUP_RANK", "0")),
                host=host,
                restart=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
                torchrun=True,
            )
        except KeyError as missing:
            raise UserError(
                f"RANK is set but {missing.args[0]} is not: start the recipe with torchrun, "
                f"or unset RANK to run it as one process"
            ) from None
