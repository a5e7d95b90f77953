"""Option groups that every recipe nests in its Config. Plain frozen dataclasses, no torch: help must answer at once."""

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class ShardingOptions:
    """How models are laid out over ranks, and how much of a batch one forward sees."""

    replicate: int = 1
    """Copies of the sharded model (HSDP): FSDP shards over world / replicate ranks."""
    tokens_per_microbatch: int = 16384
    """Most tokens in one packed forward; a longer row runs alone."""
    activation_checkpointing: bool = False
    """Recompute each layer in backward instead of keeping its activations."""
    compile: bool = False
    """torch.compile each transformer layer."""
    reshard_after_forward: bool = True
    """Free gathered layer weights after forward (ZeRO-3); off keeps them until backward (ZeRO-2)."""
    head_chunk_tokens: int = 1024
    """Tokens per chunk of the LM head: bounds the logits in memory to chunk x vocabulary."""


@dataclass(frozen=True)
class EngineOptions:
    """The sampling engine: which one, and how much memory it takes."""

    kind: Literal["auto", "transformers", "vllm"] = "auto"
    """auto: vllm on an accelerator, the built-in transformers engine on CPU."""
    max_num_seqs: int = 512
    """Most sequences decoded together."""
    bucket_mb: float = 16.0
    """Megabytes of weights that travel to the engine at a time."""


@dataclass(frozen=True)
class RewardOptions:
    """The reward processes of each rank."""

    workers: int = 1
    """Reward processes a rank; each is killed and replaced on a crash or a missed deadline."""
    timeout_s: float = 30.0
    """Seconds one sample may take."""
    max_failed_share: float = 0.05
    """Share of a batch's samples that may time out or crash their process before the run stops."""


@dataclass(frozen=True)
class RunOptions:
    """The run folder, checkpoints, logging and deadlines."""

    out: str = "runs/run"
    """Folder of the run: config.json, metrics.jsonl, completions/, plots/, checkpoints/."""
    save_every: int = 100
    """Steps between checkpoints (0: only at the end)."""
    keep: int = 0
    """Checkpoints to keep, oldest deleted first (0: all)."""
    resume: str = "auto"
    """auto: continue an unfinished folder; never: refuse an occupied one; or a checkpoint folder."""
    log_every: int = 1
    """Steps between console lines; metrics.jsonl has every step."""
    track: tuple[Literal["wandb", "trackio", "tensorboard"], ...] = field(default=())
    """Trackers beside metrics.jsonl; they run in a child process and may fail without effect."""
    profile: str = ""
    """First and last step of a torch profiler trace, as 3:5; empty for none."""
    stall_timeout_s: float = 600.0
    """Seconds without progress inside one phase before the job ends and names the rank."""
