"""What is refused at construction, in one sentence; and models, heads and devices that TRL's options name."""

import importlib
import importlib.util
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from gspo_kernels.integrations.errors import IntegrationError
from tests.draws import shifted_seed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason='TRL is missing: pip install "gspo_kernels[trl]"'
)

GSPO = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
}
REFUSED = {
    "liger": ({"use_liger_kernel": True}, "use_liger_kernel: got True"),
    "loss type": ({"loss_type": "ppo"}, "loss_type: got 'ppo', expected one of 'grpo', 'sapo'"),
    "level": (
        {"importance_sampling_level": "sequence_token"},
        "importance_sampling_level: got 'sequence_token', expected one of 'token', 'sequence'",
    ),
    "delta inside the range": (
        {"loss_type": "grpo", "epsilon_high": 0.3, "delta": 1.2},
        r"delta: got 1.2, expected None or a ratio above 1 \+ epsilon_high = 1.3",
    ),
    "cispo without a weight": (
        {"loss_type": "cispo", "epsilon_high": 0.0},
        "epsilon_high: got 0, expected a positive number",
    ),
    "negative epsilon": ({"epsilon": -0.1}, "epsilon: got -0.1, expected a finite number of at least 0"),
    "sapo": ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg: got 0.0"),
    "vespo": ({"loss_type": "vespo", "vespo_k_pos": -1.0}, "vespo_k_pos: got -1.0"),
    "no length": (
        {"loss_type": "dr_grpo", "max_completion_length": None},
        'max_completion_length: aggregation="constant" needs a positive number',
    ),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from tests.integrations.trl_problem import save_model

    return save_model(tmp_path_factory.mktemp("model"))


def ours(model, folder, **options):
    from gspo_kernels.integrations.trl import FusedGRPOTrainer
    from tests.integrations.trl_problem import make_trainer

    return make_trainer(FusedGRPOTrainer, model, folder, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_options_without_an_equal_are_refused_by_name(name, tmp_path):
    options, message = REFUSED[name]
    # the model is never looked at
    with pytest.raises(IntegrationError, match=message):
        ours("no such model", tmp_path, **options)


def test_every_default_of_grpo_config_is_served(model_path, tmp_path):
    from trl import GRPOConfig

    from gspo_kernels.integrations.trl import objective_of

    assert type(objective_of(GRPOConfig(str(tmp_path), use_cpu=True))).__name__ == "GRPO"


def test_sequences_in_parts_are_refused_where_trl_does_not_look(tmp_path, monkeypatch):
    """Its own arguments it checks itself; a configuration of accelerate's it does not."""
    from accelerate import ParallelismConfig
    from trl import GRPOConfig, GRPOTrainer

    with pytest.raises(ValueError, match="does not support sequence-dim parallelism"):
        GRPOConfig(str(tmp_path), use_cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    for name in ("cp_size", "sp_size"):
        accelerator = SimpleNamespace(parallelism_config=ParallelismConfig(**{name: 2}))
        monkeypatch.setattr(GRPOTrainer, "accelerator", accelerator, raising=False)
        monkeypatch.setattr(GRPOTrainer, "__init__", lambda self, *given, **named: None)
        with pytest.raises(IntegrationError, match=f"{name}: accelerate's ParallelismConfig has 2"):
            ours("no such model", tmp_path)


def test_a_wide_range_of_sequence_ratios_is_warned_about_once(model_path, tmp_path):
    from gspo_kernels.integrations.trl import FusedGRPOTrainer
    from tests.integrations.trl_problem import configuration

    def warned(**options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(OSError, match="no such model"):
                FusedGRPOTrainer("no such model", None, configuration(tmp_path, **options))
        return [str(warning.message) for warning in caught if "clip range" in str(warning.message)]

    assert len(warned(**GSPO | {"epsilon_high": 0.2})) == 1
    assert "epsilon=3e-4" in warned(loss_type="grpo", importance_sampling_level="sequence")[0]
    assert warned(**GSPO) == warned(loss_type="grpo") == warned(loss_type="sapo") == []


def test_a_cispo_weight_below_1_is_warned_about(tmp_path):
    """GRPOConfig's default of 0.2 trains, in TRL too, at a fifth of the rate."""
    from gspo_kernels.integrations.trl import FusedGRPOTrainer, objective_of
    from tests.integrations.trl_problem import configuration

    for options, warned in (({}, True), ({"epsilon": 2.0}, False), ({"epsilon_high": 5.0}, False)):
        args = configuration(tmp_path, loss_type="cispo", **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(OSError, match="no such model"):
                FusedGRPOTrainer("no such model", None, args)
        assert any("epsilon_high: 0.2 is" in str(each.message) for each in caught) == warned
    assert objective_of(configuration(tmp_path, loss_type="cispo")).max_ratio == 0.2


@pytest.mark.parametrize(
    ("installed", "says"), [("1.15.0", "version 1.15.0 is installed"), (None, "not installed")]
)
def test_another_trl_is_refused_in_one_sentence(installed, says, monkeypatch):
    from gspo_kernels.integrations import errors

    def version(distribution):
        if installed is None:
            raise errors.PackageNotFoundError
        return installed

    monkeypatch.setattr(errors, "version", version)
    monkeypatch.delitem(sys.modules, "gspo_kernels.integrations.trl", raising=False)
    with pytest.raises(IntegrationError, match=f"trl: {says}.*needs trl>=1.16"):
        importlib.import_module("gspo_kernels.integrations.trl")


@pytest.mark.parametrize("entropy", [False, True])
def test_scoring_takes_keywords_as_trl_does(entropy, model_path, tmp_path):
    """Every argument by keyword, or by position: the same numbers as TRL's."""
    from trl import GRPOTrainer

    from gspo_kernels.integrations.trl import FusedGRPOTrainer
    from tests.integrations.trl_problem import make_trainer

    rng = torch.Generator().manual_seed(shifted_seed(3))
    ids = torch.randint(200, (4, 9), generator=rng)
    mask = torch.ones_like(ids)
    trainer = make_trainer(FusedGRPOTrainer, model_path, tmp_path, **GSPO)
    theirs = make_trainer(GRPOTrainer, model_path, tmp_path, **GSPO)
    given = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": 6, "compute_entropy": entropy}
    with torch.no_grad():
        expected = theirs._get_per_token_logps_and_entropies(model=theirs.model, **given)
        named = trainer._get_per_token_logps_and_entropies(model=trainer.model, **given)
        placed = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 6, 2, entropy)
    assert (named[1] is not None) == (placed[1] is not None) == entropy
    for each in (named, placed):
        for got, wanted in zip(each[: 1 + entropy], expected, strict=False):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_max_chunk_bytes_reaches_the_head(model_path, tmp_path):
    trainer = ours(model_path, tmp_path, max_chunk_bytes=-1, **GSPO)
    with pytest.raises(ValueError, match="max_chunk_bytes: got -1"):
        trainer.train()


@pytest.mark.parametrize("cast", [True, False])
def test_log_probs_of_an_fp32_head_under_bf16(cast, model_path, tmp_path):
    """TRL's head, cast to fp32, sees what ours always sees; not cast, it rounds logits to bf16."""
    from trl import GRPOTrainer

    from gspo_kernels.integrations.trl import FusedGRPOTrainer
    from tests.integrations.trl_problem import make_trainer

    scored = []
    rng = torch.Generator().manual_seed(shifted_seed(2))
    ids = torch.randint(200, (4, 9), generator=rng)
    for kind in (GRPOTrainer, FusedGRPOTrainer):
        trainer = make_trainer(kind, model_path, tmp_path, bf16=True, cast_lm_head_to_fp32=cast, **GSPO)
        with torch.no_grad():
            logprobs, entropy, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), 6, compute_entropy=True
            )
        scored.append(torch.stack([logprobs, entropy]).double())
    theirs, mine = scored
    apart = (theirs - mine).abs().max() / mine.abs().max()
    if cast:
        assert apart <= 4 * torch.finfo(torch.float32).eps
    else:
        assert apart > 1e-4


def test_generation_and_evaluation_are_trls(model_path, tmp_path):
    """Without a rollout function: TRL generates with the patched model, and evaluates with our loss."""
    from datasets import Dataset
    from trl import GRPOTrainer

    from gspo_kernels.integrations.trl import FusedGRPOTrainer
    from tests.integrations.trl_problem import configuration, make_tokenizer, reward

    logs = []
    prompts = Dataset.from_dict({"prompt": ["ab", "cde", "a", "b", "fg", "gf", "c", "hh"]})
    options = {"per_device_eval_batch_size": 8, "temperature": 3.0, "gradient_accumulation_steps": 2}
    for kind in (GRPOTrainer, FusedGRPOTrainer):
        trainer = kind(
            model_path,
            reward,
            configuration(tmp_path, loss_type="cispo", epsilon_high=5.0, **options),
            train_dataset=prompts,
            eval_dataset=prompts,
            processing_class=make_tokenizer(),
        )
        logs.append(trainer.evaluate())
        trainer.train()
        logs[-1] |= trainer.state.log_history[0]
    theirs, mine = logs
    assert {"eval_ratio/min", "ratio/min"} <= set(mine) - set(theirs)
    assert theirs.keys() <= mine.keys()
    assert theirs["eval_loss"] != 0.0
    for key in ("eval_reward", "reward", "completions/mean_length"):
        assert mine[key] == theirs[key]
    for key in ("eval_loss", "loss"):
        assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7)
