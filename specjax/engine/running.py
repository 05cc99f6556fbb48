"""A row while it is decoded, as the host knows it."""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax.engine.stopping import Detokenizer, StopWatch
from specjax.engine.work import Finish, Result, Work
from specjax.record import Record, Source

__all__ = ["Running"]


class Running:
    """Work in a slot, with the text that it has by now.

    Args:
      work: what is done.
      stop_ids: the tokens that end it.
      detokenizer: a new one; None where there is no text.
    """

    def __init__(self, work: Work, stop_ids: frozenset[int], detokenizer: Detokenizer | None) -> None:
        self.work, self._stop_ids = work, stop_ids
        self._watch = (
            None
            if detokenizer is None
            else StopWatch(detokenizer, work.stop, work.sampling.get("min_tokens", 0))
        )
        self._fed = 0  # tokens that the watch has seen
        self._text = ""  # what it has shown

    def read(self, tokens: np.ndarray, length: int, record: Record, *, is_over: bool) -> Result:
        """What the row has: its ``tokens`` [S], of which ``length`` count, and its part of the record.

        ``is_over`` says that the device has ended it; a stop string ends it too, and cuts it where it begins.
        """
        begin = len(self.work.prompt)
        ids: list[int] = tokens[begin:length].tolist()
        finish: Finish | None = None
        if is_over:
            stopped = bool(ids) and ids[-1] in self._stop_ids
            finish = "failed" if record.failed else "stop" if stopped else "length"
        result = Result(
            work=self.work,
            tokens=ids,
            sources=[Source(source) for source in record.source[begin:length].tolist()],
            finish=finish,
            num_steps=int(record.num_steps),
            drafted=np.asarray(record.drafted),
            accepted=np.asarray(record.accepted),
        )
        return result if self._watch is None else self._with_text(result, self._watch)

    def _with_text(self, result: Result, watch: StopWatch) -> Result:
        self._text += watch.feed(result.tokens[self._fed :])
        self._fed = len(result.tokens)
        if result.finish is None and not watch.stopped:
            return dataclasses.replace(result, text=self._text)
        ending = watch.finish()
        return dataclasses.replace(
            result,
            tokens=result.tokens[: ending.num_tokens],
            sources=result.sources[: ending.num_tokens],
            # Logits that broke off after the stop string are of no concern.
            finish="stop" if ending.stopped else result.finish,
            text=ending.text,
            offsets=ending.offsets,
        )
