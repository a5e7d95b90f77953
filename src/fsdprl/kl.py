"""KL divergence to a reference: per-token estimates, and the coefficient that scales them."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(
    logp: Tensor, logp_ref: Tensor, *, kind: KLKind = "k3", clamp: bool = False
) -> Tensor:
    """Per-token estimate of KL(policy || reference) from one sampled token, same shape as logp.

    With d = logp_ref - logp (Schulman 2020, "Approximating KL divergence"):
    k1: -d, unbiased, of either sign (what KL in the reward uses). k2: d^2 / 2, low variance, and
    the one whose gradient is that of the KL when differentiated on policy. k3: exp(d) - d - 1,
    unbiased and never negative (what GRPO adds to the loss). abs: |d|.

    clamp: bounds d to +-20 before exp and the result to +-10, as verl and ms-swift do; a clamped
    token has no gradient. Off, a reference that finds a token impossible gives inf.

    Raises ValueError for differing shapes (nothing is broadcast) or an unknown kind.
    """
    if logp.shape != logp_ref.shape:
        raise ValueError(f"logp {tuple(logp.shape)} and logp_ref {tuple(logp_ref.shape)} differ")
    if kind not in get_args(KLKind):
        raise ValueError(f"unknown KL estimate {kind!r}: choose from {', '.join(get_args(KLKind))}")
    d = logp_ref - logp
    if clamp:
        d = d.clamp(-20, 20)
    if kind == "k1":
        kl = -d
    elif kind == "k2":
        kl = d.square() / 2
    elif kind == "abs":
        kl = d.abs()
    else:
        kl = d.expm1() - d
    return kl.clamp(-10, 10) if clamp else kl


def log_ratio(logp_old: Tensor, logp_ref: Tensor) -> Tensor:
    """logp_old - logp_ref, [S]: for Batch.apply. A row's sum estimates its KL to the reference (k1), in nats."""
    if logp_old.shape != logp_ref.shape:
        raise ValueError(f"logp_old {tuple(logp_old.shape)} and logp_ref {tuple(logp_ref.shape)}")
    return logp_old - logp_ref


@dataclass
class FixedKL:
    """A coefficient that stays, also where a run is resumed or begun from another's checkpoint with another one.

    Same interface as AdaptiveKL, so that a recipe can hold either.
    """

    coef: float

    def update(self, kl: float, samples: int) -> float:
        """Return the coefficient, whatever was measured."""
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """What the flag says holds: a saved coefficient would undo a change that was asked for."""


@dataclass
class AdaptiveKL:
    """Steers the measured KL towards a target (Ziegler et al. 2019, section 2.2).

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon. It lives on the controller:
    track it with the run, or a resumed run starts from the initial coefficient again.
    """

    coef: float
    target: float
    """KL to aim for, in the unit of what `update` is given (nats per sequence, or per token)."""
    horizon: int = 10000
    """Samples over which a constant error of 20 % moves the coefficient by 20 %."""

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"target {self.target} and horizon {self.horizon} must be positive")

    def update(self, kl: float, samples: int) -> float:
        """Move the coefficient after a step with mean KL `kl` over `samples` answers."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * samples / self.horizon
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


def controller(coef: float, *, target: float = 0.0, horizon: int = 10000) -> FixedKL | AdaptiveKL:
    """What scales a KL: steered to `target` where there is one, else fixed."""
    return AdaptiveKL(coef, target=target, horizon=horizon) if target else FixedKL(coef)
