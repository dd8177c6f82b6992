"""Completions for prompts: from a model in this process, or from rollout servers over HTTP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import small_policy
from .errors import ServerRefused, ServerUnavailable
from .layout import EOS, GUESS_TOKENS, parse

if TYPE_CHECKING:
    import httpx
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Sample:
    tokens: tuple[int, ...]
    """The tokens as sampled; an <eos> ends them early and is included."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the policy that sampled it."""

    @property
    def guess(self) -> str:
        return parse(self.tokens)


class ModelSampler:
    """A transformers model. Temperature 0 is greedy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()

    @classmethod
    def load(cls, folder: str | Path | None = None) -> ModelSampler:
        return cls(small_policy.load(folder))

    def __call__(self, prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> list[Sample]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        alike: dict[int, list[int]] = defaultdict(list)  # an <eos> in a guess makes a prompt shorter than the others
        for number, prompt in enumerate(prompts):
            alike[len(prompt)].append(number)
        samples: list[Sample] = [Sample((), ())] * len(prompts)
        for numbers in alike.values():
            ids = torch.tensor([prompts[number] for number in numbers])
            for number, sample in zip(numbers, self._complete(ids, temperature, generator), strict=True):
                samples[number] = sample
        return samples

    def _complete(self, ids: torch.Tensor, temperature: float, generator: torch.Generator) -> list[Sample]:
        import torch
        from transformers import DynamicCache

        cache, drawn, logprobs = DynamicCache(config=self.model.config), [], []
        with torch.inference_mode():
            for _ in range(GUESS_TOKENS):
                logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1].float()
                chances = torch.log_softmax(logits / temperature if temperature else logits, -1)
                if temperature:
                    ids = torch.multinomial(chances.exp(), 1, generator=generator)
                else:
                    ids = chances.argmax(-1, keepdim=True)
                drawn.append(ids)
                logprobs.append(chances.gather(1, ids))
        return [
            _until_eos(tokens, chances)
            for tokens, chances in zip(torch.cat(drawn, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        ]


def _until_eos(tokens: list[int], logprobs: list[float]) -> Sample:
    end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
    return Sample(tuple(tokens[:end]), tuple(logprobs[:end]))


class ServerSampler:
    """A rollout server that speaks POST /v1/completions with token ids (deltawire's own, or vLLM)."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        token: str | None = None,
        at_once: int = 32,
        timeout: float = 120.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._model = model
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._at_once = at_once
        self._timeout = timeout

    def __call__(self, prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> list[Sample]:
        import httpx

        asked = [
            {
                "prompt": [*prompt],
                "max_tokens": GUESS_TOKENS,
                "temperature": temperature,
                # many prompts are alike, above all the first; their samples must not be
                "seed": seed * 1_000_003 + number,
                "n": 1,
                "logprobs": 0,
                "return_token_ids": True,
                **({"model": self._model} if self._model else {}),
            }
            for number, prompt in enumerate(prompts)
        ]
        limits = httpx.Limits(max_connections=self._at_once)
        with (
            httpx.Client(base_url=self.url, headers=self._headers, timeout=self._timeout, limits=limits) as client,
            ThreadPoolExecutor(self._at_once) as pool,
        ):
            return [*pool.map(lambda body: self._ask(client, body), asked)]

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> Sample:
        import httpx

        try:
            answer = client.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            raise ServerUnavailable(f"the rollout server at {self.url} does not answer: {error!r}") from error
        if answer.status_code >= 500:
            raise ServerUnavailable(f"the rollout server at {self.url} answered {answer.status_code}")
        if answer.is_error:
            raise ServerRefused(
                f"the rollout server at {self.url} answered {answer.status_code}: {answer.text[:300]}; "
                "does it serve the Wordle policy, under this name?"
            )
        try:
            choice = answer.json()["choices"][0]
            return Sample(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
        except (ValueError, LookupError, TypeError):
            raise ServerRefused(
                f"the rollout server at {self.url} gives no token_ids and logprobs; it must know return_token_ids"
            ) from None


class Spread:
    """Several samplers as one: prompts are dealt out evenly and asked for at the same time."""

    def __init__(self, samplers: Sequence[ServerSampler]) -> None:
        self._samplers = samplers

    def __call__(self, prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> list[Sample]:
        n = len(self._samplers)
        with ThreadPoolExecutor(n) as pool:
            parts = [
                pool.submit(sampler, prompts[at::n], temperature, seed * n + at)
                for at, sampler in enumerate(self._samplers)
            ]
            samples: list[Sample] = [Sample((), ())] * len(prompts)
            for at, part in enumerate(parts):
                samples[at::n] = part.result()
        return samples
