"""A config.json whose values are checked as they are read."""

from typing import Any

LARGEST, MOST_LAYERS = 2**31 - 1, 10_000


class Config:
    """The values of a config.json over the defaults that transformers has for its family."""

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any]) -> None:
        self._values = {**defaults, **values}

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def whole(self, key: str, otherwise: int | None = None) -> int:
        """Return a whole number from 1 to `LARGEST`, `otherwise` for a missing key or null. Raises ValueError."""
        value = self.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json: {key} is {repr(value)[:80]} and must be a whole number of 1 or more")
        if value > (most := MOST_LAYERS if key == "num_hidden_layers" else LARGEST):
            raise ValueError(f"config.json: {key} is {value:,}, and no model has more than {most:,}")
        return value

    def count(self, key: str) -> int:
        """Return a whole number of 0 or more, 0 for a key that is missing or null. Raises ValueError."""
        return 0 if self.get(key) in (None, 0) else self.whole(key)

    @property
    def layers(self) -> int:
        return self.whole("num_hidden_layers")

    @property
    def head_dim(self) -> int:
        """Width of one head. Raises ValueError where the hidden size has no room for the heads."""
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        width = self.whole("head_dim") if self.get("head_dim") else hidden // heads
        if width < 1:
            raise ValueError(f"config.json: hidden_size {hidden} is too small for its num_attention_heads")
        if heads % (groups := self.whole("num_key_value_heads", heads)):
            raise ValueError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
        if width % 2:
            raise ValueError(f"config.json: a head is {width} wide, and positions turn pairs: head_dim is even")
        return width

    def kinds(self, sliding: int | None) -> list[str]:
        """Return the kind of attention of each layer: `layer_types`, else every one slides but each `sliding`-th
        (0: all, None: none). Raises ValueError."""
        kinds, layers = self.get("layer_types"), self.layers
        if kinds is None:
            full = range(layers) if sliding is None else range(sliding - 1, layers, sliding) if sliding else ()
            return ["full_attention" if index in full else "sliding_attention" for index in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
            raise ValueError(
                f"config.json: layer_types must be a list with the name of a kind for each of the {layers} layers"
            )
        return kinds

    def windows(self, sliding: int | None) -> list[int | None]:
        """Return the sliding window of each layer in tokens, None for full attention."""
        window = self.whole("sliding_window") if self.get("sliding_window") else None
        if window is None or self.get("use_sliding_window") is False:
            return [None] * len(self.kinds(sliding))
        return [window if kind == "sliding_attention" else None for kind in self.kinds(sliding)]
