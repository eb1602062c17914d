"""The records of a membership beside its generations, and their names."""

import json

from torch.distributed.distributed_c10d import Store

__all__ = [
    "ENDED",
    "NEWEST",
    "NEWS",
    "gone_key",
    "has_ended",
    "is_anybody_left",
    "is_gone",
    "tell_gone",
]

ENDED, NEWEST, NEWS = "ended", "newest", "news"


def tell_gone(store: Store, member: int, reason: str) -> None:
    """Say that a member is gone and won't be back; the first reason counts.

    Args:
        store: The membership's.
        member: Its number.
        reason: Why.
    """
    store.compare_set(gone_key(member), "", reason)
    store.add(NEWS, 1)


def is_gone(store: Store, member: int) -> bool:
    """Whether anybody has said that a member is gone."""
    return bool(store.check([gone_key(member)]))


def is_anybody_left(store: Store) -> bool:
    """Whether a member of the newest generation isn't gone."""
    if not store.check([NEWEST]):
        return False
    members = json.loads(store.get(f"members/{int(store.get(NEWEST))}"))
    return any(not is_gone(store, number) for number, _ in members)


def gone_key(member: int) -> str:
    """Return under which key the reason stands."""
    return f"gone/{member}"


def has_ended(store: Store) -> bool:
    """Whether some member has trained to the end."""
    return bool(store.check([ENDED]))
