"""Read and check the values of a config.json."""

from typing import Any

LARGEST, MOST_LAYERS = 2**31 - 1, 10_000


class Config:
    """The values of a config.json, with the defaults of the model family in transformers."""

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any]) -> None:
        self._values = {**defaults, **values}

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def whole(self, key: str, otherwise: int | None = None) -> int:
        """Return a positive integer, or `otherwise` if the key is missing. Raise ValueError for an invalid value."""
        value = self.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json: {key} is {repr(value)[:80]} and must be a whole number of 1 or more")
        if value > (most := MOST_LAYERS if key == "num_hidden_layers" else LARGEST):
            raise ValueError(f"config.json: {key} is {value:,}, and must be at most {most:,}")
        return value

    @property
    def head_dim(self) -> int:
        """The width of one attention head. Raise ValueError if the config.json has invalid heads or an odd width."""
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        width = self.whole("head_dim") if self.get("head_dim") else hidden // heads
        if width < 1:
            raise ValueError(f"config.json: hidden_size {hidden} is too small for its num_attention_heads")
        if heads % (groups := self.whole("num_key_value_heads", heads)):
            raise ValueError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
        if width % 2:
            raise ValueError(f"config.json: head_dim is {width} and must be even for rotary positions")
        return width

    def kinds(self, sliding: int | None) -> list[str]:
        """Return the kind of attention of each layer: `full_attention` or `sliding_attention`.

        The kinds come from the key `layer_types`. If this key is missing, every `sliding`-th layer has full attention,
        and the other layers have a sliding window. With `sliding` 0, all layers have a sliding window. With `sliding`
        None, all layers have full attention. Raise ValueError for an invalid value."""
        kinds, layers = self.get("layer_types"), self.whole("num_hidden_layers")
        if kinds is None:
            full = range(layers) if sliding is None else range(sliding - 1, layers, sliding) if sliding else ()
            return ["full_attention" if index in full else "sliding_attention" for index in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
            raise ValueError(f"config.json: layer_types must be a list with a name for each of the {layers} layers")
        return kinds

    def windows(self, sliding: int | None) -> list[int | None]:
        """Return the sliding window of each layer in tokens, or None for a layer with full attention."""
        window = self.whole("sliding_window") if self.get("sliding_window") else None
        if window is None or self.get("use_sliding_window") is False:
            return [None] * len(self.kinds(sliding))
        return [window if kind == "sliding_attention" else None for kind in self.kinds(sliding)]
