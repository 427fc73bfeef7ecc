"""Rollouts against hand-made cases: masks, padding, log-probs, and how tokens are drawn."""

import copy
import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import DynamicCache

import gspo_kernels as gk
from gspo_kernels import bits
from gspo_kernels.trainer import loop, rollout
from gspo_kernels.trainer.config import AUTO, InputError, RolloutConfig
from gspo_kernels.trainer.report import read_metrics
from gspo_kernels.trainer.rollout import (
    Completion,
    ContinuousEngine,
    ModelEngine,
    Sampling,
    draw,
    with_sampler,
)
from tests.draws import shifted_seed
from tests.trainer.conftest import (
    LIMIT,
    ROWS,
    assert_most_likely,
    ids_of,
    make_trainer,
    model_of_varying_rope,
    odd_share,
    plain_logits,
    plain_logprobs,
    same,
    small_config,
    tiny_model,
    tiny_qwen3,
    weights,
)


def test_tokens_that_a_loss_counts():
    truncated = Completion(torch.tensor([7, 1, 1, 7]), False, turn_ids=torch.tensor([0, -1, -1, 1]))
    ended = Completion(torch.tensor([1, 2, 9]), True)
    assert truncated.counted().int().tolist() == truncated.counted("keep").int().tolist() == [1, 0, 0, 1]
    assert not truncated.counted("mask").any() and ended.counted("mask").all()
    with pytest.raises(ValueError, match="truncated: got 'drop'"):
        ended.counted("drop")


@torch.no_grad()
def assert_logprobs_are_exact(model, prompts, completions):
    """Check that errors against fp64 are about those of an fp32 forward pass over whole sequences."""
    ids = [each.ids for each in completions]
    plain = plain_logprobs(model, prompts, ids)
    exact = plain_logprobs(copy.deepcopy(model).double(), prompts, ids)
    assert exact.isfinite().all() and exact.std() > 0.3
    budget = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (torch.cat([each.logprobs for each in completions]) - exact).abs().max() <= budget


@pytest.mark.parametrize("rules", [{"top_p": 0.8}, {"top_k": 20}, {"top_p": 0.9, "top_k": 50, "min_p": 0.3}])
@torch.no_grad()
def test_a_mask_is_what_was_drawn_from(tokenizer, rules):
    """Masks equal those of `gk.sampling_mask`; log-probs within the masks equal the engine's."""
    model, prompts = tiny_qwen3(tokenizer, initializer_range=0.1), tokenizer(["ab", "hello"] * 8)["input_ids"]
    engine = ModelEngine(model, list(range(60)), tokenizer.pad_token_id, batch_size=5)
    sampling = Sampling(6, 0.8, **rules, return_mask=True)
    found = []
    for how in (sampling, replace(sampling, return_mask=False)):
        torch.manual_seed(shifted_seed(1))
        found.append(engine.generate(prompts, how))
    assert found[1][0].mask is None and ids_of(found[0]) == ids_of(found[1])
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(*found, strict=True))
    sizes = torch.cat([each.mask.counts for each in found[0]])
    assert 1 <= sizes.min() <= sizes.max() < 258 and len({len(ids) for ids in ids_of(found[0])}) > 1
    agree = []
    for prompt, each in zip(prompts, found[0], strict=True):
        logits = plain_logits(model, prompt, each.ids)
        kept = each.mask.bitmask(258)
        again = gk.token_logprobs(logits, each.ids, temperature=0.8, kept_mask=kept).logprobs
        torch.testing.assert_close(again, each.logprobs, atol=1e-5, rtol=1e-5)
        agree.append(kept == gk.sampling_mask(logits, temperature=0.8, **rules))
    assert torch.cat(agree).float().mean() > 0.99  # a pass of other shapes may round beyond an edge


