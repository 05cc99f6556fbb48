"""Chat templates: SmolLM2's own, and ones that should not get what they reach for."""

import re

import pytest

from specjax.models.chat import ChatTemplate, ChatTemplateError
from specjax.models.load import load_model

USER = {"role": "user", "content": "Hi <there> {{ 7 * 6 }}"}


def test_smollm2_gets_the_prompt_that_it_was_trained_on(smollm2):
    rendered = smollm2.chat_template.render([USER])
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <there> {{ 7 * 6 }}<|im_end|>\n<|im_start|>assistant\n"
    )
    system = {"role": "system", "content": "Be brief."}
    assert smollm2.chat_template.render([system, USER], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <there> {{ 7 * 6 }}<|im_end|>\n"
    )


def test_a_template_and_a_tokenizer_that_each_know_bos_give_one(write_gguf):
    loaded = load_model(str(write_gguf()))
    rendered = loaded.chat_template.render([{"role": "user", "content": "he"}])
    assert rendered == "<s><user>he<assistant>"
    ids = loaded.tokenizer.encode(rendered)
    assert ids.count(loaded.tokenizer.bos_id) == 1
    assert ids[0] == loaded.tokenizer.bos_id


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__')|string }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ strftime_now.__code__.co_filename }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ self.__init__.__globals__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_what_reaches_out_of_the_sandbox_fails(source):
    messages = [dict(USER)]
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(messages)
    assert messages == [USER]


def test_a_template_can_refuse_the_messages():
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok"
    )
    assert template.render([USER]) == "ok"
    with pytest.raises(ChatTemplateError, match="refuses the messages: user first"):
        template.render([{"role": "tool", "content": ""}])


def test_the_usual_globals_and_filters_are_there():
    source = "{% for m in messages %}{% if m.content %}{{ m | tojson }}{% break %}{% endif %}{% endfor %}"
    assert ChatTemplate(source).render([USER]) == '{"role": "user", "content": "Hi <there> {{ 7 * 6 }}"}'
    assert re.fullmatch(r"\d{4}", ChatTemplate("{{ strftime_now('%Y') }}").render([]))
    template = ChatTemplate(
        "{{ bos_token }}|{{ eos_token }}|{{ tools is defined }}", bos_token="<s>", eos_token="</s>"
    )
    assert template.render([]) == "<s>|</s>|False"
    assert template.render([], tools=[]) == "<s>|</s>|True"


def test_blocks_leave_no_blank_lines():
    assert ChatTemplate("a\n  {% if true %}\nb\n  {% endif %}\nc").render([]) == "a\nb\nc"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% unknown %}"])
def test_a_template_that_is_no_jinja_is_refused(source):
    with pytest.raises(ChatTemplateError, match="not valid"):
        ChatTemplate(source)
