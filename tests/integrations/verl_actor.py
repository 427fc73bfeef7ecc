"""Actor updates in verl's own FSDP2 engine on CPU tensors: one rank of them. Run by test_registries.py.

verl has no CPU platform, but lets one be set; nothing else of it is replaced.
"""

import functools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

LENGTHS = ((3, 5), (2, 1), (4, 6), (1, 4), (2, 3), (5, 2), (3, 6), (2, 4))
ADVANTAGES = (1.0, -1.0, 0.5, 2.0, -0.5, 1.5, -2.0, 0.7)
VOCABULARY = 64


def use_cpu():
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class PlatformCPU(PlatformCUDA):
        device_name = "cpu"
        device_module = torch.cpu

        def is_available(self):
            return True

        def current_device(self):
            return torch.device("cpu")

    set_platform(PlatformCPU())


def build_engine(model):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    fp32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=model,
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, model_dtype="fp32", mixed_precision=fp32),
        FSDPOptimizerConfig(lr=0.02, optimizer="SGD", betas=None, weight_decay=0.0, total_training_steps=9),
        CheckpointConfig(),
    )
    engine.initialize()
    assert all(isinstance(each, dist.tensor.DTensor) for each in engine.module.parameters())
    return engine


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch_of(rank, world):
    """This rank's share of the batch, without old log-probs."""
    from verl.utils import tensordict_utils as tu

    rng = torch.Generator().manual_seed(7)
    rows = [
        (torch.randint(3, VOCABULARY, (p,), generator=rng), torch.randint(3, VOCABULARY, (r,), generator=rng))
        for p, r in LENGTHS
    ][rank::world]
    ids = [torch.cat(row) for row in rows]
    ones = [torch.ones(len(response), dtype=torch.int64) for _, response in rows]
    tensors = {
        "input_ids": jagged(ids),
        "position_ids": jagged(torch.arange(len(each)) for each in ids),
        "prompts": jagged(prompt for prompt, _ in rows),
        "responses": jagged(response for _, response in rows),
        "response_mask": jagged(ones),
        "loss_mask": jagged(ones),
        "advantages": jagged(a * one for a, one in zip(ADVANTAGES[rank::world], ones, strict=True)),
    }
    options = {
        "temperature": 1.0, "global_batch_size": len(LENGTHS), "use_remove_padding": False,
        "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "pad_token_id": 0, "calculate_entropy": True,
    }  # fmt: skip
    return tu.get_tensordict(tensors, non_tensor_dict=options)


def train(model, loss_mode, config, steps):
    """Old log-probs from the engine, then ``steps`` updates on them. Returns metrics and weights."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    engine, data = build_engine(model), batch_of(dist.get_rank(), dist.get_world_size())
    with engine.eval_mode():
        scored = engine.infer_batch(data.clone())["model_output"]["log_probs"]
    padded = no_padding_2_padding(scored, data)
    lengths = data["responses"].offsets().diff().tolist()
    old = jagged(row[:n] for row, n in zip(padded, lengths, strict=True))
    data["old_log_probs"] = old
    data["ref_log_prob"] = jagged(row + 0.1 * torch.sin(torch.arange(len(row))) for row in old.unbind())
    policy_loss = PolicyLossConfig(loss_mode=loss_mode)
    actor = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=2, policy_loss=policy_loss, **config)
    history = []
    with engine.train_mode():
        for _ in range(steps):
            out = engine.train_batch(data.clone(), loss_function=functools.partial(ppo_loss, actor))
            metrics = out["metrics"].items()
            means = {
                n: v.aggregate() if hasattr(v, "aggregate") else torch.tensor(v).mean() for n, v in metrics
            }
            history.append({name: float(value) for name, value in means.items()})
    weights = {name: value.full_tensor() for name, value in engine.module.state_dict().items()}
    return history, weights


if __name__ == "__main__":
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    use_cpu()
    for index, (loss_mode, config) in enumerate(runs):
        result = train(str(folder / "model"), loss_mode, config, steps=4)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{index}.pt")
    dist.destroy_process_group()
