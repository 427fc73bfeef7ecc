"""LoRA on the lm_head: equal to the product of base and adapter as one weight, in fp64, and through PEFT."""

import contextlib

import pytest
import torch

import gspo_kernels as gk
from tests.draws import shifted_seed

V, H, RANK, SCALE = 160, 24, 3, 0.5
OBJECTIVES = {
    "sequence": gk.GSPO(clip_low=0.1, clip_high=0.2),
    "token": gk.GRPO(),
    "KL": gk.GSPO(clip_low=0.1, clip_high=0.2),
}
SCHEDULES = [
    *(("aligned", kind) for kind in OBJECTIVES),
    ("two_pass", "KL"),
    ("auto", "KL"),
    ("deferred", "sequence"),
    ("known", "token"),
]
CASES = [(*case, dtype) for case in SCHEDULES for dtype in (torch.float64, torch.bfloat16)]
CASES += [("auto", "sequence", dtype) for dtype in (torch.float32, torch.float16)]


class Problem:
    """Hidden states, a frozen weight, A and B, and a batch of two masked sequences, exact in 16 bits."""

    def __init__(self, dtype):
        torch.manual_seed(shifted_seed(0))
        shapes = {"hidden": (2, 10, H), "weight": (V, H), "bias": (V,), "A": (RANK, H), "B": (V, RANK)}
        scales = {"hidden": 1.0, "weight": 0.3, "bias": 0.3, "A": 0.3, "B": 0.3}
        values = {name: scales[name] * torch.randn(shape) for name, shape in shapes.items()}
        self.values = {name: value.to(torch.bfloat16) for name, value in values.items()}
        self.dtype = dtype
        self.labels = torch.randint(V, (2, 10))
        self.mask = torch.arange(10) < torch.tensor([[10], [7]])
        self.advantages = torch.tensor([1.0, -0.5])
        self.noise = 0.1 * torch.randn(2, 10, dtype=torch.float64)

    def leaves(self, dtype):
        return {
            name: value.to(dtype, copy=True).requires_grad_(name != "weight")
            for name, value in self.values.items()
        }

    def ours(self, function, **options):
        """Output and gradients with a ``LoRAHead``."""
        leaves = self.leaves(self.dtype)
        head = gk.LoRAHead(leaves["weight"], leaves["A"], leaves["B"], SCALE)
        return self.run(leaves, head, function, **options)

    def exact(self, function, **options):
        """The same in fp64 with one weight, by the reference and in one piece."""
        leaves = self.leaves(torch.float64)
        weight = leaves["weight"] + SCALE * leaves["B"] @ leaves["A"]
        return self.run(leaves, weight, function, **options)

    def run(self, leaves, weight, function, **options):
        out = function(leaves["hidden"], weight, bias=leaves["bias"], **options)
        first = out[0]
        weights = self.noise if first.ndim < 3 else self.noise.unsqueeze(-1)
        (first if first.ndim == 0 else (first * weights).sum()).backward()
        gradients = {name: leaf.grad for name, leaf in leaves.items() if name != "weight"}
        return first.detach(), gradients

    def check(self, ours, exact):
        """Errors of a few units of the dtype: adapter and hidden states are rounded once more than there."""
        bound = 8 * torch.finfo(self.dtype).eps
        assert (ours[0].double() - exact[0]).abs().max() <= bound * exact[0].abs().max().clamp(min=1)
        for name, gradient in exact[1].items():
            error = (ours[1][name].double() - gradient).norm() / gradient.norm()
            assert error <= bound, name


@pytest.mark.parametrize(("schedule", "kind", "dtype"), CASES, ids=str)
def test_every_schedule_has_the_loss_and_gradients_of_one_weight(schedule, kind, dtype, backend):
    problem = Problem(dtype)
    shared = {"labels": problem.labels, "advantages": problem.advantages, "loss_mask": problem.mask}
    leaves = problem.leaves(torch.float64)
    weight = leaves["weight"] + SCALE * leaves["B"] @ leaves["A"]
    now = gk.linear_token_logprobs(leaves["hidden"], weight, problem.labels, bias=leaves["bias"]).logprobs
    shared["old_logprobs"] = now.detach() + problem.noise
    if kind == "KL":
        shared |= {"ref_logprobs": now.detach() - problem.noise, "kl_beta": 0.1}
    shared["objective"] = OBJECTIVES[kind]
    rows = 4 if schedule in ("deferred", "two_pass", "known") else 64
    options = {"schedule": schedule, "max_chunk_bytes": rows * V * 8, "backend": backend}
    ours = problem.ours(gk.fused_linear_policy_loss, **options, **shared)
    problem.check(ours, problem.exact(gk.fused_linear_policy_loss, backend="reference", **shared))


