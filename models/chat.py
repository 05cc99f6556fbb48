"""Chat templates: the Jinja text inside a model's file that turns messages into a prompt.

A template comes with the weights, from whoever made them, and so is rendered in Jinja's immutable sandbox:
it sees the messages and a few globals, and reaching for Python's internals is an error.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatTemplate", "ChatTemplateError"]

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A chat template is no valid Jinja, reaches where it must not, or refuses the messages."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which by itself lets a forbidden attribute pass as an empty string."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")


class ChatTemplate:
    """A compiled template.

    Args:
      source: the Jinja text.
      bos_token: the spelling of BOS that templates may write out.
      eos_token: that of EOS.

    Raises:
      ChatTemplateError: the text is no valid Jinja.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source, self._tokens = source, {"bos_token": bos_token, "eos_token": eos_token}
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is not valid: {error}") from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Writes messages as the prompt that the model was trained on.

        Encode the result as it is: the template writes BOS itself, where there is one, and
        :meth:`~specjax.models.tokenizer.Tokenizer.encode` doesn't add a second.

        Args:
          messages: mappings with ``role`` and ``content``.
          add_generation_prompt: whether to end with the opening of the assistant's turn.
          **variables: whatever else the template knows, such as ``tools``.

        Returns:
          The prompt.

        Raises:
          ChatTemplateError: the template refuses the messages, fails on them, or leaves the sandbox.
        """
        context = {
            **self._tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return self._template.render(context)
        except ChatTemplateError:
            raise
        except Exception as error:  # untrusted code: whatever it raises is its failure
            raise ChatTemplateError(f"the chat template failed: {error}") from error


def _raise(message: str) -> None:
    raise ChatTemplateError(f"the chat template refuses the messages: {message}")


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as models saw it in training: not escaped for HTML, as Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
