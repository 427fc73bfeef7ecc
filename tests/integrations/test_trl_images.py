"""A vision-language model in TRL's trainer: a tiny Gemma3, whose prompts hold an image each."""

import importlib.util

import pytest
import torch

import gspo_kernels as gk
from tests.draws import shifted_seed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason='TRL is missing: pip install "gspo_kernels[trl]"'
)

IMAGE, BEGIN, END, PATCHES, PROMPT, COMPLETION = 90, 91, 92, 4, 9, 5


def gemma3():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8,
        "initializer_range": 0.3, "max_position_embeddings": 64, "query_pre_attn_scalar": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    torch.manual_seed(shifted_seed(0))
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=PATCHES, image_token_index=IMAGE,
            boi_token_index=BEGIN, eoi_token_index=END,
        )
    )  # fmt: skip
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # it begins at zero
    return model


def rollouts():
    """Prompts with an image between two tokens of text, completions of different lengths, and TRL's terms."""
    rng = torch.Generator().manual_seed(shifted_seed(1))
    ids = torch.randint(3, 80, (3, PROMPT + COMPLETION), generator=rng)
    ids[:, 1], ids[:, 2 : 2 + PATCHES], ids[:, 2 + PATCHES] = BEGIN, IMAGE, END
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": mask[:, :PROMPT],
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask[:, PROMPT:],
        "pixel_values": torch.rand(3, 3, 16, 16, generator=rng),
        "num_images": [1, 1, 1],
        "token_type_ids": (ids == IMAGE).long(),
        "advantages": torch.tensor([1.0, -0.5, 0.25]),
        "num_items_in_batch": mask[:, PROMPT:].sum(),
    }


def from_logits(model, inputs):
    """Log-probs and entropy of the completions by the model's own logits."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    images = {name: inputs[name] for name in ("pixel_values", "token_type_ids")}
    logits = model(input_ids=ids, attention_mask=mask, **images).logits
    log_softmax = logits[:, -COMPLETION - 1 : -1].log_softmax(-1)
    chosen = log_softmax.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    counted = inputs["completion_mask"] != 0
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return torch.where(counted, chosen, 0.0), torch.where(counted, entropy, 0.0)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_images_reach_the_scores_and_the_loss(tmp_path):
    from gspo_kernels.integrations.lm_head import causal_lm_of
    from gspo_kernels.integrations.transformers import fuse_lm_head
    from gspo_kernels.integrations.trl import FusedGRPOTrainer, _take_boxes
    from tests.integrations.trl_problem import make_trainer, save_model

    trainer = make_trainer(FusedGRPOTrainer, save_model(tmp_path / "model"), tmp_path, loss_type="grpo")
    plain, model, inputs = gemma3().train(), gemma3().train(), rollouts()
    _take_boxes(causal_lm_of(fuse_lm_head(model)))
    expected, entropy = from_logits(plain, inputs)
    blank, _ = from_logits(plain, inputs | {"pixel_values": torch.zeros(3, 3, 16, 16)})
    assert (expected - blank).abs().max() > 1e-2  # the images matter

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    images = {name: inputs[name] for name in ("pixel_values", "num_images", "token_type_ids")}
    scored = trainer._get_per_token_logps_and_entropies(
        model, ids, mask, COMPLETION, batch_size=2, compute_entropy=True, **images
    )
    torch.testing.assert_close(scored[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scored[1], entropy, rtol=1e-5, atol=1e-5)

    old = expected.detach() + 0.3 * torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(shifted_seed(2))
    )
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(model, inputs | {"old_per_token_logps": old})
    loss.backward()
    wanted = gk.policy_loss(
        expected, old, inputs["advantages"], loss_mask=inputs["completion_mask"], objective=gk.GRPO()
    ).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    assert (gradient(model) - gradient(plain)).norm() <= 1e-4 * gradient(plain).norm()
    assert gradient(plain).norm() > 1e-3
