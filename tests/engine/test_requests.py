"""Lines of a batch file: each is a request, or says in one line why it isn't."""

import json

import pytest

from specjax.engine.requests import NEUTRAL, RequestError, error_line, parse_request, response_line

CHAT = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "temperature": 0,
    },
}
TEXT = {"custom_id": "b", "url": "/v1/completions", "body": {"model": "m", "prompt": "hi"}}


def changed(row, **body):
    return json.dumps({**row, "body": {**row["body"], **body}})


def test_a_request_keeps_what_it_asks_for():
    request = parse_request(changed(CHAT, top_p=0.5, top_k=7, seed=3, max_completion_tokens=9))
    assert request.is_chat
    assert request.prompt == [{"role": "user", "content": "hi"}]
    assert request.max_tokens == 9
    assert request.sampling == NEUTRAL | {"temperature": 0.0, "top_p": 0.5, "top_k": 7, "seed": 3}
    request = parse_request(
        changed(TEXT, logit_bias={"5": -100, "7": 2.5}, min_tokens=2, presence_penalty=-1)
    )
    assert request.sampling["logit_bias"] == {5: -100.0, 7: 2.5}
    assert (request.sampling["min_tokens"], request.sampling["presence_penalty"]) == (2, -1.0)


def test_what_is_left_out_or_null_has_the_usual_default():
    request = parse_request(changed(TEXT, temperature=None, top_k=-1))
    assert request.max_tokens is None
    assert request.sampling == NEUTRAL | {"seed": request.sampling["seed"]}
    assert request == parse_request(json.dumps(TEXT))  # the same on every run
    other = parse_request(json.dumps({**TEXT, "custom_id": "c"}))
    assert request.sampling["seed"] != other.sampling["seed"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"custom_id": "a"', "not JSON"),
        ("NaN", "NaN is not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must be a JSON object, not list"),
        ("3", "must be a JSON object, not int"),
        ('{"url": "x"}', "custom_id"),
        ('{"custom_id": 3}', "custom_id"),
        (json.dumps({**CHAT, "url": "/v1/embeddings"}), "url must be"),
        (json.dumps({**CHAT, "method": "GET"}), "method must be POST"),
        (json.dumps({**CHAT, "extra": 1}), "unknown field 'extra'"),
        (json.dumps({**CHAT, "body": []}), "body must be an object"),
        (changed(CHAT, model=None), "model must be a string"),
        (changed(CHAT, messages=[]), "messages must be a list"),
        (changed(CHAT, messages=[3]), "an object with a role"),
        (changed(CHAT, messages=[{"role": "user", "content": ["x"]}]), "content must be a string"),
        (changed(TEXT, prompt=""), "prompt must be a string"),
        (changed(CHAT, temperature=-1), "temperature must be a number in 0.."),
        (changed(CHAT, temperature=True), "temperature must be a number"),
        (changed(CHAT, temperature=10**400), "temperature"),
        (changed(CHAT, top_p=0), "top_p must be above 0"),
        (changed(CHAT, top_p=1.5), "top_p must be a number in 0..1"),
        (changed(CHAT, max_tokens=0), "max_tokens must be a whole number in 1"),
        (changed(CHAT, max_tokens=1.5), "max_tokens must be a whole number"),
        (changed(CHAT, seed=2**32), "seed must be"),
        (changed(CHAT, stop=["x"]), "option 'stop' is not supported"),
        (changed(CHAT, repetition_penalty=0), "repetition_penalty must be above 0"),
        (changed(CHAT, min_p=2), "min_p must be a number in 0..1"),
        (changed(CHAT, min_tokens=-1), "min_tokens must be a whole number"),
        (changed(CHAT, logit_bias=[1]), "logit_bias must be an object"),
        (changed(CHAT, logit_bias={"x": 1}), "logit_bias must map token ids to numbers, not 'x'"),
        (changed(CHAT, logit_bias={"1": "a"}), "logit_bias must map token ids to numbers"),
    ],
)
def test_a_bad_line_says_what_is_wrong(line, message):
    with pytest.raises(RequestError, match=message.replace("[", r"\[")):
        parse_request(line)


def test_an_error_line_keeps_the_id_that_could_be_read():
    with pytest.raises(RequestError) as caught:
        parse_request(changed(CHAT, stop="x"))
    row = json.loads(error_line(caught.value, 7))
    assert row["custom_id"] == "a"
    assert row["response"] is None
    assert row["error"]["message"].startswith("line 7: ")


@pytest.mark.parametrize("row", [CHAT, TEXT])
def test_a_response_has_the_form_that_clients_read(row):
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    line = response_line(
        parse_request(json.dumps(row)),
        "h\u00e9\ud83d",
        stopped=True,
        usage=usage,
        speculation={"num_spec_steps": 2},
    )
    out = json.loads(line)
    assert set(out) == {"id", "custom_id", "response", "error"}
    assert out["error"] is None
    body = out["response"]["body"]
    choice = body["choices"][0]
    assert (choice["message"]["content"] if row is CHAT else choice["text"]) == "h\u00e9\ud83d"
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {**usage, "total_tokens": 5}
    assert body["num_spec_steps"] == 2
