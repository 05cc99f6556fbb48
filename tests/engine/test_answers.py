"""From a request to work, and from results to a line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specjax.engine.answers import Answers
from specjax.engine.requests import RequestError, parse_request
from specjax.engine.work import Limits, Result
from specjax.record import Source

LIMITS = Limits(
    vocab_size=300,
    context_length=1000,
    capacity=50,
    reserve=4,
    stop_tokens=(1,),
    has_text=True,
    max_logprobs=5,
)


def answers() -> Answers:
    def encode(request):
        if request.prompt == "bad":
            raise ValueError("the template refuses it")
        return [ord(letter) for letter in request.prompt]

    return Answers(LIMITS, encode, ["m", "alias"], 16, lambda token: chr(token).encode())


def request(**body):
    return parse_request(json.dumps({"prompt": "hello", "model": "m", "custom_id": "a"} | body))


def result(work, text, finish="length"):
    tokens = [ord(letter) for letter in text]
    return Result(
        work=work,
        tokens=tokens,
        sources=[Source.PLAIN] * len(tokens),
        finish=finish,
        num_steps=len(tokens),
        drafted=np.array([len(tokens), 0]),
        accepted=np.array([len(tokens), 0]),
        text=text,
        offsets=tuple(range(len(tokens))),
    )


def test_choices_come_in_their_order_when_the_last_is_there():
    made = answers()
    works = made.work("key", "", "line 1", request(n=3, temperature=1, seed=5, stop="x", stop_token_ids=[4]))
    assert [work.tag.index for work in works] == [0, 1, 2]
    assert works[0].sampling["seed"] == 5
    assert len({work.sampling["seed"] for work in works}) == 3
    assert all(work.max_tokens == 16 and work.stop == ("x",) and work.stop_tokens == (4,) for work in works)
    assert made.take(result(works[2], "c")) is None
    assert made.take(result(works[0], "aa", "stop")) is None
    row = json.loads(made.take(result(works[1], "b")))
    assert row["id"] == "batch-key"
    body = row["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["aa", "b", "c"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length", "length"]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert body["acceptance_histogram"] == [4, 0]


def test_requests_do_not_mix():
    made = answers()
    (first,) = made.work("one", "", "line 1", request(custom_id="one"))
    (second,) = made.work("two", "", "line 2", request(custom_id="two", model="alias"))
    assert json.loads(made.take(result(second, "b")))["custom_id"] == "two"
    assert json.loads(made.take(result(first, "a")))["custom_id"] == "one"


def test_a_broken_choice_is_an_error_of_its_request():
    made = answers()
    works = made.work("key", "", "line 1", request(n=2))
    assert made.take(result(works[0], "", "failed")) is None
    with pytest.raises(RequestError, match="stopped being numbers") as caught:
        made.take(result(works[1], "b"))
    assert caught.value.custom_id == "a"


def test_the_default_number_of_tokens_is_cut_to_the_room_and_an_asked_one_is_not():
    (work,) = answers().work("key", "", "line 1", request(prompt="h" * 40))
    assert work.max_tokens == 6
    with pytest.raises(RequestError, match=r"max_tokens must be in 1..6"):
        answers().work("key", "", "line 1", request(prompt="h" * 40, max_tokens=7))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "other"}, "model 'other' is not served here; 'm' or 'alias' is"),
        ({"prompt": "bad"}, "the template refuses it"),
        ({"prompt": "h" * 46}, "leaves no room in slots of 46"),
        ({"logprobs": 6}, "log-probabilities"),
        ({"logit_bias": {"300": 1}}, "outside the vocabulary"),
    ],
)
def test_what_cannot_be_done_says_so_with_its_id(body, message):
    with pytest.raises(RequestError, match=message) as caught:
        answers().work("key", "", "line 1", request(**body))
    assert caught.value.custom_id == "a"
