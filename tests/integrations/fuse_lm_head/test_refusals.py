"""What the fused head refuses, its outputs, versions, and two processes."""

import json
import os
import pickle
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from gspo_kernels.integrations import errors, transformers
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.transformers import LMHead, fuse_lm_head
from gspo_kernels.parallel.groups import Parallel
from tests.integrations.distributed_transformers import CASES
from tests.integrations.fuse_lm_head.common import T, batch
from tests.integrations.tiny_models import tiny

SCORE = {"return_logprobs": True}
UPDATE = {"old_logprobs": None, "advantages": torch.ones(4)}
IDS = batch()[0]["input_ids"]
PACKED = {"input_ids": IDS.view(1, -1), "labels": IDS.view(1, -1), "cu_seqlens": torch.tensor([0, 20, 40])}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**SCORE}, "labels, shift_labels: expected exactly one"),
        ({**SCORE, "labels": IDS, "shift_labels": IDS}, "labels, shift_labels: expected exactly one"),
        ({"labels": IDS, "old_logprobs": None}, "advantages: missing beside 'old_logprobs'"),
        ({"labels": IDS, "temperature": 0.5}, "advantages: missing beside 'temperature'"),
        ({"labels": IDS, "advantages": torch.ones(4)}, "old_logprobs: missing"),
        ({"labels": IDS, **SCORE, **UPDATE}, "advantages: goes with a policy call"),
        ({"labels": IDS, **SCORE, "kl_beta": 0.1}, "kl_beta: goes with a policy call"),
        ({"labels": IDS, "return_logprobs": 1}, "return_logprobs: got int"),
        ({"labels": IDS.float(), **SCORE}, "labels: got torch.float32"),
        ({"labels": IDS[0], **SCORE}, r"labels: got shape \(10,\), expected \[B, T\]"),
        ({"labels": IDS[:, 1:], **SCORE}, r"hidden: got shape \(4, 10, 32\)"),
        (
            {"labels": IDS, **UPDATE, "old_logprobs": torch.zeros(4, T - 1)},
            r"old_logprobs: got shape \(4, 9\)",
        ),
        ({"labels": IDS, **UPDATE, "loss_mask": torch.ones(4, T)}, "loss_mask: belongs to the tokens"),
        (
            {"labels": IDS, **UPDATE, "old_logprobs": torch.zeros(4, T, dtype=torch.bfloat16)},
            "old_logprobs: arrives as torch.bfloat16",
        ),
        (
            {"labels": IDS, **UPDATE, "router_aux_loss_coef": 0.1},
            "router_aux_loss_coef: the forward computed no",
        ),
        ({"labels": IDS, **SCORE, "return_dict": False}, "return_dict: a fused call"),
        ({"labels": IDS, **SCORE, "logits_to_keep": 2}, "logits_to_keep: a fused call"),
        (
            {"labels": IDS, **SCORE, "position_ids": torch.tensor([[0, 1, 2, 3, 4] * 2])},
            "position_ids: restart within a row",
        ),
        ({"labels": IDS, **SCORE, "cu_seqlens": torch.tensor([0, 40])}, r"expected \[1, N\] with cu_seqlens"),
        ({**PACKED, **SCORE, "attention_mask": torch.ones(1, 40)}, "cu_seqlens: with a 2-D attention_mask"),
        ({**PACKED, **SCORE, "use_cache": True}, "cu_seqlens: with a 2-D attention_mask or use_cache"),
        ({**PACKED, **SCORE, "position_ids": torch.arange(40).unsqueeze(0)}, "position_ids: do not restart"),
        ({**PACKED, **SCORE, "temperature": torch.ones(3)}, r"temperature: got shape \(3,\)"),
    ],
)
def test_wrong_calls_name_the_argument(refusing, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        refusing(**{"input_ids": IDS, **arguments})
    assert "forward" not in refusing.lm_head.__dict__


def test_ranks_that_share_sequences_need_shifted_labels(refusing, group_of_one):
    shared = Parallel(cp_group=group_of_one)
    with pytest.raises(IntegrationError, match="labels: the next one may lie on another rank of cp_group"):
        refusing(input_ids=IDS, labels=IDS, **UPDATE, parallel=shared)
    with pytest.raises(ValueError, match="tp_group: a fused call can't use it"):
        refusing(input_ids=IDS, labels=IDS, **UPDATE, parallel=Parallel(tp_group=group_of_one))
    with pytest.raises(IntegrationError, match="parallel: goes with a policy call"):
        refusing(input_ids=IDS, labels=IDS, **SCORE, parallel=shared)


@pytest.fixture(scope="module")
def refusing():
    return fuse_lm_head(tiny())


@pytest.mark.parametrize("name", ["Gemma2, softcap", "Granite, divides", "Cohere, multiplies"])
def test_logits_that_are_changed_in_an_unknown_way_are_refused(monkeypatch, name):
    model = fuse_lm_head(tiny(name))
    blind = LMHead(model.lm_head.weight, None, 1.0, None)
    monkeypatch.setattr(transformers, "lm_head_of", lambda model: blind)
    for _ in range(2):
        with pytest.raises(IntegrationError, match="changes logits after the lm_head"):
            model(IDS, labels=IDS, return_logprobs=True)


def test_a_head_that_is_more_than_its_weight_is_refused():
    class Gated(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * hidden.mean(-1, keepdim=True)

    model = tiny()
    model.lm_head = Gated(32, 96, bias=False)
    with pytest.raises(IntegrationError, match="Gated, is not the product"):
        fuse_lm_head(model)(IDS, labels=IDS, return_logprobs=True)


def test_models_that_are_no_causal_language_models_are_refused():
    import transformers as transformers_library
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=96, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    for model in (T5ForConditionalGeneration(config), tiny().model):
        with pytest.raises(IntegrationError, match="no causal language model"):
            fuse_lm_head(model)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name in ("BertForMaskedLM", "BertLMHeadModel", "DebertaV2ForMaskedLM", "Gemma3ForCausalLM"):
        family, bidirectional = name[: name.index("For" if "For" in name else "LM")], {}
        if family == "Gemma3":
            family, bidirectional = "Gemma3Text", {"use_bidirectional_attention": True}
        config = getattr(transformers_library, f"{family}Config")(vocab_size=96, **small, **bidirectional)
        with pytest.raises(IntegrationError, match=f"model: {name} is bidirectional"):
            fuse_lm_head(getattr(transformers_library, name)(config))
    decoder = transformers_library.BertConfig(vocab_size=96, is_decoder=True, **small)
    fuse_lm_head(transformers_library.BertLMHeadModel(decoder))
    quantized = tiny()
    quantized.lm_head.weight = nn.Parameter(torch.zeros(96, 32, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(IntegrationError, match=r"torch.uint8 weight"):
        fuse_lm_head(quantized)


def test_the_weight_of_the_auxiliary_loss():
    model = fuse_lm_head(tiny("Qwen3-MoE"))
    inputs, labels = batch()
    call = {
        **inputs,
        "labels": labels,
        "old_logprobs": None,
        "advantages": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }
    with_own, without = model(**call), model(**call, router_aux_loss_coef=0.0)
    own = model(**inputs, labels=labels)
    assert torch.equal(with_own.aux_loss, own.aux_loss)
    torch.testing.assert_close(with_own.loss, without.loss + 0.1 * own.aux_loss)
    assert torch.equal(model(**inputs, labels=labels, return_logprobs=True).aux_loss, own.aux_loss)
    assert model(**call, output_router_logits=False).aux_loss is None


def test_outputs_go_through_accelerate_and_pickle():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.state import AcceleratorState

    inputs, labels = batch()
    model = fuse_lm_head(tiny())
    with torch.autocast("cpu", torch.bfloat16):
        want = model(**inputs, labels=labels, old_logprobs=None, advantages=torch.ones(4))
    AcceleratorState._reset_state(reset_partial_state=True)
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    out = prepared(**inputs, labels=labels, old_logprobs=None, advantages=torch.ones(4))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert isinstance(out, transformers.FusedLMOutput) and out.logits is None
    assert torch.equal(out.loss, want.loss) and torch.equal(out.logprobs, want.logprobs)
    assert {n: float(v) for n, v in out.metrics.items()} == {n: float(v) for n, v in want.metrics.items()}
    scored = model(**inputs, labels=labels, return_logprobs=True)
    again = pickle.loads(pickle.dumps(transformers.FusedLMOutput(logprobs=scored.logprobs.detach())))
    assert torch.equal(again.logprobs, scored.logprobs) and "loss" not in again


@pytest.mark.parametrize("version", [None, "4.57.1"])
def test_a_missing_or_unsupported_transformers(monkeypatch, version):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(errors, "version", installed)
    said = "not installed" if version is None else "version 4.57.1 is installed"
    with pytest.raises(
        IntegrationError, match=f"^transformers: {said}, this adapter needs transformers>=5.0,<6"
    ):
        fuse_lm_head(tiny())


def test_importing_the_adapter_imports_no_framework():
    code = (
        "import sys, gspo_kernels.integrations.transformers\n"
        "assert not {'transformers', 'accelerate', 'peft'} & {*sys.modules}, 'a framework was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What the cases of two gloo processes had to say, {case: traceback of either}."""
    folder = tmp_path_factory.mktemp("gloo")
    command = [sys.executable, "-m", "tests.integrations.distributed_transformers"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), str(folder / f"result{rank}")],
            cwd=Path(__file__).parents[3],
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            assert process.wait(timeout=400) == 0
    finally:
        for process in processes:
            process.kill()
    said = [json.loads((folder / f"result{rank}").read_text()) for rank in range(2)]
    return {case: said[0][case] + said[1][case] for case in said[0]}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_two_processes_equal_one_bit_for_bit(two_processes, case):
    assert not two_processes[case], two_processes[case]