def test_under_autocast_the_cache_is_in_16_bit(tokenizer, monkeypatch):
    """Norms leave keys in fp32; attention rounds them, so that stored in 16 bit they give the same tokens."""
    model, kept, torch_update = tiny_qwen3(tokenizer), set(), DynamicCache.update

    class WithoutAutocast:
        is_autocast_enabled = staticmethod(lambda kind: False)
        __getattr__ = lambda self, name: getattr(torch, name)  # noqa: E731

    def update(cache, keys, values, *rest, **options):
        kept.update((keys.dtype, values.dtype))
        return torch_update(cache, keys, values, *rest, **options)

    monkeypatch.setattr(DynamicCache, "update", update)
    prompts, found = tokenizer(["ab", "hello"] * 3)["input_ids"], []
    for stored in (torch.bfloat16, torch.float32):
        torch.manual_seed(shifted_seed(2))
        with torch.autocast("cpu", torch.bfloat16), monkeypatch.context() as patch:
            if stored == torch.float32:  # the engine sees no autocast, the model does
                patch.setattr(rollout, "torch", WithoutAutocast())
            found.append(ModelEngine(model, [3], 0, batch_size=4).generate(prompts, Sampling(6)))
        assert (kept == {torch.bfloat16}) == (stored == torch.bfloat16)
    assert ids_of(found[0]) == ids_of(found[1])
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(*found, strict=True))


def test_the_most_likely_tokens_come_with_their_logprobs(model, tokenizer):
    """They change nothing else; where fewer tokens could be drawn the other ids are -1."""
    prompts = tokenizer(["ab", "hello", "c"] * 3)["input_ids"]
    for engine, top_k in ((ModelEngine, 0), (ModelEngine, 4), (ContinuousEngine, 0)):
        for K in (6, 10**3):
            found = []
            for count in (K, 0):
                torch.manual_seed(shifted_seed(2))
                sampling = Sampling(7, 0.8, top_k=top_k, top_logprobs=count)
                found.append(engine(model, list(range(40)), 256, 4).generate(prompts, sampling))
            assert_most_likely(model, prompts, found[0], K, 0.8, top_k or 258)
            if engine is ModelEngine:  # the other one draws otherwise without centering
                assert ids_of(found[0]) == ids_of(found[1])
                assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(*found, strict=True))
            assert all(each.centering is None for each in found[1])


def test_a_mask_needs_something_that_is_cut():
    for rules in ({}, {"top_k": 5, "temperature": 0.0}):
        with pytest.raises(ValueError, match="return_mask: expected top_p"):
            Sampling(6, **rules, return_mask=True)


def test_a_token_of_probability_zero_is_never_drawn():
    """Neither the smallest nor the largest uniform number draws such a token."""
    scores = torch.zeros(3, 10)
    scores[:, [0, 3, 4, 9]] = -torch.inf
    uniforms = torch.tensor([[0.0], [1.0 - 2.0**-53], [2 / 6 + 1e-6]], dtype=torch.float64)
    assert draw(scores, Sampling(1), uniforms)[0].tolist() == [1, 8, 5]


@pytest.mark.parametrize(("V", "peaked"), [(1, 1.0), (300, 20.0), (6400, 1.0)])
def test_draws_are_those_of_the_cumulative_probabilities(V, peaked):
    generator = torch.Generator().manual_seed(shifted_seed(V))
    scores = torch.randn(512, V, generator=generator) * peaked
    scores[:, V // 3 : V // 2] = -torch.inf
    uniforms = torch.rand(512, 1, generator=generator, dtype=torch.float64)
    tokens, probs, *_ = draw(scores, Sampling(1), uniforms)
    exact = scores.double().softmax(-1)
    above, slack = exact.cumsum(-1), 4 * torch.finfo(torch.float32).eps  # draw's probabilities are fp32
    mine = tokens.unsqueeze(1)
    assert (above.gather(-1, mine) - exact.gather(-1, mine) - slack <= uniforms).all()
    assert (uniforms <= above.gather(-1, mine) + slack).all() and (exact.gather(-1, mine) > 0).all()
    torch.testing.assert_close(probs.double(), exact.gather(-1, mine).squeeze(1), rtol=1e-5, atol=1e-30)


def test_the_default_generator_decides_and_logits_are_numbers(model, tokenizer):
    engine, found = ModelEngine(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, 64), []
    for seed in (0, 0, 1):
        torch.manual_seed(shifted_seed(seed))
        found.append(ids_of(engine.generate([[97, 98]] * 4, Sampling(6))))
    assert found[0] == found[1] != found[2]
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="NaN"):
        engine.generate([[97], [98]], Sampling(4))


