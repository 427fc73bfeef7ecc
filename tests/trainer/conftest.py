"""A tiny model, a toy task and a small configuration for the trainer's tests."""

import shutil
from contextlib import contextmanager

import pytest
import torch
from transformers.integrations import PeftAdapterMixin

from gspo_kernels.trainer.config import TrainConfig, from_mapping
from gspo_kernels.trainer.report import read_metrics
from tests.draws import shifted_seed


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread: a second one only slows such small models down. Runs that a module shares use one
    as well, because bits may differ with the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_adapters_of_transformers(monkeypatch):
    """Adapters are trained, saved, resumed, exported and used without transformers' own methods for them,
    most of which need peft 0.22 from transformers 5.24 on.
    """

    def refuse(*_, **__):
        raise AssertionError("transformers' own method for adapters was called")

    verbs = "load_adapter add_adapter set_adapter delete_adapter disable_adapters enable_adapters"
    for name in (*verbs.split(), "active_adapters", "get_adapter_state_dict"):
        monkeypatch.setattr(PeftAdapterMixin, name, refuse)


def make_accelerator(precision="fp32"):
    """Make an accelerator. Reset accelerate's state first, which keeps a process's first precision."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision="no" if precision in ("auto", "fp32") else precision)


@pytest.fixture(autouse=True)
def forget_the_accelerator():
    """Make a fresh accelerator after each test, for trainers that several tests share."""
    yield
    make_accelerator()


@pytest.fixture(scope="session")
def tokenizer():
    from gspo_kernels import demo

    return demo.make_tokenizer()


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TOKENS = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": 4},
    # one layer with a window and one without
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"full_attn_idxs": [1]},
}
LIMIT = 9
ROPES = {
    "longrope": {
        "original_max_position_embeddings": LIMIT,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        },
    },
    "dynamic": {
        "max_position_embeddings": LIMIT,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}  # fmt: skip
"""RoPE, for heads of width 8, whose frequencies depend on the length of a sequence beyond LIMIT tokens."""


def tiny_model(family, tokenizer=None, seed=0, **changes):
    """Return a random model of a family of transformers, with the vocabulary of ``tokenizer`` if passed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(shifted_seed(seed))
    options = SIZES | HEADS | TOKENS | FAMILIES.get(family, {})
    if tokenizer is not None:
        names = ("eos_token_id", "pad_token_id")
        options |= {"vocab_size": len(tokenizer)} | {name: getattr(tokenizer, name) for name in names}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options | changes)).eval()


def model_of_varying_rope(kind, tokenizer=None):
    """Return a model with a kind of ``ROPES``, and weights so large that attention is far from uniform."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = tiny_model("llama" if kind == "dynamic" else "phi3", tokenizer, **heads, **ROPES[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def stretch_rope(model):
    """Give a model a RoPE of its own, whose frequencies are others in calls with positions beyond 32."""
    rotate = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: rotate(
        x, position_ids * (1 + (position_ids.max() >= 32))
    )
    return model


def tiny_qwen3(tokenizer, seed=0, **changes):
    return tiny_model("qwen3", tokenizer, seed, **changes)


@pytest.fixture
def model(tokenizer):
    return tiny_qwen3(tokenizer)


ROWS = [{"prompt": prompt, "letter": prompt[0]} for prompt in ("ab", "bcd", "c", "dabc", "ea", "fgh")]


def odd_share(completion_ids):
    """Return each completion's share of odd token ids, which varies in a random byte model."""
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def merged_config(values, sections, kind=TrainConfig) -> TrainConfig:
    """Return a configuration of ``values``; ``sections`` replace options, or update a section's options."""
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes if isinstance(changes, dict) else changes
    return from_mapping(values, kind)


def small_config(output, kind=TrainConfig, **sections) -> TrainConfig:
    values = {
        "output": str(output),
        "rollout": {"prompts_per_rollout": 3, "group_size": 4, "max_new_tokens": 5},
        "update": {"steps": 4, "minibatches": 2, "micro_batch_tokens": 24, "learning_rate": 1e-3},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2},
    }
    return merged_config(values, sections, kind)


