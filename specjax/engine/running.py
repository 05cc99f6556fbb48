"""A row while it is decoded, as the host knows it."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.engine.work import Finish, Result, Work
from specjax.record import Record, Source

__all__ = ["Running"]


class Running:
    """Work in a slot, with the text that it has by now.

    Args:
      work: what is done.
      stop_ids: the tokens that end it.
      detokenizer: turns ids into text, block by block; None where there is no text.
    """

    def __init__(self, work: Work, stop_ids: frozenset[int], detokenizer: Any) -> None:
        self.work, self._stop_ids = work, stop_ids
        self._fed = 0
        self._text: Any = None
        if detokenizer is not None:
            from specjax.engine.stopping import StopText

            self._text = StopText(detokenizer, work.stop, min_tokens=work.sampling.get("min_tokens", 0))

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
        text = None
        if self._text is not None:
            self._text.feed(ids[self._fed :])
            self._fed = len(ids)
            if is_over:
                self._text.finish()
            if self._text.stopped:
                finish = "stop"
                ids = ids[: self._text.num_tokens]
            text = self._text.text
        return Result(
            work=self.work,
            tokens=ids,
            sources=[Source(source) for source in record.source[begin : begin + len(ids)].tolist()],
            finish=finish,
            num_steps=int(record.num_steps),
            drafted=np.asarray(record.drafted),
            accepted=np.asarray(record.accepted),
            text=text,
        )
