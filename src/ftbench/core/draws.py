"""The draws of numpy's default generator, without numpy: what an estimate needs to know the lengths of a synthetic data
set before it exists. A test holds them against numpy's own.

Sources: SeedSequence and PCG64 (O'Neill 2014, XSL-RR 128/64) as numpy.random has them, and its normal ziggurat of 256
layers (Marsaglia and Tsang 2000; tables as in randmtzig, from which numpy's are).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

_M32, _M64, _M128 = 2**32 - 1, 2**64 - 1, 2**128 - 1
_MULTIPLIER = 47026247687942121848144207491837523525
_R = 3.6541528853610088
_AREA = _R * math.exp(-0.5 * _R * _R) + math.sqrt(math.pi / 2) * math.erfc(_R / math.sqrt(2))  # of each layer


def _pool(seed: int) -> list[int]:
    """SeedSequence(seed): the entropy mixed into four words."""
    entropy = [seed >> shift & _M32 for shift in range(0, max(seed.bit_length(), 1), 32)]
    multiplier = 0x43B0D7E5

    def scramble(value: int) -> int:
        nonlocal multiplier
        value ^= multiplier
        multiplier = multiplier * 0x931E8875 & _M32
        value = value * multiplier & _M32
        return value ^ value >> 16

    def mix(one: int, other: int) -> int:
        value = (0xCA01F9DD * one - 0x4973F715 * other) & _M32
        return value ^ value >> 16

    pool = [scramble(entropy[place] if place < len(entropy) else 0) for place in range(4)]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mix(pool[target], scramble(pool[source]))
    for word in entropy[4:]:
        pool = [mix(value, scramble(word)) for value in pool]
    return pool


def _state(seed: int) -> list[int]:
    """Four words of 64 bits: SeedSequence(seed).generate_state(4, uint64)."""
    pool, multiplier, words = _pool(seed), 0x8B51F9DD, []
    for place in range(8):
        value = pool[place % 4] ^ multiplier
        multiplier = multiplier * 0x58F38DED & _M32
        value = value * multiplier & _M32
        words.append(value ^ value >> 16)
    return [words[place] | words[place + 1] << 32 for place in range(0, 8, 2)]


def _words(seed: int) -> Iterator[int]:
    """PCG64: 64 bits at a time."""
    high, low, stream_high, stream_low = _state(seed)
    increment = ((stream_high << 64 | stream_low) << 1 | 1) & _M128
    state = ((increment + (high << 64 | low)) * _MULTIPLIER + increment) & _M128
    while True:
        state = (state * _MULTIPLIER + increment) & _M128
        folded, turn = (state >> 64 ^ state) & _M64, state >> 122
        yield (folded >> turn | folded << (-turn & 63)) & _M64


@cache
def _tables() -> tuple[list[int], list[float], list[float]]:
    inside, width, height = [0] * 256, [0.0] * 256, [0.0] * 256
    edge = _R
    width[255], height[255] = edge / 2**52, math.exp(-0.5 * edge * edge)
    inside[0], width[0], height[0] = int(edge * height[255] / _AREA * 2**52), _AREA / height[255] / 2**52, 1.0
    for place in range(254, 0, -1):
        x = math.sqrt(-2 * math.log(_AREA / edge + height[place + 1]))
        inside[place + 1], width[place], height[place] = int(x / edge * 2**52), x / 2**52, math.exp(-0.5 * x * x)
        edge = x
    return inside, width, height


def standard_normal(seed: int, count: int) -> list[float]:
    """`numpy.random.default_rng(seed).standard_normal(count)`."""
    words = _words(seed)
    return [_normal(words) for _ in range(count)]


def _normal(words: Iterator[int]) -> float:
    inside, width, height = _tables()
    while True:
        word = next(words)
        place, size = word & 0xFF, word >> 9 & 2**52 - 1
        x = size * width[place] * (-1 if word >> 8 & 1 else 1)
        if size < inside[place]:
            return x
        if place == 0:
            while True:
                beyond = -math.log1p(-_unit(words)) / _R
                if -2 * math.log1p(-_unit(words)) > beyond * beyond:
                    return -(_R + beyond) if size >> 8 & 1 else _R + beyond
        if (height[place - 1] - height[place]) * _unit(words) + height[place] < math.exp(-0.5 * x * x):
            return x


def _unit(words: Iterator[int]) -> float:
    return (next(words) >> 11) / 2**53