@pytest.mark.parametrize("longest", [12, 2])
def test_prompts_are_read_once_and_ended_completions_leave_the_batch(tokenizer, longest):
    """With room for 12 tokens completions end early; with room for 2 some end at the last position."""
    model, shapes = tiny_qwen3(tokenizer, initializer_range=0.2), []
    hook = lambda module, args, options: shapes.append(tuple(options["input_ids"].shape))  # noqa: E731
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    prompts, ends = [[5, 6, 7], [8, 9]] * 8, range(0, 250, 3)
    found = ModelEngine(model, list(ends), tokenizer.pad_token_id, 16).generate(prompts, Sampling(longest))
    handle.remove()
    assert shapes[0] == (2, 3) and all(tokens == 1 for _, tokens in shapes[1:])
    for each in found:  # a completion ends with its first end token, or has the maximum length
        *inside, last = [token in ends for token in each.ids.tolist()]
        assert not any(inside) and each.finished == last and (last or len(each.ids) == longest)
    ended_by = torch.tensor([len(ids) for ids in ids_of(found)])
    going = [int((ended_by > place).sum()) for place in range(1, len(shapes))]
    rows = [rows for rows, _ in shapes[1:]]
    assert all(number <= several < 2 * number for number, several in zip(going, rows, strict=True))
    assert len(set(ended_by.tolist())) > 1
    assert_logprobs_are_exact(model, prompts, found)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "llama"])
def test_other_families(tokenizer, family):
    """Gemma mixes sliding windows with full attention; left padding must not shift GPT-2's positions."""
    model = tiny_model(family, tokenizer, initializer_range=0.2)
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12]] * 2
    engine = ModelEngine(model, [9999], 0, 8)
    assert_logprobs_are_exact(model, prompts, engine.generate(prompts, Sampling(8)))
    for prompt, each in zip(prompts, engine.generate(prompts, Sampling(8, temperature=0.0)), strict=True):
        assert (
            torch.equal(plain_logits(model, prompt, each.ids).argmax(-1), each.ids) and each.logprobs is None
        )


def test_a_rows_rope_frequencies_are_its_own():
    """One row is longer than the length beyond which LongRoPE has other frequencies, the others are not."""
    model = model_of_varying_rope("longrope")
    model.lm_head.weight.data.mul_(4.0)
    prompts = [
        [n % 60 + 1 for n in range(start, start + length)] for start, length in ((0, 3), (7, 2), (9, 30))
    ]
    torch.manual_seed(shifted_seed(0))
    completions = ModelEngine(model, [], 0, batch_size=3).generate(prompts, Sampling(LIMIT - 3))
    assert_logprobs_are_exact(model, prompts, completions)


has_continuous = pytest.mark.skipif(
    not hasattr(getattr(transformers, "ContinuousBatchingConfig", None), "auto_switch_to_flash"),
    reason="this version of transformers has no continuous batching that leaves the attention alone",
)


def continuous(model, end_ids=(), batch_size=5):
    return ContinuousEngine(model, list(end_ids), 0, batch_size)


