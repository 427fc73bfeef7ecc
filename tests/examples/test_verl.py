"""examples/verl inside verl, as far as CPUs go: its command, its data and rewards, two updates of its actor.

Flash attention, packing and vLLM need a GPU, and so does a whole run.
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
from gspo_kernels.demo import make_tokenizer
from tests.forks import in_processes
from tests.integrations.test_registries import needs, verl_data
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


def on_cpu(model, *changes):
    """Return the example's configuration for CPUs, with these changes."""
    changes = ("{0}.model.path=" + str(model), *ON_CPU, *changes)
    return composed(*(each.format("actor_rollout_ref") for each in changes))


def data_of(ranks):
    """Return four completions for each rank, without the options that the configuration has."""
    from verl.utils import tensordict_utils as tu

    data = tu.concat_tensordict([verl_data(rank) for rank in ranks])
    for name in ("micro_batch_size_per_gpu", "use_dynamic_bsz", "use_remove_padding", "calculate_entropy"):
        tu.pop(data, name)
    return data


def score(workers, data):
    """Return log-probs by a worker, or by a group of them."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    request = data.clone()
    tu.assign_non_tensor(request, compute_loss=False, calculate_entropy=True)
    return response_from_nested(workers.compute_log_prob(request)["log_probs"], data["response_mask"])


class OneStep:
    """In place of verl's task runner: a step of the actor by each loss, on nodes that Ray chooses."""

    def run(self, config):
        from omegaconf import OmegaConf
        from verl.single_controller.ray import ResourcePoolManager

        OmegaConf.resolve(config)
        nodes = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
        pools = ResourcePoolManager(resource_pool_spec={"pool": nodes}, mapping={"actor": "pool"})
        pools.create_resource_pool()
        results = {}
        for name in ("gspo", "gk_gspo"):
            config.actor_rollout_ref.actor.policy_loss.loss_mode = name
            results[name] = self.step(config, pools.get_resource_pool("actor"), len(nodes))
        torch.save(results, Path(os.environ["TENSORBOARD_DIR"], "results"))

    @staticmethod
    def step(config, pool, ranks):
        """Return metrics, a list each, and by how much the step changed the log-probs."""
        import ray
        from verl.single_controller.ray import (
            RayClassWithInitArgs,
            RayWorkerGroup,
            create_colocated_worker_cls,
        )
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine_workers import ActorRolloutRefWorker

        actor = ray.remote(ActorRolloutRefWorker)
        actor = RayClassWithInitArgs(actor, config=config.actor_rollout_ref, role="actor")
        shared = create_colocated_worker_cls({"actor": actor})
        group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=shared, device_name="cpu")
        workers = group.spawn(prefix_set={"actor"})["actor"]
        workers.init_model()
        data, metrics = data_of(range(ranks)), {}
        data["old_log_probs"] = score(workers, data)

        def update_actor(batch):
            tu.assign_non_tensor(data, **batch.extra_info)
            output = workers.update_actor(data)  # TrainingWorker.train_mini_batch
            metrics.update(tu.get(output, "metrics"))
            return output

        trainer = SimpleNamespace(config=config, actor_rollout_wg=SimpleNamespace(update_actor=update_actor))
        PPOTrainer._update_actor(trainer, SimpleNamespace(extra_info={}), {})
        return metrics, score(workers, data).values() - data["old_log_probs"].values()


@pytest.fixture
def model(tmp_path):
    tiny_model("qwen3", hidden_size=16, head_dim=8).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_two_updates_on_two_nodes_equal_those_of_verl_s_loss(model, tmp_path, monkeypatch):
    """Ray's two nodes are on this machine, each with a fake GPU, and so one worker of the actor."""
    import ray
    from ray.cluster_utils import Cluster
    from verl.trainer.main_ppo import run_ppo

    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    resources = {"num_cpus": 8, "num_gpus": 1, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args=resources | {"include_dashboard": False})
    try:
        cluster.add_node(**resources)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        environment = "ray_kwargs.ray_init.runtime_env.env_vars"
        on_ray = (
            "trainer.device=cpu",
            f"+{environment}.TENSORBOARD_DIR={tmp_path}",
            f"{environment}.VERL_USE_EXTERNAL_MODULES=tests.integrations.verl_on_cpu",
        )
        run_ppo(on_cpu(model, *IN_FP32, *on_ray), ray.remote(OneStep))
    finally:
        ray.shutdown()
        cluster.shutdown()
    (theirs, expected), (ours, change) = torch.load(tmp_path / "results", weights_only=False).values()
    assert (change - expected).norm() <= 1e-3 * expected.norm() > 0
    for name in ("loss", "grad_norm", "lr", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    assert len(ours["loss"]) == 2 and ours["actor/pg_clipfrac"][1] > 0


@pytest.mark.slow
def test_log_probs_are_in_fp32(model):
    """verl rounds them to bf16 where flash attention is missing. The entropy is compiled."""

    def work(rank):
        import tests.integrations.verl_on_cpu  # noqa: F401, I001
        from gspo_kernels.integrations.backends import verl as backend
        from verl.workers.engine_workers import ActorRolloutRefWorker

        for dtype in (torch.bfloat16, torch.float32):
            worker = ActorRolloutRefWorker(on_cpu(model, "trainer.nnodes=1").actor_rollout_ref, "actor")
            worker.init_model()
            assert score(worker, data_of([0])).dtype == dtype
            backend.install()

    in_processes(1, work)
