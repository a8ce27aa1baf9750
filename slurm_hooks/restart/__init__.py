"""almanac-restart: a wrapper in a user's own job that moves it to a larger GPU type when memory runs out."""

__all__ = ("job", "wrapper")
