"""What a run needs of memory: the table against a real peak, the sizes that fit, and running out of it."""

import ctypes
import gc
import os
import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch

from gspo_kernels.cli import main
from gspo_kernels.ops import memory as memory_module
from gspo_kernels.trainer import loop, memory
from gspo_kernels.trainer.batch import Batch
from gspo_kernels.trainer.checkpoint import load_state
from gspo_kernels.trainer.config import AUTO, InputError
from gspo_kernels.trainer.memory import Memory, memory_of
from gspo_kernels.trainer.model import make_policies
from gspo_kernels.trainer.rollout import ModelEngine, Sampling
from gspo_kernels.trainer.update import Updater
from tests.trainer.conftest import (
    ROWS,
    make_accelerator,
    make_trainer,
    odd_share,
    small_config,
    tiny_model,
    tiny_qwen3,
)

# half of Qwen3-0.6B's widths
WIDE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 4096,
}  # fmt: skip
# what counts is the head's chunk of logits, which grows with the tokens up to a number of rows
HEAD = {"num_hidden_layers": 1, "vocab_size": 4000, "max_position_embeddings": 4096}
NARROW = {"num_hidden_layers": 1, "vocab_size": 300, "max_position_embeddings": 4096}
TOKENS = 2048


def resident(kind):
    """Return VmRSS or VmHWM, the memory of this process now or at most, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def peak_of_an_update(tokenizer, config, sizes, base):
    """Return the predicted bytes of an update, and the real ones of the second one, above ``base``."""
    accelerator = make_accelerator(config.update.precision)
    model = tiny_model("qwen3", **sizes)
    policies = make_policies(model, tokenizer, config, accelerator, needs_reference=False)[1:]
    predicted = memory_of(*policies[:2], config, longest=16)
    updater = Updater(accelerator, config, *policies)
    completions = [torch.randint(60, (TOKENS // 8 - 15,)) for _ in range(8)]
    batch = Batch(
        prompts=[torch.randint(60, (16,)) for _ in range(8)],
        completions=completions,
        advantages=torch.tensor([1.0, -1.0] * 4),
        loss_mask=torch.ones(sum(map(len, completions)), dtype=torch.bool),
        group_ids=torch.arange(8) // 2,
    )
    updater.update(batch)
    Path("/proc/self/clear_refs").write_text("5")
    updater.update(batch)
    return predicted.fixed + predicted.of_tokens(TOKENS), resident("VmHWM") - base


def peak_of_sampling(tokenizer, config, prompt, sizes, base):
    """Return the predicted bytes of sampling after prompts of a length, and the real ones above ``base``."""
    accelerator = make_accelerator(config.update.precision)
    model = tiny_model("qwen3", **sizes)
    policies = make_policies(model, tokenizer, config, accelerator, needs_reference=False)[1:]
    predicted = memory_of(*policies, config, longest=prompt)
    prompts = torch.randint(60, (64, prompt)).tolist()
    Path("/proc/self/clear_refs").write_text("5")
    with accelerator.autocast():
        ModelEngine(model, [], 0, len(prompts)).generate(prompts, Sampling(config.rollout.max_new_tokens))
    sampling = len(prompts) * predicted.completion + predicted.rounded
    return predicted.weights + sampling, resident("VmHWM") - base


def measured(peak_of, sizes):
    """Return what ``peak_of(sizes, base)`` does, above the memory that libraries keep."""
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    # what is freed goes back at once, and no pages are kept that the system may take any time
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    memory_module.HUGE_PAGES_FROM = 2**60
    peak_of(NARROW, 0)
    gc.collect()
    libc.malloc_trim(0)
    return peak_of(sizes, resident("VmRSS"))


# Memory that other tests have freed lies in pieces: what a process used again of them would be counted.
FRESH = get_context("forkserver")
FRESH.set_forkserver_preload([__name__])


def check_prediction(peak_of, sizes):
    """Compare what ``peak_of(sizes, base)`` returns in a process of its own: predicted and real bytes."""
    with ProcessPoolExecutor(1, FRESH) as process:
        predicted, peak = process.submit(measured, peak_of, sizes).result()
    assert predicted == pytest.approx(peak, rel=0.15)


has_peaks = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak of memory here"
)


@has_peaks
@pytest.mark.parametrize(
    ("sections", "sizes"),
    [
        ({}, WIDE),
        ({"update": {"gradient_checkpointing": True}}, WIDE),
        ({"update": {"precision": "bf16"}}, WIDE),
        ({"lora": {"rank": 4}}, WIDE),
        ({}, HEAD),
    ],
    ids=["fp32", "checkpointing", "bf16", "adapters", "head"],
)
def test_the_prediction_is_within_15_percent_of_a_real_peak(tokenizer, tmp_path, sections, sizes):
    update = {"minibatches": 1, "micro_batch_tokens": TOKENS} | sections.get("update", {})
    config = small_config(tmp_path, **sections | {"update": update})
    check_prediction(partial(peak_of_an_update, tokenizer, config), sizes)


# wide keys and values beside narrow layers, and much of a vocabulary
CACHE = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 300, "max_position_embeddings": 4096,
}  # fmt: skip
DEEP = CACHE | {"num_hidden_layers": 6}
LOGITS = CACHE | {"num_hidden_layers": 1, "vocab_size": 60000}


@has_peaks
@pytest.mark.parametrize(
    ("precision", "prompt", "new", "sizes"),
    [("fp32", 256, 8, CACHE), ("bf16", 256, 8, CACHE), ("bf16", 8, 64, DEEP), ("fp32", 8, 8, LOGITS)],
    ids=["prompts", "prompts in bf16", "completions in bf16", "logits"],
)
def test_the_prediction_of_sampling_is_within_15_percent_of_a_real_peak(
    tokenizer, tmp_path, precision, prompt, new, sizes
):
    config = small_config(tmp_path, update={"precision": precision}, rollout={"max_new_tokens": new})
    check_prediction(partial(peak_of_sampling, tokenizer, config, prompt), sizes)


GIB = 2**30
MEMORY = Memory(2 * GIB, GIB, 2 * GIB, 4 * GIB, ((256, 0, GIB), (16384, 0, 64 * GIB)), (1, 1), GIB // 32)


def test_auto_is_what_fits_and_the_table_says_what_does_not():
    assert MEMORY.fitting(1000 * GIB) == AUTO
    fits = MEMORY.fitting(20 * GIB)
    needed = MEMORY.fixed + MEMORY.of_tokens(fits["micro_batch_tokens"])
    one_more = MEMORY.fixed + MEMORY.of_tokens(fits["micro_batch_tokens"] + 256)
    assert needed <= 0.9 * 20 * GIB < one_more
    assert fits["batch_size"] == AUTO["batch_size"] and MEMORY.fitting(8 * GIB)["batch_size"] == 6
    assert MEMORY.fitting(GIB) == {"micro_batch_tokens": 256, "batch_size": 1}
    table = MEMORY.table(fits, 20 * GIB)
    assert "weights                              2.00" in table and "counted:" in table
    served = MEMORY._replace(completion=0, rounded=GIB).table(fits, 20 * GIB)
    assert "vLLM" in served and "sampling" not in served and "vLLM" not in table
    assert "counted, not measured on a GPU yet:" in MEMORY.table(fits, 20 * GIB, on_gpu=True)
    assert "not fit" not in table and "available                           20.00" in table
    for sizes, available, words in (
        ({"micro_batch_tokens": 16384, "batch_size": 1}, 20, "a smaller update.micro_batch_tokens, or"),
        ({"micro_batch_tokens": 256, "batch_size": 1}, 9, "lora.rank above 0"),
        ({"micro_batch_tokens": 256, "batch_size": 999}, 20, "a smaller rollout.batch_size or"),
    ):
        assert f"not fit; what helps: {words}" in MEMORY.table(sizes, available * GIB)


def test_sizes_that_auto_chose_are_used_again_on_resume(tokenizer, tmp_path, monkeypatch, capsys):
    def made(free, **sections):
        sections = {
            "update": {"micro_batch_tokens": "auto", "steps": 1},
            "checkpoint": {"every": 1},
        } | sections
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"available": free}))
        return make_trainer(tokenizer, ROWS, odd_share, small_config(tmp_path, **sections))

    trainer = made(4 * 2**20)
    trainer.train()
    chosen = trainer.sizes
    assert "memory in GiB, counted" in capsys.readouterr().out
    assert chosen["micro_batch_tokens"] < 16384 and chosen["batch_size"] <= 256
    assert trainer.updater.config.update.micro_batch_tokens == chosen["micro_batch_tokens"]
    assert trainer.engine.batch_size == chosen["batch_size"]
    assert load_state(trainer.directory.latest_checkpoint())["sizes"] == chosen
    again = made(64 * GIB, update={"micro_batch_tokens": "auto", "steps": 2}, rollout={"batch_size": 7})
    again.train(resume=True)
    assert again.sizes == chosen | {"batch_size": 7}
    more = made(64 * GIB)
    more.train(overwrite=True)
    assert more.sizes == AUTO


def test_why_memory_is_not_predicted_is_said(tokenizer, tmp_path, monkeypatch, capsys):
    """An error of the model's code, or of ours, is named with its place, and sizes that are auto stay."""
    update = {"micro_batch_tokens": "auto"}
    trainer = make_trainer(tokenizer, ROWS, odd_share, small_config(tmp_path, update=update))
    monkeypatch.setattr(memory, "_update_bytes", lambda *arguments: 1 // 0)
    trainer.plan_memory({"batch_size": 9})
    said = " ".join(capsys.readouterr().out.split())
    assert "memory is not predicted: ZeroDivisionError" in said and "test_memory.py, line" in said
    assert trainer.sizes == AUTO | {"batch_size": 9}
    monkeypatch.setattr(type(trainer.accelerator), "is_fsdp2", True)
    trainer.plan_memory({})
    assert "not predicted: shards of FSDP2 are not traced" in capsys.readouterr().out


def test_running_out_of_memory_is_one_sentence_and_a_checkpoint_is_kept(tokenizer, tmp_path, monkeypatch):
    trainer = make_trainer(tokenizer, ROWS, odd_share, small_config(tmp_path, checkpoint={"every": 1}))
    update = trainer.update

    def fails(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    trainer.update = lambda batch: update(batch) if trainer.step == 1 else fails()
    options = r"micro_batch_tokens, or update\.gradient_checkpointing"
    with pytest.raises(InputError, match=rf"out of memory; what helps: a smaller .*{options}"):
        trainer.train()
    assert trainer.directory.latest_checkpoint().name == "step_000001"
    monkeypatch.setattr(type(trainer.engine), "generate", fails)
    with pytest.raises(InputError, match=r"helps: a smaller rollout\.batch_size or rollout\.max"):
        trainer.evaluate()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--lora.rank", "2", "--data.prompt_template", "the cache holds: {prompt}"],
        ["--kl.beta", "0.1", "--update.gradient_checkpointing", "--update.precision", "bf16"],
    ],
    ids=["weights", "adapters", "reference"],
)
def test_a_dry_run_predicts_what_the_run_does_and_reads_no_weights(
    tokenizer, tmp_path, monkeypatch, capsys, options
):
    base, run, reward = tmp_path / "base", tmp_path / "run", "gspo_kernels.demo:exact"
    tiny_qwen3(tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    words = ["train", "--model", str(base), "--reward", reward]
    for key, prompt in (("dataset", "ab"), ("eval_dataset", "a prompt that is longer")):
        (tmp_path / key).with_suffix(".jsonl").write_text(f'{{"prompt": "{prompt}", "answer": "ab"}}\n')
        words += [f"--{key}", str((tmp_path / key).with_suffix(".jsonl"))]
    words += ["--output", str(run), "--rollout.max_new_tokens", "8", *options]
    make_accelerator("bf16" if "bf16" in options else "fp32")
    predictions, lengths = [], set()

    def predicted(*given):
        predictions.append(memory_of(*given))
        lengths.add(given[3])
        return MEMORY

    monkeypatch.setattr(memory, "memory_of", predicted)
    with monkeypatch.context() as patch:
        patch.setattr(loop.GSPOTrainer, "train", lambda trainer, **flags: trainer.plan_memory({}))
        assert main(words) == 0
    (base / "model.safetensors").unlink()
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert re.match(r"Qwen3ForCausalLM with 0.0 million weights: memory in GiB, counted:", said)
    assert "most at once" in said and "sampling of" in said and not run.exists()
    assert main([*words, "--engine.url", "http://localhost:1", "--dry-run"]) == 0
    of_run, dry, of_server = predictions
    assert lengths == {len("a prompt that is longer") + len("the cache holds: ") * ("--lora.rank" in options)}
    assert of_run == dry and (dry.reference > 0) == ("--kl.beta" in options)
    assert of_server == dry._replace(completion=0) and of_server.fitting(GIB)["batch_size"] == 256
