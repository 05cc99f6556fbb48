"""Transformers to speculate with, and what loads them.

:func:`~specjax.models.load.load_model` gives everything at once; :func:`~specjax.models.functional.to_model`
turns a module of one's own into the function that the core calls.
"""

from specjax.models.chat import ChatTemplate, ChatTemplateError
from specjax.models.config import ModelConfig
from specjax.models.errors import ModelFileError
from specjax.models.functional import FunctionalModel, abstract_model, to_model
from specjax.models.load import LoadedModel, load_model
from specjax.models.tokenizer import Detokenizer, Tokenizer, check_same_vocabulary
from specjax.models.transformer import Transformer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "FunctionalModel",
    "LoadedModel",
    "ModelConfig",
    "ModelFileError",
    "Tokenizer",
    "Transformer",
    "abstract_model",
    "check_same_vocabulary",
    "load_model",
    "to_model",
]
