"""Imported first by small test recipes: verbs of the control plane alone, without the models' imports."""

import sys
import types

NAMES = "blending conversing feeding ferry learn moving profiling rewording rollout row_files rows slicing writing"

for _name in NAMES.split():
    _module = types.ModuleType(f"fsdprl.{_name}")
    _module.VERBS = {}  # type: ignore[attr-defined]
    sys.modules[_module.__name__] = _module
