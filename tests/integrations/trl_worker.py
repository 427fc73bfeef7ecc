"""One process of two: trains TRL's trainer and ours under DDP, then under FSDP2, and saves what came out.

accelerate on CPU ignores an FSDP plugin and runs DDP, so the plugin is put into its state after construction;
the parameters that train must then be DTensors.
"""

import sys
from pathlib import Path

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer

from gspo_kernels.integrations.trl import FusedGRPOTrainer
from tests.integrations.test_trl_training import DAPO, GSPO
from tests.integrations.trl_problem import make_trainer


def shard(trainer, mixed_precision):
    """What accelerate would do on a GPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )
    if mixed_precision:
        plugin.set_mixed_precision("bf16")
    state = trainer.accelerator.state
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    trainer.is_fsdp_enabled = True


def run(kind, sharded, model_path, folder, **options):
    AcceleratorState._reset_state()
    trainer = make_trainer(kind, model_path, folder, max_steps=5, **options)
    if sharded:
        shard(trainer, mixed_precision=options.get("bf16", False))
    trainer.train()
    parameters = list(trainer.model_wrapped.parameters())
    if sharded:
        assert all(isinstance(p, DTensor) for p in parameters), "accelerate did not shard the model"
        parameters = [p.full_tensor() for p in parameters]
    else:
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    weights = torch.cat([p.detach().float().flatten() for p in parameters])
    return {"weights": weights, "log": trainer.state.log_history[:-1]}


def main():
    model_path, folder = sys.argv[1:]
    torch.set_num_threads(1)
    results = {}
    for sharded in (False, True):
        for name, options in (("GSPO", GSPO), ("dapo", DAPO)):
            for kind in (GRPOTrainer, FusedGRPOTrainer):
                where = "FSDP2" if sharded else "DDP"
                results[where, name, kind.__name__] = run(kind, sharded, model_path, folder, **options)
    results["FSDP2", "bf16"] = run(FusedGRPOTrainer, True, model_path, folder, bf16=True, **GSPO)
    torch.save(results, Path(folder) / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
