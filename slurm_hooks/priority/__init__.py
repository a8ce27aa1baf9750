"""Site factors of pending jobs, and the evidence that corrects them."""

__all__ = ("reprioritize",)
