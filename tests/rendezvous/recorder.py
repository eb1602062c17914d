"""Record what this process really issues: every communication, and every wait for one, in order.

The recorder stands in for `torch.distributed`, whatever the backend is. Both ends of a message must
mean the same, so each operation is tagged with the range of a trace in which it was issued, such as
`F3` or `pull.post 7`: layers of one size that are sent in another order would else not be found.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_hetero.runtime import clock
from lightning_hetero.runtime.iteration.split_run import SplitRun
from lightning_hetero.runtime.stage.activations import ActivationLink
from lightning_hetero.runtime.stage.messages import Inbox
from tests.rendezvous.operations import Operation, OperationKind, Transfer

_MESSAGES = ("isend", "irecv", "send", "recv", "batch_isend_irecv")
_PAYLOADS = {
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "all_reduce": "tensor",
    "barrier": None,
    "broadcast": "tensor",
    "gather": "tensor",
    "reduce": "tensor",
    "reduce_scatter_single": "input",
    "reduce_scatter_tensor": "input",
}
"""Collectives, with the argument that is of one size on all ranks."""
_SPLIT = "all_to_all_single"
"""Each rank sends each other as much as it says."""
_UNSEEN = ("all_gather_coalesced", "all_reduce_coalesced", "all_to_all")


REST = " rest"
"""Ends the name of a queue of what didn't fit into buffers, which has a tag of its own."""


class Recorder:
    """Notes operations inside its `with` block; communicators go by the names of their groups."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._ranges: list[str] = []
        self._is_inner = False
        self._patches: list[Any] = []

    def __enter__(self) -> Self:
        for name in filter(
            functools.partial(hasattr, dist), (*_MESSAGES, *_PAYLOADS, _SPLIT, *_UNSEEN)
        ):
            # One function for both modules: members of a batch are told apart by identity.
            recorded = self._stand_in(name, getattr(dist, name))
            self._patch(dist, name, recorded)
            self._patch(distributed_c10d, name, recorded)
        self._patch(clock, "_profiler_enabled", lambda: True)
        self._patch(clock, "record_function", self._range)
        expect = ActivationLink.expect_gradient

        def expect_gradient(link: ActivationLink, index: int, sent: Any) -> None:
            with self._range(f"B{index}"):  # It is posted before that action begins.
                expect(link, index, sent)

        self._patch(ActivationLink, "expect_gradient", expect_gradient)
        # The check of losses sends micro-batches of other sizes, which among CPUs, where headers
        # travel with them, are shorter than their buffers. On accelerators all sizes are known.
        self._patch(SplitRun, "is_due", lambda _: False)
        begin, post = ActivationLink.begin, Inbox.post

        num_posted: dict[Inbox, int] = {}

        def begun(link: ActivationLink, *held: int) -> None:
            num_posted[link._inbox] = 0
            begin(link, *held)

        def posted(inbox: Inbox, *where: Any) -> None:
            number = num_posted.get(inbox, 0)
            with self._range(f"F{number}"):  # It is posted before that action begins.
                post(inbox, *where)
            num_posted[inbox] = number + 1

        self._patch(ActivationLink, "begin", begun)
        self._patch(Inbox, "post", posted)
        return self

    def __exit__(self, *_: object) -> None:
        for patch in reversed(self._patches):
            patch.stop()

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._patches.append(mock.patch.object(owner, name, value))
        self._patches[-1].start()

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self._ranges.append(re.sub(r"^I(?=\d)", "B", name))
        try:
            yield
        finally:
            self._ranges.pop()

    @property
    def _tag(self) -> str:
        return self._ranges[-1] if self._ranges else ""

    def _stand_in(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            assert name not in _UNSEEN, f"{name} isn't recorded"
            if self._is_inner:  # The members of a batch are one operation.
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            position = len(self.operations)
            self.operations.append(self._operation(name, given))
            self._is_inner = True
            try:
                work = original(*args, **kwargs)
            finally:
                self._is_inner = False
            if name in ("send", "recv"):
                self._wait(position)
                return work
            if isinstance(work, list):
                return [_RecordedWork(item, self, position) for item in work]
            return None if work is None else _RecordedWork(work, self, position)

        return recorded

    def _operation(self, name: str, given: dict[str, Any]) -> Operation:
        if name in (*_PAYLOADS, _SPLIT):
            group = given.get("group") or dist.group.WORLD
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            payload = _PAYLOADS.get(name)
            return Operation(
                kind=OperationKind.COLLECTIVE,
                label=f"{name} {self._tag}".strip(),
                communicator=group.group_name,
                transfers=self._splits(given, ranks) if name == _SPLIT else (),
                ranks=ranks,
                num_bytes=0 if payload is None else given[payload].nbytes,
                is_async=bool(given.get("async_op")),
            )
        members = [given]
        if name == "batch_isend_irecv":
            members = [
                {"tensor": op.tensor, "op": op.op.__name__, "peer": op.peer, "group": op.group}
                for op in given["p2p_op_list"]
            ]
        return Operation(
            kind=OperationKind.TRANSFER,
            label=f"{name} {self._tag}".strip(),
            communicator=(members[0].get("group") or dist.group.WORLD).group_name
            + (REST if given.get("tag", 0) % 2 else ""),
            transfers=tuple(self._transfer(name, member) for member in members),
        )

    def _splits(self, given: dict[str, Any], ranks: tuple[int, ...]) -> tuple[Transfer, ...]:
        """Return what an all-to-all sends and receives here, empty parts left out."""
        own, found = dist.get_rank(), []
        for side in ("input", "output"):
            tensor = given[side]
            sizes = given.get(f"{side}_split_sizes")
            if sizes is None:
                sizes = [len(tensor) // len(ranks)] * len(ranks)
            row_bytes = tensor[:1].nbytes
            for peer, size in zip(ranks, sizes, strict=True):
                if peer != own and size:
                    ends = (own, peer) if side == "input" else (peer, own)
                    found.append(Transfer(*ends, size * row_bytes, self._tag))
        return tuple(found)

    def _transfer(self, name: str, given: dict[str, Any]) -> Transfer:
        tensor, own = given["tensor"], dist.get_rank()
        assert isinstance(tensor, Tensor)
        if given.get("op", name) in ("isend", "send"):
            return Transfer(own, given.get("peer", given.get("dst")), tensor.nbytes, self._tag)
        return Transfer(given.get("peer", given.get("src")), own, tensor.nbytes, self._tag)

    def _wait(self, position: int) -> None:
        label = f"wait for {self.operations[position].label}"
        wait = Operation(kind=OperationKind.COMPUTE, label=label, waits_for=(position,))
        self.operations.append(wait)


class _RecordedWork:
    """An operation under way whose `wait` is noted."""

    def __init__(self, work: dist.Work, recorder: Recorder, position: int) -> None:
        self._work = work
        self._recorder = recorder
        self._position = position

    def wait(self, *args: Any) -> Any:
        self._recorder._wait(self._position)
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
