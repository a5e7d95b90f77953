"""The built-in engine against the model's own full forward, one request at a time, and bad weights."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import KINDS, checkpoint, config, tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fsdprl.engines import EngineError, Request, Sampling, build_engine
from fsdprl.engines import batching as batching_module
from fsdprl.engines.decoding import filter_logits
from fsdprl.engines.transformers import TransformersEngine
from fsdprl.errors import UserError
from fsdprl.options import EngineOptions
from fsdprl.stream import Bucket, Part, tensor_checksum, weight_stream
from fsdprl.world import World

END = tokenizer().eos_token_id
VOCABULARY = len(tokenizer())


def quiet() -> None:
    """No progress to report."""


@functools.cache
def trained(kind: str, seed: int = 0) -> Any:
    """The model whose weights the engine gets, as transformers loads it."""
    path = checkpoint(kind, seed=seed)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def buckets(
    kind: str, dtype: str = "float32", seed: int = 0, bucket_bytes: int = 4096
) -> list[Bucket]:
    model = SimpleNamespace(hf=trained(kind, seed))
    return list(weight_stream(model, dtype=dtype, bucket_bytes=bucket_bytes))


def build(kind: str, *, dtype: str = "float32", max_model_len: int = 64, **options) -> Any:
    return build_engine(
        "transformers",
        str(checkpoint(kind)),
        EngineOptions(**options),
        world=World(),
        device=torch.device("cpu"),
        dtype=dtype,
        max_model_len=max_model_len,
        seed=0,
    )


def loaded(kind: str, **given) -> Any:
    engine = build(kind, **given)
    engine.update_weights(iter(buckets(kind, given.get("dtype", "float32"))), 0)
    return engine


def ragged(count: int, *, samples: int = 1, seed: int = 0) -> list[Request]:
    """Requests with prompts of 1 to 23 tokens, `samples` of each prompt."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        length = int(torch.randint(1, 24, (1,), generator=generator))
        ids = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
        out += [Request(ids, seed=1000 * seed + i * samples + j) for j in range(samples)]
    return out


def answers(completions) -> list[tuple[list[int], str]]:
    return [(c.ids.tolist(), c.finish) for c in completions]


