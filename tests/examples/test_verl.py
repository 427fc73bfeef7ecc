"""examples/verl inside verl, as far as CPUs go: its command, its data and rewards.

Flash attention, packing and vLLM need a GPU, and so does a whole run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.verl import prepare
from gspo_kernels.demo import make_tokenizer
from tests.integrations.test_registries import needs

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
def test_the_command_composes_what_verl_accepts(run, nodes=2):
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


def test_data_and_rewards(run):
    """verl's own data set and reward read what ``prepare`` writes."""
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.reward_score import default_compute_score

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with initialize_config_dir(str(FOLDER), version_base=None):
        data = compose("gsm8k").data
    for split, train in (("train", True), ("test", False)):
        (row,) = create_rl_dataset(str(run / "data" / f"{split}.parquet"), data, tokenizer, None, train)
        (message,) = row["raw_prompt"]
        assert message == {"role": "user", "content": f"500 + 772? {prepare.INSTRUCTION}"}
        truth = row["reward_model"]["ground_truth"]
        for text, reward in (("It is 1272.\n#### 1,272", 1.0), ("#### 1271", 0.0), ("1272", 0.0)):
            assert default_compute_score(row["data_source"], text, truth) == reward
