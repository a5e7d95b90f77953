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
    min_num_params: int = 1_000_000
    """Parameters from which a model is sharded, and each layer on its own; every rank keeps a smaller one
    whole, because its collectives would take longer to start than to run."""
    head_chunk_tokens: int = 1024
    """Tokens per chunk of the LM head: bounds the logits in memory to chunk x vocabulary."""
    offload_model: bool = False
    """Keep weights in host memory while the engine samples, frozen models' outside of their pass."""
    offload_optimizer: bool = False
    """Keep optimizer states in host memory from the rollout until the first optimizer step."""
    gc_after_offload: bool = False
    """Run Python's garbage collector after each offload."""


@dataclass(frozen=True)
class EngineOptions:
    """The sampling engine: which one, and how much memory it takes."""

    kind: Literal["auto", "transformers", "vllm"] = "auto"
    """auto: vllm on an accelerator, the built-in transformers engine on CPU."""
    max_num_seqs: int = 512
    """Most sequences decoded together."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together (None: --max-prompt-length + --max-new-tokens)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the engine's weights and computation; auto: that of --dtype."""
    bucket_mb: float = 16.0
    """Megabytes of weights that travel to the engine at a time."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the key-value cache (None: by gpu_memory_utilization; on CPU at most 4 GiB built in,
    1 GiB for vllm)."""
    gpu_memory_utilization: float | None = None
    """Share of the device's memory for the engine's weights and cache (None: 0.5)."""
    tensor_parallel_size: int = 1
    """vllm: consecutive ranks that share one engine."""
    enforce_eager: bool | None = None
    """vllm: neither compile nor capture graphs (None: compile on an accelerator, not on CPU)."""
    enable_prefix_caching: bool | None = None
    """vllm: compute a prompt's beginning once (None: vllm's default)."""
    sleep_level: Literal[0, 1, 2] = 0
    """While models train: 0 keeps the engine's memory, 1 drops its cache and parks its weights on the
    host, 2 drops both and pulls anew. On CPU nothing is given back."""
    extra: tuple[str, ...] = ()
    """vllm: further engine arguments as NAME=VALUE, values in JSON: cpu_offload_gb=4."""


@dataclass(frozen=True)
class CorrectionOptions:
    """Token weights against the gap between trainer and engine, rho = p_trainer / p_engine."""

    kind: Literal[
        "none",
        "tis",
        "icepop",
        "sequence_tis",
        "sequence_mask",
        "geometric_mask",
        "geometric_mask_tis",
    ] = "none"
    """tis: min(rho, cap) a token. icepop: rho inside [low, high], else 0. sequence_tis, sequence_mask:
    the product of rho over a row, truncated at cap or 0 beyond it. geometric_mask: rows whose geometric
    mean lies in [low, high]; _tis: times tis."""
    low: float | None = None
    """Lower bound of a band (None: 0.5 for icepop, 0.99 for geometric masks)."""
    high: float | None = None
    """Upper bound of a band (None: 5 for icepop, 1.01 for geometric masks)."""
    cap: float | None = None
    """Largest weight (None: 2, or 3 for sequence_mask)."""


@dataclass(frozen=True)
class TurnOptions:
    """Conversations of several turns with an environment."""

    max_turns: int = 4
    """Most turns of the model in a conversation."""
    max_turn_tokens: int = 0
    """Most tokens of one turn (0: as many as --max-new-tokens leaves, which bounds all behind the prompt)."""
    timeout_s: float = 60.0
    """Seconds that the environment may take to answer one turn."""
    concurrency: int = 64
    """Most calls of a plain environment at a time on each rank; async ones have no bound."""
    max_failed_share: float = 0.05
    """Share of a batch's conversations that may lose their environment before the run stops."""
    history: Literal["refuse", "keep"] = "refuse"
    """Where the chat template takes the thinking out of earlier turns: refuse it, or keep what was sampled."""


@dataclass(frozen=True)
class RewardOptions:
    """The reward processes of each rank."""

    workers: int = 1
    """Reward processes a rank; each is killed and replaced on a crash or a missed deadline."""
    timeout_s: float = 30.0
    """Seconds one sample may take."""
    max_failed_share: float = 0.05
    """Share of a batch's samples that may time out or crash their process before the run stops."""

    def failures_allowed(self, samples: int, unit: int = 1) -> int:
        """How many of a batch may fail: the share, but at least what one hang or crash can cost (unit),
        unless the share is 0."""
        return max(int(self.max_failed_share * samples), unit if self.max_failed_share else 0)


@dataclass(frozen=True)
class RunOptions:
    """The run folder, checkpoints, logging and deadlines."""

    out: str = "runs/run"
    """Folder of the run: config, metrics, completions, plots, checkpoints. Best on storage that all hosts share; where
    they share none it is on that of rank 0, and what the others write goes there."""
    save_every: int = 100
    """Steps between checkpoints (0: only at the end)."""
    keep: int = 0
    """Checkpoints to keep, oldest deleted first (0: all)."""
    keep_best: str = ""
    """Keep, beside those, the checkpoint with the best value of this metric, as checkpoints/best: eval/reward. Lower
    is better where the name ends in loss; NAME:min and NAME:max say it. Measured in steps that save."""
    background_save: bool = True
    """Write checkpoints while training goes on, from a copy in host memory; off needs no copy."""
    resume: str = "auto"
    """auto: continue an unfinished folder; never: refuse an occupied one; or a checkpoint folder to start from."""
    forget: tuple[Literal["optimizer", "rng", "progress"], ...] = field(default=())
    """What of the checkpoint of --run.resume is not restored. optimizer: moments begin at zero. rng: answers are
    drawn with other seeds. progress: steps, place in the data, KL coefficient and the like begin anew. All three:
    weights only."""
    allow: tuple[str, ...] = field(default=())
    """What may differ from the run that a folder holds, by name: options such as lr or data, and recipe."""
    deterministic: bool = False
    """The same numbers to the bit whenever this command runs, on as many ranks and threads: kernels that add in a fixed
    order. A run that was interrupted then ends like one that was not. BENCHMARKS.md has its cost."""
    log_every: int = 1
    """Steps between console lines; metrics.jsonl has every step."""
    log_entropy: bool = False
    """Measure the policy's entropy in every update, whether or not it has a bonus: time in the LM head, not a pass."""
    track: tuple[Literal["wandb", "trackio", "tensorboard"], ...] = field(default=())
    """Trackers beside metrics.jsonl; they run in a child process and may fail without effect."""
    plots: bool = True
    """Draw OUT/plots (matplotlib) after each checkpoint and at the end: some seconds of a core, in a child process."""
    profile: str = ""
    """First and last step (from 0) of a torch profiler trace in OUT/profile, as 3:5; empty for none."""
    skip_nonfinite: int = 0
    """Updates to leave out because their loss or gradient is not finite before the run stops (0: it stops at once)."""
    stall_timeout_s: float = 600.0
    """Seconds without progress inside one phase before the job ends and names the rank."""
