"""The flow of disaggregated prefill and decode. `pairs` is it from top to bottom; the legs have a module each."""

from gateway.net.disagg.pairs import Pairs

__all__ = ["Pairs"]
