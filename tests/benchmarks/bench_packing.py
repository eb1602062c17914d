"""Packed against padded batches on real lengths: tokens/s of a training step on the CPU.

The peer is what a plain collate gives: the same model and samples, each padded to the longest of
its batch, labels ignored on the padding. It needs no mask, since causal attention never looks
ahead, and its equal lengths run in one SDPA call, so it is the strongest form of padding.

The floor: with every batch padded to 2,048, padded work is 2048 / mean(l) times the packed work in
matrix products and 2048² / mean(l²) times in attention. For lengths clipped to 2,048 that is 1.51
and 1.75 for python-files, 1.19 and 1.27 for web-documents, 68 % of which are longer than the clip:
no packing can gain more there. The note of each row has the ratio of FLOPs of its own samples,
which are the quantiles of the file's lengths, so that few stand for all. One layer is enough: every
layer has the same ratio.
"""

from pathlib import Path

import numpy as np
import torch

from lightning_hetero.models import (
    IGNORED_LABEL,
    HeteroLM,
    LMConfig,
    PackedBatch,
    pack_samples,
    packed_cross_entropy,
)
from tests.benchmarks.harness import Row, median_times_s

LENGTHS_FOLDER = Path(__file__).resolve().parents[2].parent / "shared/data/lengths"
CLIP_TOKENS = 2048
SAMPLES_PER_BATCH = 8
CONFIG = LMConfig(vocab_size=257, hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=2)


def run() -> list[Row]:
    """Return one row per file of lengths; none, with the reason printed, if there are no files."""
    paths = sorted(LENGTHS_FOLDER.glob("*.npy"))
    if not paths:
        print("packing: skipped, ../shared/data/lengths beside the checkout holds no lengths")
    return [_compare(path) for path in paths]


def _compare(path: Path) -> Row:
    generator = np.random.default_rng(0)
    shares = (np.arange(SAMPLES_PER_BATCH) + 0.5) / SAMPLES_PER_BATCH
    quantiles = np.quantile(np.minimum(np.load(path), CLIP_TOKENS), shares).astype(int)
    samples = [generator.integers(0, CONFIG.vocab_size, length) for length in quantiles.tolist()]
    packed, padded = pack_samples(samples), _padded(samples)
    torch.manual_seed(0)
    model = HeteroLM(CONFIG)
    packed_s, padded_s = median_times_s(
        lambda: _train(model, packed), lambda: _train(model, padded), repeats=3
    )
    spec = CONFIG.spec
    flops_ratio = spec.step_flops(padded.lengths) / spec.step_flops(packed.lengths)
    return Row(
        name=f"packed batches, {path.stem}, clipped to {CLIP_TOKENS}",
        ours=packed.num_tokens / packed_s,
        peer=packed.num_tokens / padded_s,
        unit="tokens/s",
        target=1.5,
        better="higher",
        value=padded_s / packed_s,
        note=f"peer pads to the longest of {SAMPLES_PER_BATCH}; FLOPs {flops_ratio:.2f}x",
    )


def _padded(samples: list[np.ndarray]) -> PackedBatch:
    """Return the samples in rows of one length, token 0 and no target on the padding."""
    longest = max(len(sample) for sample in samples)
    batch = pack_samples([np.pad(sample, (0, longest - len(sample))) for sample in samples])
    for row, sample in zip(batch.labels.view(-1, longest), samples, strict=True):
        row[len(sample) - 1 :] = IGNORED_LABEL
    return batch


def _train(model: HeteroLM, batch: PackedBatch) -> None:
    model.zero_grad()
    logits = model(batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen)
    packed_cross_entropy(logits, batch.labels).backward()