def test_other_functions_take_it_too():
    problem = Problem(torch.float64)
    ids = torch.randint(V, (2, 10, 4))
    teacher = {"teacher_hidden": torch.randn(2, 10, H).double(), "teacher_weight": torch.randn(V, H).double()}
    for function, options in (
        (gk.linear_token_logprobs, {"labels": problem.labels}),
        (gk.linear_selected_logprobs, {"ids": ids}),
        (gk.fused_linear_distillation_loss, teacher),
    ):
        problem.check(problem.ours(function, **options), problem.exact(function, **options))


def test_memory_is_that_of_a_frozen_head_and_the_adapter():
    problem = Problem(torch.bfloat16)
    leaves = problem.leaves(torch.bfloat16)
    rest = (problem.labels, None, problem.advantages)
    frozen = gk.explain_schedule(leaves["hidden"], leaves["weight"].detach(), *rest, schedule="aligned")
    head = gk.LoRAHead(leaves["weight"], leaves["A"], leaves["B"], SCALE)
    adapted = gk.explain_schedule(leaves["hidden"], head, *rest, schedule="aligned")
    assert adapted.peak_bytes - frozen.peak_bytes == 4 * V * RANK


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"schedule": "frozen"}, "the lm_head's weight or bias needs a gradient"),
        ({}, {"batch_invariant": True}, "the two products of a LoRAHead have no fixed order"),
        ({"A": torch.zeros(RANK, H + 1)}, {}, "weight.A: got shape"),
        ({"A": None}, {}, "weight.A: got NoneType"),
        ({"B": torch.zeros(V, RANK + 1)}, {}, "weight.B: got shape"),
        ({"scale": "1"}, {}, "weight.scale"),
        ({"weight": torch.zeros(V, H, requires_grad=True)}, {}, "weight.weight: needs a gradient"),
    ],
)
def test_what_is_refused(change, options, message):
    parts = {"weight": torch.zeros(V, H), "A": torch.zeros(RANK, H), "B": torch.zeros(V, RANK), "scale": 1.0}
    parts["B"].requires_grad_()
    head = gk.LoRAHead(**(parts | change))
    labels = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=message):
        gk.fused_linear_policy_loss(torch.zeros(2, 3, H), head, labels, None, torch.ones(2), **options)


# --- PEFT's


def adapted_model(**options):
    peft = pytest.importorskip("peft")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(shifted_seed(1))
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(Qwen3ForCausalLM(config), peft.LoraConfig(**(adapter | options)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("path", ["transformers", "trainer"])
@pytest.mark.parametrize("enabled", [True, False], ids=["adapter", "disabled"])
def test_models_with_an_adapter_on_the_head_learn_as_peft_computes_it(enabled, path):
    from gspo_kernels.integrations.transformers import fuse_lm_head
    from gspo_kernels.trainer.model import Policy

    model = adapted_model().eval()
    prompt, completions = torch.arange(4), [torch.randint(96, (5,)), torch.randint(96, (5,))]
    rows = torch.stack([torch.cat([prompt, completion]) for completion in completions])
    advantages = torch.tensor([1.0, -2.0])
    with contextlib.nullcontext() if enabled else model.disable_adapter():
        logits = model(rows).logits[:, 3:-1]
        logprobs = logits.log_softmax(-1).gather(-1, rows[:, 4:, None]).squeeze(-1)
        old = logprobs.detach() + 0.05 * torch.randn_like(logprobs)
        objective = gk.GSPO(clip_low=0.3, clip_high=0.3)
        expected = gk.policy_loss(logprobs, old, advantages, objective=objective).loss
        if enabled:
            expected.backward()
            wanted = gradients(model)
        if path == "trainer":
            terms = {"old_logprobs": old.flatten(), "advantages": advantages, "objective": objective}
            loss = Policy(model, temperature=1.0)([prompt, prompt], completions, terms).loss
        else:
            labels = torch.nn.functional.pad(rows[:, 4:], (3, 1), value=-100)
            terms = {"old_logprobs": torch.nn.functional.pad(old, (3, 1)), "objective": objective}
            fused = fuse_lm_head(model)
            loss = fused(input_ids=rows, shift_labels=labels, advantages=advantages, **terms).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        if not enabled:
            return
        loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys() and any("lm_head.lora_B" in name for name in found)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora_dropout": 0.1}, "LoRA with dropout"),
        ({"use_dora": True}, "a variant of LoRA"),
        ({"lora_bias": True, "bias": "none"}, "LoRA with a bias"),
    ],
)
def test_other_adapters_are_refused_with_the_reason(options, reason):
    from gspo_kernels.integrations.transformers import IntegrationError, lm_head_of

    model = adapted_model(**options).train()
    with pytest.raises(IntegrationError, match=reason):
        lm_head_of(model)
