"""The neighbours of a plan: plans that differ from it by one change.

A change is a moved layer or device, another TP degree or size of micro-batches, or two places
swapped. Changes to one of several equal pipelines are also made to all of them together.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from lightning_hetero.planner.judge import Candidate, Judge, Pipeline
from lightning_hetero.planner.placement import PlacedStages, share_nodes

_FEW_STAGES = 12
"""Number of stages up to which a stage of a pipeline is moved to any place."""

_KINDS = 12
"""Largest number of kinds of pipelines between which a micro-batch is moved."""

_Pattern = tuple[tuple[int, int], ...]
"""(position of the stage whose node is used, TP degree) of every stage of a changed pipeline."""


def _placed(pattern: _Pattern, stages: PlacedStages) -> PlacedStages:
    return tuple([(stages[place][0], degree) for place, degree in pattern])


def _given(pipeline: Pipeline, number: int) -> Pipeline:
    return pipeline._replace(num_microbatches=pipeline.num_microbatches + number)


def _firsts(own: Candidate) -> list[int]:
    """Return the first of all equal pipelines, by index."""
    found: dict[Pipeline, int] = {}
    for index, pipeline in enumerate(own):
        found.setdefault(pipeline, index)
    return list(found.values())


def _with(own: Candidate, changed: dict[int, PlacedStages]) -> Candidate:
    """Return pipelines with other stages; those without any are left out."""
    return tuple(
        [
            pipeline._replace(stages=changed[index], layers=()) if index in changed else pipeline
            for index, pipeline in enumerate(own)
            if index not in changed or changed[index]
        ]
    )


class Neighbourhood:
    """Yields the neighbours of placed pipelines.

    Args:
        judge: Has the nodes, TP degrees and sizes of micro-batches.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def of(self, own: Candidate) -> Iterator[Candidate]:
        """Yield the pipelines of each neighbour, those whose layers must be chosen without any."""
        firsts = _firsts(own)
        free = list(self.judge.any_stages.counts)
        for pipeline in own:
            for node, degree in pipeline.stages:
                free[node] -= degree
        alike: dict[object, list[int]] = {}
        for index, p in enumerate(own):
            kind = self.judge.options(p.stages), share_nodes(p.stages), p.size
            alike.setdefault(kind, []).append(index)
        like_of = {index: like for like in alike.values() for index in like}
        yield from self._layers_moved(own, firsts, like_of)
        for index in firsts:
            like = like_of[index]
            for pattern in self._patterns(own[index].stages):
                for chosen in (like, [index]) if len(like) > 1 else (like,):
                    yield _with(own, {i: _placed(pattern, own[i].stages) for i in chosen})
            for stages in self._grown(own[index].stages, free):
                yield _with(own, {index: stages})
        yield from self._resized(own, firsts)
        yield from self._between(own, firsts)
        for node in self._distinct_nodes(free):
            for degree in self._degrees(node, free[node]):
                yield *own, own[0]._replace(stages=((node, degree),), layers=())

    def dealt(self, own: Candidate) -> Iterator[Candidate]:
        """Yield other distributions: one micro-batch moves from a kind of pipelines to another.

        Layers stay, or are chosen again for the new numbers.
        """
        for giver, taker in itertools.permutations(_firsts(own)[:_KINDS], 2):
            if own[giver].num_microbatches > 1 and own[giver].size == own[taker].size:
                moved = list(own)
                moved[giver] = _given(own[giver], -1)
                moved[taker] = _given(own[taker], 1)
                yield tuple(moved)
                for index in (giver, taker):
                    moved[index] = moved[index]._replace(layers=())
                yield tuple(moved)

    def _resized(self, own: Candidate, firsts: Sequence[int]) -> Iterator[Candidate]:
        """Yield plans in which a pipeline's micro-batches hold other numbers of samples."""
        for index, size in itertools.product(firsts, self.judge.stages):
            if size != own[index].size:
                count = max(1, own[index].num_microbatches * own[index].size // size)
                other = own[index]._replace(size=size, layers=(), num_microbatches=count)
                yield *own[:index], other, *own[index + 1 :]

    @staticmethod
    def _layers_moved(
        own: Candidate, firsts: Sequence[int], like_of: Mapping[int, list[int]]
    ) -> Iterator[Candidate]:
        """Yield plans with a layer moved, in one pipeline or in all that are like it."""
        for index in firsts:
            layers = own[index].layers
            like = [i for i in like_of[index] if own[i].layers == layers]
            for giver, taker in itertools.permutations(range(len(layers)), 2):
                if layers[giver] > 1 and (len(layers) <= 8 or abs(giver - taker) == 1):
                    moved = list(layers)
                    moved[giver] -= 1
                    moved[taker] += 1
                    new = tuple(moved)
                    for chosen in (like, [index]) if len(like) > 1 else (like,):
                        yield tuple(
                            [
                                p._replace(layers=new) if i in chosen else p
                                for i, p in enumerate(own)
                            ]
                        )

    def _distinct_nodes(self, free: Sequence[int]) -> list[int]:
        """Return nodes with free devices, one for each class and number of free devices."""
        kinds = self.judge.any_stages.class_of_node
        found: dict[tuple[int, int], int] = {}
        for node, count in enumerate(free):
            if count:
                found.setdefault((kinds[node], count), node)
        return list(found.values())

    def _degrees(self, node: int, most: int) -> list[int]:
        stages = self.judge.any_stages
        kind = stages.class_of_node[node]
        return [o.tp_degree for o in stages.options if o.node_class == kind and o.tp_degree <= most]

    def _patterns(self, stages: PlacedStages) -> Iterator[_Pattern]:
        """Yield changes on a pipeline's own devices.

        A stage is left out, made narrower, halved or joined to the next one, or stages are
        reordered.
        """
        own = tuple((place, degree) for place, (_, degree) in enumerate(stages))
        for place, (node, degree) in enumerate(stages):
            before, after = own[:place], own[place + 1 :]
            if len(stages) > 1:
                yield before + after
            for other in self._degrees(node, degree - 1):
                yield (*before, (place, other), *after)
                if other * 2 == degree:
                    yield (*before, (place, other), (place, other), *after)
        for place, ((node, degree), (near, next_degree)) in enumerate(itertools.pairwise(stages)):
            joined = degree + next_degree
            if node == near and joined in self._degrees(node, joined):
                yield (*own[:place], (place, joined), *own[place + 2 :])
        yield from self._reordered(stages, own)

    @staticmethod
    def _reordered(stages: PlacedStages, own: _Pattern) -> Iterator[_Pattern]:
        """Yield a pipeline with two stages swapped, or one moved."""
        for one, other in itertools.combinations(range(len(stages)), 2):
            if stages[one] != stages[other] and (len(stages) <= 8 or other == one + 1):
                swapped = list(own)
                swapped[one], swapped[other] = swapped[other], swapped[one]
                yield tuple(swapped)
        if len(stages) <= _FEW_STAGES:
            for place, other in itertools.permutations(range(len(stages)), 2):
                if abs(other - place) > 1 and stages[other] != stages[place]:
                    rest = own[:place] + own[place + 1 :]
                    yield (*rest[:other], own[place], *rest[other:])

    def _grown(self, stages: PlacedStages, free: Sequence[int]) -> Iterator[PlacedStages]:
        """Yield one pipeline's stages with free devices: one is wider, or there is one more."""
        for place, (node, degree) in enumerate(stages):
            for other in self._degrees(node, degree + free[node]):
                if other > degree:
                    yield (*stages[:place], (node, other), *stages[place + 1 :])
        for node in self._distinct_nodes(free):
            for degree in self._degrees(node, free[node]):
                for place in range(len(stages) + 1):
                    yield (*stages[:place], (node, degree), *stages[place:])

    def _between(self, own: Candidate, firsts: Sequence[int]) -> Iterator[Candidate]:
        """Yield plans with stages of two pipelines moved or swapped, or both joined."""
        for one, other in itertools.permutations(firsts, 2):
            if own[one].size != own[other].size:
                continue
            a, b = own[one].stages, own[other].stages
            if one < other:
                yield _with(own, {one: a + b, other: ()})
                for i, j in itertools.product(range(len(a)), range(len(b))):
                    if a[i] != b[j]:
                        yield _with(
                            own,
                            {
                                one: (*a[:i], b[j], *a[i + 1 :]),
                                other: (*b[:j], a[i], *b[j + 1 :]),
                            },
                        )
            for i in range(len(a)):
                for place in sorted({0, len(b) // 2, len(b)}):
                    rest = (*b[:place], a[i], *b[place:])
                    yield _with(own, {one: a[:i] + a[i + 1 :], other: rest})
        for index in firsts:
            stages = own[index].stages
            for place in range(1, len(stages)):
                halves = [
                    own[index]._replace(stages=part, layers=())
                    for part in (stages[:place], stages[place:])
                ]
                yield *own[:index], *halves, *own[index + 1 :]
