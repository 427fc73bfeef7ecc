"""Rollouts against hand-made cases: masks, padding, the layout for training, how tokens are drawn."""

import copy
import math

import pytest
import torch

from gspo_kernels.trainer.engines.embedded import TransformersEngine, left_padded
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rollout import (
    Completion,
    Sampling,
    Segment,
    join_segments,
    sampling_mismatch,
)
from gspo_kernels.trainer.rows.policy import Policy
from tests.draws import shifted_seed
from tests.trainer.conftest import ids_of, tiny_qwen3

END, OTHER_END, PAD = 9, 8, 0


class Recites:
    """A model whose ``generate`` writes given tokens, whatever it is asked."""

    def __init__(self, ids):
        self.ids, self.device, self.generation_config = torch.tensor(ids), torch.device("cpu"), None

    def get_output_embeddings(self):
        return None

    def generate(self, input_ids, attention_mask, generation_config, custom_generate):
        custom_generate.completion_ids[:] = self.ids
        custom_generate.logprobs[:] = -torch.arange(1.0, 1.0 + self.ids.shape[1])


@pytest.mark.parametrize(
    ("ids", "length", "finished"),
    [
        ([1, 2, END, PAD], 3, True),  # ended early
        ([1, 2, 3, END], 4, True),  # ended in the last place
        ([1, 2, 3, 4], 4, False),  # truncated
        ([END, PAD, PAD, PAD], 1, True),  # empty text
        ([END, END, END, END], 1, True),  # padded with the end token
        ([1, OTHER_END, END, PAD], 2, True),  # the first of several end tokens
        ([1, PAD, 2, END], 4, True),  # a padding token that was sampled
    ],
)
def test_a_completion_goes_up_to_its_first_end_token(ids, length, finished):
    found = TransformersEngine(Recites([ids]), [END, OTHER_END], PAD, 1).generate([[5]], Sampling(4))
    assert ids_of(found) == [ids[:length]] and found[0].finished == finished
    assert found[0].logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0][:length]


