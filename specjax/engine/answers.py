"""From a request to work for the engine, and from its results to the request's line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.engine.requests import Request, RequestError, choice_seeds
from specjax.engine.responses import Choice, TokenLogprobs, response_line
from specjax.engine.work import Limits, Result, Work

__all__ = ["Answers", "Asked"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request that is being answered; the tag of its work."""

    key: str  # the ledger's name for its line
    shard: str  # the file of the output that its line goes to
    place: str  # where it stands in the input
    request: Request
    index: int  # which of its n choices


class Answers:
    """Holds the choices of a request until all of them are there.

    Args:
      limits: what the engine can do.
      encode: a request's prompt as ids; a ValueError says why there are none.
      models: the names that a request may call the model by.
      max_tokens: for requests that don't say; cut to the room that there is.
      token_bytes: the bytes that a token stands for.
    """

    def __init__(
        self,
        limits: Limits,
        encode: Callable[[Request], Sequence[int]],
        models: Sequence[str],
        max_tokens: int,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._limits, self._encode, self._models = limits, encode, tuple(models)
        self._max_tokens, self._token_bytes = max_tokens, token_bytes
        self._results: dict[str, dict[int, Result]] = {}

    def work(self, key: str, shard: str, place: str, request: Request) -> list[Work]:
        """The work that a request asks for, one piece for each of its choices.

        Raises:
          RequestError: it can't be done here.
        """
        try:
            if request.model not in self._models:
                names = " or ".join(map(repr, self._models))
                raise ValueError(f"model {request.model!r} is not served here; {names} is")
            prompt = tuple(self._encode(request))
            room = self._limits.room_after(len(prompt))
            works = [
                Work(
                    prompt=prompt,
                    max_tokens=request.max_tokens or max(1, min(self._max_tokens, room)),
                    sampling=request.sampling | {"seed": seed},
                    stop_tokens=request.stop_token_ids,
                    ignore_eos=request.ignore_eos,
                    stop=request.stop,
                    num_logprobs=request.logprobs,
                    tag=Asked(key, shard, place, request, index),
                )
                for index, seed in enumerate(choice_seeds(request))
            ]
            self._limits.check(works[0])
        except ValueError as error:
            raise RequestError(str(error), request.custom_id) from None
        return works

    def take(self, result: Result) -> str | None:
        """Takes a result in.

        Returns:
          The request's line, if this was the last of its choices.

        Raises:
          RequestError: the model broke down over one of them.
        """
        asked: Asked = result.work.tag
        results = self._results.setdefault(asked.key, {})
        results[asked.index] = result
        if len(results) < asked.request.n:
            return None
        del self._results[asked.key]
        ordered = [results[index] for index in range(asked.request.n)]
        if any(result.finish == "failed" for result in ordered):
            raise RequestError("the model's logits stopped being numbers", asked.request.custom_id)
        return response_line(
            asked.key,
            asked.request,
            [self._choice(result) for result in ordered],
            usage={
                "prompt_tokens": len(result.work.prompt),
                "completion_tokens": sum(len(result.tokens) for result in ordered),
            },
            speculation={
                "num_spec_steps": sum(result.num_steps for result in ordered),
                "num_draft_tokens": sum(result.num_draft_tokens for result in ordered),
                "num_accepted_draft_tokens": sum(result.num_accepted_tokens for result in ordered),
                "acceptance_histogram": np.sum([result.accepted for result in ordered], axis=0).tolist(),
            },
            token_bytes=self._token_bytes,
        )

    def _choice(self, result: Result) -> Choice:
        request: Request = result.work.tag.request
        logprobs: Any = result.logprobs
        return Choice(
            text=result.text or "",
            finish_reason="stop" if result.finish == "stop" else "length",
            tokens=result.tokens,
            logprobs=None
            if logprobs is None
            else TokenLogprobs(
                chosen=np.asarray(logprobs.chosen).tolist(),
                top_tokens=np.asarray(logprobs.top_tokens).tolist(),
                top=np.asarray(logprobs.top).tolist(),
                offsets=result.offsets,
            ),
            sources=[source.name.lower() for source in result.sources] if request.include_sources else None,
        )
