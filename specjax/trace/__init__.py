"""Seeing what speculation did: a decoding that tells of every step, and a page that shows it."""

from specjax.trace.page import pieces, render
from specjax.trace.steps import Choice, Proposal, Step, Trace, TracedDecoding, trace

__all__ = ["Choice", "Proposal", "Step", "Trace", "TracedDecoding", "pieces", "render", "trace"]
