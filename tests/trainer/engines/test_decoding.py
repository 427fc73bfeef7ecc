"""How tokens are chosen, and what the loop over them spares: passes of prompts, of rows and of the head."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_kernels.trainer.engines import decoding
from gspo_kernels.trainer.engines.decoding import by_inversion, draw
from gspo_kernels.trainer.engines.embedded import TransformersEngine
from gspo_kernels.trainer.rollout import Sampling
from tests.draws import shifted_seed
from tests.trainer.conftest import ids_of, tiny_qwen3


def test_draws_have_the_probabilities_of_the_scores():
    """Evenly spread uniform numbers must give each token as often as its probability says."""
    n, scores = 4096, torch.randn(1, 300, generator=torch.Generator().manual_seed(shifted_seed(0))) * 2
    scores[0, 0] = scores[0, 7] = scores[0, -1] = -torch.inf
    uniforms = ((torch.arange(n, dtype=torch.float64) + 0.5) / n).unsqueeze(1)
    tokens, probs, _ = draw(scores.repeat(n, 1), Sampling(1), uniforms)
    counts = torch.bincount(tokens, minlength=300)
    expected = n * scores[0].double().softmax(-1)
    assert ((counts - expected).abs() <= 1.0).all()
    torch.testing.assert_close(probs.log().float(), scores[0].log_softmax(-1)[tokens])


def test_a_token_of_probability_zero_is_never_drawn():
    impossible = [0, 3, 4, 9]
    scores = torch.zeros(3, 10)
    scores[:, impossible] = -torch.inf
    uniforms = torch.tensor([[0.0], [1.0 - 2.0**-53], [2 / 6 + 1e-6]], dtype=torch.float64)
    assert draw(scores, Sampling(1), uniforms)[0].tolist() == [1, 8, 5]


@pytest.mark.parametrize("V", [1, 300, 4097, 6400])
@pytest.mark.parametrize("peaked", [1.0, 20.0])
def test_draws_are_those_of_the_cumulative_probabilities(V, peaked):
    rng = torch.Generator().manual_seed(shifted_seed(V))
    scores = torch.randn(512, V, generator=rng) * peaked
    scores[:, V // 3 : V // 2] = -torch.inf  # whole blocks among them
    probs, uniforms = scores.softmax(-1), torch.rand(512, 1, generator=rng, dtype=torch.float64)
    tokens, shares = by_inversion(probs, uniforms)
    above = probs.double().cumsum(-1)
    places, below = uniforms * above[:, -1:], above - probs.double()
    # probabilities are fp32: the sum of a block's has a rounding or two
    slack = 2 * torch.finfo(torch.float32).eps
    assert (below.gather(-1, tokens) - slack <= places).all() and (
        places <= above.gather(-1, tokens) + slack
    ).all()
    assert (probs.gather(-1, tokens) > 0).all()
    torch.testing.assert_close(shares.float(), probs.gather(-1, tokens))
    alone = [by_inversion(p[None], u[None])[0] for p, u in zip(probs[:8], uniforms[:8], strict=True)]
    assert torch.equal(torch.cat(alone), tokens[:8])


@pytest.mark.parametrize("possible", [[0], [5000], [300, 4700], [255, 256], [511]])
def test_blocks_of_probability_zero_are_never_drawn_from(possible):
    """At both ends, and where a token has next to nothing of its block."""
    probs = torch.zeros(4, 5001)
    probs[:, possible] = torch.tensor([1.0, 1e-30])[: len(possible)]
    uniforms = torch.tensor([[0.0], [2.0**-53], [0.5], [1.0 - 2.0**-53]], dtype=torch.float64)
    assert by_inversion(probs, uniforms)[0].flatten().tolist() == [possible[0]] * 4
    probs[:, possible[-1]] = 1.0
    drawn = by_inversion(probs, uniforms)[0].flatten().tolist()
    assert drawn[0] == possible[0] and drawn[-1] == possible[-1]


class Calls:
    """Notes how many rows and tokens each forward pass of a model has."""

    def __init__(self, model, monkeypatch):
        self.shapes, forward = [], model.forward

        def noted(input_ids=None, **others):
            self.shapes.append(tuple(input_ids.shape))
            return forward(input_ids=input_ids, **others)

        noted.__signature__ = inspect.signature(forward)
        monkeypatch.setattr(model, "forward", noted)


def test_a_prompt_is_read_once(tokenizer, monkeypatch):
    model = tiny_qwen3(tokenizer, initializer_range=0.2)
    engine = TransformersEngine(model, [9999], tokenizer.pad_token_id, 8)
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7], [5, 6, 7], [8, 9]]
    alone = [
        ids_of(engine.generate([prompt], Sampling(4), seeds=[seed]))[0] for seed, prompt in enumerate(prompts)
    ]
    calls = Calls(model, monkeypatch)
    found = engine.generate(prompts, Sampling(4), seeds=range(5))
    assert calls.shapes == [(2, 3), (5, 1), (5, 1), (5, 1)]
    assert ids_of(found) == alone


def test_completions_that_have_ended_leave_the_batch(tokenizer, monkeypatch):
    model = tiny_qwen3(tokenizer, initializer_range=0.2)
    prompts = [[5, 6, 7], [8, 9]] * 8
    endless = TransformersEngine(model, [9999], 0, 16).generate(prompts, Sampling(12), seeds=range(16))
    ends = list(range(0, 250, 3))
    calls = Calls(model, monkeypatch)
    found = TransformersEngine(model, ends, 0, 16).generate(prompts, Sampling(12), seeds=range(16))
    expected = [
        ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), 12)]
        for ids in ids_of(endless)
    ]
    assert ids_of(found) == expected
    ended_by = torch.tensor([len(ids) for ids in expected])
    going = [int((ended_by > place).sum()) for place in range(1, len(calls.shapes))]
    rows = [rows for rows, _ in calls.shapes[1:]]
    assert all(number <= several < 2 * number for number, several in zip(going, rows, strict=True))
    assert rows[-1] < 16


def test_sliding_windows_and_full_attention_in_one_model(tokenizer):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(shifted_seed(0))
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"], initializer_range=0.2,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    engine = TransformersEngine(model, [9999], 0, 8)
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12]] * 2
    for sampling in (Sampling(8), Sampling(8, temperature=0.0)):
        found = engine.generate(prompts, sampling, seeds=range(4))
        for row, (prompt, ids) in enumerate(zip(prompts, ids_of(found), strict=True)):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            if found[row].logprobs is None:
                assert logits.argmax(-1).tolist() == ids
            else:
                exact = logits.log_softmax(-1).gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)
                torch.testing.assert_close(found[row].logprobs, exact, atol=1e-5, rtol=1e-5)


class Operations(TorchDispatchMode):
    """Notes the names of oneDNN's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "mkldnn":
            self.names.append(function._schema.name.removeprefix("mkldnn::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(not decoding.packs(), reason="no oneDNN products for this processor")
@pytest.mark.parametrize("bias", [False, True])
def test_the_weight_of_the_head_is_laid_out_once(tokenizer, monkeypatch, bias):
    model = tiny_qwen3(tokenizer, initializer_range=0.2, tie_word_embeddings=False)
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-2.0, 2.0, len(tokenizer)))
    engine = TransformersEngine(model, [9999], 0, 8)
    with Operations() as plain_operations:
        plain = engine.generate([[5, 6], [7]], Sampling(4), seeds=range(2))
    monkeypatch.setattr(decoding, "SMALL", 0)
    with Operations() as operations:
        found = engine.generate([[5, 6], [7]], Sampling(4), seeds=range(2))
    assert plain_operations.names == []
    assert operations.names == ["_reorder_linear_weight"] + ["_linear_pointwise"] * 4
    assert ids_of(found) == ids_of(plain)
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=1e-5, rtol=1e-5)
    assert "forward" not in vars(model.lm_head)
    with torch.no_grad():  # the next rollout has the next weights
        model.lm_head.weight.neg_()
    assert ids_of(engine.generate([[5, 6], [7]], Sampling(4), seeds=range(2))) != ids_of(plain)
