"""What a line of a batch file asks for: OpenAI's batch form, or a bare body. No tokenizer, no device.

``{"custom_id", "method": "POST", "url", "body": {"model", "messages" | "prompt", ...}}`` with the url
``/v1/chat/completions`` or ``/v1/completions``; or the body alone, as ``{"prompt": "..."}``. An option that
isn't honoured is refused by its name, never ignored. :mod:`specjax.engine.responses` is the way back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from typing import Any

__all__ = ["NEUTRAL", "Request", "RequestError", "choice_seeds", "parse_request"]

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
MOST = 2**31 - 1
"""The largest number that an option may have, where nothing else bounds it."""
MOST_CHOICES, MOST_STOPS, MOST_STOP_TOKENS, MOST_TOP_LOGPROBS, MOST_BIASES = 128, 16, 8, 20, 512

NOTHING: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "store": False,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
"""Options that are taken at the one value that asks for nothing."""

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
    prompt: str | tuple[int, ...] | list[dict[str, Any]]  # text, its ids, or a conversation's messages
    max_tokens: int | None  # None leaves it to the job
    sampling: dict[str, Any]  # every option of make_sampling, seed included
    n: int = 1  # choices asked for
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # how many of the likeliest tokens beside the chosen one; None is no logprobs
    ignore_eos: bool = False
    include_sources: bool = False  # whether the answer says where each token came from

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation."""
        return isinstance(self.prompt, list)


def parse_request(line: str, name: str | None = None, model: str | None = None) -> Request:
    """Reads one line.

    Args:
      line: JSON; half surrogate pairs stand for bytes that were no UTF-8.
      name: the custom_id of a bare body without one, such as ``line-17``; None refuses it.
      model: the model of a bare body that names none; None refuses it.

    Raises:
      RequestError: says what is wrong, with the custom_id if the line has one.
    """
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"not UTF-8 at character {error.start + 1}") from None
    try:
        # Python's JSON takes NaN and nests as deep as its stack; a line may do neither.
        row = json.loads(line, parse_constant=lambda name: _refuse(f"{name} is not JSON"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RequestError(f"a line must be a JSON object, not {type(row).__name__}")
    bare = not row.keys() & {"method", "url", "body"}
    if bare:  # null means: not given
        row = {name: value for name, value in row.items() if value is not None}
    custom_id = row.pop("custom_id", name if bare else None)
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError("custom_id must be a string that is not empty")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise RequestError("custom_id is no Unicode") from None
    try:
        if bare:
            return _parse_body(custom_id, {"model": model} | row, chat="messages" in row)
        return _parse(custom_id, row)
    except RequestError as error:
        raise RequestError(str(error), custom_id) from None


def choice_seeds(request: Request) -> list[int]:
    """The seeds of the n choices: the first has the request's own, each other a hash of it and its index."""
    seed = request.sampling["seed"]
    hashes = (hashlib.blake2b(f"{seed}/{i}".encode(), digest_size=4) for i in range(1, request.n))
    return [seed, *(int.from_bytes(digest.digest(), "little") for digest in hashes)]


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
    return _parse_body(custom_id, body, chat=url == CHAT_URL)


def _parse_body(custom_id: str, body: dict[str, Any], *, chat: bool) -> Request:
    body = {name: value for name, value in body.items() if value is not None}  # null means: not given
    prompt = _messages(body.pop("messages", None)) if chat else _text(body.pop("prompt", None))
    model = body.pop("model", None)
    if not isinstance(model, str):
        raise RequestError("model must be a string")
    max_tokens = _number(body, "max_tokens", int, 1, MOST)
    if chat:
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
    request = Request(
        custom_id,
        model,
        prompt,
        max_tokens,
        sampling,
        n=_number(body, "n", int, 1, MOST_CHOICES, 1),
        stop=_stops(body.pop("stop", [])),
        stop_token_ids=_stop_tokens(body.pop("stop_token_ids", [])),
        logprobs=_logprobs(body, chat),
        ignore_eos=_flag(body, "ignore_eos"),
        include_sources=_flag(body, "return_token_sources"),
    )
    _check_rest(body, request)
    return request


def _check_rest(body: dict[str, Any], request: Request) -> None:
    """Refuses whatever asks for something and was not read."""
    nothing = NOTHING if request.is_chat else NOTHING | {"suffix": "", "best_of": request.n}
    for name, value in sorted(body.items()):
        idle = name in nothing and type(value) is type(nothing[name]) and value == nothing[name]
        if not idle and not (name == "user" and isinstance(value, str)):
            raise RequestError(f"option {name!r} is not supported")


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


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.pop(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {value!r}")
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise RequestError(f"stop must be a string, or a list of at most {MOST_STOPS}")
    if not all(isinstance(text, str) and text for text in stops):
        raise RequestError("stop must hold strings that are not empty")
    return tuple(dict.fromkeys(stops))


def _stop_tokens(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or len(ids) > MOST_STOP_TOKENS or not all(map(_is_id, ids)):
        raise RequestError(f"stop_token_ids must be a list of at most {MOST_STOP_TOKENS} token ids")
    return tuple(dict.fromkeys(ids))


def _logprobs(body: dict[str, Any], chat: bool) -> int | None:
    if not chat:
        return _number(body, "logprobs", int, 0, MOST_TOP_LOGPROBS)
    wanted = _flag(body, "logprobs")
    top = _number(body, "top_logprobs", int, 0, MOST_TOP_LOGPROBS)
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs: true")
    return (top or 0) if wanted else None


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise RequestError("logit_bias must be an object from token ids to numbers")
    if len(bias) > MOST_BIASES:
        raise RequestError(f"logit_bias may have {MOST_BIASES} entries, not {len(bias)}")
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


def _text(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and prompt and all(map(_is_id, prompt)):
        return tuple(prompt)
    if not isinstance(prompt, str) or not prompt:
        raise RequestError("prompt must be a string that is not empty, or a list of token ids; one a line")
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
