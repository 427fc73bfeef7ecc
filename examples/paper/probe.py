"""What other old log-probs do to the gradient, before any update, by the length of the completions.

With exact old log-probs every ratio is 1 here, nothing is clipped, and GRPO and GSPO have the same gradient.
So whatever a source changes is its own doing.
"""

import time

import torch

import gspo_kernels as gk
from examples.paper.old_logprobs import RoutingRecorder, changed_experts, parse
from examples.paper.training import OBJECTIVES
from gspo_kernels.trainer.model import Policy
from gspo_kernels.trainer.rollout import ModelEngine, Sampling

SOURCES = {
    "dense": ("bf16", "noise=0.01", "noise=0.05"),
    "moe": ("bf16", "routing=0.2", "noise=0.01", "noise=0.05"),
}
SEQUENCES = 64


def probe(model, tokenizer, kind, rows, *, seed, lengths):
    """Return one record with an entry for every length, source and objective.

    Entries have the cosine between the gradients with old log-probs of the source and with exact ones, the
    ratio of their norms, the share of clipped tokens, the deviations of log-ratios of tokens and sequences,
    and the share of experts that the source's pass chose otherwise (None where there are none).
    """
    started, entries = time.process_time(), []
    policy = Policy(model, temperature=1.0)
    prompt_ids = [tokenizer(row["prompt"])["input_ids"] for row in rows[:SEQUENCES]]
    for length in lengths:
        torch.manual_seed(seed)
        batch = sample_batch(model, tokenizer, prompt_ids, length)
        exact, exact_routing = score(policy, batch, "exact")
        reference, _ = gradient(policy, batch, exact, OBJECTIVES["GSPO"])
        for source in SOURCES[kind]:
            old, routing = score(policy, batch, source)
            log_ratio = (exact - old).view(-1, length)
            shared = {
                "length": length,
                "old_logprobs": source,
                "token_sd": float(log_ratio.std()),
                "sequence_sd": float(log_ratio.mean(1).std()),
                "experts_changed": changed_experts(exact_routing[0], routing[0]) if routing else None,
            }
            for name, objective in OBJECTIVES.items():
                found, clipped = gradient(policy, batch, old, objective)
                cosine = torch.nn.functional.cosine_similarity(found, reference, dim=0)
                entries.append(
                    shared
                    | {
                        "objective": name,
                        "cosine": float(cosine),
                        "norm_ratio": float(found.norm() / reference.norm()),
                        "clip_tokens": clipped,
                    }
                )
    model.zero_grad()
    seconds = time.process_time() - started
    return {"kind": "probe", "model": kind, "seed": seed, "cpu_seconds": seconds, "entries": entries}


def sample_batch(model, tokenizer, prompt_ids, length):
    """Sample completions of one length; the advantage is the normalised share of even token ids.

    A made-up reward, as it is defined for any length; generation goes on after the end token.
    """
    engine = ModelEngine(
        model,
        end_ids=[tokenizer.vocab_size + 1],
        pad_id=tokenizer.pad_token_id,
        batch_size=len(prompt_ids),
    )
    completions = [each.ids for each in engine.generate(prompt_ids, Sampling(length))]
    rewards = torch.stack([(ids % 2 == 0).float().mean() for ids in completions])
    return {
        "prompts": [torch.tensor(ids) for ids in prompt_ids],
        "completions": completions,
        "advantages": gk.advantages.group_normalized(rewards, group_size=len(rewards)),
    }


@torch.no_grad()
def score(policy, batch, source):
    """Return the old log-probs that a source gives, packed, and the experts that its passes chose."""
    with parse(source)(policy) as (engine, on_logprobs), RoutingRecorder(engine.model) as routing:
        logprobs = engine(batch["prompts"], batch["completions"]).logprobs
    return on_logprobs(logprobs), routing.passes


def gradient(policy, batch, old_logprobs, objective):
    """Return the gradient of all parameters as one vector, and the share of clipped tokens."""
    terms = {"old_logprobs": old_logprobs, "advantages": batch["advantages"], "objective": objective}
    output = policy(batch["prompts"], batch["completions"], terms)
    parameters = list(policy.parameters())
    found = torch.autograd.grad(output.loss, parameters, materialize_grads=True)
    vector = torch.cat([each.flatten() for each in found]).double()
    return vector, float(output.metrics["clip_fraction/tokens"])
