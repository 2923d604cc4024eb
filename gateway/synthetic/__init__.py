"""The synthetic upstream: a stand-in for `vllm serve` that needs no engine."""
