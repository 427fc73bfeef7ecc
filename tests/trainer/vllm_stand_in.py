"""A server that speaks vLLM's HTTP interface, with a tiny transformers model behind it.

It refuses unknown fields, which vLLM accepts, and it exposes careless clients: options that a request leaves
out have unusual defaults, and new weights are used only when the prefix cache has been reset.
"""

import contextlib
import copy
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

from gspo_kernels.trainer.rollout import ModelEngine, Sampling

NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
DEFAULTS = {"temperature": 0.1, "top_p": 0.5, "top_k": 1, "min_p": 0.5, **dict.fromkeys(NEUTRAL, 5.0)}
OPTIONS = {"max_tokens", "seed", "logprobs", "stop_token_ids", "ignore_eos", *DEFAULTS}


class Refused(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class StandIn:
    """The state and the answers of the server; tests change its attributes while it runs."""

    def __init__(self, model):
        self.model, self.dtype = model.eval(), torch.float32  # the dtype of reloaded weights
        self.names, self.key, self.seconds = ["policy"], None, 0.0  # listed models, API key, delay of answers
        self.max_model_len = 4096
        self.developing = True  # whether it reloads weights
        self.spoil = lambda answer: answer  # may change an answer before it is sent
        self.reloads, self.loaded = [], self.model  # loaded directories; the model after the next reset
        self.top, self.lock = [], threading.Lock()

    def answer(self, method, path, body, headers):
        threading.Event().wait(self.seconds)
        if path.startswith("/v1") and self.key and headers["Authorization"] != f"Bearer {self.key}":
            raise Refused(401, '{"error":"Unauthorized"}')
        if (method, path) == ("GET", "/v1/models"):
            card = {"parent": None, "max_model_len": self.max_model_len}
            listed = [{"id": name} | card for name in self.names]
            return {"object": "list", "data": [*listed, {"id": "an adapter", "parent": "policy"}]}
        posted = {"/v1/completions": self.complete}
        if self.developing:
            posted |= {"/collective_rpc": self.reload, "/reset_prefix_cache": self.forget}
        if method != "POST" or path not in posted:
            raise Refused(404, '{"detail":"Not Found"}')
        with self.lock:
            return self.spoil(posted[path](body))

    def complete(self, body):
        named = {"model", "prompt", "return_token_ids", "return_tokens_as_token_ids"}
        if unknown := body.keys() - named - OPTIONS:
            raise Refused(400, f"unknown fields {sorted(unknown)}")
        if body["model"] not in self.names:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        prompt, options = body["prompt"], DEFAULTS | body
        assert isinstance(prompt, list) and prompt
        assert body["return_token_ids"] is True
        assert -(2**63) <= options.get("seed", 0) < 2**63
        if max(prompt) >= self.model.config.vocab_size:
            raise Refused(400, f"Token id {max(prompt)} is out of vocabulary")
        tokens, logprobs, reason = self.sample(prompt, options)
        choice = {"index": 0, "text": "unused", "token_ids": tokens, "finish_reason": reason}
        if options.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": [str(token) for token in tokens], "token_logprobs": logprobs}
            written = "token_id:{}" if body.get("return_tokens_as_token_ids") else "text of {}"
            choice["logprobs"]["top_logprobs"] = [
                {written.format(token): max(value, -9999.0) for token, value in each.items()}
                for each in self.top
            ]
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}

    def sample(self, prompt, options):
        assert all(options[name] == value for name, value in NEUTRAL.items())
        ends = {*options.get("stop_token_ids", ())}
        if not options.get("ignore_eos"):
            ends.add(self.model.config.eos_token_id)
        rules = [options[name] for name in ("max_tokens", "temperature", "top_p", "top_k")]
        assert options["min_p"] == 0.0
        sampling = Sampling(*rules, top_logprobs=options.get("logprobs") or 0)
        with torch.random.fork_rng():
            torch.manual_seed(options.get("seed", 0))
            (found,) = ModelEngine(self.model, sorted(ends), 0, 1).generate([prompt], sampling)
        logprobs = found.logprobs if found.logprobs is not None else torch.zeros(len(found.ids))
        tokens, logprobs = found.ids.tolist(), logprobs.tolist()
        # vLLM puts the sampled token first, and ids that could not be drawn have -inf
        self.top = [{token: value} for token, value in zip(tokens, logprobs, strict=True)]
        if found.centering is not None:
            ids, values = (x.tolist() for x in (found.centering.ids, found.centering.logprobs))
            for top, *pairs in zip(self.top, ids, values, strict=True):
                unused = (token for token in range(258) if token not in pairs[0])
                for token, value in zip(*pairs, strict=True):
                    top.setdefault(*((next(unused), -math.inf) if token < 0 else (token, value)))
        return tokens, logprobs, "stop" if found.finished else "length"

    def reload(self, body):
        assert body["method"] == "reload_weights"
        weights_path = body["kwargs"]["weights_path"]
        if not Path(weights_path).is_dir():
            raise Refused(500, f"no such directory {weights_path}")
        self.load(AutoModelForCausalLM.from_pretrained(weights_path, dtype=self.dtype).eval())
        if not all(path.stat().st_mode & 0o4 for path in Path(weights_path).rglob("*")):
            raise Refused(500, "PermissionError: the server belongs to another user")
        self.reloads.append(weights_path)
        return {"results": [None]}

    def load(self, loaded):
        mine, new = ({k: v.shape for k, v in model.state_dict().items()} for model in (self.model, loaded))
        if mine != new:
            raise Refused(500, "AssertionError: shapes of weights")
        self.loaded = loaded

    def receive(self, weights):
        """Load weights by the names that a checkpoint has, in place of a file; ties are tied again."""
        loaded, weights = copy.deepcopy(self.model).to(self.dtype), dict(weights)
        loaded.load_state_dict(weights)
        assert {weight.dtype for weight in weights.values()} == {self.dtype}
        self.reloads.append(len(self.reloads))
        self.load(loaded)

    def forget(self, body):
        self.model = self.loaded


@contextlib.contextmanager
def serving(model):
    """Yield a `StandIn` that answers at its ``url``."""
    stand_in = StandIn(model)

    class Handler(BaseHTTPRequestHandler):
        def respond(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            status = 200
            try:
                answer = stand_in.answer(self.command, urlsplit(self.path).path, body, self.headers)
            except Refused as refusal:
                answer, status = str(refusal), refusal.status
            text = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer)
            with contextlib.suppress(ConnectionError):  # the client may have given up
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

        do_GET = do_POST = respond

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    with Server(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        stand_in.url = f"http://localhost:{server.server_port}"
        try:
            yield stand_in
        finally:
            server.shutdown()
