"""Advice files: the rows, the files, and the folder that hooks read."""