def test_left_padding():
    ids, mask = left_padded([[1, 2, 3], [4]], PAD)
    assert ids.tolist() == [[1, 2, 3], [PAD, PAD, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_tokens_that_a_loss_counts():
    truncated = Completion(torch.tensor([7, 1, 1, 7]), False, turn_ids=torch.tensor([0, -1, -1, 1]))
    ended = Completion(torch.tensor([1, 2, END]), True, turn_ids=torch.tensor([0, 0, 0]))
    plain = Completion(torch.tensor([7, 1, 1, 7]), False)
    kept, masked = (
        [each.counted(what).int().tolist() for each in (truncated, ended, plain)] for what in ("keep", "mask")
    )
    assert kept == [[1, 0, 0, 1], [1, 1, 1], [1, 1, 1, 1]]
    assert masked == [[0, 0, 0, 0], [1, 1, 1], [0, 0, 0, 0]]
    assert torch.equal(plain.counted(), plain.counted("keep"))
    with pytest.raises(ValueError, match="truncated: got 'drop'"):
        plain.counted("drop")


def test_segments_of_several_turns():
    turns = [Segment([7, 8], [-0.5, -1.0]), Segment([5], sampled=False), Segment([6, END], [-2.0, -0.25])]
    completion = join_segments(turns, True)
    assert completion.finished and completion.ids.tolist() == [7, 8, 5, 6, END]
    assert completion.turn_ids.tolist() == [0, 0, -1, 1, 1]
    assert completion.logprobs.tolist() == [-0.5, -1.0, 0.0, -2.0, -0.25]
    assert completion.counted().int().tolist() == [1, 1, 0, 1, 1]
    other = join_segments([Segment([5, 5], sampled=False), Segment([3], [-3.0])], False)
    assert other.ids.tolist() == [5, 5, 3] and other.turn_ids.tolist() == [-1, -1, 0]
    assert other.logprobs.tolist() == [0.0, 0.0, -3.0]
    assert other.counted().int().tolist() == [0, 0, 1] and not other.counted("mask").any()
    assert join_segments([*turns, Segment([3])], False).logprobs is None
    with pytest.raises(ValueError, match="logprobs: got 1 for 2 tokens"):
        Segment([1, 2], [0.0])


def sample(model, tokenizer, prompts, sampling, batch_size=64, seeds=None):
    engine = TransformersEngine(
        model, end_ids=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id, batch_size=batch_size
    )
    return engine.generate(tokenizer(prompts)["input_ids"], sampling, seeds=seeds)


def test_greedy_completions_do_not_depend_on_padding_or_batches(model, tokenizer):
    prompts = ["a", "hello", "xyz", "abcdefg"]
    together = ids_of(sample(model, tokenizer, prompts, Sampling(6, temperature=0.0)))
    in_pairs = ids_of(sample(model, tokenizer, prompts, Sampling(6, temperature=0.0), batch_size=2))
    alone = [ids_of(sample(model, tokenizer, [p], Sampling(6, temperature=0.0)))[0] for p in prompts]
    assert together == in_pairs == alone
    # and are what the model itself finds most likely
    ids = tokenizer(["hello"])["input_ids"][0]
    for expected in alone[1]:
        found = model(torch.tensor([ids])).logits[0, -1].argmax().item()
        assert found == expected
        ids.append(found)


def test_batches_that_end_early(tokenizer):
    model = tiny_qwen3(tokenizer, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits are equal, so greedy decoding takes token 0 ...
    completions = sample(model, tokenizer, ["a", "b"], Sampling(4, temperature=0.0))
    assert ids_of(completions) == [[0] * 4] * 2
    assert not any(completion.finished for completion in completions)
    engine = TransformersEngine(model, end_ids=[0], pad_id=7, batch_size=1)
    completions = engine.generate([[1], [2]], Sampling(4, temperature=0.0))  # ... which ends here
    assert ids_of(completions) == [[0], [0]]


def test_the_models_own_generation_defaults_are_set_aside(model, tokenizer):
    torch.manual_seed(shifted_seed(0))
    plain = ids_of(sample(model, tokenizer, ["ab"] * 16, Sampling(6)))
    model.generation_config.top_k = 1
    model.generation_config.temperature = 0.1
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_length = 3
    torch.manual_seed(shifted_seed(0))
    again = ids_of(sample(model, tokenizer, ["ab"] * 16, Sampling(6)))
    assert plain == again
    assert model.generation_config.top_k == 1, "the model keeps its own defaults"


def test_temperature_and_top_k_reach_the_sampler(model, tokenizer):
    def distinct(sampling):
        torch.manual_seed(shifted_seed(0))
        return len({tuple(ids) for ids in ids_of(sample(model, tokenizer, ["ab"] * 32, sampling))})

    assert distinct(Sampling(4, top_k=1)) == 1
    assert distinct(Sampling(4, temperature=1e-4)) == 1
    assert distinct(Sampling(4)) > 16


def sampling_logprobs(model, prompts, completions, sampling):
    """[N] by a forward pass without a cache, and the definitions of temperature, top-k and top-p."""
    rows = []
    for prompt, completion in zip(prompts, (each.ids for each in completions), strict=True):
        ids = torch.cat([torch.tensor(prompt), completion]).unsqueeze(0)
        logits = model(ids).logits[0, -len(completion) - 1 : -1] / sampling.temperature
        if sampling.top_k:
            smallest = logits.sort(-1, descending=True).values[:, sampling.top_k - 1 : sampling.top_k]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        probs, order = logits.softmax(-1).sort(-1, descending=True)
        needed = probs.cumsum(-1) - probs < sampling.top_p
        logits = logits.masked_fill(~torch.zeros_like(needed).scatter(-1, order, needed), -torch.inf)
        rows.append(logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1))
    return torch.cat(rows)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(6), Sampling(6, 0.7), Sampling(6, 1.3, top_k=20), Sampling(6, 0.9, top_p=0.8, top_k=50)],
    ids=str,
)
@torch.no_grad()
def test_logprobs_are_those_of_the_sampling_distribution(tokenizer, sampling):
    model = tiny_qwen3(tokenizer, initializer_range=0.2)  # so that logits differ
    prompts = ["ab", "hello", "c", "xyz"] * 8
    completions = sample(model, tokenizer, prompts, sampling, batch_size=8)
    tokens = tokenizer(prompts)["input_ids"]
    plain = sampling_logprobs(model, tokens, completions, sampling)
    exact = sampling_logprobs(copy.deepcopy(model).double(), tokens, completions, sampling)
    assert exact.isfinite().all() and exact.std() > 0.3
    budget = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (torch.cat([each.logprobs for each in completions]) - exact).abs().max() <= budget