@has_continuous
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_continuous_batching_returns_the_log_probs_of_a_forward(tokenizer, family):
    """Prompts are within a page and beyond it; 9 completions share a batch of 5, in which new ones take
    the places of ended ones; nothing else of the model or of random generators is changed.
    """
    model, ends = tiny_model(family, tokenizer, initializer_range=0.2).train(), range(0, 250, 3)
    model.lm_head.eval()
    before, prompts = weights(model), [[5, 6, 7], [n % 250 for n in range(300)], [8, 9]] * 3
    found, after = [], []
    for seed, count in ((1, 9), (1, 9), (2, 9), (1, 1)):
        torch.manual_seed(shifted_seed(seed))
        found.append(continuous(model, ends).generate(prompts[:count], Sampling(12)))
        after.append(torch.rand(4))
    assert ids_of(found[0]) == ids_of(found[1]) and ids_of(found[0]) != ids_of(found[2])
    assert torch.equal(after[0], after[3]) and not torch.equal(after[0], after[2])
    again = continuous(model, ends).generate(prompts, Sampling(12))
    assert ids_of(again) != ids_of(continuous(model, ends).generate(prompts, Sampling(12)))
    assert model.training and model.model.training and not model.lm_head.training
    assert same(weights(model), before) and model.config._attn_implementation == "sdpa"
    for each in found[0]:
        *inside, last = [token in ends for token in each.ids.tolist()]
        assert not any(inside) and each.finished == last and (last or len(each.ids) == 12)
    assert len({len(each.ids) for each in found[0]}) > 2
    assert_logprobs_are_exact(model.eval(), prompts, found[0])
    greedy = continuous(model, ends).generate(prompts, Sampling(12, temperature=0.0))
    assert ids_of(greedy) == ids_of(ModelEngine(model, list(ends), 0, 9).generate(prompts, Sampling(12, 0.0)))
    assert all(each.logprobs is None for each in greedy)


@has_continuous
@pytest.mark.parametrize("rules", [{"temperature": 0.6}, {"temperature": 1.4, "top_k": 12, "top_p": 0.9}])
@torch.no_grad()
def test_continuous_batching_draws_from_the_softmax(rules):
    """A model whose next token depends on no other one draws 3,840 times: frequencies are probabilities."""
    model = tiny_model("qwen3", vocab_size=40, initializer_range=0.2)
    model.model.embed_tokens.weight[:] = model.model.embed_tokens.weight[7]
    logits = model(torch.tensor([[1, 2]])).logits[0, -1].double() / rules["temperature"]
    if "top_k" in rules:
        mask = gk.sampling_mask(logits[None].float(), top_k=rules["top_k"], top_p=rules["top_p"])
        logits = logits.masked_fill(~bits.columns(mask, 40)[0], -torch.inf)
    exact = logits.log_softmax(-1)
    torch.manual_seed(shifted_seed(0))
    found = continuous(model, batch_size=32).generate([[1, 2]] * 32, Sampling(120, **rules))
    drawn = torch.cat([each.ids for each in found])
    torch.testing.assert_close(
        torch.cat([each.logprobs for each in found]).double(), exact[drawn], atol=1e-5, rtol=1e-5
    )
    expected = len(drawn) * exact.exp()
    counts, deviation = drawn.bincount(minlength=40), (expected * (1.0 - exact.exp())).sqrt()
    assert ((counts - expected).abs() <= 6.0 * deviation + 4.0).all() and (expected > 30.0).sum() > 5
    assert all(first != second for first, second in itertools.pairwise(ids_of(found)))


