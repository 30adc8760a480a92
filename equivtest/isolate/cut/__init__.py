"""Microbatches inside a large batch: found in its tensors, and run one after the other."""
