"""Texts that the toy environments return and the tests expect."""

LONG = "".join(f"{number:>9}" for number in range(2000))
"""A text longer than a chunk of a stream, with spaces at the edges of chunks."""

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAD0lEQVR4nGP8xcDAwMAAAAXqAPxLLDoxAAAAAElFTkSuQmCC"
"""A PNG with two red pixels, in base64."""
