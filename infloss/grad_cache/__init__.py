"""Encoders that hold the activations of one chunk at a time (GradCache, arXiv 2101.06983)."""

from infloss.grad_cache.cached_loss import cached_loss
from infloss.grad_cache.functional import cached, cat_input_tensor, gather_input_tensor
from infloss.grad_cache.gradcache import GradCache
from infloss.grad_cache.tower import Tower

__all__ = [
    "GradCache",
    "Tower",
    "cached",
    "cached_loss",
    "cat_input_tensor",
    "gather_input_tensor",
]