def make_trainer(own_tokenizer, rows, reward, config, **changes):
    """Return a trainer of a tiny model. A third of the vocabulary ends a completion, so lengths differ."""
    from gspo_kernels.trainer import GSPOTrainer

    model = changes.pop("model", None)
    arguments = {
        "model": tiny_qwen3(own_tokenizer) if model is None else model,
        "tokenizer": own_tokenizer,
        "rewards": reward,
        "dataset": rows,
        "eval_dataset": rows[:3],
        "config": config,
    }
    if "accelerator" not in changes:
        changes["accelerator"] = make_accelerator(config.update.precision)
    trainer = GSPOTrainer(**(arguments | changes))
    if hasattr(trainer.engine, "end_ids"):
        trainer.engine.end_ids = list(range(0, 250, 3))
    return trainer


def untimed(run):
    """Return the records of a run's metrics without times and memory."""
    timed, records = ("seconds", "tokens_per_second", "memory"), read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in record.items() if not key.startswith(timed)} for record in records]


def copy_after(step, run, copy):
    """Copy a finished run's directory as a kill after this step would leave it."""
    shutil.copytree(run, copy)
    for path in (copy / "model", *(copy / "checkpoints").glob("step_*")):
        if path.name == "model" or int(path.name[5:]) > step:
            shutil.rmtree(path)


def batch_of(trainer):
    """Return the batch of the first step: its rollout with advantages."""
    trainer.step = 1
    torch.manual_seed(0)
    return trainer.compare(trainer.rollout())


@contextmanager
def nothing_in_single_precision():
    """Compute in fp64 what models of any dtype compute in fp32 (norms, routers)."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def plain_logits(model, prompt, completion):
    """Return the logits that predict a completion's tokens, [C, V], from this sequence's own forward pass."""
    ids = torch.cat([torch.as_tensor(prompt), completion]).unsqueeze(0)
    return model(ids).logits[0, len(prompt) - 1 : -1]


@torch.no_grad()
def plain_logprobs(model, prompts, completions):
    """Return log-probs of the completions' tokens, [N], at temperature 1."""
    each = (
        plain_logits(model, *pair).log_softmax(-1).gather(-1, pair[1].unsqueeze(-1)).squeeze(-1)
        for pair in zip(prompts, completions, strict=True)
    )
    return torch.cat(list(each))


@torch.no_grad()
def assert_most_likely(model, prompts, completions, K, temperature, top_k):
    """Check that completions have the K most likely ids of each token, of ``top_k`` that could be drawn."""
    k = min(K, top_k)
    for prompt, completion in zip(prompts, completions, strict=True):
        scores = plain_logits(model, prompt, completion.ids) / temperature
        expected = scores.topk(top_k).values.log_softmax(-1)[:, :k]
        ids, logprobs = completion.centering.ids.long(), completion.centering.logprobs
        assert ids.shape == logprobs.shape == (len(completion.ids), K)
        assert (ids[:, k:] == -1).all() and all(len({*row}) == k for row in ids[:, :k].tolist())
        torch.testing.assert_close(logprobs[:, :k], expected, rtol=0, atol=1e-5)
        of_ids = scores.gather(-1, ids[:, :k]) - scores.topk(top_k).values.logsumexp(-1, keepdim=True)
        torch.testing.assert_close(logprobs[:, :k], of_ids, rtol=0, atol=1e-5)
        drawn = ids == completion.ids.unsqueeze(1)
        own = completion.logprobs.unsqueeze(1).expand(-1, K)[drawn]
        torch.testing.assert_close(logprobs[drawn], own, rtol=0, atol=1e-6)


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(found, expected):
    """Return whether two dictionaries of tensors are equal bit for bit."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def ids_of(completions):
    """Return the token ids of completions as lists."""
    return [completion.ids.tolist() for completion in completions]
