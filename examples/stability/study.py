"""One run of the study: a tiny model, a rollout engine in bf16, and a plain loop on the public losses."""

import copy
import functools
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import gspo_kernels as gk
from gspo_kernels.advantages import group_normalized
from gspo_kernels.off_policy import rollout_weights
from gspo_kernels.trainer.rollout import ModelEngine, Sampling

DIGITS, EQUALS, VOCABULARY = 64, 10, 11
PROMPTS, GROUP = 4, 8
"""Prompts in a minibatch, and completions of each."""
UPDATES, LEARNING_RATE = 320, 1e-3
OBJECTIVES = {
    "GSPO": gk.GSPO(clip_low=3e-4, clip_high=4e-4),
    "GSPO-token": gk.GSPOToken(clip_low=3e-4, clip_high=4e-4),
    "GRPO": gk.GRPO(clip_low=0.2, clip_high=0.27),
    "CISPO": gk.CISPO(max_ratio=5.0),
    "M2PO": gk.M2PO(),
}


@dataclass(frozen=True)
class Setting:
    """The options of a run; the defaults are the baseline.

    Attributes:
        model: "dense" or "moe", 2 of 8 experts.
        objective: a name of ``OBJECTIVES``.
        old: the source of old log-probs: the "trainer", by the path of the new log-probs, or the "engine".
        head: "fp32", or "bf16": hidden states, weight and logits are rounded.
        updates: minibatches that every rollout is cut into; each gets one update.
        correction: "none", "token TIS" or "sequence mask": rollout weights of trainer against engine.
        replay: whether training uses the experts that the engine chose.
        learning_rate: AdamW's learning rate.
        warm_up: updates over which the learning rate rises to its value, which it then keeps.
        seed: the seed of weights, prompts and sampling.
    """

    model: str = "dense"
    objective: str = "GSPO"
    old: str = "trainer"
    head: str = "fp32"
    updates: int = 4
    correction: str = "none"
    replay: bool = False
    learning_rate: float = LEARNING_RATE
    warm_up: int = 0
    seed: int = 0


def setting_of(record):
    """Return the setting of a record; fields that older records lack have the baseline's values."""
    return Setting(**{name: record[name] for name in vars(Setting()) if name in record})


def make_model(kind, seed):
    """Return a Qwen3, or a Qwen3-MoE of 8 experts, of 2 layers and width 64."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(intermediate_size=128, **shared))
    experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts, norm_topk_prob=True, **shared))


def make_prompts(count, generator):
    """Return digits and an equals sign, [count, DIGITS + 1], and the answer: each digit plus one, mod 10."""
    digits = torch.randint(10, (count, DIGITS), generator=generator)
    return torch.cat([digits, torch.full((count, 1), EQUALS)], 1), (digits + 1) % 10


@functools.cache
def make_start(kind, seed):
    """Return a model that was trained on right answers until 60% of the digits are right."""
    model, generator = make_model(kind, seed), torch.Generator().manual_seed(seed)
    optimizer, right = torch.optim.AdamW(model.parameters(), lr=2e-3), 0.0
    while right < 0.6:
        prompts, answers = make_prompts(32, generator)
        logits = model(torch.cat([prompts, answers[:, :-1]], 1), use_cache=False).logits[:, DIGITS:]
        right = float((logits.argmax(-1) == answers).float().mean())
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


class Routers:
    """The routers of a mixture of experts; their choices can be recorded or replaced."""

    def __init__(self, model):
        self.modules = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]

    @contextmanager
    def hooked(self, hook):
        """Have a forward hook on every router in this context."""
        handles = [module.register_forward_hook(hook) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def recorded(self):
        """Record the experts of each router in ``self.choices``, [tokens, k], in the order of the layers."""
        self.choices = []
        return self.hooked(lambda module, inputs, output: self.choices.append(output[2]))

    def replaying(self, choices):
        """Make the routers choose these experts, with the probabilities of the routers' own logits."""
        left = iter(choices)

        def replay(module, inputs, output):
            logits, _, _ = output
            experts = next(left)
            scores = logits.softmax(-1, dtype=torch.float).gather(-1, experts)
            return logits, (scores / scores.sum(-1, keepdim=True)).to(logits.dtype), experts

        return self.hooked(replay)


def hidden_states(model, prompts, completions):
    """Return the hidden states that predict the completions, [B, DIGITS, H]."""
    ids = torch.cat([prompts, completions[:, :-1]], 1)
    return model.model(input_ids=ids, use_cache=False).last_hidden_state[:, DIGITS:]


def head_of(model, head, hidden):
    """Return hidden states, weight and options as the losses take them, for a head in fp32 or bf16."""
    if head == "fp32":
        return hidden, model.lm_head.weight, {}
    return hidden.bfloat16(), model.lm_head.weight.bfloat16(), {"logits_dtype": "input"}


