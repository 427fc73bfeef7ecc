"""Rollouts by transformers' continuous batching: a paged cache, and a new completion where another ended.

It attends by pages with flash attention alone. With sdpa all completions of a batch are one row under a dense
mask, whose cost grows with the square of their number; then the loop over tokens of `ModelEngine` is faster.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from gspo_kernels.integrations.rope import varying_ropes
from gspo_kernels.trainer.batch import attention_of
from gspo_kernels.trainer.config import InputError, RolloutConfig
from gspo_kernels.trainer.rollout import Completion, ModelEngine, Sampling

PAGE, ROW = 256, 2048  # tokens in a page, as flash-attention takes it; most prompt tokens in a forward pass


def with_sampler(
    loop: ModelEngine, config: RolloutConfig, accelerator: Any, say: Callable[..., None]
) -> ModelEngine:
    """Return the engine of ``rollout.sampler``, and say why continuous batching does not sample on a GPU."""
    auto, attention = config.sampler == "auto", attention_of(loop.model)
    if config.sampler == "loop" or (auto and loop.model.device.type != "cuda"):
        return loop
    engine = ContinuousEngine(**vars(loop))
    if accelerator.is_fsdp2:
        why = "it takes no shards of FSDP2"
    elif auto and "flash" not in attention:
        why = f"it is slow with {attention}, and fast with attn_implementation flash_attention_2"
    else:
        with accelerator.autocast():
            why = engine.unsupported(config)
    if not why:
        return engine
    if not auto:
        raise InputError(f"rollout.sampler: got 'continuous', and continuous batching cannot sample: {why}")
    say(f"continuous batching does not sample: {why}")
    return loop


class ContinuousEngine(ModelEngine):
    """A `ModelEngine` that samples by continuous batching; min_p and sampling masks take its loop.

    Weights, training mode and random generators are afterwards what they were before.
    """

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """See `RolloutEngine.generate`; a completion that fails is a `RuntimeError`."""
        if not prompts or sampling.min_p > 0.0 or sampling.return_mask:
            return super().generate(prompts, sampling)
        longest = max(map(len, prompts)) + sampling.max_new_tokens
        at_once, greedy = min(self.batch_size, len(prompts)), sampling.temperature == 0.0
        config = transformers.ContinuousBatchingConfig(
            return_logprobs=True,
            # From the default generator, so each rollout has another seed, and the same ones when resumed.
            seed=int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")),
            num_blocks=at_once * -(-longest // PAGE),
            max_batch_tokens=max(at_once, min(ROW, sum(map(len, prompts)))),
            max_requests_per_batch=at_once,
            safety_margin=0.0,  # there are pages for all
            auto_switch_to_flash=False,
            drop_unsupported_processors=False,
            disable_nccl_graph_mixing=False,
        )
        rules: Any = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        rules = {"do_sample": False} if greedy else rules | {"do_sample": True}
        generation = transformers.GenerationConfig(eos_token_id=self.end_ids, **rules)
        outputs: dict[str, Any] = {}
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with _borrowed(self.model), torch.random.fork_rng(devices):
            manager = self.model.init_continuous_batching(generation, config)
            # All requests wait before the thread starts, so that the batches, and so the draws, repeat.
            names = manager.add_requests(prompts, max_new_tokens=sampling.max_new_tokens)
            manager.start()
            try:
                while len(outputs) < len(names):
                    output = manager.get_result(timeout=1.0)
                    if output is not None and output.is_finished():
                        outputs[output.request_id] = output
                    elif output is None and not manager.is_running():
                        break
            finally:
                gc.freeze()  # transformers collects garbage now, which takes a second in a large process
                manager.stop(hard_stop=len(outputs) < len(names))
                gc.unfreeze()
        errors = [outputs[name].error if name in outputs else "no answer" for name in names]
        if failed := [error for error in errors if error is not None]:
            raise RuntimeError(f"continuous batching: {len(failed)} of {len(names)} completions: {failed[0]}")
        completions = []
        for output in (outputs[name] for name in names):
            ids = torch.tensor(output.generated_tokens, dtype=torch.int64, device="cpu")
            logprobs = torch.tensor(output.logprobs, dtype=torch.float32, device="cpu")
            if len(logprobs) != len(ids) or not bool(logprobs.isfinite().all()):
                raise RuntimeError(f"continuous batching: {len(ids)} tokens have log-probs {output.logprobs}")
            finished = output.generated_tokens[-1] in self.end_ids
            completions.append(Completion(ids, finished, None if greedy else logprobs))
        return completions

    def unsupported(self, config: RolloutConfig) -> str:
        """Return why a run cannot sample with this engine, or ""; a few tokens are sampled to find out."""
        if config.keep_sampling_mask or config.min_p > 0.0:
            return "it has no min_p and returns no sampling masks"
        if varying_ropes(self.model):
            return "the frequencies of this model's RoPE depend on the length of a sequence"
        options = getattr(transformers, "ContinuousBatchingConfig", None)
        if not hasattr(options, "return_logprobs") or not hasattr(options, "auto_switch_to_flash"):
            return "it returns no log-probs, or changes the attention, in this version of transformers"
        logs = logging.root.manager.disable
        logging.disable()  # transformers would log the whole trace of what is returned here
        try:
            with torch.random.fork_rng([]):
                self.generate([[0, 0, 0], [0]], Sampling(4))
        except Exception as error:  # of the model's attention, or of a cache that has not every layer
            return f"tried on a few tokens, it raised {error!r:.300}"
        finally:
            logging.disable(logs)
        return ""


@contextmanager
def _borrowed(model: Any) -> Iterator[None]:
    """Let a thread of transformers run the model in the body.

    Autocast is off in other threads, so the weights are rounded to the type in which it computes here.
    """
    kind = model.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    modes, weights = [(m, m.training) for m in model.modules()], [(p, p.data) for p in model.parameters()]
    try:
        for weight, data in weights:
            weight.data = data.to(dtype) if dtype is not None and data.is_floating_point() else data
        yield
    finally:
        for weight, data in weights:
            weight.data = data
        for module, training in modes:
            module.training = training
