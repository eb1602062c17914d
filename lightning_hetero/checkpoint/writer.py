"""Write checkpoints while training goes on.

`save` copies the rank's state to host memory (`snapshot`) and returns. After that, in order:

1. A thread writes this rank's part to the tiers of its node: data files first, the manifest last
   (`tiers`). Then the host memory is free for the next snapshot.
2. The ranks tell each other which tiers have their parts (`commit`). They wait for ranks with slow
   storage, and copy parts to other nodes.
3. Another thread uploads the part to the remote tier, so that slow uploads don't delay later
   checkpoints.
4. A kind of tier, such as the disks, is *sound* if it has the parts of all ranks and their copies:
   the checkpoint is then marked as confirmed there, and old checkpoints are deleted. If a tier of
   that kind failed on any rank, nothing is deleted.

This takes memory for one copy of the rank's slices and a few chunks, however slow the tiers are. A
failure is logged, and the next checkpoint is the next attempt. Only if no lasting tier (disk or
remote) has taken any checkpoint for longer than `lasting_within_s`, all ranks raise an error.
"""

import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hetero.checkpoint.commit import Committer, WriterOptions
from lightning_hetero.checkpoint.content import CheckpointContent
from lightning_hetero.checkpoint.deadlines import MARGIN, BackgroundThread
from lightning_hetero.checkpoint.encoding import metadata_files
from lightning_hetero.checkpoint.snapshot import HostBuffer, SavedCheckpoint, Snapshot
from lightning_hetero.checkpoint.statuses import Peers
from lightning_hetero.checkpoint.tiers import Tier, TierKind
from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.core.process import Deadline

if TYPE_CHECKING:
    from concurrent.futures import Future

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """Saves one rank's parts into tiers; all ranks make the same calls in the same order.

    ::

        writer = CheckpointWriter([Tier(kind=TierKind.DISK, store=LocalStore("run"))])
        writer.save(content).wait_for_snapshot()  # now the tensors may change
        writer.close()

    Args:
        tiers: The tiers of this node, fastest first, and at most one remote tier.
        node_of_rank: Name of each rank's node.
        peers: All ranks; the writer's threads use branches of them.
        options: How to write.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        node_of_rank: Sequence[str] = ("node",),
        peers: Peers | None = None,
        options: WriterOptions | None = None,
    ) -> None:
        options = options or WriterOptions()
        num_remote = sum(tier.kind is TierKind.REMOTE for tier in tiers)
        if not tiers or num_remote > 1:
            raise ConfigurationError(
                f"A checkpoint needs one tier or more, at most one of them remote; got "
                f"{len(tiers)} with {num_remote} remote."
            )
        if options.replicas > 1 and num_remote == len(tiers):
            raise ConfigurationError(
                f"replicas={options.replicas} needs a local tier to keep copies in. Give local_dir."
            )
        self._stall_s = options.stall_s
        self._memory = HostBuffer(options.stall_s)
        self._thread = BackgroundThread("checkpoint-commit")
        self._committer = Committer(tiers, tuple(node_of_rank), peers or Peers(), options)
        self._last: Future[None] | None = None
        self._end: Future[bool] | None = None

    def save(self, content: CheckpointContent, *, leaving: Collection[str] = ()) -> SavedCheckpoint:
        """Start a checkpoint at a step boundary.

        The caller mustn't change the tensors before `wait_for_snapshot` has returned.

        Args:
            content: The rank's state.
            leaving: Nodes that are about to be lost; their parts are copied to nodes that stay.

        Raises:
            CheckpointError: No lasting tier has accepted a checkpoint for too long, or the metadata
                can't be saved.
        """
        start_s = time.perf_counter()
        metadata = metadata_files(content)
        snapshot = self._take(content)
        saved = SavedCheckpoint(
            id=content.id,
            snapshot=snapshot,
            stall_s=time.perf_counter() - start_s,
            metadata=metadata,
            leaving=leaving,
        )
        saved.local = self._last = self._thread.submit(self._committer.write, saved)
        return saved

    @property
    def complete_steps(self) -> dict[str, int]:
        """For each tier, by name, the step of its newest checkpoint with the parts of all ranks."""
        return self._committer.complete_steps

    def _take(self, content: CheckpointContent) -> Snapshot | None:
        """Copy the state once the previous checkpoint is written; None if its writing hangs."""
        try:
            if self._last is not None:
                self._wait_for(self._last)
            # The ranks have agreed on this error, so all raise it at the same save.
            if self._committer.overdue is not None:
                raise self._committer.overdue
            return self._memory.take(content)
        except TimeoutError as error:
            _log.warning("%s isn't saved: %s", content.id, error)
            return None

    def _wait_for(self, future: "Future[Any]") -> None:
        """Wait until the ranks have finished a save, successfully or not."""
        Deadline(MARGIN**2 * self._stall_s, self._committer.progress).wait_for(future)

    def upload_newest(self) -> None:
        """Upload the newest checkpoint, once an older one's upload has ended.

        All ranks call it if no other save follows soon; the upload may end after it returns.
        """
        self._thread.submit(self._committer.upload_deferred)

    def leave(self) -> None:
        """Stop the threads after the work that they have been given; doesn't wait for them."""
        self._thread.submit(self._committer.end)
        self._thread.finish()
        self._memory.close()

    def close(self) -> None:
        """Finish all that was started, and check that a lasting tier has the newest checkpoint.

        A second call returns or raises the same.

        Raises:
            CheckpointError: No lasting tier has it from all ranks; all ranks raise it.
        """
        is_safe, why = False, ""
        if self._end is None:
            self._end = self._thread.submit(self._committer.finish)
        try:
            self._wait_for(self._end)
            is_safe = self._end.result()
        except (TimeoutError, PeerError) as error:
            why = f"The end wasn't awaited: {error}"
        self.leave()
        if not is_safe:
            raise self._committer.error(why)