def run(setting):
    """Train a copy of the starting point; return the setting and its curves."""
    model, objective = copy.deepcopy(make_start(setting.model, setting.seed)), OBJECTIVES[setting.objective]
    started = time.process_time()
    torch.manual_seed(setting.seed)
    generator = torch.Generator().manual_seed(1000 + setting.seed)
    routers, curves = Routers(model), {name: [] for name in CURVES}
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / max(1, setting.warm_up)))
    for _ in range(UPDATES // setting.updates):
        batch = rollout(model, setting, generator)
        for name in ("reward", "mismatch", "experts_changed", "kept"):
            curves[name].append(batch.pop(name))
        clipped, spread = [], []
        for part in range(setting.updates):
            rows = slice(part * PROMPTS * GROUP, (part + 1) * PROMPTS * GROUP)
            weights = None if batch["weights"] is None else batch["weights"][rows]
            replay = [
                choice.view(-1, 2 * DIGITS, choice.shape[-1])[rows].flatten(0, 1)
                for choice in batch["choices"]
            ]
            with routers.replaying(replay) if setting.replay else routers.hooked(lambda *_: None):
                hidden = hidden_states(model, batch["prompts"][rows], batch["completions"][rows])
            hidden, weight, options = head_of(model, setting.head, hidden)
            out = gk.fused_linear_policy_loss(
                hidden,
                weight,
                batch["completions"][rows],
                batch["old"][rows],
                batch["advantages"][rows],
                rollout_weights=weights,
                objective=objective,
                **options,
            )
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            clipped.append(float(out.metrics["clip_fraction/tokens"]))
            spread.append(float((out.logprobs - batch["old"][rows]).mean(1).std()))
        curves["clipped"].append(sum(clipped) / len(clipped))
        curves["spread"].append(spread[0])
    return {**vars(setting), "cpu_seconds": time.process_time() - started, **curves}


CURVES = ("reward", "clipped", "spread", "mismatch", "experts_changed", "kept")
"""The curves of a run, a number per rollout: mean reward; share of tokens whose ratio is clipped; standard
deviation of the sequences' mean log-ratio before the first update; mean distance of trainer's and engine's
log-probs in nats; share of experts that these two choose differently; mean weight of the correction."""


@torch.no_grad()
def rollout(model, setting, generator):
    """Sample from the engine, the same weights in bf16, decoding token by token; score by the trainer."""
    engine = copy.deepcopy(model).bfloat16()
    prompts, answers = (
        x.repeat_interleave(GROUP, 0) for x in make_prompts(PROMPTS * setting.updates, generator)
    )
    sampler = ModelEngine(engine, end_ids=[], pad_id=EQUALS, batch_size=len(prompts))
    sampled = sampler.generate(prompts.tolist(), Sampling(DIGITS))
    completions = torch.stack([each.ids for each in sampled])
    engine_logprobs = torch.stack([each.logprobs for each in sampled])
    engine_routers, routers = Routers(engine), Routers(model)
    with engine_routers.recorded():
        hidden_states(engine, prompts, completions)
    choices = engine_routers.choices
    with routers.recorded():
        hidden = hidden_states(model, prompts, completions)
    changed = experts_changed(choices, routers.choices)
    if setting.replay:
        with routers.replaying(choices):
            hidden = hidden_states(model, prompts, completions)
    hidden, weight, options = head_of(model, setting.head, hidden)
    ours = gk.linear_token_logprobs(hidden, weight, completions, **options).logprobs
    weights = None
    if setting.correction == "token TIS":
        weights = rollout_weights(ours, engine_logprobs, high=2.0)
    elif setting.correction == "sequence mask":
        weights = rollout_weights(ours, engine_logprobs, level="sequence", mode="mask", low=0.998, high=1.002)
    rewards = (completions == answers).float().mean(1)
    return {
        "prompts": prompts,
        "completions": completions,
        "advantages": group_normalized(rewards, group_size=GROUP),
        "old": ours if setting.old == "trainer" else engine_logprobs,
        "weights": weights,
        "choices": choices,
        "reward": float(rewards.mean()),
        "mismatch": float((ours - engine_logprobs).abs().mean()),
        "experts_changed": changed,
        "kept": 1.0 if weights is None else float(weights.mean()),
    }


def experts_changed(one, other):
    """Return the share of chosen experts that the other side did not choose; 0 for a dense model."""
    if not one:
        return 0.0
    kept = [
        (a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1).float().mean() for a, b in zip(one, other, strict=True)
    ]
    return 1.0 - float(torch.stack(kept).mean())
