"""What a membership writes down, beside its generations, and under which names."""

from torch.distributed.distributed_c10d import Store

__all__ = ["ENDED", "NEWEST", "NEWS", "gone_key", "has_ended", "is_gone", "tell_gone"]

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


def gone_key(member: int) -> str:
    """Return under which key the reason stands."""
    return f"gone/{member}"


def has_ended(store: Store) -> bool:
    """Whether some member has trained to the end."""
    return bool(store.check([ENDED]))
