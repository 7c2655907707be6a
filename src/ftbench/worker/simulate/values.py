"""What is known of the values of fake tensors: token ids, labels, positions and masks are the data's own, so that code
that asks for them (how many labels, is there padding) gets the real answer; activations have none."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from ftbench.worker.simulate.tracker import tensors

MOST = 2**26  # elements: larger masks are not computed


class Unknown(RuntimeError):
    """The program's way depends on values that a simulation does not have."""


class Values:
    """Real values beside fake tensors, carried through every operation whose inputs all have one."""

    def learn(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        fake.known_values = value

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return getattr(tensor, "known_values", None)

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Keep, after an operation on fake tensors, its result's values, where they can be known and are whole
        numbers."""
        written = list(_written(func, args, kwargs)) if func._schema.is_mutable else []
        outputs = written or list(tensors(result))
        if not outputs or (outputs[0].is_floating_point() and outputs[0].numel() > 1):
            return
        real = self.compute(func, args, kwargs, outputs)
        if real is None:
            for fake in written:
                fake.known_values = None
        elif not written:
            for fake, value in zip(outputs, tensors(real), strict=True):
                self.learn(fake, value)
        # what was written to has changed its values in place

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> Any:
        """Return the operation's real result, or None where an input is unknown."""
        inputs = [*tensors(list(args)), *tensors(list(kwargs.values()))]
        if any(self.get(t) is None for t in inputs) or any(t.numel() > MOST for t in (*outputs, *inputs)):
            return None
        real_args = tree_map_only(torch.Tensor, self.get, args)
        real_kwargs = tree_map_only(torch.Tensor, self.get, kwargs)
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        real_kwargs.pop("pin_memory", None)
        real_kwargs.pop("non_blocking", None)
        with unset_fake_temporarily():
            result = func(*real_args, **real_kwargs)
        return () if result is None else result

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return a value that the program asks for. What depends on weights is a number of no matter: 1, or no."""
        known = self.get(tensor)
        if known is not None:
            with unset_fake_temporarily():
                return known.item()
        if tensor.is_floating_point():
            return 1.0
        if tensor.dtype == torch.bool:
            return False
        raise Unknown("the program asks for a whole number that depends on the model's weights")


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(args[index] if index < len(args) else kwargs.get(argument.name))
