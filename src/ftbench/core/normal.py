"""Normal random numbers as numpy's `default_rng(seed).standard_normal(count)` draws them, without importing numpy.

Sources: O'Neill 2014 (PCG XSL-RR 128/64, and the mixing of seeds that numpy's SeedSequence took from there), Marsaglia
and Tsang 2000 (the ziggurat: 256 layers of equal area, most draws end in the rectangle of one).
"""

import math
from collections.abc import Iterator

_WORD, _LONG, _STATE = 2**32 - 1, 2**64 - 1, 2**128 - 1
_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
_TAIL = 3.6541528853610088  # where the last layer ends, of 256
_AREA = _TAIL * math.exp(-0.5 * _TAIL * _TAIL) + math.sqrt(math.pi / 2) * math.erfc(_TAIL / math.sqrt(2))
_FRACTION = 2**52


def standard_normals(seed: int, count: int) -> list[float]:
    """Return `count` independent draws of the normal distribution with mean 0 and deviation 1."""
    numbers = _uniform_bits(seed)
    return [_normal(numbers) for _ in range(count)]


def _seed_words(seed: int) -> list[int]:
    """Return the 8 words of 32 bits that a seed below 2**128 is spread over."""
    constant, multiplier = 0x43B0D7E5, 0x931E8875

    def scrambled(value: int) -> int:
        nonlocal constant
        value ^= constant
        constant = constant * multiplier & _WORD
        value = value * constant & _WORD
        return value ^ value >> 16

    pool = [scrambled(seed >> 32 * at & _WORD) for at in range(4)]
    for source in range(4):
        for target in range(4):
            if source != target:
                mixed = 0xCA01F9DD * pool[target] - 0x4973F715 * scrambled(pool[source]) & _WORD
                pool[target] = mixed ^ mixed >> 16
    constant, multiplier = 0x8B51F9DD, 0x58F38DED
    return [scrambled(pool[at % 4]) for at in range(8)]


def _uniform_bits(seed: int) -> Iterator[int]:
    """Yield numbers of 64 random bits."""
    words = _seed_words(seed)
    start, stream = (words[at + 1] << 96 | words[at] << 64 | words[at + 3] << 32 | words[at + 2] for at in (0, 4))
    step = (stream << 1 | 1) & _STATE
    state = ((step + start) * _MULTIPLIER + step) & _STATE
    while True:
        state = (state * _MULTIPLIER + step) & _STATE
        folded, turn = (state >> 64 ^ state) & _LONG, state >> 122
        yield (folded >> turn | folded << (64 - turn)) & _LONG


def _layers() -> tuple[list[float], list[float], list[float]]:
    """Return of each layer the widest 52-bit fraction inside its rectangle, the width of a fraction of 1, and the
    density at its edge."""
    inside, width, density = [0.0] * 256, [0.0] * 256, [1.0] * 256
    edge = previous = _TAIL
    base = _AREA / math.exp(-0.5 * edge * edge)
    inside[0], inside[1] = edge / base * _FRACTION, 0.0
    width[0], width[255] = base / _FRACTION, edge / _FRACTION
    density[255] = math.exp(-0.5 * edge * edge)
    for layer in range(254, 0, -1):
        edge = math.sqrt(-2 * math.log(_AREA / previous + math.exp(-0.5 * previous * previous)))
        inside[layer + 1] = edge / previous * _FRACTION
        previous = edge
        width[layer], density[layer] = edge / _FRACTION, math.exp(-0.5 * edge * edge)
    return inside, width, density


_INSIDE, _WIDTH, _DENSITY = _layers()


def _normal(numbers: Iterator[int]) -> float:
    while True:
        bits = next(numbers)
        layer, negative, fraction = bits & 255, bits >> 8 & 1, bits >> 9 & _FRACTION - 1
        value = -fraction * _WIDTH[layer] if negative else fraction * _WIDTH[layer]
        if fraction < _INSIDE[layer]:
            return value
        if layer == 0:
            return _beyond(numbers, bool(fraction >> 8 & 1))
        height = (_DENSITY[layer - 1] - _DENSITY[layer]) * _share(numbers) + _DENSITY[layer]
        if height < math.exp(-0.5 * value * value):
            return value


def _beyond(numbers: Iterator[int], negative: bool) -> float:
    """Return a draw from the tail beyond the last layer."""
    while True:
        distance = -math.log1p(-_share(numbers)) / _TAIL
        if -2 * math.log1p(-_share(numbers)) > distance * distance:
            return -(_TAIL + distance) if negative else _TAIL + distance


def _share(numbers: Iterator[int]) -> float:
    """Return a uniform number from 0 up to 1."""
    return (next(numbers) >> 11) * 2.0**-53
