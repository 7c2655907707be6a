"""What all tests share. Property tests draw the same examples every time and have no deadline: the machine is shared."""

from hypothesis import settings

settings.register_profile("ftbench", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("ftbench")
