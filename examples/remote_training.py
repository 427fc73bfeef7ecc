"""GSPO on a remote training service, which runs the model; the loss is computed here, on any CPU.

Tinker's ``forward_backward_custom`` hands the log-probs of each sequence to a function and takes its gradient
back; services with the same signature (Fireworks) take the same function.

    pip install tinker gspo_kernels
    TINKER_API_KEY=... python -m examples.remote_training --model Qwen/Qwen3-4B-Instruct-2507

Old log-probs come from the service's ``forward``. Between these and the sampler's, a mean absolute difference
of 0.01 nats per token is normal for bf16; much more indicates stale data or another temperature. If
``clip_fraction/tokens`` is near 1 from the second update on, reduce the learning rate.
"""

import argparse
from dataclasses import dataclass

import torch

import gspo_kernels as gk
from gspo_kernels.models.layouts import offsets_of

GSPO = gk.GSPO()


@dataclass
class Sample:
    """A sequence as it was sampled: token ids, the sampler's log-probs of the completion, an advantage."""

    prompt: list[int]
    completion: list[int]
    sampler_logprobs: list[float]
    advantage: float = 0.0


def gspo_loss(samples, old_logprobs, objective=GSPO, high=2.0):
    """Return a loss function for ``forward_backward_custom``.

    Args:
        samples: the sequences, in the order of the service's data.
        old_logprobs: the trainer's log-probs before the updates, one tensor per sequence; the last values are
            those of the completion.
        objective: GSPO, or any other objective.
        high: the largest weight of a sequence that the trainer finds more likely than the sampler did.
    """

    def of_completions(values):
        pairs = zip(values, samples, strict=True)
        return torch.cat([value[-len(sample.completion) :] for value, sample in pairs])

    cu_seqlens = offsets_of(torch.tensor([len(sample.completion) for sample in samples]))
    old = of_completions([torch.as_tensor(values) for values in old_logprobs])
    sampler = torch.tensor([logp for sample in samples for logp in sample.sampler_logprobs])
    weights = gk.rollout_weights(old, sampler, cu_seqlens=cu_seqlens, level="sequence", high=high)
    advantages = torch.tensor([sample.advantage for sample in samples])

    def loss(data, logprobs):
        out = gk.policy_loss(
            of_completions(logprobs),
            old,
            advantages,
            cu_seqlens=cu_seqlens,
            rollout_weights=weights,
            objective=objective,
        )
        metrics = {name: float(value) for name, value in out.metrics.items()}
        metrics["mismatch/mean"] = float((old - sampler).abs().mean())
        return out.loss, metrics

    return loss


def update(client, data, samples, adam, minibatches=2):
    """Take one update per minibatch on the same rollout; return the metrics of each."""
    scored = client.forward(data, "cross_entropy").result()
    old = [output["logprobs"].to_torch() for output in scored.loss_fn_outputs]
    metrics = []
    for part in range(minibatches):
        here = slice(part, None, minibatches)
        loss = gspo_loss(samples[here], old[here])
        metrics.append(client.forward_backward_custom(data[here], loss).result().metrics)
        client.optim_step(adam).result()
    return metrics


def main():
    """Teach a model to answer briefly, in a few steps."""
    import tinker
    from tinker import types

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-4B-Instruct-2507")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    client = tinker.ServiceClient().create_lora_training_client(base_model=options.model, rank=16).result()
    tokenizer = client.get_tokenizer()
    prompt = tokenizer.encode("Name a river and say where it flows.\n")
    sampling = types.SamplingParams(max_tokens=64, temperature=1.0)
    for step in range(options.steps):
        sampler = client.save_weights_and_get_sampling_client(name=f"step-{step}").result()
        drawn = sampler.sample(types.ModelInput.from_ints(prompt), 16, sampling).result().sequences
        samples = [Sample(prompt, list(each.tokens), list(each.logprobs)) for each in drawn]
        rewards = torch.tensor([-float(len(sample.completion)) for sample in samples])
        advantages = gk.advantages.group_normalized(rewards, group_size=len(samples))
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):
            sample.advantage = advantage
        data = [datum(types, sample) for sample in samples]
        metrics = update(client, data, samples, types.AdamParams(learning_rate=1e-4))
        print(step, f"{-rewards.mean():.1f} tokens", metrics[-1])


def datum(types, sample):
    """Return a sequence as the service takes it: input tokens, and the token that each position predicts."""
    ids = sample.prompt + sample.completion
    targets = types.TensorData.from_torch(torch.tensor(ids[1:]))
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": targets}
    )


if __name__ == "__main__":
    main()
