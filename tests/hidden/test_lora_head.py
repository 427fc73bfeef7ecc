"""LoRA on the lm_head: results equal those of base and adapter as one weight, also through PEFT."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import ADAPTER_SCALE, make_case, run
from tests.integrations.tiny_models import tiny
from tests.judging import assert_equals_oracle

V, H, RANK = 160, 24, 3
GSPO = gk.GSPO(clip_low=0.1, clip_high=0.2)
SCHEDULES = [
    ("aligned", GSPO, "holes"),
    ("aligned", gk.GRPO(), "holes"),
    ("two_pass", GSPO, "k3"),
    ("auto", GSPO, "k3"),
    ("deferred", GSPO, "holes"),
    ("known", gk.GRPO(), "holes"),
]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CASES = [(*case, *dtypes) for case in SCHEDULES for dtypes in ((F64, F64), (BF16, F32))]
CASES += [("auto", GSPO, "plain", *dtypes) for dtypes in ((F32, F32), (F16, F16), (F16, F32), (BF16, BF16))]


@functools.cache
def case_of(terms, dtype, adapter):
    """Return a case whose adapter, if its dtype is wider, has values that 16 bits can't hold."""
    case = make_case("linear", "padded", terms, adapter=RANK, vocabulary=V, width=H, dtype=dtype)
    if adapter == dtype:
        return case
    return replace(case, inputs=case.inputs | {x: 1.001 * case.inputs[x].to(adapter) for x in ("A", "B")})


@pytest.mark.parametrize(("schedule", "objective", "terms", "dtype", "adapter"), CASES)
def test_every_schedule_equals_one_weight(schedule, objective, terms, dtype, adapter, backend):
    """Log-probs and loss are as exact as fp32's also where the weight or the adapter has 16 bits."""
    case = case_of(terms, dtype, adapter)
    rows = 4 if schedule in ("deferred", "two_pass", "known") else 64
    options = {"schedule": schedule, "max_chunk_bytes": rows * V * 8}
    got = run(case, "fused_linear_policy_loss", objective, backend, **options)
    assert_equals_oracle(got, case, objective)


def test_other_functions_take_it_too():
    inputs = make_case("linear", "padded", "plain", adapter=RANK, vocabulary=V, width=H).inputs
    leaves = {name: value.double().requires_grad_(name != "weight") for name, value in inputs.items()}
    hidden, weight, bias, A, B = leaves.values()
    labels = torch.randint(V, (*hidden.shape[:2], 4))
    teacher = {"teacher_hidden": torch.randn_like(hidden), "teacher_weight": torch.randn_like(weight)}
    for function, options in (
        (gk.linear_token_logprobs, {"labels": labels[..., 0]}),
        (gk.linear_selected_logprobs, {"ids": labels}),
        (gk.fused_linear_distillation_loss, teacher),
    ):
        found = []
        for head in (gk.LoRAHead(weight, A, B, ADAPTER_SCALE), weight + ADAPTER_SCALE * B @ A):
            value = function(hidden, head, bias=bias, **options)[0]
            # so that upstream gradients differ
            total = (value * torch.arange(value.numel()).view(value.shape)).sum() + value.sum()
            found.append([value, *torch.autograd.grad(total, (hidden, bias, A, B))])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"schedule": "frozen"}, "the lm_head's weight or bias needs a gradient"),
        ({}, {"batch_invariant": True}, "a LoRAHead is not supported"),
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


# --- PEFT's adapters


def adapted_model(**options):
    peft = pytest.importorskip("peft")
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
    return peft.get_peft_model(tiny(), peft.LoraConfig(**(adapter | options)))


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("enabled", [True, False], ids=["adapter", "disabled"])
def test_losses_equal_pefts(enabled):
    """In the trainer; tests/integrations compare a fused model."""
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
        terms = {"old_logprobs": old.flatten(), "advantages": advantages, "objective": objective}
        terms["cu_seqlens"] = torch.tensor([0, 5, 10], dtype=torch.int32)
        loss = Policy(model, temperature=1.0)([prompt, prompt], completions, terms).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        if not enabled:
            return
        loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys() and any("lm_head.lora_B" in name for name in found)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


ON_HEAD = {"target_modules": ["lm_head"]}
TOKENS = {"token_indices": [5, 6, 7], "init_weights": False}
ADAPTERS = [
    ("LoraConfig", {"target_modules": ["q_proj", "lm_head"], "use_rslora": True}, None),
    ("LoraConfig", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, None),
    ("LoraConfig", {"target_modules": ["embed_tokens"]}, None),
    ("LoraConfig", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]}, None),
    ("LoraConfig", ON_HEAD | {"use_dora": True}, "a variant of LoRA"),
    ("LoraConfig", ON_HEAD | {"lora_dropout": 0.1}, "LoRA with dropout"),
    ("LoraConfig", ON_HEAD | {"lora_bias": True}, "LoRA with a bias"),
    ("IA3Config", ON_HEAD | {"feedforward_modules": []}, "an adapter"),
    ("TrainableTokensConfig", TOKENS, "an adapter"),
    ("PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}, "prompt learning"),
    ("PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}, "prompt learning"),
]


@pytest.mark.parametrize(("kind", "options", "refused"), ADAPTERS)
def test_every_adapter_learns_in_a_loop_or_is_refused(kind, options, refused):
    """Embedding and head are one weight. The loop takes hidden states of the backbone, and lm_head_of."""
    from gspo_kernels.integrations.transformers import IntegrationError, lm_head_of

    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("Qwen3 tied"), getattr(peft, kind)(**options))
    rows = torch.arange(2, 20).view(2, 9)

    def ours():
        hidden = model.get_base_model().base_model(input_ids=rows).last_hidden_state
        head = lm_head_of(model)
        return gk.linear_token_logprobs(hidden, head.weight, rows, **head.options()).logprobs

    if refused:
        model.train()
        with pytest.raises(IntegrationError, match=refused):
            ours()
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.3)
    theirs = model.eval()(rows).logits.log_softmax(-1).gather(-1, rows.unsqueeze(-1)).squeeze(-1)
    weights, found = torch.linspace(-1, 1, rows.numel()).view(rows.shape), []
    for logprobs in (ours(), theirs):
        gradients = torch.autograd.grad((weights * logprobs).sum(), trained)
        found.append([logprobs.detach(), *gradients])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_mismatch_refuses_an_adapter_on_the_head():
    from gspo_kernels.integrations.transformers import IntegrationError
    from gspo_kernels.mismatch.scoring import Samples, Setting, score

    samples = Samples([torch.arange(4)], [torch.arange(5)], torch.zeros(5))
    with pytest.raises(IntegrationError, match="its lm_head carries LoRA"):
        score(lambda dtype, attention: adapted_model().eval(), samples, Setting(), 64)
