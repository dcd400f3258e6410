"""Files that somebody has changed: other values anywhere in their JSON, other bytes anywhere."""

import copy
import json
import math

__all__ = ["changed_bytes", "changed_json", "dumped", "one_sentence"]

_ODD = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**48 + 1, 2**63 - 1, 2**63, 2**64, 2**80, 10**400,
    -(10**400), 0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, "", "x", "../x", "/etc",
    "\0", "\x1b[31m", "\ud800", "float32", "quint8", "bits8", "qint32", "float4_e2m1fn_x2",
    "float8_e8m0fnu", "complex128", "Tensor", "x" * 5000, [], {}, [[]], [{}], {"": None}, [0] * 70,
    [2**40, 2**40],
]  # fmt: skip


def changed_json(content, dice):
    """Plain data with a few changes: an odd value, or one that is gone, doubled or elsewhere."""
    content = copy.deepcopy(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        places = list(_places(content))
        if not places:
            return content
        holder, key = dice.choice(places)
        match dice.randrange(6):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(dice.choice(_ODD))
            case 3:
                del holder[key]
            case 4:
                other, name = dice.choice(places)
                if _has(holder, key) and _has(other, name):
                    holder[key] = copy.deepcopy(other[name])
            case 5 if isinstance(holder, dict):
                holder[dice.choice(["", "x", "class", "0.weight", key + "x"])] = holder.pop(key)
            case _:
                holder.insert(key, copy.deepcopy(dice.choice(_ODD))) if isinstance(
                    holder, list
                ) else None
    return content


def _places(content):
    if isinstance(content, (dict, list)):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield content, key
            yield from _places(value)


def _has(holder, key):
    return key in holder if isinstance(holder, dict) else key < len(holder)


def changed_bytes(content, dice, first=0, last=None):
    """Bytes with one to four changes between two places: flipped, exchanged, cut, put in, zero."""
    content = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 4))):
        end = min(len(content), last or len(content))
        if end <= first:
            break
        place = dice.randrange(first, end)
        match dice.randrange(5):
            case 0:
                content[place] ^= 1 << dice.randrange(8)
            case 1:
                content[place] = dice.choice((0, 0x22, 0x2C, 0x5B, 0x5D, 0x7B, 0x7D, 0x39, 255))
            case 2:
                del content[place : place + dice.choice((1, 2, 8, 50))]
            case 3:
                content[place:place] = bytes(
                    dice.randrange(256) for _ in range(dice.choice((1, 8)))
                )
            case 4:
                content[place : place + 8] = bytes(min(8, len(content) - place))
    return bytes(content)


def one_sentence(work, *arguments):
    """What a reader gives for a file, or None where it says in one line of ours what is wrong."""
    try:
        return work(*arguments)
    except (ValueError, OSError) as error:
        told = error
    ours = type(told).__module__.startswith(("lightning_bnn", "weightsym"))
    assert ours or type(told) in (ValueError, OSError, FileNotFoundError), repr(told)
    message = str(told)
    assert message, repr(told)
    assert len(message.splitlines()) == 1, message
    assert len(message) < 1000, message
    assert message.isprintable(), repr(message)
    return None


def dumped(content):
    """JSON, in which numbers may be NaN and texts may be no Unicode."""
    return json.dumps(content).encode()
