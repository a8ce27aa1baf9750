"""almanac-pack: a launcher in a user's own job that runs several tasks on each GPU, under an MPS daemon of its own."""

__all__ = ("launcher",)
