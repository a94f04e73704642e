"""Calls of a pool with one group, as most tests make them."""


def admit_one(pool, hit, blocks, gate, watermark, reserved, prompt, limit, publish, hashes, /):
    """(row, new blocks), or None."""
    given = pool.admit(watermark, reserved, hit, blocks, gate, prompt, limit, 0, publish, hashes)
    if given is None:
        return None
    row, (added,) = given
    return row, added


def grow_one(pool, row, blocks, gate, watermark, reserved, prompt, limit, publish, hashes, /):
    """The new blocks, or None."""
    given = pool.grow(row, watermark, reserved, blocks, gate, prompt, limit, 0, publish, hashes)
    if given is None:
        return None
    (added,) = given
    return added
