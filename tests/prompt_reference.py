"""The projection of prompt features, from a ChaCha8 written out."""

import numpy as np


def chacha8(seed: int, words: int) -> list[int]:
    """D. J. Bernstein's stream: key from the seed, nonce 0, 64-bit block counter."""
    mask = 0xFFFFFFFF
    key = np.frombuffer(seed.to_bytes(8, "little") + bytes(24), "<u4").tolist()
    constants = np.frombuffer(b"expand 32-byte k", "<u4").tolist()

    def quarter(s: list[int], a: int, b: int, c: int, d: int) -> None:
        for x, y, z, r in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) & mask
            v = s[z] ^ s[x]
            s[z] = (v << r | v >> (32 - r)) & mask

    out: list[int] = []
    block = 0
    while len(out) < words:
        start = [*constants, *key, block & mask, block >> 32, 0, 0]
        s = list(start)
        for _ in range(4):
            for i in range(4):
                quarter(s, i, 4 + i, 8 + i, 12 + i)
            for i in range(4):
                quarter(s, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        out += [(a + b) & mask for a, b in zip(s, start, strict=True)]
        block += 1
    return out[:words]


def projection(d: int, dim: int, seed: int) -> np.ndarray:
    per_row = -(-dim // 32)
    words = np.array(chacha8(seed, d * per_row), "<u4").reshape(d, per_row)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :dim]
    return np.where(bits == 1, 1.0, -1.0) / np.sqrt(dim)
