"""Lines of a batch file: each is a request, or says in one line why it isn't."""

import json

import pytest

from specjax.engine.requests import NEUTRAL, RequestError, choice_seeds, parse_request

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
        ('{"prompt": "hi \ud800"}', "not UTF-8 at character 16"),
        ('{"prompt": "hi"}', "custom_id must be"),
        ('{"custom_id": "a", "prompt": "hi"}', "model must be a string"),
        (changed(TEXT, prompt=["a", "b"]), "one a line"),
        (changed(TEXT, prompt=[]), "prompt must be"),
        (changed(TEXT, prompt=[1, -1]), "prompt must be"),
        (changed(TEXT, prompt=[[1]]), "prompt must be"),
        (changed(TEXT, prompt=[True]), "prompt must be"),
        (changed(CHAT, n=0), "n must be a whole number in 1..128"),
        (changed(CHAT, n=129), "n must be a whole number in 1..128"),
        (changed(CHAT, stop=""), "stop must hold strings"),
        (changed(CHAT, stop=["x", 3]), "stop must hold strings"),
        (changed(CHAT, stop=["x"] * 17), "a list of at most 16"),
        (changed(CHAT, stop_token_ids=5), "stop_token_ids must be a list"),
        (changed(CHAT, stop_token_ids=[0] * 9), "a list of at most 8"),
        (changed(CHAT, stop_token_ids=[1.0]), "stop_token_ids must be a list"),
        (changed(CHAT, logprobs=3), "logprobs must be true or false"),
        (changed(CHAT, top_logprobs=3), "top_logprobs needs logprobs: true"),
        (changed(CHAT, logprobs=True, top_logprobs=21), "top_logprobs must be a whole number in 0..20"),
        (changed(TEXT, logprobs=21), "logprobs must be a whole number in 0..20"),
        (changed(TEXT, logprobs=True), "logprobs must be a whole number in 0..20"),
        (changed(TEXT, top_logprobs=1), "option 'top_logprobs' is not supported"),
        (changed(CHAT, ignore_eos=1), "ignore_eos must be true or false"),
        (changed(CHAT, stream=True), "option 'stream' is not supported"),
        (changed(CHAT, stream=0), "option 'stream' is not supported"),
        (changed(CHAT, response_format={"type": "json_object"}), "option 'response_format' is not"),
        (changed(CHAT, tools=[{}]), "option 'tools' is not supported"),
        (changed(CHAT, user=3), "option 'user' is not supported"),
        (changed(CHAT, best_of=1), "option 'best_of' is not supported"),
        (changed(TEXT, echo=True), "option 'echo' is not supported"),
        (changed(TEXT, best_of=2), "option 'best_of' is not supported"),
        (changed(TEXT, logit_bias={str(i): 1 for i in range(513)}), "may have 512 entries, not 513"),
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


def test_every_further_option_is_kept():
    request = parse_request(
        changed(
            CHAT,
            n=3,
            stop="x",
            stop_token_ids=[4, 2],
            logprobs=True,
            top_logprobs=5,
            ignore_eos=True,
            return_token_sources=True,
        )
    )
    assert (request.n, request.stop, request.stop_token_ids) == (3, ("x",), (4, 2))
    assert (request.logprobs, request.ignore_eos, request.include_sources) == (5, True, True)
    request = parse_request(changed(TEXT, stop=["x", "y", "x"], logprobs=0, prompt=[3, 1]))
    assert (request.stop, request.logprobs, request.prompt) == (("x", "y"), 0, (3, 1))
    assert not request.is_chat


def test_logprobs_that_nobody_asked_for_are_none():
    for line in (changed(CHAT), changed(CHAT, logprobs=False), changed(TEXT)):
        assert parse_request(line).logprobs is None
    assert parse_request(changed(CHAT, logprobs=True)).logprobs == 0


@pytest.mark.parametrize(
    "row",
    [
        changed(CHAT, stream=False, user="u", tools=[], response_format={"type": "text"}, store=False),
        changed(TEXT, stream=False, user="u", echo=False, best_of=1, suffix=""),
        changed(TEXT, n=2, best_of=2),
    ],
)
def test_options_that_ask_for_nothing_are_taken(row):
    parse_request(row)


def test_a_bare_body_is_a_request():
    request = parse_request('{"prompt": "hi", "max_tokens": 3}', "line-17", "m")
    assert (request.custom_id, request.model, request.prompt) == ("line-17", "m", "hi")
    assert request.max_tokens == 3
    request = parse_request('{"custom_id": "x", "model": "o", "prompt": "hi"}', "line-17", "m")
    assert (request.custom_id, request.model) == ("x", "o")
    request = parse_request('{"messages": [{"role": "user", "content": "hi"}]}', "line-17", "m")
    assert request.is_chat
    with pytest.raises(RequestError) as caught:
        parse_request('{"prompt": "hi", "mad": 3}', "line-17", "m")
    assert (str(caught.value), caught.value.custom_id) == ("option 'mad' is not supported", "line-17")
    with pytest.raises(RequestError, match="custom_id must be"):  # only a bare body may do without
        parse_request(json.dumps({"url": TEXT["url"], "body": TEXT["body"]}), "line-17", "m")


def test_a_null_of_a_bare_body_is_as_if_it_were_not_there():
    plain = parse_request('{"prompt": "x"}', "line-1", "m")
    nulls = '{"prompt": "x", "messages": null, "model": null, "custom_id": null, "seed": null}'
    assert parse_request(nulls, "line-1", "m") == plain


def test_choices_have_seeds_of_their_own():
    request = parse_request(changed(TEXT, n=128, seed=7))
    seeds = choice_seeds(request)
    assert seeds == choice_seeds(request)
    assert len(set(seeds)) == 128
    assert seeds[0] == 7
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert choice_seeds(parse_request(changed(TEXT, n=2, seed=7))) == seeds[:2]
    assert not set(seeds) & set(choice_seeds(parse_request(changed(TEXT, n=128, seed=8))))
