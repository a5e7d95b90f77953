"""The option a user meant: by its own name at another level, by another framework's word, by spelling."""

import difflib
from collections.abc import Iterable, Sequence

# What other frameworks call it -> what recipes here may call it. A target that the recipe does not have
# is not suggested.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("lr",),
    "actor_lr": ("lr",),
    "num_generations": ("group_size",),
    "n_samples_per_prompt": ("group_size",),
    "rollout_n": ("group_size",),
    "n": ("group_size",),
    "beta": ("kl_coef",),
    "kl_coeff": ("kl_coef",),
    "kl_loss_coef": ("kl_coef",),
    "entropy_coeff": ("entropy_coef",),
    "max_completion_length": ("max_new_tokens",),
    "max_response_length": ("max_new_tokens",),
    "max_tokens": ("max_new_tokens", "tokens_per_microbatch"),
    "max_length": ("max_length", "max_prompt_length", "max_new_tokens"),
    "batch_size": ("prompts_per_step", "rows_per_step"),
    "train_batch_size": ("prompts_per_step", "rows_per_step"),
    "global_batch_size": ("prompts_per_step", "rows_per_step"),
    "per_device_train_batch_size": ("tokens_per_microbatch",),
    "micro_batch_size": ("tokens_per_microbatch",),
    "gradient_accumulation_steps": ("minibatches",),
    "mini_batch_size": ("minibatches",),
    "ppo_mini_batch_size": ("minibatches",),
    "num_iterations": ("passes",),
    "ppo_epochs": ("passes",),
    "lmbda": ("student_share",),
    "teacher_model": ("teacher",),
    "teacher_model_name_or_path": ("teacher",),
    "gkd_logits_topk": ("top_k",),
    "partial_rollout_max_split": ("rollout_splits",),
    "metric_for_best_model": ("keep_best",),
    "epsilon": ("clip_low", "clip_high"),
    "epsilon_low": ("clip_low",),
    "epsilon_high": ("clip_high",),
    "clip_ratio": ("clip_low", "clip_high"),
    "clip_ratio_low": ("clip_low",),
    "clip_ratio_high": ("clip_high",),
    "grad_clip": ("max_grad_norm",),
    "max_steps": ("steps",),
    "total_training_steps": ("steps",),
    "train_iters": ("steps",),
    "num_train_epochs": ("epochs",),
    "total_epochs": ("epochs",),
    "model_name_or_path": ("model",),
    "model_path": ("model",),
    "checkpoint": ("model",),
    "dataset": ("data",),
    "dataset_name": ("data",),
    "train_files": ("data",),
    "train_data": ("data",),
    "val_files": ("eval_data",),
    "eval_dataset": ("eval_data",),
    "eval_steps": ("eval_every",),
    "test_freq": ("eval_every",),
    "system_prompt": ("system",),
    "output_dir": ("out",),
    "out_dir": ("out",),
    "default_local_dir": ("out",),
    "save_steps": ("save_every",),
    "save_freq": ("save_every",),
    "save_interval": ("save_every",),
    "save_total_limit": ("keep",),
    "logging_steps": ("log_every",),
    "report_to": ("track",),
    "logger": ("track",),
    "tracker": ("track",),
    "resume_from_checkpoint": ("resume",),
    "backend": ("kind",),
    "use_vllm": ("kind",),
    "rollout_engine": ("kind",),
    "tp": ("tensor_parallel_size",),
    "tensor_model_parallel_size": ("tensor_parallel_size",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "torch_dtype": ("dtype",),
    "precision": ("dtype",),
    "torch_compile": ("compile",),
}


def nearest(name: str, known: Sequence[str], most: int = 3) -> list[str]:
    """The dotted names in `known` that `name` may have meant, best first."""
    leaf = name.rpartition(".")[2]
    found = [path for path in known if last(path) == leaf]
    if not found:
        found = misspelt(leaf, known)
    if not found:
        # A part of a compound name: --engine.memory-utilization, --clip.
        found = [path for path in known if len(leaf) > 3 and leaf in last(path)]
    return list(dict.fromkeys(found))[:most]


def misspelt(leaf: str, known: Sequence[str]) -> list[str]:
    """Names whose last part, or another framework's word for it, is spelt like `leaf` or almost so."""
    meant: dict[str, list[str]] = {
        word: [path for target in targets for path in known if last(path) == target]
        for word, targets in SYNONYMS.items()
    }
    meant |= {last(path): [other for other in known if last(other) == last(path)] for path in known}
    likeness = {
        word: difflib.SequenceMatcher(None, leaf, word).ratio()
        for word, paths in meant.items()
        if paths
    }
    best = max(likeness.values(), default=0.0)
    if best < 0.7:
        return []
    return [path for word, like in likeness.items() if like > best - 0.03 for path in meant[word]]


def closest_choice(value: str, choices: Iterable[object]) -> str:
    """The choice that a misspelt value is closest to, or an empty string."""
    close = difflib.get_close_matches(value, [str(choice) for choice in choices], n=1, cutoff=0.6)
    return close[0] if close else ""


def last(path: str) -> str:
    """a.b.c -> c"""
    return path.rpartition(".")[2]