@torch.no_grad()
def reference_logp(model: Any, request: Request, ids: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs of an answer from one full forward without a cache, filters applied step by step."""
    whole = torch.tensor([[*request.ids, *ids.tolist()]])
    logits = model(input_ids=whole, use_cache=False).logits[0, len(request.ids) - 1 : -1].float()
    out = []
    for step, row in enumerate(logits):
        seen = torch.zeros(1, len(row), dtype=torch.bool)
        seen[0, whole[0, : len(request.ids) + step]] = True
        out.append(filter_logits(row[None].clone(), sampling, seen).log_softmax(-1)[0, ids[step]])
    return torch.stack(out)


FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.8, "temperature": 0.7},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1, "temperature": 1.3},
    "penalty": {"repetition_penalty": 1.3, "temperature": 0.9},
    "greedy": {"temperature": 0.0, "top_k": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_the_models_own_forward(kind):
    engine = loaded(kind, max_num_seqs=3)  # 8 requests through 3 slots: rows move and enter late
    requests = ragged(4, samples=2)
    for given in FILTERS.values():
        sampling = Sampling(max_new_tokens=9, **given)
        for request, got in zip(requests, engine.generate(requests, sampling, quiet), strict=True):
            expected = reference_logp(trained(kind), request, got.ids, sampling)
            torch.testing.assert_close(got.logp, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_greedy_tokens_equal_transformers_generate(kind):
    engine = loaded(kind)
    requests = ragged(6)
    got = engine.generate(requests, Sampling(max_new_tokens=10, temperature=0.0), quiet)
    for request, completion in zip(requests, got, strict=True):
        ids = torch.tensor([list(request.ids)])
        out = trained(kind).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10
        )
        assert completion.ids.tolist() == out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen3_moe"])
def test_samples_depend_on_seed_and_prompt_only(kind, monkeypatch):
    requests = ragged(5, samples=3)
    sampling = Sampling(max_new_tokens=9)
    engine = loaded(kind)
    together = answers(engine.generate(requests, sampling, quiet))
    assert len({tuple(ids) for ids, _ in together}) > 12  # or the rest would show nothing

    alone = [answers(engine.generate([request], sampling, quiet))[0] for request in requests]
    assert alone == together
    backwards = answers(engine.generate(requests[::-1], sampling, quiet))
    assert backwards[::-1] == together
    for slots in (2, 7):
        few = loaded(kind, max_num_seqs=slots)
        assert answers(few.generate(requests, sampling, quiet)) == together
    monkeypatch.setattr(batching_module, "PREFILL_TOKENS", 20)
    monkeypatch.setattr(batching_module, "LOGITS_ELEMENTS", 2 * VOCABULARY)
    assert answers(engine.generate(requests, sampling, quiet)) == together


def test_global_random_state_is_neither_read_nor_changed():
    requests, sampling = ragged(4), Sampling(max_new_tokens=6)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    engine = loaded("qwen3")
    first = answers(engine.generate(requests, sampling, quiet))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert answers(engine.generate(requests, sampling, quiet)) == first


def test_answers_end_at_the_end_token_and_keep_it():
    engine = loaded("qwen3", max_num_seqs=16)
    requests = ragged(60)
    got = engine.generate(requests, Sampling(max_new_tokens=30, temperature=1.5), quiet)
    stopped = [c for c in got if c.finish == "stop"]
    assert 5 < len(stopped) < 60
    for completion in got:
        ids = completion.ids.tolist()
        assert completion.ids.dtype == torch.int32 and completion.logp.dtype == torch.float32
        assert len(ids) == len(completion.logp)
        assert END not in ids[:-1]
        assert (ids[-1] == END) == (completion.finish == "stop")
        assert completion.finish == "stop" or len(ids) == 30


def test_end_tokens_come_from_generation_config_and_tokenizer(tmp_path):
    path = checkpoint("qwen3")
    words = tokenizer()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    extra = words.convert_tokens_to_ids("x")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{extra}, 0]}}')
    engine = TransformersEngine(
        str(tmp_path),
        EngineOptions(),
        device=torch.device("cpu"),
        dtype="float32",
        max_model_len=64,
    )
    assert engine.stop_ids == sorted([0, extra, END])
    engine.update_weights(iter(buckets("qwen3")), 0)
    got = engine.generate(ragged(40), Sampling(max_new_tokens=30, temperature=1.5), quiet)
    last = {c.ids.tolist()[-1] for c in got if c.finish == "stop"}
    assert extra in last and last <= {0, extra, END}


def test_stop_strings_end_an_answer_that_keeps_them():
    engine = loaded("qwen3")
    requests = ragged(30)
    free = engine.generate(requests, Sampling(max_new_tokens=20), quiet)
    text = [tokenizer().decode(c.ids.tolist(), skip_special_tokens=True) for c in free]
    pair = text[3][4:6]  # occurs for sure, at the sixth token of the fourth answer or before
    got = engine.generate(requests, Sampling(max_new_tokens=20, stop=(pair, "@@@")), quiet)
    assert got[3].finish == "stop"
    for completion, unstopped in zip(got, text, strict=True):
        ids = completion.ids.tolist()
        found = tokenizer().decode(ids, skip_special_tokens=True)
        assert unstopped.startswith(found)
        if pair in unstopped:
            assert found == unstopped[: unstopped.index(pair) + len(pair)]
            assert completion.finish == "stop"


def test_answers_end_at_the_longest_sequence():
    engine = loaded("qwen3", max_model_len=25)
    requests = [Request([5] * length, seed=length) for length in (1, 10, 24)]
    got = engine.generate(requests, Sampling(max_new_tokens=30), quiet)
    for request, completion in zip(requests, got, strict=True):
        if completion.finish == "length":
            assert len(request.ids) + len(completion.ids) == 25
    assert len(got[2].ids) == 1
    with pytest.raises(UserError, match=r"request 1 .*25 tokens.*--max-new-tokens"):
        engine.generate([requests[0], Request([5] * 25, 0)], Sampling(max_new_tokens=2), quiet)
    with pytest.raises(UserError, match=r"request 0 .*0 tokens"):
        engine.generate([Request([], 0)], Sampling(max_new_tokens=2), quiet)


def test_more_tokens_than_the_model_has_positions_are_refused():
    with pytest.raises(UserError, match="512 positions"):
        build("qwen3", max_model_len=513)


def test_progress_is_told_at_every_step_and_statistics_are_counted():
    engine = loaded("qwen3", max_num_seqs=4)
    ticks = []
    requests = ragged(3, samples=4)
    got = engine.generate(requests, Sampling(max_new_tokens=9), lambda: ticks.append(1))
    assert len(ticks) >= max(len(c.ids) for c in got)
    stats = engine.stats()
    prompt_tokens = sum(len(r.ids) for r in requests)
    assert stats["prompt_tokens"] == prompt_tokens
    assert stats["cached_prompt_tokens"] == prompt_tokens * 3 / 4
    assert stats["cache_hit_rate"] == 0.75
    assert stats["generated_tokens"] == sum(len(c.ids) for c in got)
    assert stats["preemptions"] == 0
    assert engine.stats()["prompt_tokens"] == 0
    assert engine.generate([], Sampling(max_new_tokens=9), quiet) == []


@pytest.mark.parametrize("kind", KINDS)
def test_update_confirms_checksums_and_replaces_every_weight(kind):
    engine = build(kind)
    for version, seed in enumerate((0, 1, 0)):
        sent = buckets(kind, seed=seed)
        expected = {name: tensor_checksum(t) for bucket in sent for name, t in bucket.tensors}
        assert engine.update_weights(iter(sent), version) == expected
        assert engine.version == version
        own = dict(engine.replica.hf.named_parameters())
        for name, parameter in trained(kind, seed).named_parameters():
            assert torch.equal(own[name], parameter), name


def parts_of(engine: Any, kind: str, bucket_bytes: int = 700) -> list[Bucket]:
    """The stream with every tensor above a bucket in parts."""
    model = SimpleNamespace(hf=trained(kind))
    options: dict = {"dtype": "float32", "divisible": engine.divisible}
    return list(weight_stream(model, bucket_bytes=bucket_bytes, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_large_weights_come_in_parts(kind):
    engine = build(kind)
    sent = parts_of(engine, kind)
    assert len({part.name for bucket in sent for part in bucket.parts}) > 3
    whole = {name: tensor_checksum(t) for b in buckets(kind) for name, t in b.tensors}
    assert engine.update_weights(iter(sent), 0) == whole
    own = dict(engine.replica.hf.named_parameters())
    for name, parameter in trained(kind).named_parameters():
        assert torch.equal(own[name], parameter), name


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("missing", "rows of"),
        ("nan", "not finite"),
        ("twice", "rows of"),
        ("shape", "has shape"),
        ("far", "has row"),
    ],
)
def test_bad_parts_are_named(damage: str, text: str):
    name = "model.embed_tokens.weight"
    engine = build("qwen3")
    sent = parts_of(engine, "qwen3")
    bucket = next(b for b in sent if b.parts and b.parts[0].name == name)
    part, rest = bucket.parts[0], bucket.parts[1:]
    nan = part.rows.clone()
    nan[1, 1] = float("nan")
    bucket.parts = {
        "missing": rest,
        "nan": [Part(name, part.first_row, nan), *rest],
        "twice": [part, part, *rest],
        "shape": [Part(name, part.first_row, part.rows[:, :-1]), *rest],
        "far": [Part(name, 10_000, part.rows), *rest],
    }[damage]
    with pytest.raises(EngineError, match=text) as raised:
        engine.update_weights(iter(sent), 7)
    assert name in str(raised.value) and engine.version == -1


def test_half_precision_engine_holds_cast_weights_and_agrees_with_that_model():
    engine = loaded("qwen3", dtype="bfloat16")
    half = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), dtype=torch.bfloat16)
    assert torch.equal(engine.replica.hf.lm_head.weight, half.lm_head.weight)
    sampling = Sampling(max_new_tokens=12)
    requests = ragged(8)
    for request, got in zip(requests, engine.generate(requests, sampling, quiet), strict=True):
        expected = reference_logp(half, request, got.ids, sampling)
        assert float((got.logp - expected).abs().mean()) < 0.1


def replaced(sent: list[Bucket], name: str, *tensors: Tensor) -> list[Bucket]:
    """The same buckets with `tensors` in the place of the tensor `name`."""
    out = []
    for bucket in sent:
        kept = []
        for own, tensor in bucket.tensors:
            kept += [(own, t) for t in tensors] if own == name else [(own, tensor)]
        out.append(Bucket(kept, bucket.layer_end))
    return out


VICTIM = "model.layers.1.mlp.experts.2.up_proj.weight"


def damages() -> dict[str, tuple[list[Tensor], str]]:
    good = dict(pair for bucket in buckets("qwen3_moe") for pair in bucket.tensors)[VICTIM]
    nan, infinite = good.clone(), good.clone()
    nan[3, 4], infinite[0, 0] = float("nan"), float("inf")
    return {
        "missing": ([], "lacks weight"),
        "twice": ([good, good], "twice"),
        "shape": ([good.T.contiguous()], "has shape"),
        "dtype": ([good.bfloat16()], "bfloat16"),
        "nan": ([nan], "not finite"),
        "inf": ([infinite], "not finite"),
    }


@pytest.mark.parametrize("damage", ["missing", "twice", "shape", "dtype", "nan", "inf"])
def test_bad_weights_are_named_and_nothing_is_generated_with_them(damage):
    engine = loaded("qwen3_moe")
    request, sampling = [Request([5, 6], 0)], Sampling(max_new_tokens=4)
    before = answers(engine.generate(request, sampling, quiet))
    tensors, text = damages()[damage]
    with pytest.raises(EngineError, match=text) as raised:
        engine.update_weights(iter(replaced(buckets("qwen3_moe"), VICTIM, *tensors)), 7)
    assert VICTIM in str(raised.value)
    with pytest.raises(EngineError, match="update to version 7 did not complete"):
        engine.generate(request, sampling, quiet)
    assert engine.version == 0
    engine.update_weights(iter(buckets("qwen3_moe")), 8)
    assert answers(engine.generate(request, sampling, quiet)) == before


def test_unexpected_weight_is_named():
    engine = build("qwen2_tied")
    extra = Bucket([("lm_head.weight", torch.zeros(VOCABULARY, 32))], True)
    with pytest.raises(EngineError, match=r"unexpected weight lm_head\.weight"):
        engine.update_weights(iter([*buckets("qwen2_tied"), extra]), 0)


def test_generating_before_any_update_is_an_error():
    engine = build("qwen3")
    assert engine.version == -1
    with pytest.raises(EngineError, match="no weights have been pulled"):
        engine.generate([Request([5], 0)], Sampling(max_new_tokens=1), quiet)


def test_non_finite_logits_name_the_request_and_the_token():
    engine = loaded("qwen3")
    requests, sampling = [Request([5, 6, 7], 0), Request([8, 9], 1)], Sampling(5, temperature=0.0)
    first, second = (c.ids.tolist() for c in engine.generate(requests, sampling, quiet))
    third = second[2]
    assert third not in (*first, *second[:2], *requests[0].ids, *requests[1].ids)
    with torch.no_grad():  # the activations of one token only
        engine.replica.hf.model.embed_tokens.weight[third] = float("nan")
    with pytest.raises(EngineError, match=r"request 1 .*2 tokens.*answer token 3"):
        engine.generate(requests, sampling, quiet)


def test_sleep_frees_memory_and_waking_restores_or_demands_an_update():
    engine = loaded("qwen3")
    request, sampling = [Request([5, 6], 0)], Sampling(max_new_tokens=4)
    before = answers(engine.generate(request, sampling, quiet))
    assert engine.replica.cache.memory.nbytes > 0

    engine.sleep(0)
    assert answers(engine.generate(request, sampling, quiet)) == before
    engine.sleep(1)
    assert engine.replica.cache.memory.nbytes == 0
    with pytest.raises(EngineError, match="sleeps"):
        engine.generate(request, sampling, quiet)
    engine.wake(["weights"])
    with pytest.raises(EngineError, match="kv_cache"):
        engine.generate(request, sampling, quiet)
    engine.wake(["kv_cache"])
    assert answers(engine.generate(request, sampling, quiet)) == before

    engine.sleep(2)
    assert all(parameter.is_meta for parameter in engine.replica.hf.parameters())
    with pytest.raises(EngineError, match="wake"):
        engine.update_weights(iter(buckets("qwen3")), 1)
    engine.wake()
    with pytest.raises(EngineError, match="level 2 dropped"):
        engine.generate(request, sampling, quiet)
    engine.update_weights(iter(buckets("qwen3")), 1)
    assert answers(engine.generate(request, sampling, quiet)) == before


def test_level_2_keeps_tied_weights_tied():
    engine = loaded("qwen2_tied")
    request, sampling = [Request([5, 6], 0)], Sampling(max_new_tokens=4)
    before = answers(engine.generate(request, sampling, quiet))
    engine.sleep(2)
    engine.wake()
    engine.update_weights(iter(buckets("qwen2_tied")), 1)
    assert engine.replica.hf.lm_head.weight is engine.replica.hf.model.embed_tokens.weight
    assert answers(engine.generate(request, sampling, quiet)) == before


def saved(folder, made: Any) -> str:
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def engine_of(path: str, max_model_len: int = 32) -> Any:
    return TransformersEngine(
        path,
        EngineOptions(),
        device=torch.device("cpu"),
        dtype="float32",
        max_model_len=max_model_len,
    )


def test_sliding_windows_are_refused_only_where_they_matter(tmp_path):
    made = config("qwen3", sliding_window=32, use_sliding_window=True, max_window_layers=0)
    path = saved(tmp_path, made)
    assert engine_of(path, 32).max_model_len == 32
    with pytest.raises(UserError, match=r"Qwen3.*sliding window of 32"):
        engine_of(path, 33)


def test_architectures_it_cannot_cache_are_refused_by_name(tmp_path):
    small = {"vocab_size": 50, "num_hidden_layers": 2, "hidden_size": 32}
    made = AutoConfig.for_model("mamba", state_size=4, architectures=["MambaForCausalLM"], **small)
    with pytest.raises(UserError, match="Mamba"):
        engine_of(saved(tmp_path, made))


def test_logits_that_the_architecture_scales_are_found_at_the_first_update(tmp_path):
    common = config("llama").to_dict()
    for key in ("model_type", "architectures", "rope_parameters"):
        common.pop(key, None)
    made = AutoConfig.for_model("granite", logits_scaling=8.0, **common)
    model = AutoModelForCausalLM.from_config(made).float()
    path = saved(tmp_path, model)
    engine = engine_of(path)
    with pytest.raises(UserError, match="Granite"):
        engine.update_weights(weight_stream(SimpleNamespace(hf=model), dtype="float32"), 0)
    with pytest.raises(EngineError, match="did not complete"):
        engine.generate([Request([5], 0)], Sampling(max_new_tokens=1), quiet)
