"""examples/verl inside verl, as far as CPUs go: its command, its data and rewards, two updates of its actor.

Replaced or changed is what needs a GPU: flash attention and packing, vLLM, and the processes that Ray starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.verl import prepare
from gspo_kernels.trainer.demo import make_tokenizer
from tests.forks import in_processes
from tests.integrations.test_registries import let_verl_run_on_cpu, needs, verl_data
from tests.trainer.conftest import tiny_model

pytestmark = needs("verl")
FOLDER = Path(prepare.__file__).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a folder for RUN, with data prepared from a folder that is laid out as the dataset is."""
    path = tmp_path_factory.mktemp("verl")
    splits = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (path / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")
    row = {"question": "500 + 772?", "answer": "500+772=<<500+772=1272>>1272\n#### 1,272"}
    for split, rows in (("train", [row, {"question": "long " * 400, "answer": "#### 1"}]), ("test", [row])):
        (path / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (path / "run" / "data").mkdir(parents=True)
    prepare.main(str(path / "run" / "data"), str(path))
    return path / "run"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_command_composes_what_verl_accepts(nodes, run):
    """With ``--cfg job`` verl prints the configuration instead of training."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [FOLDER / "train.sh", f"trainer.nnodes={nodes}", "--cfg", "job", "--resolve"]
    environment = {**os.environ, "PATH": path, "RUN": "run"}
    done = subprocess.run(command, env=environment, cwd=run.parent, stdout=subprocess.PIPE, check=True)
    config = OmegaConf.create(done.stdout.decode())
    assert not need_critic(config) and not need_reference_policy(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert get_policy_loss_fn(actor.policy_loss.loss_mode).objective.__name__ == "GSPO"
    assert actor.engine.strategy == "fsdp2" and actor.engine.fsdp_size == 8
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (3e-4, 4e-4)
    # what one update takes is the same for all ranks
    assert config.trainer.nnodes == nodes
    assert actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n % (8 * nodes) == 0
    folders = (config.data.train_files, config.data.val_files, config.trainer.default_local_dir)
    assert all(Path(each).is_relative_to(run) for each in folders)


def composed(*changes):
    """Return the example's configuration."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(FOLDER), version_base=None):
        return compose("gsm8k", [*changes])


def test_data_and_rewards(run):
    """verl's own data set and reward read what ``prepare`` writes."""
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.reward_score import default_compute_score

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    data = composed().data
    for split, train in (("train", True), ("test", False)):
        (row,) = create_rl_dataset(str(run / "data" / f"{split}.parquet"), data, tokenizer, None, train)
        (message,) = row["raw_prompt"]
        assert message == {"role": "user", "content": f"500 + 772? {prepare.INSTRUCTION}"}
        truth = row["reward_model"]["ground_truth"]
        for text, reward in (("It is 1272.\n#### 1,272", 1.0), ("#### 1271", 0.0), ("1272", 0.0)):
            assert default_compute_score(row["data_source"], text, truth) == reward


ON_CPU = (
    "+{0}.model.load_tokenizer=false", "{0}.model.use_remove_padding=false",
    "+{0}.model.override_config.attn_implementation=eager",
    "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "{0}.rollout.n=2", "{0}.actor.ppo_mini_batch_size=2",
    "{0}.actor.optim.lr=1e-4", "{0}.actor.optim.lr_warmup_steps=0",
)  # fmt: skip
"""What a CPU needs; two ranks, each a node of its own; two updates of two groups of two completions."""
IN_FP32 = (
    "+{0}.actor.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
    "{0}.actor.fsdp_config.use_torch_compile=false",
)


def actor_worker(model, *changes):
    """Return the example's configuration with these changes, and verl's worker of the actor made from it."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    changes = ("{0}.model.path=" + str(model), *ON_CPU, *changes)
    config = composed(*(each.format("actor_rollout_ref") for each in changes))
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
    worker.init_model()
    return config, worker


def scored(worker):
    """Return this rank's half of eight completions, with log-probs by the worker."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    data = verl_data(worker.rank)
    for name in ("micro_batch_size_per_gpu", "use_dynamic_bsz", "use_remove_padding", "calculate_entropy"):
        tu.pop(data, name)  # the configuration's
    request = data.clone()
    tu.assign_non_tensor(request, compute_loss=False, calculate_entropy=True)
    log_probs = worker.compute_log_prob(request)["log_probs"]
    data["old_log_probs"] = response_from_nested(log_probs, data["response_mask"])
    return data


def update_twice(model, loss_mode):
    """Return metrics of a step by verl's trainer and worker, a list each, and the weights after it."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import tensordict_utils as tu

    config, worker = actor_worker(model, "{0}.actor.policy_loss.loss_mode=" + loss_mode, *IN_FP32)
    data, metrics = scored(worker), {}

    def update_actor(batch):
        tu.assign_non_tensor(data, **batch.extra_info)
        output = worker.update_actor(data)  # TrainingWorker.train_mini_batch
        metrics.update(tu.get(output, "metrics"))
        return output

    trainer = SimpleNamespace(config=config, actor_rollout_wg=SimpleNamespace(update_actor=update_actor))
    PPOTrainer._update_actor(trainer, SimpleNamespace(extra_info={}), {})
    weights = worker.actor.engine.module.state_dict().values()
    return metrics, torch.cat([each.full_tensor().flatten() for each in weights])


@pytest.mark.slow
def test_two_updates_equal_those_of_verl_s_loss(tmp_path):
    """In fp32. In bf16, and without flash attention, verl rounds log-probs by more than the clip range."""
    network = tiny_model("qwen3", hidden_size=16, head_dim=8)
    network.save_pretrained(tmp_path)
    start = torch.cat([each.detach().flatten() for each in network.state_dict().values()])

    def work(rank):
        from gspo_kernels.integrations.backends import verl as backend

        let_verl_run_on_cpu()
        (theirs, expected), (ours, weights) = (update_twice(tmp_path, name) for name in ("gspo", "gk_gspo"))
        assert (weights - expected).norm() <= 1e-3 * (expected - start).norm()
        for name in ("loss", "grad_norm", "lr", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
        assert len(ours["loss"]) == 2 and ours["actor/pg_clipfrac"][1] > 0
        _, worker = actor_worker(tmp_path)
        assert scored(worker)["old_log_probs"].dtype == torch.bfloat16
        backend.install()
        _, worker = actor_worker(tmp_path)  # compiles the entropy
        assert scored(worker)["old_log_probs"].dtype == torch.float32

    in_processes(2, work)
