"""fsdprl: reinforcement learning for language models in plain PyTorch, one readable file an algorithm.

Names are looked up when they are first used (PEP 562), so that `import fsdprl` and the help of a recipe need
neither torch nor transformers. Modules of pure functions are names too: `fsdprl.losses.clipped_surrogate`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdprl import advantages as advantages
    from fsdprl import corrections as corrections
    from fsdprl import coupled as coupled
    from fsdprl import kl as kl
    from fsdprl import losses as losses
    from fsdprl import packing as packing
    from fsdprl import preference as preference
    from fsdprl import rewards as rewards
    from fsdprl import schedules as schedules
    from fsdprl import surrogates as surrogates
    from fsdprl import tools as tools
    from fsdprl import weights as weights
    from fsdprl.anchors import anchored_advantages as anchored_advantages
    from fsdprl.batch import Batch as Batch
    from fsdprl.clipping import clips as clips
    from fsdprl.conversation import Conversation as Conversation
    from fsdprl.correcting import correct as correct
    from fsdprl.correcting import mismatch as mismatch
    from fsdprl.data.chat import PromptFormat as PromptFormat
    from fsdprl.data.chat import load_tokenizer as load_tokenizer
    from fsdprl.data.example_rows import ExampleFormat as ExampleFormat
    from fsdprl.data.example_rows import OverLength as OverLength
    from fsdprl.data.preference_rows import PreferenceFormat as PreferenceFormat
    from fsdprl.errors import RemoteError as RemoteError
    from fsdprl.errors import UnscoredError as UnscoredError
    from fsdprl.errors import UserError as UserError
    from fsdprl.evaluation import Evaluator as Evaluator
    from fsdprl.evaluation import estimated as estimated
    from fsdprl.evaluation import evaluate as evaluate
    from fsdprl.examples import Examples as Examples
    from fsdprl.launch import launch as launch
    from fsdprl.options import CorrectionOptions as CorrectionOptions
    from fsdprl.options import DType as DType
    from fsdprl.options import EngineOptions as EngineOptions
    from fsdprl.options import RewardOptions as RewardOptions
    from fsdprl.options import RunOptions as RunOptions
    from fsdprl.options import ShardingOptions as ShardingOptions
    from fsdprl.options import TurnOptions as TurnOptions
    from fsdprl.pair_loss import PairLoss as PairLoss
    from fsdprl.plan import Plan as Plan
    from fsdprl.policy import Critic as Critic
    from fsdprl.policy import Policy as Policy
    from fsdprl.policy import Reference as Reference
    from fsdprl.policy import RewardModel as RewardModel
    from fsdprl.policy import TrainedRewardModel as TrainedRewardModel
    from fsdprl.policy import kl_reference as kl_reference
    from fsdprl.policy import reward_models as reward_models
    from fsdprl.precomputed import PrecomputedReference as PrecomputedReference
    from fsdprl.precomputed import UniformReference as UniformReference
    from fsdprl.preferences import Preferences as Preferences
    from fsdprl.preferences import preference_sets as preference_sets
    from fsdprl.prompts import LongPrompts as LongPrompts
    from fsdprl.prompts import Prompts as Prompts
    from fsdprl.prompts import prompt_sets as prompt_sets
    from fsdprl.resampling import GroupPool as GroupPool
    from fsdprl.run import Run as Run
    from fsdprl.sample import Sample as Sample
    from fsdprl.sampler import Sampler as Sampler
    from fsdprl.schedules import Schedule as Schedule
    from fsdprl.scoring import Rewards as Rewards
    from fsdprl.spread import quantile as quantile
    from fsdprl.spread import whiten as whiten
    from fsdprl.telling import logprobs_told as logprobs_told

NAMES: dict[str, str] = {
    "anchored_advantages": "anchors",
    "Batch": "batch",
    "clips": "clipping",
    "Conversation": "conversation",
    "correct": "correcting",
    "mismatch": "correcting",
    "CorrectionOptions": "options",
    "RemoteError": "errors",
    "UnscoredError": "errors",
    "UserError": "errors",
    "PromptFormat": "data.chat",
    "load_tokenizer": "data.chat",
    "ExampleFormat": "data.example_rows",
    "OverLength": "data.example_rows",
    "PreferenceFormat": "data.preference_rows",
    "Examples": "examples",
    "Evaluator": "evaluation",
    "estimated": "evaluation",
    "evaluate": "evaluation",
    "launch": "launch",
    "DType": "options",
    "EngineOptions": "options",
    "RewardOptions": "options",
    "RunOptions": "options",
    "ShardingOptions": "options",
    "TurnOptions": "options",
    "PairLoss": "pair_loss",
    "Plan": "plan",
    "PrecomputedReference": "precomputed",
    "UniformReference": "precomputed",
    "Critic": "policy",
    "Policy": "policy",
    "Reference": "policy",
    "RewardModel": "policy",
    "TrainedRewardModel": "policy",
    "kl_reference": "policy",
    "reward_models": "policy",
    "Preferences": "preferences",
    "preference_sets": "preferences",
    "LongPrompts": "prompts",
    "Prompts": "prompts",
    "prompt_sets": "prompts",
    "GroupPool": "resampling",
    "Run": "run",
    "Schedule": "schedules",
    "Sample": "sample",
    "Sampler": "sampler",
    "Rewards": "scoring",
    "quantile": "spread",
    "whiten": "spread",
    "logprobs_told": "telling",
}
MODULES = (
    "advantages",
    "corrections",
    "coupled",
    "kl",
    "losses",
    "packing",
    "preference",
    "rewards",
    "schedules",
    "surrogates",
    "tools",
    "weights",
)


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(f"fsdprl.{name}")
    if name not in NAMES:
        raise AttributeError(f"fsdprl has no name {name!r}")
    value = getattr(importlib.import_module(f"fsdprl.{NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*NAMES, *MODULES])
