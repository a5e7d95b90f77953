"""Rewards to use as they are or to copy: each is a module-level `fn(sample) -> float | None`.

Bind settings with `functools.partial(fn, name=value)`. They import nothing heavy before they run.
"""
