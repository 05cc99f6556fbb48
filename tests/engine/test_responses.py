"""Lines of a batch output, in the form that clients read."""

import json
import math

import pytest

from specjax.engine.requests import RequestError, parse_request
from specjax.engine.responses import Choice, TokenLogprobs, error_line, response_line

CHAT = parse_request(
    '{"custom_id": "a", "url": "/v1/chat/completions",'
    ' "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}}'
)
TEXT = parse_request('{"prompt": "hi"}', "line-1", "m")
VOCABULARY = [b"h", b"\xc3", b"\xa9", b"x"]
LOGPROBS = TokenLogprobs(
    chosen=[-0.25, -1.0, -math.inf],
    top_tokens=[[0, 3], [3, 0], [2, 3]],
    top=[[-0.25, -2.0], [-0.5, -3.0], [-0.125, -4.0]],
    offsets=[0, 1, 1],
)
USAGE = {"prompt_tokens": 2, "completion_tokens": 3}


def answer(request, *choices, **speculation):
    line = response_line(
        "k1",
        request,
        choices,
        usage=USAGE,
        speculation=speculation,
        token_bytes=VOCABULARY.__getitem__,
    )
    assert "\n" not in line
    return json.loads(line)


@pytest.mark.parametrize("request_", [CHAT, TEXT])
def test_a_response_has_the_form_that_clients_read(request_):
    out = answer(request_, Choice("h\u00e9\ud83d", "stop", [0, 1]), num_spec_steps=2)
    assert list(out) == ["id", "custom_id", "response", "error"]
    assert (out["id"], out["custom_id"], out["error"]) == ("batch-k1", request_.custom_id, None)
    response = out["response"]
    body = response["body"]
    assert (response["status_code"], response["request_id"]) == (200, body["id"])
    (choice,) = body["choices"]
    if request_ is CHAT:
        assert body["object"] == "chat.completion"
        assert choice.pop("message") == {"role": "assistant", "content": "h\u00e9\ud83d"}
    else:
        assert body["object"] == "text_completion"
        assert choice.pop("text") == "h\u00e9\ud83d"
    assert choice == {"index": 0, "logprobs": None, "finish_reason": "stop"}
    assert body["usage"] == {**USAGE, "total_tokens": 5}
    assert body["num_spec_steps"] == 2


def test_choices_are_numbered_and_may_say_where_their_tokens_came_from():
    out = answer(
        TEXT,
        Choice("h", "stop", [0], sources=["accepted"]),
        Choice("xx", "length", [3, 3], sources=["bonus", "plain"]),
    )
    first, second = out["response"]["body"]["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert (second["token_ids"], second["token_sources"]) == ([3, 3], ["bonus", "plain"])
    assert second["finish_reason"] == "length"


def test_logprobs_of_a_conversation():
    out = answer(CHAT, Choice("hé", "stop", [0, 1, 2], LOGPROBS))
    content = out["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "h",
        "logprob": -0.25,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.25, "bytes": [104]},
            {"token": "x", "logprob": -2.0, "bytes": [120]},
        ],
    }
    assert (content[1]["token"], content[1]["bytes"]) == ("bytes:\\xc3", [0xC3])
    assert content[2]["logprob"] == -9999.0  # JSON has no infinity
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "hé"


def test_logprobs_of_a_completion():
    out = answer(TEXT, Choice("hé", "stop", [0, 1, 2], LOGPROBS))
    logprobs = out["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.25, -1.0, -9999.0],
        "top_logprobs": [
            {"h": -0.25, "x": -2.0},
            {"x": -0.5, "h": -3.0, "bytes:\\xc3": -1.0},  # the chosen one is always there
            {"bytes:\\xa9": -0.125, "x": -4.0},
        ],
        "text_offset": [0, 1, 1],
    }


def test_lists_of_unequal_length_are_a_bug():
    with pytest.raises(ValueError, match="zip"):
        answer(CHAT, Choice("h", "stop", [0], LOGPROBS))
    with pytest.raises(ValueError, match="zip"):
        answer(TEXT, Choice("h", "stop", [0], LOGPROBS))


def test_an_error_line_keeps_the_id_that_could_be_read():
    row = json.loads(error_line("k1", RequestError("no", "a"), "line 7"))
    assert row == {
        "id": "batch-k1",
        "custom_id": "a",
        "response": None,
        "error": {"code": "invalid_request", "message": "line 7: no"},
    }
    row = json.loads(error_line("k1", RequestError("no")))
    assert (row["custom_id"], row["error"]["message"]) == (None, "no")