def test_completions_do_not_depend_on_their_batch(tokenizer):
    """Nor on order, on the number of processes that share the prompts, or on the longest completion."""
    model = tiny_qwen3(tokenizer, initializer_range=0.2)
    prompts = ["a", "hello", "xyz", "abcdefg", "b", "hello", "q" * 30, "hello"]
    seeds = list(range(100, 108))
    whole = sample(model, tokenizer, prompts, Sampling(6, 1.2), seeds=seeds)
    assert len({tuple(ids) for ids in ids_of(whole)}) == 8, "equal prompts have their own numbers"
    for batch_size in (1, 3):
        other = sample(model, tokenizer, prompts, Sampling(6, 1.2), batch_size, seeds)
        assert ids_of(other) == ids_of(whole)
        both = ([each.logprobs for each in found] for found in (other, whole))
        torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)
    order = [5, 2, 7, 0, 6, 1]
    some = sample(
        model, tokenizer, [prompts[i] for i in order], Sampling(6, 1.2), 2, [seeds[i] for i in order]
    )
    assert ids_of(some) == [ids_of(whole)[i] for i in order]
    shorter = sample(model, tokenizer, prompts, Sampling(3, 1.2), seeds=seeds)
    assert ids_of(shorter) == [ids[:3] for ids in ids_of(whole)]
    with pytest.raises(ValueError, match="seeds: got 3"):
        sample(model, tokenizer, prompts, Sampling(6), seeds=seeds[:3])


def test_without_seeds_the_default_generator_decides(model, tokenizer):
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(shifted_seed(seed))
        found.append([ids_of(sample(model, tokenizer, ["ab"] * 4, Sampling(6))) for _ in range(2)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1] and found[0][0] != found[2][0]


def test_prompts_of_similar_length_are_batched_together(model, tokenizer, monkeypatch):
    shapes, generate = [], model.generate

    def spy(input_ids, **arguments):
        shapes.append(tuple(input_ids.shape))
        return generate(input_ids=input_ids, **arguments)

    monkeypatch.setattr(model, "generate", spy)
    sample(model, tokenizer, ["a" * n for n in (2, 20, 3, 19, 1)], Sampling(2), batch_size=2)
    assert shapes == [(2, 20), (2, 3), (1, 1)]


def test_logits_that_are_not_numbers_are_refused(tokenizer):
    model = tiny_qwen3(tokenizer)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="not numbers"):
        sample(model, tokenizer, ["a", "b"], Sampling(4))


def test_greedy_completions_have_no_logprobs(model, tokenizer):
    assert sample(model, tokenizer, ["a"], Sampling(2, temperature=0.0))[0].logprobs is None


@torch.no_grad()
def test_mismatch_with_training_logprobs(tokenizer):
    model = tiny_qwen3(tokenizer, initializer_range=0.2)

    def mismatch(sampling):
        completions = sample(model, tokenizer, ["ab", "hello", "c"] * 4, sampling, seeds=range(12))
        sampled = torch.cat([each.logprobs for each in completions])
        training = Policy(model, layout="packed", temperature=sampling.temperature)(
            [torch.tensor(ids) for ids in tokenizer(["ab", "hello", "c"] * 4)["input_ids"]],
            [each.ids for each in completions],
        ).logprobs
        return sampling_mismatch(training, sampled, torch.ones_like(sampled, dtype=torch.bool))

    same = mismatch(Sampling(6, 0.8))
    assert 0.0 < same["mismatch/mean"] <= same["mismatch/max"] < 1e-5
    assert same["mismatch/ratio"] == pytest.approx(1.0, abs=1e-5)
    cut = mismatch(Sampling(6, 0.8, top_k=5))  # training takes the whole vocabulary
    assert cut["mismatch/mean"] > 0.1
    assert cut["mismatch/ratio"] < 0.9


def test_mismatch_by_hand():
    training = torch.tensor([[-1.0, -2.0, torch.nan], [-3.0, 5.0, -1.0]])
    sampled = torch.tensor([[-1.5, -2.0, 0.0], [-2.0, 0.0, torch.nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    found = sampling_mismatch(training, sampled, mask)
    assert found["mismatch/mean"] == pytest.approx(0.5)
    assert found["mismatch/max"] == pytest.approx(1.0)
    assert found["mismatch/ratio"] == pytest.approx((math.exp(0.5) + 1.0 + math.exp(-1.0)) / 3)
    assert all(math.isnan(value) for value in sampling_mismatch(training, sampled, mask & False).values())
