"""What a line of a batch output says: OpenAI's form, with the counts of the speculation beside it.

``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``. The same request gives
the same line, so there is no time and no counter in it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from specjax.engine.requests import Request, RequestError

__all__ = ["Choice", "TokenLogprobs", "error_line", "response_line"]

LEAST = -9999.0
"""What OpenAI writes for a token that is all but impossible; JSON has no infinity."""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """The target's log-probabilities of a choice's tokens."""

    chosen: Sequence[float]  # of each token
    top_tokens: Sequence[Sequence[int]]  # at each token the likeliest ids, in falling order
    top: Sequence[Sequence[float]]
    offsets: Sequence[int]  # where in the text each token's characters begin


@dataclasses.dataclass(frozen=True)
class Choice:
    """One answer to a request, cut where it stopped."""

    text: str
    finish_reason: Literal["stop", "length"]
    tokens: Sequence[int]
    logprobs: TokenLogprobs | None = None
    sources: Sequence[str] | None = None  # "plain", "accepted", "corrected" or "bonus" for each token


def response_line(
    key: str,
    request: Request,
    choices: Sequence[Choice],
    *,
    usage: Mapping[str, int],
    speculation: Mapping[str, Any],
    token_bytes: Callable[[int], bytes],
) -> str:
    """The line of a request that was answered.

    Args:
      key: the ledger's name for the input line.
      request: what was asked.
      choices: its n answers, in order.
      usage: ``prompt_tokens`` and ``completion_tokens``.
      speculation: further fields for the body, under vLLM's names.
      token_bytes: the bytes that a token stands for, special ones spelt out; only called for logprobs.

    Returns:
      JSON without a line end.
    """
    kind = "chatcmpl" if request.is_chat else "cmpl"
    body = {
        "id": f"{kind}-{key}",
        "object": "chat.completion" if request.is_chat else "text_completion",
        "model": request.model,
        "choices": [_choice(i, choice, request, token_bytes) for i, choice in enumerate(choices)],
        "usage": {**usage, "total_tokens": sum(usage.values())},
        **speculation,
    }
    response = {"status_code": 200, "request_id": body["id"], "body": body}
    return _line(key, request.custom_id, response, None)


def error_line(key: str, error: RequestError, place: str | None = None) -> str:
    """The line of a request that could not be answered; ``place`` says where it stood, as ``line 17``."""
    message = str(error) if place is None else f"{place}: {error}"
    return _line(key, error.custom_id, None, {"code": "invalid_request", "message": message})


def _line(
    key: str, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None
) -> str:
    row = {"id": f"batch-{key}", "custom_id": custom_id, "response": response, "error": error}
    # ASCII only: a lone surrogate, which JSON may carry, has no UTF-8.
    return json.dumps(row, allow_nan=False)


def _choice(
    index: int, choice: Choice, request: Request, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    content: dict[str, Any]
    if request.is_chat:
        content = {"message": {"role": "assistant", "content": choice.text}}
    else:
        content = {"text": choice.text}
    spell = _chat_logprobs if request.is_chat else _completion_logprobs
    row = {
        "index": index,
        **content,
        "logprobs": None if choice.logprobs is None else spell(choice.tokens, choice.logprobs, token_bytes),
        "finish_reason": choice.finish_reason,
    }
    if choice.sources is not None:
        row |= {"token_ids": list(choice.tokens), "token_sources": list(choice.sources)}
    return row


def _chat_logprobs(
    tokens: Sequence[int], logprobs: TokenLogprobs, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        data = token_bytes(token)
        return {"token": _spell(data), "logprob": _finite(value), "bytes": list(data)}

    columns = zip(tokens, logprobs.chosen, logprobs.top_tokens, logprobs.top, strict=True)
    content = [
        {**entry(token, value), "top_logprobs": [entry(*pair) for pair in zip(top, values, strict=True)]}
        for token, value, top, values in columns
    ]
    return {"content": content}


def _completion_logprobs(
    tokens: Sequence[int], logprobs: TokenLogprobs, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    tops = []
    for token, value, top, values in zip(
        tokens, logprobs.chosen, logprobs.top_tokens, logprobs.top, strict=True
    ):
        table: dict[str, float] = {}
        for other, its in (*zip(top, values, strict=True), (token, value)):  # the chosen one is always there
            table.setdefault(_spell(token_bytes(other)), _finite(its))
        tops.append(table)
    return {
        "tokens": [_spell(token_bytes(token)) for token in tokens],
        "token_logprobs": [_finite(value) for value in logprobs.chosen],
        "top_logprobs": tops,
        "text_offset": list(logprobs.offsets),
    }


def _spell(data: bytes) -> str:
    """The token as text; one that ends inside a character is spelt ``bytes:\\xe2\\x82``, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    """As many digits as a float32 has."""
    return float(f"{max(float(value), LEAST):.7g}")
