"""The OpenAI batch form: a line in, a request; a result, a line out. No tokenizer, no device.

In: ``{"custom_id", "method": "POST", "url", "body": {"model", "messages" | "prompt", ...}}`` with the url
``/v1/chat/completions`` or ``/v1/completions``. Out: ``{"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}``. An option that isn't honoured is refused by its name, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

__all__ = ["NEUTRAL", "Request", "RequestError", "error_line", "parse_request", "response_line"]

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
MOST = 2**31 - 1
"""The largest number that an option may have, where nothing else bounds it."""


NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "logit_bias": {},
    "seed": 0,
}
"""The sampling options, with the values that a request has where it says nothing."""


class RequestError(ValueError):
    """A line asks for what can't be done; it costs that line only."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclasses.dataclass(frozen=True)
class Request:
    """One line of a batch file, checked."""

    custom_id: str
    model: str
    prompt: str | list[dict[str, Any]]  # bare text, or the messages of a conversation
    max_tokens: int | None  # None leaves it to the job
    sampling: dict[str, Any]  # every option of make_sampling, seed included

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation."""
        return not isinstance(self.prompt, str)


def parse_request(line: str) -> Request:
    """Reads one line.

    Raises:
      RequestError: says what is wrong, with the custom_id if the line has one.
    """
    try:
        # Python's JSON takes NaN and nests as deep as its stack; a line may do neither.
        row = json.loads(line, parse_constant=lambda name: _refuse(f"{name} is not JSON"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RequestError(f"a line must be a JSON object, not {type(row).__name__}")
    custom_id = row.pop("custom_id", None)
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError("custom_id must be a string that is not empty")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise RequestError("custom_id is no Unicode") from None
    try:
        return _parse(custom_id, row)
    except RequestError as error:
        raise RequestError(str(error), custom_id) from None


def response_line(
    request: Request, text: str, *, stopped: bool, usage: dict[str, int], speculation: dict[str, Any]
) -> str:
    """The line of a request that was answered.

    Args:
      request: what was asked.
      text: the answer.
      stopped: whether the model ended it, rather than max_tokens.
      usage: ``prompt_tokens`` and ``completion_tokens``.
      speculation: further fields for the body, under vLLM's names.

    Returns:
      JSON without a line end. The same request gives the same line, so there is no time in it.
    """
    content = {"message": {"role": "assistant", "content": text}} if request.is_chat else {"text": text}
    body = {
        "id": f"specjax-{request.custom_id}",
        "object": "chat.completion" if request.is_chat else "text_completion",
        "model": request.model,
        "choices": [
            {"index": 0, **content, "logprobs": None, "finish_reason": "stop" if stopped else "length"}
        ],
        "usage": {**usage, "total_tokens": sum(usage.values())},
        **speculation,
    }
    response = {"status_code": 200, "request_id": body["id"], "body": body}
    return _line(request.custom_id, response, None)


def error_line(error: RequestError, number: int | None = None) -> str:
    """The output line of a request that could not be answered, in the input's ``number``-th line from 1."""
    return _line(
        error.custom_id,
        None,
        {"code": "invalid_request", "message": str(error) if number is None else f"line {number}: {error}"},
    )


def _line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> str:
    row = {"id": f"batch-{custom_id}", "custom_id": custom_id, "response": response, "error": error}
    # ASCII only: a lone surrogate, which JSON may carry, has no UTF-8.
    return json.dumps(row)


def _refuse(message: str) -> Any:
    raise RequestError(message)


def _parse(custom_id: str, row: dict[str, Any]) -> Request:
    if row.pop("method", "POST") != "POST":
        raise RequestError("method must be POST")
    url, body = row.pop("url", None), row.pop("body", None)
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise RequestError(f"url must be {CHAT_URL} or {COMPLETIONS_URL}, not {url!r}")
    if not isinstance(body, dict):
        raise RequestError("body must be an object")
    if row:
        raise RequestError(f"unknown field {min(row)!r}")
    body = {name: value for name, value in body.items() if value is not None}  # null means: not given
    prompt = _messages(body.pop("messages", None)) if url == CHAT_URL else _text(body.pop("prompt", None))
    model = body.pop("model", None)
    if not isinstance(model, str):
        raise RequestError("model must be a string")
    max_tokens = _number(body, "max_tokens", int, 1, MOST)
    if url == CHAT_URL:
        max_tokens = _number(body, "max_completion_tokens", int, 1, MOST, max_tokens)
    sampling = NEUTRAL | {
        "temperature": _number(body, "temperature", float, 0, MOST),
        "top_p": _number(body, "top_p", float, 0, 1),
        "top_k": _number(body, "top_k", int, -1, MOST),
        "min_p": _number(body, "min_p", float, 0, 1),
        "presence_penalty": _number(body, "presence_penalty", float, -MOST, MOST),
        "frequency_penalty": _number(body, "frequency_penalty", float, -MOST, MOST),
        "repetition_penalty": _number(body, "repetition_penalty", float, 0, MOST),
        "min_tokens": _number(body, "min_tokens", int, 0, MOST),
        "logit_bias": _bias(body.pop("logit_bias", {})),
        # Without a seed of its own a request still gives the same answer each time it is run.
        "seed": _number(body, "seed", int, 0, 2**32 - 1, zlib.crc32(custom_id.encode())),
    }
    sampling["top_k"] = max(0, sampling["top_k"])  # vLLM's -1 is our 0: keep all
    for name in ("top_p", "repetition_penalty"):
        if sampling[name] == 0:
            raise RequestError(f"{name} must be above 0")
    if body:
        raise RequestError(f"option {min(body)!r} is not supported")
    return Request(custom_id, model, prompt, max_tokens, sampling)


def _number(body: dict[str, Any], name: str, kind: type, low: float, high: float, default: Any = None) -> Any:
    """Takes an option out of the body; ``default``, or the neutral value, where it isn't there."""
    if name not in body:
        return NEUTRAL.get(name) if default is None else default
    value = body.pop(name)
    right_kind = isinstance(value, (int, float)) if kind is float else isinstance(value, int)
    if isinstance(value, bool) or not right_kind or not (low <= value <= high):
        noun = "a number" if kind is float else "a whole number"
        raise RequestError(f"{name} must be {noun} in {low}..{high}, not {value!r}")
    return kind(value)


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise RequestError("logit_bias must be an object from token ids to numbers")
    for token, value in bias.items():
        known = token.isascii() and token.isdigit() and len(token) < 10
        if (
            not known
            or isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not abs(value) <= MOST
        ):
            raise RequestError(f"logit_bias must map token ids to numbers, not {token!r} to {value!r}")
    return {int(token): float(value) for token, value in bias.items()}


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str) or not prompt:
        raise RequestError("prompt must be a string that is not empty")
    return prompt


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list that is not empty")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("each message must be an object with a role")
        if not isinstance(message.get("content"), str):
            raise RequestError("each message's content must be a string")
    return messages
