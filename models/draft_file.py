"""Drafts in files: safetensors of what was trained, the rest taken from the target.

The embedding is always the target's, and so is the head where it wasn't trained. The header says what kind
of draft it is; nothing in the file is run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.models.config import ModelConfig
from specjax.models.derive import narrow_model, output_rows
from specjax.models.drafts import FeatureHead, FeatureModel, to_feature_model
from specjax.models.errors import ModelFileError
from specjax.models.functional import FunctionalModel
from specjax.types import Params

__all__ = ["DRAFTS", "LoadedDraft", "load_draft", "save_draft"]

DRAFTS = {"smollm2-draft": Path(__file__).parent / "data" / "smollm2_draft.safetensors"}
"""Drafts that come with the package, by name."""

_FORMAT = "specjax draft 1"
_MOST_TENSORS = 10_000


@dataclasses.dataclass(frozen=True)
class LoadedDraft:
    """A draft for one target."""

    kind: Literal["model", "head"]
    model: FunctionalModel | FeatureModel
    params: Params
    about: dict[str, Any]  # what the file says of its making


def save_draft(
    path: str | os.PathLike[str],
    kind: Literal["model", "head"],
    cfg: ModelConfig,
    params: Params,
    about: dict[str, Any],
    dtype: str = "float16",
) -> None:
    """Writes a draft, whole or not at all.

    Args:
      path: the file.
      kind: "model" for a narrow transformer, "head" for a feature head.
      cfg: its sizes.
      params: the trained weights and ``vocabulary``; what is left out is the target's.
      about: anything to remember, as JSON.
      dtype: what the weights are stored in.

    Raises:
      OSError: it can't be written.
    """
    tensors = {}
    for path_of, x in jax.tree.leaves_with_path(params):
        x = np.asarray(x)
        name = jax.tree_util.keystr(path_of, simple=True, separator=".")
        tensors[name] = x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x
    header = {"format": _FORMAT, "kind": kind, "config": json.dumps(dataclasses.asdict(cfg))}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        save_file(tensors, beside, metadata={**header, "about": json.dumps(about)})
    except SafetensorError as error:
        beside.unlink(missing_ok=True)
        raise OSError(f"{path}: can't be written: {error}") from error
    beside.replace(path)


def load_draft(
    spec: str,
    target: FunctionalModel,
    target_params: Params,
    vocabulary: np.ndarray | None = None,
) -> LoadedDraft:
    """Loads a draft by name or from a ``.safetensors`` file, for a target.

    Args:
      spec: a name in :data:`DRAFTS`, or a path.
      target: its sizes and dtype become the draft's.
      target_params: whose embedding, and perhaps head, the draft shares.
      vocabulary: [W] int32, rising: other tokens to score than it was made for. A draft with a head of its
        own keeps those that it has.

    Raises:
      ModelFileError: the file is missing, damaged, no draft, or of another target.
    """
    path = DRAFTS.get(spec, Path(spec))
    header, tensors = _read(path)
    if header.get("format") != _FORMAT or header.get("kind") not in ("model", "head"):
        raise ModelFileError(path, "is no draft of specjax; make one with specjax distill")
    try:
        cfg = ModelConfig(**json.loads(header["config"]))
        about = json.loads(header.get("about", "{}"))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(path, f"its sizes make no model: {error}") from error
    ours = target.config
    for name in ("vocab_size", "width") if header["kind"] == "head" else ("vocab_size",):
        if getattr(cfg, name) != getattr(ours, name):
            raise ModelFileError(
                path, f"was made for a target of {name} {getattr(cfg, name)}, not {getattr(ours, name)}"
            )
    cfg = dataclasses.replace(cfg, dtype=ours.dtype, scan_layers=False)
    if vocabulary is not None and "head" not in tensors:
        tensors["vocabulary"] = vocabulary
    vocabulary = tensors.get("vocabulary")
    if vocabulary is None or vocabulary.ndim != 1 or not 0 < len(vocabulary) <= cfg.vocab_size:
        raise ModelFileError(path, "lacks the list of tokens that it scores; make it anew")
    if vocabulary.dtype != np.int32 or vocabulary[0] < 0 or vocabulary[-1] >= cfg.vocab_size:
        raise ModelFileError(path, "lists tokens that the target doesn't have")
    if not (np.diff(vocabulary) > 0).all():
        raise ModelFileError(path, "lists its tokens in no rising order")
    if cfg.num_layers > sum(name.endswith("attention.qkv.kernel") for name in tensors):
        raise ModelFileError(path, f"claims {cfg.num_layers} layers and has fewer")
    model: FunctionalModel | FeatureModel
    if header["kind"] == "model":
        model, like = narrow_model(cfg, len(vocabulary))
    else:
        model, like = to_feature_model(nnx.eval_shape(lambda: FeatureHead(cfg, len(vocabulary), nnx.Rngs(0))))
    shared = {"embedding": target_params["embedding"]}
    if "head" not in tensors:
        shared["head"] = output_rows(target_params)[vocabulary]
    params = _fill(path, like, tensors, shared)
    return LoadedDraft("model" if header["kind"] == "model" else "head", model, params, about)


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The header and the tensors of a safetensors file; its offsets are checked by the library."""
    try:
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
        if size > path.stat().st_size:
            raise ModelFileError(path, "is cut short, or no safetensors file")
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            if len(names) > _MOST_TENSORS:
                raise ModelFileError(path, f"claims {len(names)} tensors")
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except OSError as error:
        raise ModelFileError(path, error.strerror or str(error)) from error
    except SafetensorError as error:
        raise ModelFileError(path, f"is damaged: {error}") from error


def _fill(path: Path, like: Params, tensors: dict[str, np.ndarray], shared: Params) -> Params:
    """The tree of ``like`` with the file's tensors, and the target's where the file has none."""
    left = dict(tensors)

    def take(place: Any, x: Any) -> jax.Array:
        name = jax.tree_util.keystr(place, simple=True, separator=".")
        if name not in left and name in shared:
            return shared[name]
        if name not in left:
            raise ModelFileError(path, f"lacks the tensor {name!r}")
        value = left.pop(name)
        if value.shape != x.shape:
            raise ModelFileError(path, f"tensor {name!r} is {value.shape}, not {x.shape}")
        if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value.astype(np.float32)).all():
            raise ModelFileError(path, f"tensor {name!r} holds values that are no numbers")
        return jnp.asarray(value, x.dtype)

    params = jax.tree.map_with_path(take, like)
    if left:
        raise ModelFileError(path, f"has a tensor {min(left)!r} that no draft of its kind has")
    return params
