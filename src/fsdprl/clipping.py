"""The bounds of a ratio as flags: checked before anything starts."""

from fsdprl.errors import UserError


def clips(low: float, high: float, dual: float) -> dict[str, float | None]:
    """Keywords of clipped_surrogate and gspo_surrogate. dual: 0 for none.

    Raises UserError naming the flag for bounds that cannot be.
    """
    if not 0 <= low <= 1:
        raise UserError(f"--clip-low {low}: must lie between 0 and 1")
    if high < 0:
        raise UserError(f"--clip-high {high}: must not be negative")
    if dual and dual <= 1 + high:
        raise UserError(
            f"--dual-clip {dual}: it bounds the ratio itself, so it must exceed 1 + --clip-high, {1 + high:g}"
        )
    return {"clip_low": low, "clip_high": high, "dual_clip": dual or None}
