"""GSPO with a training service, tested with a stand-in for the interface that Tinker 0.38 publishes."""

import sys
from types import SimpleNamespace

import pytest
import torch

from examples import remote_training
from examples.remote_training import Sample, gspo_loss, update
from tests.draws import shifted_seed

VOCABULARY, END = 8, 0


class Future(SimpleNamespace):
    def result(self):
        return self.value


class Service:
    """A bigram model behind Tinker's interface: a loss's gradient weights the log-probs in the backward."""

    def __init__(self):
        torch.manual_seed(shifted_seed(0))
        self.table = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)

    def logprobs(self, datum):
        rows = self.table[datum.model_input].log_softmax(-1)
        return rows.gather(-1, datum.loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)

    def forward(self, data, loss_fn):
        assert loss_fn == "cross_entropy"
        outputs = [{"logprobs": SimpleNamespace(to_torch=self.logprobs(each).detach)} for each in data]
        return Future(value=SimpleNamespace(loss_fn_outputs=outputs))

    def forward_backward_custom(self, data, loss_fn):
        logprobs = [self.logprobs(each) for each in data]
        leaves = [each.detach().clone().requires_grad_() for each in logprobs]
        loss, metrics = loss_fn(data, leaves)
        loss.backward()
        sum((leaf.grad * each).sum() for leaf, each in zip(leaves, logprobs, strict=True)).backward()
        return Future(value=SimpleNamespace(metrics=metrics))

    def optim_step(self, adam):
        with torch.no_grad():
            self.table -= adam.learning_rate * self.table.grad
        self.table.grad = None
        return Future(value=None)

    def create_lora_training_client(self, base_model, rank):
        return Future(value=self)

    def get_tokenizer(self):
        return SimpleNamespace(encode=lambda text: [1, 2])

    def save_weights_and_get_sampling_client(self, name):
        return Future(value=self)

    def sample(self, prompt, count, sampling):
        sequences = []
        for _ in range(count):
            tokens, logprobs, last = [], [], int(prompt[-1])
            while len(tokens) < sampling.max_tokens and last != END:
                rows = self.table[last].detach().log_softmax(-1)
                last = int(rows.exp().multinomial(1))
                tokens.append(last)
                logprobs.append(float(rows[last]))
            sequences.append(SimpleNamespace(tokens=tokens, logprobs=logprobs))
        return Future(value=SimpleNamespace(sequences=sequences))


def types():
    return SimpleNamespace(
        Datum=SimpleNamespace,
        ModelInput=SimpleNamespace(from_ints=torch.tensor),
        TensorData=SimpleNamespace(from_torch=lambda tensor: tensor),
        SamplingParams=SimpleNamespace,
        AdamParams=SimpleNamespace,
    )


def samples_of(service, count=4):
    drawn = service.sample([1, 2], count, SimpleNamespace(max_tokens=6)).result().sequences
    samples = [Sample([1, 2], each.tokens, each.logprobs) for each in drawn]
    for i, sample in enumerate(samples):
        sample.advantage = float(i) - 1.5
    return samples, [remote_training.datum(types(), sample) for sample in samples]


def test_the_service_gets_the_gradient_of_the_loss():
    service = Service()
    samples, data = samples_of(service)
    for sample in samples:  # as if the sampler rounded: weights of trainer against sampler are not 1
        sample.sampler_logprobs = [logp + 0.1 for logp in sample.sampler_logprobs]
    old = [service.logprobs(each).detach() for each in data]
    metrics = service.forward_backward_custom(data, gspo_loss(samples, old)).result().metrics
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
    assert metrics["mismatch/mean"] == pytest.approx(0.1)
    found, service.table.grad = service.table.grad, None
    completions = [service.logprobs(d)[-len(s.completion) :] for d, s in zip(data, samples, strict=True)]
    # On-policy the loss has the gradient of minus the mean over sequences of exp(-0.1) * A * mean log-prob.
    each = [s.advantage * logp.mean() for s, logp in zip(samples, completions, strict=True)]
    (-torch.exp(torch.tensor(-0.1)) * torch.stack(each).mean()).backward()
    torch.testing.assert_close(found, service.table.grad)


def test_updates_after_the_first_see_another_policy():
    service = Service()
    samples, data = samples_of(service)
    first, second = update(service, data, samples, SimpleNamespace(learning_rate=0.05))
    assert first["ratio/max"] == 1.0 and second["ratio/max"] != 1.0


def test_the_loop_learns(monkeypatch, capsys):
    service = Service()
    monkeypatch.setitem(sys.modules, "tinker", SimpleNamespace(ServiceClient=lambda: service, types=types()))
    monkeypatch.setattr(sys, "argv", ["remote_training", "--steps", "12"])
    adam = SimpleNamespace(learning_rate=5.0)
    monkeypatch.setattr(sys.modules["tinker"].types, "AdamParams", lambda learning_rate: adam)
    remote_training.main()
    lengths = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert sum(lengths[-3:]) < 0.6 * sum(lengths[:3])
