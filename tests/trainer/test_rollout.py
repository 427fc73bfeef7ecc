"""Rollouts against hand-made cases: masks, padding, log-probs, and how tokens are drawn."""

import copy
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.rollout import Completion, ModelEngine, Sampling, draw
from tests.draws import shifted_seed
from tests.trainer.conftest import (
    LIMIT,
    assert_most_likely,
    ids_of,
    model_of_varying_rope,
    plain_logits,
    plain_logprobs,
    tiny_model,
    tiny_qwen3,
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


@pytest.mark.parametrize("rules", [{"top_p": 0.8}, {"top_k": 20}, {"top_p": 0.9, "top_k": 50}])
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


def test_most_likely_tokens_come_with_logprobs(model, tokenizer):
    """They change nothing else; where fewer tokens could be drawn the other ids are -1."""
    prompts = tokenizer(["ab", "hello", "c"] * 3)["input_ids"]
    for top_k in (0, 4):
        for K in (6, 10**3):
            found = []
            for count in (K, 0):
                torch.manual_seed(shifted_seed(2))
                sampling = Sampling(7, 0.8, top_k=top_k, top_logprobs=count)
                found.append(ModelEngine(model, list(range(40)), 256, 4).generate(prompts, sampling))
            assert_most_likely(model, prompts, found[0], K, 0.8, top_k or 258)
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
def test_draws_follow_cumulative_probabilities(V, peaked):
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


def test_the_default_generator_decides(model, tokenizer):
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
def test_ended_completions_leave_the_batch(tokenizer, longest):
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