@has_continuous
def test_under_autocast_continuous_batching_samples_with_rounded_weights(tokenizer, monkeypatch):
    """Threads inherit no autocast, and the cache has the dtype of the weights."""
    model, seen = tiny_qwen3(tokenizer, initializer_range=0.2), set()
    kept = [p.data_ptr() for p in model.parameters()]
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    handle = model.lm_head.register_forward_hook(lambda *parts: seen.add(parts[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = continuous(model).generate([[5, 6]], Sampling(6))
    handle.remove()
    assert seen == {torch.bfloat16} and [p.data_ptr() for p in model.parameters()] == kept
    assert {p.dtype for p in model.parameters()} == {torch.float32} == {model.lm_head.weight.grad.dtype}
    exact = plain_logprobs(model, [[5, 6]], [found[0].ids])
    assert 1e-6 < (found[0].logprobs - exact).abs().max() < 0.1


@has_continuous
def test_a_completion_that_fails_is_an_error(tokenizer, monkeypatch):
    model, calls = tiny_qwen3(tokenizer).train(), itertools.count()
    whole = type(model).forward

    @wraps(whole)
    def forward(self, *args, **options):
        if next(calls) == 3:
            raise RuntimeError("CUDA out of memory")
        return whole(self, *args, **options)

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(RuntimeError, match=r"continuous batching: 4 of 4 completions: CUDA out of memory"):
        continuous(model).generate([[5, 6]] * 4, Sampling(8))
    assert model.training


@has_continuous
def test_which_sampler_a_run_gets(tokenizer, monkeypatch):
    """What continuous batching cannot do takes the loop, and the run says why."""
    model, said = tiny_qwen3(tokenizer), []

    def engine_of(model, sharded=False, top=False, **options):
        accelerator = SimpleNamespace(is_fsdp2=sharded, autocast=nullcontext)
        config = RolloutConfig(**options)
        return type(with_sampler(ModelEngine(model, [3], 0, 8), config, accelerator, said.append, top))

    assert engine_of(model) is engine_of(model, sampler="loop") is ModelEngine and not said
    assert engine_of(model, sampler="continuous") is ContinuousEngine and not said
    masks = continuous(model).generate([[5]], Sampling(2, top_k=3, return_mask=True))[0].mask
    assert masks.counts.tolist() == [3, 3]
    for changes, words in (
        ({"min_p": 0.1}, "it has no min_p and returns no sampling masks"),
        ({"sharded": True}, "it takes no shards of FSDP2"),
        ({"top": True}, "it returns log-probs of drawn tokens alone"),
        ({"model": model_of_varying_rope("longrope")}, "RoPE depend on the length"),
        ({"model": tiny_model("gpt2", tokenizer)}, "tried on a few tokens, it raised"),
    ):
        with pytest.raises(InputError, match=f"got 'continuous', and .* cannot sample: .*{words}"):
            engine_of(**{"model": model, "sampler": "continuous", **changes})
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "transformers", SimpleNamespace(ContinuousBatchingConfig=object))
        with pytest.raises(InputError, match="no log-probs, or changes the attention, in this version"):
            engine_of(model, sampler="continuous")

    class OnGPU:
        device = torch.device("cuda")
        __getattr__ = lambda self, name: getattr(model, name)  # noqa: E731

    assert engine_of(OnGPU()) is ModelEngine and "it is slow with sdpa, and fast with" in said.pop()
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    monkeypatch.setattr(ContinuousEngine, "trial", lambda self: "")
    assert engine_of(OnGPU()) is ContinuousEngine and not said


@has_continuous
def test_a_run_with_continuous_batching(tokenizer, tmp_path, monkeypatch):
    """Log-probs of sampling are those of training, and the table counts whole pages."""
    rollout = {"sampler": "continuous", "prompts_per_rollout": 3, "group_size": 4, "max_new_tokens": 5}
    config = small_config(tmp_path, rollout=rollout, update={"steps": 2})
    trainer = make_trainer(tokenizer, ROWS, odd_share, config)
    assert type(trainer.engine) is ContinuousEngine
    trainer.train()
    steps = [each["mismatch/max"] for each in read_metrics(tmp_path / "metrics.jsonl")[1:]]
    assert len(steps) == 2 and max(steps) < 1e-5
    with monkeypatch.context() as patch:
        patch.setattr(loop, "plan_memory", lambda *parts: ({**AUTO, "longest": parts[4]}, ""))
        trainer.plan_memory({})
    assert trainer.sizes["longest"] == 256 - 5
